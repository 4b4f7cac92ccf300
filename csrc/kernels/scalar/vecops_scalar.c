/* vecops_scalar.c - vector operations and attention, compiled for plain C. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#define QSF_NAME(op) op##_scalar
#define lane_fma qsf_fmaf

#include "kernels/scalar/lanes_scalar.h"

#include "kernels/exp_tmpl.h"

#include "kernels/vecops_tmpl.h"

#include "kernels/recur_tmpl.h"

#include "kernels/attend_tmpl.h"

void qsf_vecops_fill_scalar(qsf_kernels *k)
{
    fill_scalar(k);
}
