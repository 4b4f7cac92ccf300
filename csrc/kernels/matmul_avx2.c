/* matmul_avx2.c - matrix products with AVX2: two registers hold the rows, 8 and 8.
 *
 * vpmaddubsw multiplies unsigned by signed bytes and adds neighbours to 16 bits, which
 * must not saturate; vpmaddwd with ones then adds neighbours to 32 bits: the row sums.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/forced_inline.h"

#define QSF_NAME(op) op##_avx2
#define QSF_FLOAT_SUMS 4 /* in 8 of 16 registers */

QSF_TARGET_BEGIN("avx2,fma,f16c")

#include "kernels/lanes_avx2.h"

#include "kernels/matmul_float_tmpl.h"

/* Activations q [4] in each of 8 rows */
static inline __m256i broadcast4(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm256_set1_epi32(four);
}

static inline __m256i load32(const unsigned char *p)
{
    return _mm256_loadu_si256((const void *)p);
}

/* dot [n_tokens][2], rows 0..7 and 8..15: codes of a 4-bit tile times q [n_tokens, q_stride].
 * A 16-bit lane takes 8 products of pairs before it is widened, at most
 * 8 * 2 * 15 * 127 = 30480 < 32768. */
QSF_FORCED_INLINE void dot_tile_4bit(const unsigned char *tile, const int8_t *q, size_t q_stride,
                                     size_t n_tokens, __m256i dot[][2])
{
    const __m256i low_nibbles = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1);
    for (size_t t = 0; t < n_tokens; t++) {
        dot[t][0] = _mm256_setzero_si256();
        dot[t][1] = _mm256_setzero_si256();
    }
    for (size_t p0 = 0; p0 < 8; p0 += 4) {
        __m256i pairs[4][2];
        for (size_t t = 0; t < n_tokens; t++) {
            pairs[t][0] = _mm256_setzero_si256();
            pairs[t][1] = _mm256_setzero_si256();
        }
        for (size_t p = p0; p < p0 + 4; p++) {
            for (size_t half = 0; half < 2; half++) {
                const __m256i codes = load32(tile + QSF_TILE_CODES_OFF(true) + p * 64 + half * 32);
                const __m256i low = _mm256_and_si256(codes, low_nibbles);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low_nibbles);
                for (size_t t = 0; t < n_tokens; t++) {
                    const int8_t *const qt = q + t * q_stride + 4 * p;
                    const __m256i by_low = _mm256_maddubs_epi16(low, broadcast4(qt));
                    const __m256i by_high = _mm256_maddubs_epi16(high, broadcast4(qt + 32));
                    pairs[t][half] =
                        _mm256_add_epi16(pairs[t][half], _mm256_add_epi16(by_low, by_high));
                }
            }
        }
        for (size_t t = 0; t < n_tokens; t++)
            for (size_t half = 0; half < 2; half++)
                dot[t][half] =
                    _mm256_add_epi32(dot[t][half], _mm256_madd_epi16(pairs[t][half], ones));
    }
}

/* Columns 0, 2 and 1, 3 of four 16-bit activations 256 q + q_low, in each of 8 rows */
static inline void broadcast_fine(const int8_t *q, const int8_t *q_low, __m256i *even, __m256i *odd)
{
    const __m256i high = broadcast4(q);
    const __m256i low = broadcast4(q_low);
    const __m256i low_even = _mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8);
    *even = _mm256_add_epi16(_mm256_slli_epi16(high, 8), low_even);
    *odd = _mm256_add_epi16(_mm256_and_si256(high, _mm256_set1_epi16(-256)),
                            _mm256_srai_epi16(low, 8));
}

/* dot [n_tokens][2], rows 0..7 and 8..15: codes of an 8-bit tile, without the zero point,
 * times 256 q + q_low. Codes widen to 16 bits where they lie, as columns 0, 2 and 1, 3. */
QSF_FORCED_INLINE void dot_tile_8bit(const unsigned char *tile, const int8_t *q,
                                     const int8_t *q_low, size_t q_stride, size_t n_tokens,
                                     __m256i dot[][2])
{
    const __m256i low_bytes = _mm256_set1_epi16(255);
    for (size_t t = 0; t < n_tokens; t++) {
        dot[t][0] = _mm256_setzero_si256();
        dot[t][1] = _mm256_setzero_si256();
    }
    for (size_t g = 0; g < 16; g++) {
        const __m256i codes[2] = {load32(tile + QSF_TILE_CODES_OFF(false) + g * 64),
                                  load32(tile + QSF_TILE_CODES_OFF(false) + g * 64 + 32)};
        for (size_t t = 0; t < n_tokens; t++) {
            const size_t i = t * q_stride + 4 * g;
            __m256i x_even;
            __m256i x_odd;
            broadcast_fine(q + i, q_low + i, &x_even, &x_odd);
            for (size_t half = 0; half < 2; half++) {
                const __m256i w_even = _mm256_and_si256(codes[half], low_bytes);
                const __m256i w_odd = _mm256_srli_epi16(codes[half], 8);
                const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(w_even, x_even),
                                                          _mm256_madd_epi16(w_odd, x_odd));
                dot[t][half] = _mm256_add_epi32(dot[t][half], products);
            }
        }
    }
}

/* One tile row times tokens t0 .. t0 + n_tokens - 1 (n_tokens a literal <= 4); y: the tile
 * row's first output of token t0 */
QSF_FORCED_INLINE void group_4bit(const unsigned char *tiles, size_t tile_bytes, const qsf_acts *x,
                                  size_t t0, size_t n_tokens, float *y, size_t y_stride)
{
    const size_t n_blocks = x->n_blocks;
    lanes acc[4];
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = lanes_set(0.0F);
    for (size_t b = 0; b < n_blocks; b++) {
        const unsigned char *const tile = tiles + b * tile_bytes;
        const size_t block = t0 * n_blocks + b;
        __m256i dot[4][2];
        dot_tile_4bit(tile, x->q + block * QSF_BLOCK, n_blocks * QSF_BLOCK, n_tokens, dot);
        const lanes scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
        const lanes min = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
        for (size_t t = 0; t < n_tokens; t++) {
            const size_t i = block + t * n_blocks;
            const lanes sum = {_mm256_cvtepi32_ps(dot[t][0]), _mm256_cvtepi32_ps(dot[t][1])};
            acc[t] = lanes_fma(sum, lanes_mul(scale, lanes_set(x->scale[i])), acc[t]);
            acc[t] = lanes_fma(min, lanes_set(x->scaled_sum[i]), acc[t]);
        }
    }
    for (size_t t = 0; t < n_tokens; t++)
        lanes_store(y + t * y_stride, acc[t]);
}

/* As group_4bit. With f = 256 q + q_low, in exact integers below 2^30:
 * sum((code - 128) f) = sum(code f) - 128 sum(f). */
QSF_FORCED_INLINE void group_8bit(const unsigned char *tiles, size_t tile_bytes, const qsf_acts *x,
                                  size_t t0, size_t n_tokens, float *y, size_t y_stride)
{
    const size_t n_blocks = x->n_blocks;
    lanes acc[4];
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = lanes_set(0.0F);
    for (size_t b = 0; b < n_blocks; b++) {
        const unsigned char *const tile = tiles + b * tile_bytes;
        const size_t block = t0 * n_blocks + b;
        __m256i dot[4][2];
        dot_tile_8bit(tile, x->q + block * QSF_BLOCK, x->q_low + block * QSF_BLOCK,
                      n_blocks * QSF_BLOCK, n_tokens, dot);
        const lanes scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
        for (size_t t = 0; t < n_tokens; t++) {
            const size_t i = block + t * n_blocks;
            const __m256i zero_part = _mm256_set1_epi32(128 * x->fine_sum[i]);
            const lanes exact = {_mm256_cvtepi32_ps(_mm256_sub_epi32(dot[t][0], zero_part)),
                                 _mm256_cvtepi32_ps(_mm256_sub_epi32(dot[t][1], zero_part))};
            const lanes fine_scale = lanes_set(x->scale[i] * 0x1p-8F);
            acc[t] = lanes_fma(exact, lanes_mul(scale, fine_scale), acc[t]);
        }
    }
    for (size_t t = 0; t < n_tokens; t++)
        lanes_store(y + t * y_stride, acc[t]);
}

/* Defines a matmul that takes the tokens in groups of 4, 2 and 1. */
#define MATMUL_BY_GROUPS(name, group, dtype)                                                      \
    static void name(const unsigned char *tiles, size_t n_tile_rows, const qsf_acts *x, float *y, \
                     size_t y_stride)                                                             \
    {                                                                                             \
        const size_t tile_bytes = qsf_dtype_tile_bytes(dtype);                                    \
        for (size_t i = 0; i < n_tile_rows; i++) {                                                \
            const unsigned char *const row = tiles + i * x->n_blocks * tile_bytes;                \
            float *const yi = y + i * QSF_TILE_ROWS;                                              \
            size_t t = 0;                                                                         \
            for (; t + 4 <= x->n_tokens; t += 4)                                                  \
                group(row, tile_bytes, x, t, 4, yi + t * y_stride, y_stride);                     \
            for (; t + 2 <= x->n_tokens; t += 2)                                                  \
                group(row, tile_bytes, x, t, 2, yi + t * y_stride, y_stride);                     \
            for (; t < x->n_tokens; t++)                                                          \
                group(row, tile_bytes, x, t, 1, yi + t * y_stride, y_stride);                     \
        }                                                                                         \
    }

MATMUL_BY_GROUPS(matmul_4bit_i8_avx2, group_4bit, QSF_DTYPE_4BIT)
MATMUL_BY_GROUPS(matmul_8bit_i16_avx2, group_8bit, QSF_DTYPE_8BIT)

QSF_TARGET_END

void qsf_kernels_fill_avx2(qsf_kernels *k)
{
    k->matmul[QSF_DTYPE_4BIT] = matmul_4bit_i8_avx2;
    k->matmul[QSF_DTYPE_8BIT] = matmul_8bit_i16_avx2;
    fill_matmul_float_avx2(k);
    qsf_vecops_fill_avx2(k);
}

#endif
