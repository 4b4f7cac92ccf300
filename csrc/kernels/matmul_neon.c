/* matmul_neon.c - matrix products with NEON, with and without SDOT. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_ARM

#include <stdbool.h>
#include <string.h>

#include <arm_neon.h>

#include "kernels/forced_inline.h"

#define QSF_NAME(op) op##_neon
#define QSF_FLOAT_SUMS 4 /* in 16 of 32 registers */

#include "kernels/lanes_neon.h"

#include "kernels/matmul_float_tmpl.h"

void qsf_kernels_fill_neon(qsf_kernels *k)
{
    fill_matmul_float_neon(k);
    qsf_vecops_fill_neon(k);
}

void qsf_kernels_fill_dotprod(qsf_kernels *k)
{
    (void)k;
}

#endif
