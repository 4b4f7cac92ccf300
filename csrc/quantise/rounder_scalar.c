/* rounder_scalar.c - fitting and rounding, compiled for plain C. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/rounder.h"

/* Columns and tiles of 16 rows whose sums stay in registers. */
#define QSF_CATCH_UP_COLS 2
#define QSF_CATCH_UP_TILES 1

#include "kernels/scalar/lanes_scalar.h"

#include "quantise/fit_tmpl.h"

#include "quantise/feedback_tmpl.h"

const qsf_rounder qsf_rounder_scalar = QSF_ROUNDER;
