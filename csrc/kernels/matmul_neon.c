/* matmul_neon.c - matrix products with NEON, with and without SDOT. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_ARM

void qsf_kernels_fill_neon(qsf_kernels *k)
{
    (void)k;
}

void qsf_kernels_fill_dotprod(qsf_kernels *k)
{
    (void)k;
}

#endif
