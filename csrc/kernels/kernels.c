/* kernels.c - fills the table of kernels for a level of instruction set. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernels.h"

void qsf_kernels_init(qsf_kernels *k, qsf_isa isa)
{
    *k = (qsf_kernels){0};
    qsf_kernels_fill_scalar(k);
#if QSF_ARCH_X86
    if (isa >= QSF_ISA_AVX2)
        qsf_kernels_fill_avx2(k);
    if (isa == QSF_ISA_AVXVNNI)
        qsf_kernels_fill_avxvnni(k);
    if (isa >= QSF_ISA_AVX512)
        qsf_kernels_fill_avx512(k);
    if (isa >= QSF_ISA_AMX)
        qsf_kernels_fill_amx(k);
#endif
#if QSF_ARCH_ARM
    if (isa >= QSF_ISA_NEON)
        qsf_kernels_fill_neon(k);
    if (isa >= QSF_ISA_DOTPROD)
        qsf_kernels_fill_dotprod(k);
#endif
    k->isa_name = qsf_isa_name(isa);
}
