/* rounder.c - the codes of each type, and the choice of the rounder. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/rounder.h"

static const qsf_code_range range_2bit_sym = {.low = -2,
                                              .high = 1,
                                              .zero = 2,
                                              .half = 0.5F,
                                              .reach = 1.5F,
                                              .is_even = true,
                                              .is_exact = true};
static const qsf_code_range range_2bit = {.high = 3, .has_min = true};
static const qsf_code_range range_3bit = {.high = 7, .has_min = true};
static const qsf_code_range range_4bit = {.high = 15, .has_min = true};
static const qsf_code_range range_q4_k = {.high = 15, .has_min = true, .is_below = true};
static const qsf_code_range range_q5_k = {.high = 31, .has_min = true, .is_below = true};
static const qsf_code_range range_ternary = {
    .low = -1, .high = 1, .zero = 1, .reach = 1, .is_even = true, .is_exact = true};
static const qsf_code_range range_8bit = {
    .low = -127, .high = 127, .zero = 128, .reach = 127, .is_even = true};
static const float levels[] = {QSF_LEVELS};
static const qsf_code_range range_4bit_nl = {
    .levels = levels, .low = -32, .high = 28, .zero = 32, .reach = 32};
static const qsf_code_range range_4bit_sym = {.low = -8, .high = 7, .zero = 8, .reach = 8};
static const qsf_code_range range_q5_0 = {.low = -16, .high = 15, .zero = 16, .reach = 16};

static const qsf_code_range *const range_by_dtype[QSF_DTYPE_COUNT] = {
    [QSF_DTYPE_2BIT_SYM] = &range_2bit_sym,
    [QSF_DTYPE_2BIT] = &range_2bit,
    [QSF_DTYPE_3BIT] = &range_3bit,
    [QSF_DTYPE_4BIT] = &range_4bit,
    [QSF_DTYPE_TERNARY] = &range_ternary,
    [QSF_DTYPE_8BIT] = &range_8bit,
    [QSF_DTYPE_TERNARY_DENSE] = &range_ternary,
    [QSF_DTYPE_4BIT_SYM] = &range_4bit_sym,
    [QSF_DTYPE_4BIT_NL] = &range_4bit_nl,
    [QSF_DTYPE_Q5_0] = &range_q5_0,
    [QSF_DTYPE_Q4_K] = &range_q4_k,
    [QSF_DTYPE_Q5_K] = &range_q5_k,
};

const qsf_code_range *qsf_code_range_of(uint32_t dtype)
{
    return dtype < QSF_DTYPE_COUNT ? range_by_dtype[dtype] : NULL;
}

const qsf_rounder *qsf_rounder_of(qsf_isa isa)
{
#if QSF_ARCH_X86
    if (isa >= QSF_ISA_AVX512)
        return &qsf_rounder_avx512;
    if (isa >= QSF_ISA_AVX2)
        return &qsf_rounder_avx2;
#endif
#if QSF_ARCH_ARM
    if (isa >= QSF_ISA_NEON)
        return &qsf_rounder_neon;
#endif
    (void)isa;
    return &qsf_rounder_scalar;
}
