/* rounder.c - the levels of each type, and the choice of the inner loops. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/rounder.h"

static const qsf_levels levels_2bit_sym = {.low = -2,
                                           .high = 1,
                                           .zero = 2,
                                           .half = 0.5F,
                                           .reach = 1.5F,
                                           .is_even = true,
                                           .is_exact = true};
static const qsf_levels levels_2bit = {.high = 3, .has_min = true};
static const qsf_levels levels_3bit = {.high = 7, .has_min = true};
static const qsf_levels levels_4bit = {.high = 15, .has_min = true};
static const qsf_levels levels_ternary = {
    .low = -1, .high = 1, .zero = 1, .reach = 1, .is_even = true, .is_exact = true};
static const qsf_levels levels_8bit = {
    .low = -127, .high = 127, .zero = 128, .reach = 127, .is_even = true};
static const qsf_levels levels_4bit_sym = {.low = -8, .high = 7, .zero = 8, .reach = 8};

static const qsf_levels *const levels_by_dtype[QSF_DTYPE_COUNT] = {
    [QSF_DTYPE_2BIT_SYM] = &levels_2bit_sym,
    [QSF_DTYPE_2BIT] = &levels_2bit,
    [QSF_DTYPE_3BIT] = &levels_3bit,
    [QSF_DTYPE_4BIT] = &levels_4bit,
    [QSF_DTYPE_TERNARY] = &levels_ternary,
    [QSF_DTYPE_8BIT] = &levels_8bit,
    [QSF_DTYPE_TERNARY_DENSE] = &levels_ternary,
    [QSF_DTYPE_4BIT_SYM] = &levels_4bit_sym,
};

const qsf_levels *qsf_levels_of(uint32_t dtype)
{
    return dtype < QSF_DTYPE_COUNT ? levels_by_dtype[dtype] : NULL;
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
