/* cpu_x86.c - the instruction sets of an x86-64 processor, asked with cpuid and xgetbv. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/cpu.h"

#if QSF_ARCH_X86

#include <cpuid.h>
#include <stdbool.h>

/* cpuid leaf 1, ecx */
#define LEAF1_ECX_FMA (1U << 12)
#define LEAF1_ECX_OSXSAVE (1U << 27)
#define LEAF1_ECX_AVX (1U << 28)
#define LEAF1_ECX_F16C (1U << 29)
/* cpuid leaf 7, ebx and ecx */
#define LEAF7_EBX_AVX2 (1U << 5)
#define LEAF7_EBX_AVX512F (1U << 16)
#define LEAF7_EBX_AVX512DQ (1U << 17)
#define LEAF7_EBX_AVX512BW (1U << 30)
#define LEAF7_EBX_AVX512VL (1U << 31)
#define LEAF7_ECX_AVX512VNNI (1U << 11)
/* Registers that the operating system saves: xmm and ymm; those and k, zmm0-15, zmm16-31. */
#define XCR0_YMM 0x06U
#define XCR0_ZMM 0xE6U

static bool has_all(unsigned have, unsigned want)
{
    return (have & want) == want;
}

/* The instruction traps unless cpuid said OSXSAVE. Written out, because the intrinsic
 * needs a target of its own. */
static unsigned read_xcr0(void)
{
    unsigned low;
    unsigned high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return low;
}

qsf_isa qsf_isa_detect(void)
{
    unsigned eax;
    unsigned ebx;
    unsigned ecx;
    unsigned edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0)
        return QSF_ISA_SCALAR;
    if (!has_all(ecx, LEAF1_ECX_OSXSAVE | LEAF1_ECX_AVX | LEAF1_ECX_FMA | LEAF1_ECX_F16C))
        return QSF_ISA_SCALAR;
    const unsigned xcr0 = read_xcr0();
    if (!has_all(xcr0, XCR0_YMM))
        return QSF_ISA_SCALAR;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || !has_all(ebx, LEAF7_EBX_AVX2))
        return QSF_ISA_SCALAR;
    if (!has_all(xcr0, XCR0_ZMM))
        return QSF_ISA_AVX2;
    if (!has_all(ebx, LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512DQ | LEAF7_EBX_AVX512BW |
                          LEAF7_EBX_AVX512VL) ||
        !has_all(ecx, LEAF7_ECX_AVX512VNNI))
        return QSF_ISA_AVX2;
    return QSF_ISA_AVX512;
}

#endif
