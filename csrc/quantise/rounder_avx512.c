/* rounder_avx512.c - fitting and rounding, compiled for AVX-512. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/rounder.h"

#if QSF_ARCH_X86

#include <immintrin.h>

/* Columns and tiles of 16 rows whose sums stay in registers. */
#define QSF_CATCH_UP_COLS 4
#define QSF_CATCH_UP_TILES 4

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "kernels/avx512/lanes_avx512.h"

#include "quantise/fit_tmpl.h"

#include "quantise/feedback_tmpl.h"

QSF_TARGET_END

const qsf_rounder qsf_rounder_avx512 = QSF_ROUNDER;

#endif
