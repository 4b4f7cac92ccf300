/* matmul_avx512.c - matrix products with AVX-512 and VNNI: one register holds the 16 rows.
 *
 * A 64-byte load of codes is 16 rows x 4 columns; vpdpbusd multiplies it with four
 * activations broadcast to all rows and adds to 16 row sums. Codes are the unsigned operand.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/forced_inline.h"

#define QSF_NAME(op) op##_avx512
#define QSF_FLOAT_SUMS 8 /* in 8 of 32 registers */

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "kernels/lanes_avx512.h"

#include "kernels/matmul_float_tmpl.h"

/* Activations q [4] in each of the 16 rows */
static inline __m512i broadcast4(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm512_set1_epi32(four);
}

/* dot [n_tokens][2], the two to be added: codes of a 4-bit tile times q [n_tokens, q_stride].
 * Two sums per token, because the next vpdpbusd waits for the one before. */
QSF_FORCED_INLINE void dot_tile_4bit(const unsigned char *tile, const int8_t *q, size_t q_stride,
                                     size_t n_tokens, __m512i dot[][2])
{
    const __m512i low_nibbles = _mm512_set1_epi8(15);
    for (size_t t = 0; t < n_tokens; t++) {
        dot[t][0] = _mm512_setzero_si512();
        dot[t][1] = _mm512_setzero_si512();
    }
    for (size_t p = 0; p < 8; p++) {
        const __m512i codes =
            _mm512_loadu_si512((const void *)(tile + QSF_TILE_CODES_OFF(true) + p * 64));
        const __m512i low = _mm512_and_si512(codes, low_nibbles);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_nibbles);
        for (size_t t = 0; t < n_tokens; t++) {
            const int8_t *const qt = q + t * q_stride + 4 * p;
            dot[t][0] = _mm512_dpbusd_epi32(dot[t][0], low, broadcast4(qt));
            dot[t][1] = _mm512_dpbusd_epi32(dot[t][1], high, broadcast4(qt + 32));
        }
    }
}

/* dot [n_tokens][2]: codes of an 8-bit tile times q and times q_low [n_tokens, q_stride],
 * without the zero point. */
QSF_FORCED_INLINE void dot_tile_8bit(const unsigned char *tile, const int8_t *q,
                                     const int8_t *q_low, size_t q_stride, size_t n_tokens,
                                     __m512i dot[][2])
{
    for (size_t t = 0; t < n_tokens; t++) {
        dot[t][0] = _mm512_setzero_si512();
        dot[t][1] = _mm512_setzero_si512();
    }
    for (size_t g = 0; g < 16; g++) {
        const __m512i codes =
            _mm512_loadu_si512((const void *)(tile + QSF_TILE_CODES_OFF(false) + g * 64));
        for (size_t t = 0; t < n_tokens; t++) {
            const size_t i = t * q_stride + 4 * g;
            dot[t][0] = _mm512_dpbusd_epi32(dot[t][0], codes, broadcast4(q + i));
            dot[t][1] = _mm512_dpbusd_epi32(dot[t][1], codes, broadcast4(q_low + i));
        }
    }
}

/* One tile row times tokens t0 .. t0 + n_tokens - 1 (n_tokens a literal <= 8); y: the tile
 * row's first output of token t0 */
QSF_FORCED_INLINE void group_4bit(const unsigned char *tiles, size_t tile_bytes, const qsf_acts *x,
                                  size_t t0, size_t n_tokens, float *y, size_t y_stride)
{
    const size_t n_blocks = x->n_blocks;
    __m512 acc[8];
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = _mm512_setzero_ps();
    for (size_t b = 0; b < n_blocks; b++) {
        const unsigned char *const tile = tiles + b * tile_bytes;
        const size_t block = t0 * n_blocks + b;
        __m512i dot[8][2];
        dot_tile_4bit(tile, x->q + block * QSF_BLOCK, n_blocks * QSF_BLOCK, n_tokens, dot);
        const __m512 scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
        const __m512 min = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
        for (size_t t = 0; t < n_tokens; t++) {
            const size_t i = block + t * n_blocks;
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(dot[t][0], dot[t][1]));
            acc[t] =
                _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, _mm512_set1_ps(x->scale[i])), acc[t]);
            acc[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(x->scaled_sum[i]), acc[t]);
        }
    }
    for (size_t t = 0; t < n_tokens; t++)
        _mm512_storeu_ps(y + t * y_stride, acc[t]);
}

/* As group_4bit. With f = 256 q + q_low, in exact integers below 2^30:
 * sum((code - 128) f) = 256 sum(code q) + sum(code q_low) - 128 sum(f). */
QSF_FORCED_INLINE void group_8bit(const unsigned char *tiles, size_t tile_bytes, const qsf_acts *x,
                                  size_t t0, size_t n_tokens, float *y, size_t y_stride)
{
    const size_t n_blocks = x->n_blocks;
    __m512 acc[8];
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = _mm512_setzero_ps();
    for (size_t b = 0; b < n_blocks; b++) {
        const unsigned char *const tile = tiles + b * tile_bytes;
        const size_t block = t0 * n_blocks + b;
        __m512i dot[8][2];
        dot_tile_8bit(tile, x->q + block * QSF_BLOCK, x->q_low + block * QSF_BLOCK,
                      n_blocks * QSF_BLOCK, n_tokens, dot);
        const __m512 scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
        for (size_t t = 0; t < n_tokens; t++) {
            const size_t i = block + t * n_blocks;
            const __m512i zero_part = _mm512_set1_epi32(128 * x->fine_sum[i]);
            const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(dot[t][0], 8), dot[t][1]);
            const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(both, zero_part));
            const __m512 fine_scale = _mm512_set1_ps(x->scale[i] * 0x1p-8F);
            acc[t] = _mm512_fmadd_ps(exact, _mm512_mul_ps(scale, fine_scale), acc[t]);
        }
    }
    for (size_t t = 0; t < n_tokens; t++)
        _mm512_storeu_ps(y + t * y_stride, acc[t]);
}

/* Defines a matmul that takes the tokens in groups of 8, 4, 2 and 1. */
#define MATMUL_BY_GROUPS(name, group, dtype)                                                      \
    static void name(const unsigned char *tiles, size_t n_tile_rows, const qsf_acts *x, float *y, \
                     size_t y_stride)                                                             \
    {                                                                                             \
        const size_t tile_bytes = qsf_dtype_tile_bytes(dtype);                                    \
        for (size_t i = 0; i < n_tile_rows; i++) {                                                \
            const unsigned char *const row = tiles + i * x->n_blocks * tile_bytes;                \
            float *const yi = y + i * QSF_TILE_ROWS;                                              \
            size_t t = 0;                                                                         \
            for (; t + 8 <= x->n_tokens; t += 8)                                                  \
                group(row, tile_bytes, x, t, 8, yi + t * y_stride, y_stride);                     \
            for (; t + 4 <= x->n_tokens; t += 4)                                                  \
                group(row, tile_bytes, x, t, 4, yi + t * y_stride, y_stride);                     \
            for (; t + 2 <= x->n_tokens; t += 2)                                                  \
                group(row, tile_bytes, x, t, 2, yi + t * y_stride, y_stride);                     \
            for (; t < x->n_tokens; t++)                                                          \
                group(row, tile_bytes, x, t, 1, yi + t * y_stride, y_stride);                     \
        }                                                                                         \
    }

MATMUL_BY_GROUPS(matmul_4bit_i8_avx512, group_4bit, QSF_DTYPE_4BIT)
MATMUL_BY_GROUPS(matmul_8bit_i16_avx512, group_8bit, QSF_DTYPE_8BIT)

QSF_TARGET_END

void qsf_kernels_fill_avx512(qsf_kernels *k)
{
    k->matmul[QSF_DTYPE_4BIT] = matmul_4bit_i8_avx512;
    k->matmul[QSF_DTYPE_8BIT] = matmul_8bit_i16_avx512;
    fill_matmul_float_avx512(k);
    qsf_vecops_fill_avx512(k);
}

#endif
