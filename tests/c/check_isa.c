/* check_isa.c - QSF_ISA is obeyed or refused, cores are counted. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <stdlib.h>

#include "machine/machine.h"
#include "platform/cpu.h"
#include "system.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__linux__) && QSF_ARCH_ARM
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if QSF_ARCH_X86

/* The compiler's run-time library looks at the processor in its own way. That of zig, which has no
 * glibc of its own, is asked nothing: it says no to everything. */
static void check_by_compiler(void)
{
#if defined(__GLIBC__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 =
        has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni");
    CHECK(qsf_isa_has(QSF_ISA_AVX2) == has_avx2);
    CHECK(qsf_isa_has(QSF_ISA_AVX512) == has_avx512);
    CHECK(has_avx2 || !qsf_isa_has(QSF_ISA_AVXVNNI));
    CHECK(has_avx512 || !qsf_isa_has(QSF_ISA_AMX));
#endif
    CHECK(!qsf_isa_has(QSF_ISA_NEON));
}

#elif QSF_ARCH_ARM

/* The system answers for the register in which the processor describes itself. */
static void check_by_compiler(void)
{
    CHECK(!qsf_isa_has(QSF_ISA_AVX2) && !qsf_isa_has(QSF_ISA_AMX));
    CHECK(qsf_isa_has(QSF_ISA_NEON));
#if defined(__linux__)
    if ((getauxval(AT_HWCAP) & HWCAP_CPUID) == 0)
        return;
    uint64_t features;
    __asm__("mrs %0, ID_AA64ISAR0_EL1" : "=r"(features));
    const bool has_dotprod = (features >> 44 & 15) != 0;
    CHECK(qsf_isa_has(QSF_ISA_DOTPROD) == has_dotprod);
    __asm__("mrs %0, ID_AA64ISAR1_EL1" : "=r"(features));
    CHECK(qsf_isa_has(QSF_ISA_I8MM) == (has_dotprod && (features >> 52 & 15) != 0));
#endif
}

#else

static void check_by_compiler(void)
{
    CHECK(!qsf_isa_has(QSF_ISA_AVX2) && !qsf_isa_has(QSF_ISA_NEON));
}

#endif

/* QSF_CHECK_ISA names the level that this machine has, for those who know (`make check-arm` says
 * what qemu imitates). */
static void check_expected(qsf_isa highest)
{
    const char *const expected = getenv("QSF_CHECK_ISA");
    if (expected == NULL)
        return;
    printf("QSF_CHECK_ISA: this should be a machine with %s\n", expected);
    CHECK_STR(qsf_isa_name(highest), expected);
}

static void check_choice(qsf_isa highest)
{
    qsf_isa isa = QSF_ISA_COUNT;
    CHECK_EQ(unsetenv("QSF_ISA"), 0);
    CHECK_OK(qsf_isa_choose(&isa));
    CHECK_EQ(isa, highest);
    CHECK_EQ(setenv("QSF_ISA", "", 1), 0); /* empty is as good as unset */
    CHECK_OK(qsf_isa_choose(&isa));
    CHECK_EQ(isa, highest);

    for (int level = 0; level < (int)QSF_ISA_COUNT; level++) {
        const char *const name = qsf_isa_name((qsf_isa)level);
        CHECK_EQ(setenv("QSF_ISA", name, 1), 0);
        if (qsf_isa_has((qsf_isa)level)) {
            isa = QSF_ISA_COUNT;
            CHECK_OK(qsf_isa_choose(&isa));
            CHECK_EQ(isa, level);
        } else {
            CHECK_STATUS(qsf_isa_choose(&isa), QSF_ERR_ARG);
            CHECK_CONTAINS(qsf_error_detail(), name);
            CHECK_CONTAINS(qsf_error_detail(), "lacks");
        }
    }
}

static void check_unknown(void)
{
    static const char *const unknown[] = {"sse9", "AVX2", "avx2 ", "unknown", "scalar,avx2"};
    for (size_t i = 0; i < COUNT_OF(unknown); i++) {
        qsf_isa isa;
        CHECK_EQ(setenv("QSF_ISA", unknown[i], 1), 0);
        CHECK_STATUS(qsf_isa_choose(&isa), QSF_ERR_ARG);
        /* What the machine has is listed after the colon, and nothing else. */
        char list[512];
        const char *const colon = strrchr(qsf_error_detail(), ':');
        snprintf(list, sizeof list, "%s ", colon != NULL ? colon : "");
        for (int level = 0; level < (int)QSF_ISA_COUNT; level++) {
            char word[32];
            snprintf(word, sizeof word, " %s ", qsf_isa_name((qsf_isa)level));
            CHECK_EQ(strstr(list, word) != NULL, qsf_isa_has((qsf_isa)level));
        }
    }
    CHECK_EQ(unsetenv("QSF_ISA"), 0);
}

static void check_names(void)
{
    static const char *const names[] = {
        [QSF_ISA_SCALAR] = "scalar",   [QSF_ISA_AVX2] = "avx2", [QSF_ISA_AVXVNNI] = "avxvnni",
        [QSF_ISA_AVX512] = "avx512",   [QSF_ISA_AMX] = "amx",   [QSF_ISA_NEON] = "neon",
        [QSF_ISA_DOTPROD] = "dotprod", [QSF_ISA_I8MM] = "i8mm", [QSF_ISA_COUNT] = "unknown"};
    for (int isa = 0; isa <= (int)QSF_ISA_COUNT; isa++)
        CHECK_STR(qsf_isa_name((qsf_isa)isa), names[isa]);
}

static void check_core_count(void)
{
    const uint32_t n_cores = qsf_core_count();
    CHECK(n_cores >= 1);
#if defined(__linux__)
    cpu_set_t before;
    if (sched_getaffinity(0, sizeof before, &before) != 0)
        return; /* more processors than the set holds */
    CHECK(n_cores <= (uint32_t)CPU_COUNT(&before));
    /* On any one processor there is one core. */
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &before))
            continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
        CHECK_EQ(qsf_core_count(), 1);
    }
    CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
    CHECK_EQ(qsf_core_count(), n_cores);
#endif
}

int main(void)
{
    const qsf_isa highest = qsf_isa_detect();
    CHECK(qsf_isa_has(highest) && qsf_isa_has(QSF_ISA_SCALAR) && !qsf_isa_has(QSF_ISA_COUNT));
    check_expected(highest);
    check_by_compiler();
    check_names();
    check_choice(highest);
    check_unknown();
    check_core_count();
    return check_report("check_isa");
}
