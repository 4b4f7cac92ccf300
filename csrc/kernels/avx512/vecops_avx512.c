/* vecops_avx512.c - vector operations and attention, compiled for AVX-512. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

#include <immintrin.h>

#define QSF_NAME(op) op##_avx512
#define lane_fma qsf_fmaf_by_instruction
#define QSF_LOW_TOKENS 8
#define QSF_SUM_GROUPS 4 /* with 6 rows: 24 of 32 registers hold sums */

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "kernels/avx512/lanes_avx512.h"

#include "kernels/exp_tmpl.h"

#include "kernels/vecops_tmpl.h"

#include "kernels/avx512/quantise_avx512.h"

#include "kernels/recur_tmpl.h"

#include "kernels/attend_tmpl.h"

QSF_TARGET_END

void qsf_vecops_fill_avx512(qsf_kernels *k)
{
    fill_avx512(k);
    k->quantise = quantise_by_fours;
}

#endif
