/* rounder_neon.c - fitting and rounding, compiled for NEON. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/rounder.h"

#if QSF_ARCH_ARM

#include <arm_neon.h>

/* Columns and tiles of 16 rows whose sums stay in registers. */
#define QSF_CATCH_UP_COLS 3
#define QSF_CATCH_UP_TILES 2

#include "kernels/neon/lanes_neon.h"

#include "quantise/fit_tmpl.h"

#include "quantise/feedback_tmpl.h"

const qsf_rounder qsf_rounder_neon = QSF_ROUNDER;

#endif
