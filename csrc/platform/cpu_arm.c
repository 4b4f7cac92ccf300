/* cpu_arm.c - the instruction sets of a 64-bit ARM processor, as the system reports them. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/cpu.h"

#if QSF_ARCH_ARM

#if defined(__linux__)
#include <sys/auxv.h>
#define HWCAP_BIT_CRC32 (1UL << 7)
#define HWCAP_BIT_ASIMDDP (1UL << 20)
#define HWCAP2_BIT_I8MM (1UL << 13)
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

static bool has_dotprod(void)
{
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_BIT_ASIMDDP) != 0;
#elif defined(__ARM_FEATURE_DOTPROD)
    return true; /* set by the compiler; every Apple processor has it */
#else
    return false;
#endif
}

static bool has_i8mm(void)
{
#if defined(__linux__)
    return (getauxval(AT_HWCAP2) & HWCAP2_BIT_I8MM) != 0;
#elif defined(__APPLE__)
    int has = 0; /* the M1 has not, the M2 has */
    size_t n_bytes = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &n_bytes, NULL, 0) == 0 && has != 0;
#else
    return false;
#endif
}

bool qsf_cpu_has_crc32(void)
{
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_BIT_CRC32) != 0;
#elif defined(__ARM_FEATURE_CRC32)
    return true;
#else
    return false;
#endif
}

bool qsf_isa_has(qsf_isa isa)
{
    if (isa == QSF_ISA_DOTPROD)
        return has_dotprod();
    if (isa == QSF_ISA_I8MM)
        return has_dotprod() && has_i8mm();
    return isa == QSF_ISA_SCALAR || isa == QSF_ISA_NEON;
}

#endif
