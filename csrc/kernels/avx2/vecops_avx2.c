/* vecops_avx2.c - vector operations and attention, compiled for AVX2. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

#include <immintrin.h>

#define QSF_NAME(op) op##_avx2
#define lane_fma qsf_fmaf_by_instruction

QSF_TARGET_BEGIN("avx2,fma,f16c")

#include "kernels/avx2/lanes_avx2.h"

#include "kernels/exp_tmpl.h"

#include "kernels/vecops_tmpl.h"

#include "kernels/recur_tmpl.h"

#include "kernels/attend_tmpl.h"

QSF_TARGET_END

void qsf_vecops_fill_avx2(qsf_kernels *k)
{
    fill_avx2(k);
}

#endif
