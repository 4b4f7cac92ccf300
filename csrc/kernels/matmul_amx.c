/* matmul_amx.c - matrix products of many tokens with AMX tiles of int8. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

void qsf_kernels_fill_amx(qsf_kernels *k)
{
    (void)k;
}

#endif
