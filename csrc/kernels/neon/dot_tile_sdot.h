/* dot_tile_sdot.h - multiplies tiles with SDOT: the low-bit types through dot_tile_neon.h, and 8
 * bits.
 *
 * A register of codes is 4 rows x 4 columns; sdot multiplies it with four activations, a lane of
 * another register, and adds to 4 row sums.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define LEVEL_PAIRS 8

typedef int32x4_t partial;

QSF_FORCED_INLINE partial partial_zero(void)
{
    return vdupq_n_s32(0);
}

QSF_FORCED_INLINE partial partial_add(partial sums, int8x16_t codes, int8x16_t q, size_t lane)
{
    switch (lane) {
    case 0:
        return vdotq_laneq_s32(sums, codes, q, 0);
    case 1:
        return vdotq_laneq_s32(sums, codes, q, 1);
    case 2:
        return vdotq_laneq_s32(sums, codes, q, 2);
    default:
        return vdotq_laneq_s32(sums, codes, q, 3);
    }
}

QSF_FORCED_INLINE int32x4_t partial_rows(partial sums)
{
    return sums;
}

#include "kernels/neon/dot_tile_neon.h"

/* Adds group g = 4 k + lane (lane a literal) of n_quarters quarters of an 8-bit tile, less its zero
 * point 128, times q and q_low [n_tokens, q_stride] (from column 16 k on), to acc [n_tokens,
 * n_quarters, 2]. */
QSF_FORCED_INLINE void add_group_fine(const unsigned char *codes, const int8_t *q,
                                      const int8_t *q_low, size_t q_stride, size_t n_tokens,
                                      size_t n_quarters, size_t lane, partial *acc)
{
    int8x16_t code[4];
    QSF_UNROLL_8
    for (size_t i = 0; i < n_quarters; i++)
        code[i] =
            vreinterpretq_s8_u8(veorq_u8(vld1q_u8(codes + 64 * lane + 16 * i), vdupq_n_u8(128)));
    QSF_UNROLL_8
    for (size_t t = 0; t < n_tokens; t++) {
        const int8x16_t high = vld1q_s8(q + t * q_stride);
        const int8x16_t low = vld1q_s8(q_low + t * q_stride);
        QSF_UNROLL_8
        for (size_t i = 0; i < n_quarters; i++) {
            partial *const sums = acc + (t * n_quarters + i) * 2;
            sums[0] = partial_add(sums[0], code[i], high, lane);
            sums[1] = partial_add(sums[1], code[i], low, lane);
        }
    }
}

QSF_FORCED_INLINE void dot_quarters_fine(const unsigned char *bytes, size_t first, size_t n,
                                         const int8_t *q, const int8_t *q_low, size_t q_stride,
                                         size_t n_tokens, size_t first_quarter, size_t n_quarters,
                                         dots *dot)
{
    partial acc[16];
    QSF_UNROLL_8
    for (size_t i = 0; i < n_tokens * n_quarters * 2; i++)
        acc[i] = partial_zero();
    QSF_ROLLED
    for (size_t k = first / 4; k < (first + n) / 4; k++) {
        const unsigned char *const codes = bytes + 256 * k + 16 * first_quarter;
        const int8_t *const qk = q + 16 * k;
        const int8_t *const qk_low = q_low + 16 * k;
        add_group_fine(codes, qk, qk_low, q_stride, n_tokens, n_quarters, 0, acc);
        add_group_fine(codes, qk, qk_low, q_stride, n_tokens, n_quarters, 1, acc);
        add_group_fine(codes, qk, qk_low, q_stride, n_tokens, n_quarters, 2, acc);
        add_group_fine(codes, qk, qk_low, q_stride, n_tokens, n_quarters, 3, acc);
    }
    QSF_UNROLL_8
    for (size_t t = 0; t < n_tokens; t++) {
        QSF_UNROLL_8
        for (size_t i = 0; i < n_quarters; i++) {
            const partial *const sums = acc + (t * n_quarters + i) * 2;
            dot[t].quarter[first_quarter + i] = vaddq_s32(vshlq_n_s32(sums[0], 8), sums[1]);
        }
    }
}

/* dot [n_tokens]: exact sums of (code - 128) * (256 q + q_low) of groups first .. first + n - 1 of
 * an 8-bit tile, multiples of 4 */
QSF_FORCED_INLINE void sdot_fine(const unsigned char *bytes, size_t first, size_t n,
                                 const int8_t *q, const int8_t *q_low, size_t q_stride,
                                 size_t n_tokens, dots *dot)
{
    const size_t n_quarters = n_tokens <= 2 ? 4 : n_tokens <= 4 ? 2 : 1;
    QSF_ROLLED
    for (size_t quarter = 0; quarter < 4; quarter += n_quarters)
        dot_quarters_fine(bytes, first, n, q, q_low, q_stride, n_tokens, quarter, n_quarters, dot);
}
