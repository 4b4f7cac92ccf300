/* rounder_avx2.c - fitting and rounding, compiled for AVX2. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/rounder.h"

#if QSF_ARCH_X86

#include <immintrin.h>

/* Columns and tiles of 16 rows whose sums stay in registers. */
#define QSF_CATCH_UP_COLS 2
#define QSF_CATCH_UP_TILES 2

QSF_TARGET_BEGIN("avx2,fma,f16c")

#include "kernels/avx2/lanes_avx2.h"

#include "quantise/fit_tmpl.h"

#include "quantise/feedback_tmpl.h"

QSF_TARGET_END

const qsf_rounder qsf_rounder_avx2 = QSF_ROUNDER;

#endif
