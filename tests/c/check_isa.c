/* check_isa.c - QSF_ISA is obeyed or refused, function targets work, cores are counted. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <stdlib.h>

#include "platform/cpu.h"

#if defined(__linux__)
#include <sched.h>
#endif

#if QSF_ARCH_X86

#include <immintrin.h>

/* The rest of the file is compiled for any x86-64; if the macros did nothing, the
 * intrinsics would not compile. */
QSF_TARGET_BEGIN("avx2,fma,f16c")
static void add_avx2(const int32_t *a, const int32_t *b, int32_t *sum)
{
    const __m256i left = _mm256_loadu_si256((const void *)a);
    const __m256i right = _mm256_loadu_si256((const void *)b);
    _mm256_storeu_si256((void *)sum, _mm256_add_epi32(left, right));
}
QSF_TARGET_END

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
static void dot_avx512(const int8_t *x, int32_t *sums)
{
    const __m512i ones = _mm512_set1_epi8(1);
    const __m512i values = _mm512_loadu_si512((const void *)x);
    _mm512_storeu_si512((void *)sums, _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, values));
}
QSF_TARGET_END

static void check_targets(qsf_isa highest)
{
    if (highest >= QSF_ISA_AVX2) {
        const int32_t a[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        int32_t sum[8];
        add_avx2(a, a, sum);
        for (int i = 0; i < 8; i++)
            CHECK_EQ(sum[i], 2 * (i + 1));
    }
    if (highest >= QSF_ISA_AVX512) {
        int8_t x[64];
        int32_t sums[16];
        for (int i = 0; i < 64; i++)
            x[i] = (int8_t)(i - 32);
        dot_avx512(x, sums);
        for (int i = 0; i < 16; i++)
            CHECK_EQ(sums[i], 4 * (4 * i - 32) + 6);
    }
}

/* The compiler's run-time library looks at the processor in its own way. */
static qsf_isa level_by_compiler(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return QSF_ISA_SCALAR;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vnni")
               ? QSF_ISA_AVX512
               : QSF_ISA_AVX2;
}

#else

static void check_targets(qsf_isa highest)
{
    CHECK_EQ(highest, QSF_ISA_SCALAR);
}

static qsf_isa level_by_compiler(void)
{
    return QSF_ISA_SCALAR;
}

#endif

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
        if (level <= (int)highest) {
            isa = QSF_ISA_COUNT;
            CHECK_OK(qsf_isa_choose(&isa));
            CHECK_EQ(isa, level);
        } else {
            CHECK_STATUS(qsf_isa_choose(&isa), QSF_ERR_ARG);
            CHECK_CONTAINS(qsf_fail_text(), name);
            CHECK_CONTAINS(qsf_fail_text(), "lacks");
        }
    }
}

static void check_unknown(qsf_isa highest)
{
    static const char *const unknown[] = {
        "sse9",    "AVX2",        "avx",
        "avx2 ",   " avx2",       "0",
        "unknown", "scalar,avx2", "a name that is far longer than any instruction set's"};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        qsf_isa isa;
        CHECK_EQ(setenv("QSF_ISA", unknown[i], 1), 0);
        CHECK_STATUS(qsf_isa_choose(&isa), QSF_ERR_ARG);
        /* What the machine has is listed after the colon, and nothing else. */
        const char *const list = strrchr(qsf_fail_text(), ':');
        if (!CHECK(list != NULL))
            continue;
        for (int level = 0; level < (int)QSF_ISA_COUNT; level++)
            CHECK((strstr(list, qsf_isa_name((qsf_isa)level)) != NULL) == (level <= (int)highest));
    }
    CHECK_EQ(unsetenv("QSF_ISA"), 0);
}

static void check_names(void)
{
    CHECK_STR(qsf_isa_name(QSF_ISA_SCALAR), "scalar");
    CHECK_STR(qsf_isa_name(QSF_ISA_AVX2), "avx2");
    CHECK_STR(qsf_isa_name(QSF_ISA_AVX512), "avx512");
    CHECK_STR(qsf_isa_name(QSF_ISA_COUNT), "unknown");
}

static void check_core_count(void)
{
    const uint32_t n_cores = qsf_cpu_core_count();
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
        CHECK_EQ(qsf_cpu_core_count(), 1);
    }
    CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
    CHECK_EQ(qsf_cpu_core_count(), n_cores);
#endif
}

int main(void)
{
    const qsf_isa highest = qsf_isa_detect();
    CHECK_EQ(highest, level_by_compiler());
    check_names();
    check_choice(highest);
    check_unknown(highest);
    check_targets(highest);
    check_core_count();
    return check_report("check_isa");
}
