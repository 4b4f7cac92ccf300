/* cpu.c - detects the instruction sets of the processor (with cpuid and xgetbv on x86-64) and
 * chooses a level. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/cpu.h"

#if QSF_ARCH_X86
#include <cpuid.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

const char *qsf_isa_name(qsf_isa isa)
{
    static const char *const names[QSF_ISA_COUNT] = {
        [QSF_ISA_SCALAR] = "scalar",   [QSF_ISA_AVX2] = "avx2", [QSF_ISA_AVXVNNI] = "avxvnni",
        [QSF_ISA_AVX512] = "avx512",   [QSF_ISA_AMX] = "amx",   [QSF_ISA_NEON] = "neon",
        [QSF_ISA_DOTPROD] = "dotprod", [QSF_ISA_I8MM] = "i8mm",
    };
    return isa < QSF_ISA_COUNT ? names[isa] : "unknown";
}

#if QSF_ARCH_X86

/* cpuid leaf 1, ecx */
#define LEAF1_ECX_PCLMUL (1U << 1)
#define LEAF1_ECX_FMA (1U << 12)
#define LEAF1_ECX_SSE41 (1U << 19)
#define LEAF1_ECX_OSXSAVE (1U << 27)
#define LEAF1_ECX_AVX (1U << 28)
#define LEAF1_ECX_F16C (1U << 29)
/* cpuid leaf 7, ebx, ecx and edx */
#define LEAF7_EBX_AVX2 (1U << 5)
#define LEAF7_EBX_AVX512F (1U << 16)
#define LEAF7_EBX_AVX512DQ (1U << 17)
#define LEAF7_EBX_AVX512BW (1U << 30)
#define LEAF7_EBX_AVX512VL (1U << 31)
#define LEAF7_ECX_VPCLMULQDQ (1U << 10)
#define LEAF7_ECX_AVX512VNNI (1U << 11)
#define LEAF7_EDX_AMX_TILE (1U << 24)
#define LEAF7_EDX_AMX_INT8 (1U << 25)
/* cpuid leaf 7, subleaf 1, eax */
#define LEAF7_1_EAX_AVXVNNI (1U << 4)
/* Registers that the operating system saves. ZMM includes YMM (xmm, ymm) and adds k and zmm. */
#define XCR0_YMM 0x06U
#define XCR0_ZMM 0xE6U
#define XCR0_TILES 0x60000U

/* Output registers of cpuid and xgetbv. */
typedef struct cpu_facts {
    unsigned leaf1_ecx;
    unsigned leaf7_ebx;
    unsigned leaf7_ecx;
    unsigned leaf7_edx;
    unsigned leaf7_1_eax;
    unsigned xcr0;
} cpu_facts;

static bool has_all(unsigned have, unsigned want)
{
    return (have & want) == want;
}

/* The instruction traps unless cpuid reports OSXSAVE. In assembly, because the intrinsic would need
 * its own target. */
static unsigned read_xcr0(void)
{
    unsigned low;
    unsigned high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return low;
}

static cpu_facts look(void)
{
    cpu_facts f = {0};
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &f.leaf1_ecx, &edx) == 0)
        return f;
    if (has_all(f.leaf1_ecx, LEAF1_ECX_OSXSAVE))
        f.xcr0 = read_xcr0();
    if (__get_cpuid_count(7, 0, &eax, &f.leaf7_ebx, &f.leaf7_ecx, &f.leaf7_edx) != 0 && eax >= 1)
        (void)__get_cpuid_count(7, 1, &f.leaf7_1_eax, &ebx, &ecx, &edx);
    return f;
}

static bool has_avx2(const cpu_facts *f)
{
    return has_all(f->leaf1_ecx, LEAF1_ECX_AVX | LEAF1_ECX_FMA | LEAF1_ECX_F16C) &&
           has_all(f->leaf7_ebx, LEAF7_EBX_AVX2) && has_all(f->xcr0, XCR0_YMM);
}

static bool has_avx512(const cpu_facts *f)
{
    return has_avx2(f) && has_all(f->xcr0, XCR0_ZMM) &&
           has_all(f->leaf7_ebx, LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512DQ | LEAF7_EBX_AVX512BW |
                                     LEAF7_EBX_AVX512VL) &&
           has_all(f->leaf7_ecx, LEAF7_ECX_AVX512VNNI);
}

static bool has_clmul(const cpu_facts *f)
{
    return has_all(f->leaf1_ecx, LEAF1_ECX_PCLMUL | LEAF1_ECX_SSE41);
}

bool qsf_cpu_has_clmul(void)
{
    const cpu_facts f = look();
    return has_clmul(&f);
}

bool qsf_cpu_has_clmul512(void)
{
    const cpu_facts f = look();
    return has_clmul(&f) && has_avx512(&f) && has_all(f.leaf7_ecx, LEAF7_ECX_VPCLMULQDQ);
}

static bool has_amx(const cpu_facts *f)
{
    return has_avx512(f) && has_all(f->xcr0, XCR0_TILES) &&
           has_all(f->leaf7_edx, LEAF7_EDX_AMX_TILE | LEAF7_EDX_AMX_INT8) &&
           qsf_cpu_request_tiles();
}

bool qsf_isa_has(qsf_isa isa)
{
    const cpu_facts f = look();
    switch (isa) {
    case QSF_ISA_SCALAR:
        return true;
    case QSF_ISA_AVX2:
        return has_avx2(&f);
    case QSF_ISA_AVXVNNI:
        return has_avx2(&f) && has_all(f.leaf7_1_eax, LEAF7_1_EAX_AVXVNNI);
    case QSF_ISA_AVX512:
        return has_avx512(&f);
    case QSF_ISA_AMX:
        return has_amx(&f);
    case QSF_ISA_NEON:
    case QSF_ISA_DOTPROD:
    case QSF_ISA_I8MM:
    case QSF_ISA_COUNT:
        break;
    }
    return false;
}

#elif QSF_ARCH_ARM

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

#else

bool qsf_isa_has(qsf_isa isa)
{
    return isa == QSF_ISA_SCALAR;
}

#endif

qsf_isa qsf_isa_detect(void)
{
    int level = QSF_ISA_COUNT - 1;
    while (!qsf_isa_has((qsf_isa)level))
        level--;
    return (qsf_isa)level;
}

void qsf_isa_list(char *text, size_t cap_bytes)
{
    size_t used_bytes = 0;
    for (int level = 0; level < QSF_ISA_COUNT && used_bytes < cap_bytes; level++) {
        if (!qsf_isa_has((qsf_isa)level))
            continue;
        const int n_bytes = snprintf(text + used_bytes, cap_bytes - used_bytes, "%s%s",
                                     level > 0 ? " " : "", qsf_isa_name((qsf_isa)level));
        used_bytes += n_bytes > 0 ? (size_t)n_bytes : 0;
    }
}

qsf_isa qsf_isa_limit(void)
{
    const char *const wanted = getenv("QSF_ISA");
    int level = 0;
    while (level < (int)QSF_ISA_COUNT &&
           (wanted == NULL || strcmp(wanted, qsf_isa_name((qsf_isa)level)) != 0))
        level++;
    return (qsf_isa)level;
}

qsf_status qsf_isa_choose(qsf_isa *out)
{
    const char *const wanted = getenv("QSF_ISA");
    *out = qsf_isa_detect();
    if (wanted == NULL || *wanted == '\0')
        return QSF_OK;
    char available[64];
    qsf_isa_list(available, sizeof available);
    for (int level = 0; level < (int)QSF_ISA_COUNT; level++) {
        if (strcmp(wanted, qsf_isa_name((qsf_isa)level)) != 0)
            continue;
        QSF_FAIL_IF(!qsf_isa_has((qsf_isa)level), ARG,
                    "QSF_ISA is \"%s\", which this machine lacks; it has: %s", wanted, available);
        *out = (qsf_isa)level;
        return QSF_OK;
    }
    return QSF_FAIL(ARG, "QSF_ISA is \"%.32s\", which is unknown; this machine has: %s", wanted,
                    available);
}
