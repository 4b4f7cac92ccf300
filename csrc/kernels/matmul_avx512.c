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
#define QSF_GROUP_TOKENS 8

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "kernels/lanes_avx512.h"

#include "kernels/matmul_float_tmpl.h"

/* Two sums to be added, because the next vpdpbusd waits for the one before. */
typedef struct dots {
    __m512i part[2];
} dots;

QSF_FORCED_INLINE __m512i load64(const unsigned char *p)
{
    return _mm512_loadu_si512((const void *)p);
}

/* Activations q [4] in each of the 16 rows */
static inline __m512i broadcast4(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Adds code * q of one group of columns, codes [16, 4], q [n_tokens, q_stride]. */
QSF_FORCED_INLINE void add_group(__m512i codes, const int8_t *q, size_t q_stride, size_t n_tokens,
                                 size_t part, dots *dot)
{
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[part] =
            _mm512_dpbusd_epi32(dot[t].part[part], codes, broadcast4(q + t * q_stride));
}

QSF_FORCED_INLINE void dot_tile_4bit(const unsigned char *codes, const int8_t *q, size_t q_stride,
                                     size_t n_tokens, dots *dot)
{
    const __m512i low_nibbles = _mm512_set1_epi8(15);
    for (size_t p = 0; p < 8; p++) {
        const __m512i bytes = load64(codes + p * 64);
        const __m512i high = _mm512_srli_epi32(bytes, 4);
        add_group(_mm512_and_si512(bytes, low_nibbles), q + 4 * p, q_stride, n_tokens, 0, dot);
        add_group(_mm512_and_si512(high, low_nibbles), q + 4 * p + 32, q_stride, n_tokens, 1, dot);
    }
}

/* 2- and 3-bit and ternary */
QSF_FORCED_INLINE void dot_tile_2bit(const unsigned char *codes, bool has_third, const int8_t *q,
                                     size_t q_stride, size_t n_tokens, dots *dot)
{
    const __m512i threes = _mm512_set1_epi8(3);
    const __m512i fours = _mm512_set1_epi8(4);
    for (size_t p = 0; p < 4; p++) {
        const __m512i low = load64(codes + p * 64);
        const __m512i high = has_third ? load64(codes + 256 + p / 2 * 64) : _mm512_setzero_si512();
        for (unsigned b = 0; b < 4; b++) {
            __m512i code = _mm512_and_si512(_mm512_srli_epi32(low, 2 * b), threes);
            const int shift = (int)b - 2 + 4 * (int)(p % 2);
            const __m512i third = shift >= 0 ? _mm512_srli_epi32(high, (unsigned)shift)
                                             : _mm512_slli_epi32(high, (unsigned)-shift);
            if (has_third) /* code | (third & fours) */
                code = _mm512_ternarylogic_epi32(code, third, fours, 0xF8);
            add_group(code, q + 4 * (p + 4 * b), q_stride, n_tokens, b % 2, dot);
        }
    }
}

/* Leaves 3 * bytes mod 256 and gives the digit before the point. */
static inline __m512i next_trit(__m512i *bytes)
{
    const __m512i ones = _mm512_set1_epi8(1);
    const __m512i above1 = _mm512_subs_epu8(*bytes, _mm512_set1_epi8(85));
    const __m512i above2 = _mm512_subs_epu8(*bytes, _mm512_set1_epi8((char)170));
    *bytes = _mm512_add_epi8(*bytes, _mm512_add_epi8(*bytes, *bytes));
    return _mm512_add_epi8(_mm512_min_epu8(above1, ones), _mm512_min_epu8(above2, ones));
}

QSF_FORCED_INLINE void dot_tile_dense(const unsigned char *codes, const int8_t *q, size_t q_stride,
                                      size_t n_tokens, dots *dot)
{
    for (size_t p = 0; p < 3; p++) {
        __m512i bytes = load64(codes + p * 64);
        for (size_t k = 0; k < 5; k++)
            add_group(next_trit(&bytes), q + 4 * (5 * p + k), q_stride, n_tokens, k % 2, dot);
    }
    /* A byte per row: its digits 0 .. 3 are the last four columns. */
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(codes + 192)));
    const __m512i powers = _mm512_set1_epi32(1 | 3 << 16);
    const __m512i twice = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
    const __m512i first2 = _mm512_mullo_epi16(twice, powers);
    const __m512i last2 = _mm512_mullo_epi16(first2, _mm512_set1_epi16(9));
    const __m512i low_bytes = _mm512_set1_epi16(255);
    const __m512i even = _mm512_packus_epi16(_mm512_and_si512(first2, low_bytes),
                                             _mm512_and_si512(last2, low_bytes));
    /* In each 128 bits: digits 0, 1 of four rows, then digits 2, 3 of them. */
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    __m512i last = _mm512_shuffle_epi8(even, order);
    add_group(next_trit(&last), q + 60, q_stride, n_tokens, 1, dot);
}

/* dot [n_tokens]: exact sums of code * q, q [n_tokens, q_stride] */
QSF_FORCED_INLINE void dot_tile(qsf_dtype dtype, const unsigned char *tile, const int8_t *q,
                                size_t q_stride, size_t n_tokens, dots *dot)
{
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
    switch (dtype) {
    case QSF_DTYPE_2BIT_SYM:
    case QSF_DTYPE_TERNARY:
        dot_tile_2bit(tile + QSF_TILE_CODES_OFF(false), false, q, q_stride, n_tokens, dot);
        break;
    case QSF_DTYPE_2BIT:
        dot_tile_2bit(tile + QSF_TILE_CODES_OFF(true), false, q, q_stride, n_tokens, dot);
        break;
    case QSF_DTYPE_3BIT:
        dot_tile_2bit(tile + QSF_TILE_CODES_OFF(true), true, q, q_stride, n_tokens, dot);
        break;
    case QSF_DTYPE_4BIT:
        dot_tile_4bit(tile + QSF_TILE_CODES_OFF(true), q, q_stride, n_tokens, dot);
        break;
    case QSF_DTYPE_4BIT_SYM:
        dot_tile_4bit(tile + QSF_TILE_CODES_OFF(false), q, q_stride, n_tokens, dot);
        break;
    case QSF_DTYPE_TERNARY_DENSE:
        dot_tile_dense(tile + QSF_TILE_CODES_OFF(false), q, q_stride, n_tokens, dot);
        break;
    case QSF_DTYPE_MIXED:
    case QSF_DTYPE_8BIT:
    case QSF_DTYPE_F16:
    case QSF_DTYPE_F32:
    case QSF_DTYPE_COUNT:
        break;
    }
}

/* dot [n_tokens]: exact sums of code * (256 q + q_low) of an 8-bit tile */
QSF_FORCED_INLINE void dot_tile_fine(const unsigned char *tile, const int8_t *q,
                                     const int8_t *q_low, size_t q_stride, size_t n_tokens,
                                     dots *dot)
{
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
    for (size_t g = 0; g < 16; g++) {
        const __m512i codes = load64(tile + QSF_TILE_CODES_OFF(false) + g * 64);
        add_group(codes, q + 4 * g, q_stride, n_tokens, 0, dot);
        add_group(codes, q_low + 4 * g, q_stride, n_tokens, 1, dot);
    }
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = _mm512_slli_epi32(dot[t].part[0], 8);
}

QSF_FORCED_INLINE lanes dots_to_lanes(dots d, int32_t factor, int32_t start)
{
    __m512i sum = _mm512_add_epi32(d.part[0], d.part[1]);
    if (factor == 2)
        sum = _mm512_add_epi32(sum, sum);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(start)));
}

#include "kernels/matmul_int_tmpl.h"

QSF_TARGET_END

void qsf_kernels_fill_avx512(qsf_kernels *k)
{
    fill_matmul_int_avx512(k);
    fill_matmul_float_avx512(k);
    qsf_vecops_fill_avx512(k);
}

#endif
