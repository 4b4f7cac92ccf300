/* matmul_avxvnni.c - matrix products with 256-bit vpdpbusd, for processors without AVX-512. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

void qsf_kernels_fill_avxvnni(qsf_kernels *k)
{
    (void)k;
}

#endif
