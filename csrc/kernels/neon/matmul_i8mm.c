/* matmul_i8mm.c - matrix products with SMMLA, the int8 matrix extension of ARMv8.6.
 *
 * smmla multiplies 2 rows x 8 columns with the same columns of two tokens and adds to 4 sums: twice
 * the products of sdot. A register of a tile is 4 rows x 4 columns, so tiles are unpacked to memory
 * in the order of smmla, once for all tokens. That pays from 6 tokens on; fewer tokens, and MXFP4,
 * use sdot. Tiles of 8 bits need no unpacking: smmla pays from 2 tokens on.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

/* As in matmul_dotprod.c: otherwise this level uses the kernels of dotprod. */
#if QSF_ARCH_ARM && \
    (defined(__ARM_FEATURE_MATMUL_INT8) || !defined(__clang__) || __clang_major__ >= 16)

#include <arm_neon.h>

#define QSF_NAME(op) op##_i8mm
#define QSF_GROUP_TOKENS 8
#define QSF_UNPACKED_TOKENS 6 /* fewer are faster with sdot */
#define QSF_UNPACKED_BYTES 1024
#define QSF_PANEL_TOKENS 6 /* sums in 24 of 32 registers, activations in 6, codes in one */
#define QSF_FINE_ZERO 0    /* dot_fine has subtracted it */

#if defined(__clang__)
QSF_TARGET_BEGIN("dotprod,i8mm")
#else
QSF_TARGET_BEGIN("arch=armv8.2-a+dotprod+i8mm")
#endif

#include "kernels/neon/lanes_neon.h"

#include "kernels/neon/dot_tile_sdot.h"

#define QSF_ROW_PAIRS (QSF_TILE_ROWS / 2)

/* 2 rows x 8 columns of rows 4i, 4i + 1 and of rows 4i + 2, 4i + 3 */
typedef struct row_pairs {
    int8x16_t at[2];
} row_pairs;

/* From the codes of neighbouring groups */
QSF_FORCED_INLINE row_pairs row_pairs_of(int8x16_t even, int8x16_t odd)
{
    const int32x4_t a = vreinterpretq_s32_s8(even);
    const int32x4_t b = vreinterpretq_s32_s8(odd);
    return (row_pairs){
        {vreinterpretq_s8_s32(vzip1q_s32(a, b)), vreinterpretq_s8_s32(vzip2q_s32(a, b))}};
}

/* to [8 columns of 64, 8 row pairs, 2 x 8] */
QSF_FORCED_INLINE void unpack_tile(qsf_form form, const unsigned char *tile, unsigned char *to)
{
    QSF_UNROLL_8
    for (size_t g = 0; g < 8; g += 2) {
        QSF_UNROLL_8
        for (size_t quarter = 0; quarter < 4; quarter++) {
            const code_pair even = unpack_pair(form, tile, quarter, g);
            const code_pair odd = unpack_pair(form, tile, quarter, g + 1);
            QSF_UNROLL_8
            for (size_t half = 0; half < 2; half++) {
                const row_pairs rows = row_pairs_of(even.at[half], odd.at[half]);
                unsigned char *const at = to + (8 * half + g) * 64 + 32 * quarter;
                vst1q_s8((int8_t *)at, rows.at[0]);
                vst1q_s8((int8_t *)at + 16, rows.at[1]);
            }
        }
        keep_loads_here();
    }
}

/* 8 columns of two tokens */
typedef struct token_pair {
    int8x16_t at[2];
} token_pair;

/* Sums of columns 0 .. 7 and 8 .. 15 of two tokens */
QSF_FORCED_INLINE token_pair load_tokens(const int8_t *first, const int8_t *second)
{
    const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(first));
    const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(second));
    return (token_pair){
        {vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))}};
}

/* sums [2]: of two row pairs and two tokens; writes a quarter of dot [n_tokens], one or two. */
QSF_FORCED_INLINE void store_quarter(const int32x4_t *sums, size_t n_tokens, size_t quarter,
                                     dots *dot)
{
    dot[0].quarter[quarter] = vuzp1q_s32(sums[0], sums[1]);
    if (n_tokens > 1)
        dot[1].quarter[quarter] = vuzp2q_s32(sums[0], sums[1]);
}

/* As dot_tile, of a tile that unpack_tile() has unpacked. A last token without another is
 * multiplied twice. */
QSF_FORCED_INLINE void dot_unpacked(qsf_codes kind, const unsigned char *codes, const int8_t *q,
                                    size_t q_stride, size_t n_tokens, dots *dot)
{
    const size_t n_pairs = (n_tokens + 1) / 2;
    int32x4_t acc[QSF_PANEL_TOKENS / 2][QSF_ROW_PAIRS];
    (void)kind;
    QSF_UNROLL_8
    for (size_t i = 0; i < n_pairs; i++) {
        QSF_UNROLL_8
        for (size_t r = 0; r < QSF_ROW_PAIRS; r++)
            acc[i][r] = vdupq_n_s32(0);
    }
    QSF_UNROLL_8
    for (size_t c = 0; c < QSF_BLOCK; c += 16) {
        token_pair x[QSF_PANEL_TOKENS / 2];
        QSF_UNROLL_8
        for (size_t i = 0; i < n_pairs; i++) {
            const int8_t *const first = q + 2 * i * q_stride + c;
            x[i] = load_tokens(first, 2 * i + 1 < n_tokens ? first + q_stride : first);
        }
        QSF_UNROLL_8
        for (size_t half = 0; half < 2; half++) {
            QSF_UNROLL_8
            for (size_t r = 0; r < QSF_ROW_PAIRS; r++) {
                const int8x16_t code =
                    vld1q_s8((const int8_t *)codes + 16 * c + 128 * half + 16 * r);
                QSF_UNROLL_8
                for (size_t i = 0; i < n_pairs; i++)
                    acc[i][r] = vmmlaq_s32(acc[i][r], code, x[i].at[half]);
                keep_loads_here();
            }
        }
    }
    QSF_UNROLL_8
    for (size_t i = 0; i < n_pairs; i++) {
        QSF_UNROLL_8
        for (size_t quarter = 0; quarter < 4; quarter++)
            store_quarter(acc[i] + 2 * quarter, n_tokens - 2 * i, quarter, dot + 2 * i);
    }
}

/* Computes n_quarters quarters of an 8-bit tile: x [2 planes, 8 columns of 64, n_pairs] */
QSF_FORCED_INLINE void smmla_quarters_fine(const unsigned char *bytes, size_t first, size_t n,
                                           const int8x16_t *x, size_t n_pairs, size_t first_quarter,
                                           size_t n_quarters, dots *dot)
{
    int32x4_t acc[2][8]; /* [2 planes, n_pairs, n_quarters, 2] */
    QSF_UNROLL_8
    for (size_t i = 0; i < 2 * n_pairs * n_quarters; i++) {
        acc[0][i] = vdupq_n_s32(0);
        acc[1][i] = vdupq_n_s32(0);
    }
    QSF_ROLLED
    for (size_t s = first / 2; s < (first + n) / 2; s++) {
        const unsigned char *const codes = bytes + 128 * s + 16 * first_quarter;
        QSF_UNROLL_8
        for (size_t k = 0; k < n_quarters; k++) {
            const uint8x16_t even = veorq_u8(vld1q_u8(codes + 16 * k), vdupq_n_u8(128));
            const uint8x16_t odd = veorq_u8(vld1q_u8(codes + 64 + 16 * k), vdupq_n_u8(128));
            const row_pairs rows =
                row_pairs_of(vreinterpretq_s8_u8(even), vreinterpretq_s8_u8(odd));
            QSF_UNROLL_8
            for (size_t i = 0; i < n_pairs; i++) {
                QSF_UNROLL_8
                for (size_t plane = 0; plane < 2; plane++) {
                    const int8x16_t xi = x[(8 * plane + s) * n_pairs + i];
                    int32x4_t *const sums = acc[plane] + 2 * (i * n_quarters + k);
                    sums[0] = vmmlaq_s32(sums[0], rows.at[0], xi);
                    sums[1] = vmmlaq_s32(sums[1], rows.at[1], xi);
                }
            }
        }
    }
    QSF_UNROLL_8
    for (size_t i = 0; i < n_pairs; i++) {
        QSF_UNROLL_8
        for (size_t k = 0; k < n_quarters; k++) {
            int32x4_t sums[2];
            QSF_UNROLL_8
            for (size_t r = 0; r < 2; r++) {
                const size_t at = 2 * (i * n_quarters + k) + r;
                sums[r] = vaddq_s32(vshlq_n_s32(acc[0][at], 8), acc[1][at]);
            }
            store_quarter(sums, 2, first_quarter + k, dot + 2 * i);
        }
    }
}

/* A block of 16-bit activations: of pairs of tokens, planes [2, 8, n_pairs]; of one, where they are
 */
typedef struct fine_acts {
    int8x16_t pairs[2 * 8 * QSF_GROUP_TOKENS / 2];
    const int8_t *q;
    const int8_t *q_low;
} fine_acts;

QSF_FORCED_INLINE void load_fine(const int8_t *q, const int8_t *q_low, size_t q_stride,
                                 size_t n_tokens, fine_acts *x)
{
    const size_t n_pairs = n_tokens / 2;
    x->q = q;
    x->q_low = q_low;
    for (size_t i = 0; i < n_pairs; i++)
        for (size_t c = 0; c < 4; c++)
            for (size_t plane = 0; plane < 2; plane++) {
                const int8_t *const first = (plane == 0 ? q : q_low) + 2 * i * q_stride + 16 * c;
                const token_pair pair = load_tokens(first, first + q_stride);
                x->pairs[(8 * plane + 2 * c) * n_pairs + i] = pair.at[0];
                x->pairs[(8 * plane + 2 * c + 1) * n_pairs + i] = pair.at[1];
            }
}

/* dot [n_tokens]: exact sums of (code - 128) * x of the codes of an 8-bit tile */
QSF_FORCED_INLINE void dot_fine(const unsigned char *bytes, size_t first, size_t n,
                                const fine_acts *x, size_t n_tokens, dots *dot)
{
    const size_t n_quarters = n_tokens <= 2 ? 4 : n_tokens <= 4 ? 2 : 1;
    if (n_tokens == 1) {
        sdot_fine(bytes, first, n, x->q, x->q_low, 0, 1, dot);
        return;
    }
    QSF_ROLLED
    for (size_t quarter = 0; quarter < 4; quarter += n_quarters)
        smmla_quarters_fine(bytes, first, n, x->pairs, n_tokens / 2, quarter, n_quarters, dot);
}

#include "kernels/matmul_int_tmpl.h"

QSF_TARGET_END

void qsf_kernels_fill_i8mm(qsf_kernels *k)
{
    fill_matmul_int_i8mm(k);
}

#elif QSF_ARCH_ARM

void qsf_kernels_fill_i8mm(qsf_kernels *k)
{
    (void)k;
}

#endif
