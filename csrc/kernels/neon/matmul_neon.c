/* matmul_neon.c - matrix products with the NEON that every 64-bit ARM has.
 *
 * smlal multiplies signed bytes and adds to 16 bits, which must not overflow: a sum takes one
 * product of each of the 16 groups of a tile, at most 16 * 15 * 127 = 30480 < 32768, so it is
 * widened only at the end.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_ARM

#include <arm_neon.h>

#define QSF_NAME(op) op##_neon
#define QSF_FLOAT_SUMS 4 /* in 16 of 32 registers */
#define QSF_GROUP_TOKENS 2
#define QSF_FINE_ZERO 128

#include "kernels/neon/lanes_neon.h"

#include "kernels/matmul_float_tmpl.h"

#define LEVEL_PAIRS 2 /* 4 * 60 * 127 = 30480; of IQ4 2 * 127 * 128 = 32512 */

/* Sums by row and column of a group, 4 rows x 4 columns */
typedef struct partial {
    int16x8_t rows01;
    int16x8_t rows23;
} partial;

QSF_FORCED_INLINE partial partial_zero(void)
{
    return (partial){vdupq_n_s16(0), vdupq_n_s16(0)};
}

QSF_FORCED_INLINE int8x16_t broadcast4(int8x16_t q, size_t lane)
{
    const int32x4_t words = vreinterpretq_s32_s8(q);
    switch (lane) {
    case 0:
        return vreinterpretq_s8_s32(vdupq_laneq_s32(words, 0));
    case 1:
        return vreinterpretq_s8_s32(vdupq_laneq_s32(words, 1));
    case 2:
        return vreinterpretq_s8_s32(vdupq_laneq_s32(words, 2));
    default:
        return vreinterpretq_s8_s32(vdupq_laneq_s32(words, 3));
    }
}

QSF_FORCED_INLINE partial partial_add(partial sums, int8x16_t codes, int8x16_t q, size_t lane)
{
    const int8x16_t q4 = broadcast4(q, lane);
    return (partial){vmlal_s8(sums.rows01, vget_low_s8(codes), vget_low_s8(q4)),
                     vmlal_high_s8(sums.rows23, codes, q4)};
}

QSF_FORCED_INLINE int32x4_t partial_rows(partial sums)
{
    return vpaddq_s32(vpaddlq_s16(sums.rows01), vpaddlq_s16(sums.rows23));
}

#include "kernels/neon/dot_tile_neon.h"

/* Computes the row sums of one quarter of an 8-bit tile: fine [n_tokens, 64] are 16-bit
 * activations. Two groups together are 8 columns of each row, widened to 16 bits. */
QSF_FORCED_INLINE void dot_quarter_fine(const unsigned char *bytes, size_t first, size_t n,
                                        size_t quarter, const int16_t *fine, size_t n_tokens,
                                        dots *dot)
{
    int32x4_t acc[4 * QSF_GROUP_TOKENS];
    QSF_UNROLL_8
    for (size_t i = 0; i < 4 * n_tokens; i++)
        acc[i] = vdupq_n_s32(0);
    for (size_t g = first; g < first + n; g += 2) {
        const unsigned char *const codes = bytes + g * 64 + quarter * 16;
        const uint32x4_t even = vreinterpretq_u32_u8(vld1q_u8(codes));
        const uint32x4_t odd = vreinterpretq_u32_u8(vld1q_u8(codes + 64));
        const uint8x16_t rows01 = vreinterpretq_u8_u32(vzip1q_u32(even, odd));
        const uint8x16_t rows23 = vreinterpretq_u8_u32(vzip2q_u32(even, odd));
        const int16x8_t row[4] = {vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(rows01))),
                                  vreinterpretq_s16_u16(vmovl_high_u8(rows01)),
                                  vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(rows23))),
                                  vreinterpretq_s16_u16(vmovl_high_u8(rows23))};
        QSF_UNROLL_8
        for (size_t t = 0; t < n_tokens; t++) {
            const int16x8_t x = vld1q_s16(fine + t * QSF_BLOCK + 4 * g);
            QSF_UNROLL_8
            for (size_t r = 0; r < 4; r++)
                acc[4 * t + r] = vmlal_high_s16(
                    vmlal_s16(acc[4 * t + r], vget_low_s16(row[r]), vget_low_s16(x)), row[r], x);
        }
    }
    QSF_UNROLL_8
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].quarter[quarter] = vpaddq_s32(vpaddq_s32(acc[4 * t], acc[4 * t + 1]),
                                             vpaddq_s32(acc[4 * t + 2], acc[4 * t + 3]));
}

/* A block of 16-bit activations */
typedef struct fine_acts {
    int16_t fine[QSF_GROUP_TOKENS * QSF_BLOCK];
} fine_acts;

QSF_FORCED_INLINE void load_fine(const int8_t *q, const int8_t *q_low, size_t q_stride,
                                 size_t n_tokens, fine_acts *x)
{
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t i = 0; i < QSF_BLOCK; i += 8) {
            const int16x8_t high = vshll_n_s8(vld1_s8(q + t * q_stride + i), 8);
            const int8x8_t low = vld1_s8(q_low + t * q_stride + i);
            vst1q_s16(x->fine + t * QSF_BLOCK + i, vaddw_s8(high, low));
        }
}

/* dot [n_tokens]: exact sums of code * x of the codes of an 8-bit tile */
QSF_FORCED_INLINE void dot_fine(const unsigned char *bytes, size_t first, size_t n,
                                const fine_acts *x, size_t n_tokens, dots *dot)
{
    for (size_t quarter = 0; quarter < 4; quarter++)
        dot_quarter_fine(bytes, first, n, quarter, x->fine, n_tokens, dot);
}

#include "kernels/matmul_int_tmpl.h"

void qsf_kernels_fill_neon(qsf_kernels *k)
{
    fill_matmul_int_neon(k);
    fill_matmul_float_neon(k);
    qsf_vecops_fill_neon(k);
}

#endif
