/* cpu_arm.c - the instruction sets of a 64-bit ARM processor. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/cpu.h"

#if QSF_ARCH_ARM

#include "platform/cpu_system.h"

bool qsf_cpu_has_crc32(void)
{
    return qsf_cpu_arm_features().has_crc32;
}

bool qsf_isa_has(qsf_isa isa)
{
    const qsf_arm_features f = qsf_cpu_arm_features();
    if (isa == QSF_ISA_DOTPROD)
        return f.has_dotprod;
    if (isa == QSF_ISA_I8MM)
        return f.has_dotprod && f.has_i8mm;
    return isa == QSF_ISA_SCALAR || isa == QSF_ISA_NEON;
}

#endif
