/* vecops_neon.c - vector operations and attention, compiled for NEON. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_ARM

#include <arm_neon.h>

#define QSF_NAME(op) op##_neon
#define lane_fma qsf_fmaf_by_instruction

#include "kernels/neon/lanes_neon.h"

#include "kernels/exp_tmpl.h"

#include "kernels/vecops_tmpl.h"

#include "kernels/recur_tmpl.h"

#include "kernels/attend_tmpl.h"

void qsf_vecops_fill_neon(qsf_kernels *k)
{
    fill_neon(k);
}

#endif
