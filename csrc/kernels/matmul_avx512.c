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
#include "kernels/int_form.h"
#include "kernels/matmul_avx512.h"

#define QSF_NAME(op) op##_avx512
#define QSF_FLOAT_SUMS 8   /* in 8 of 32 registers */
#define QSF_GROUP_TOKENS 4 /* if there are fewer than MANY_FROM */
#define QSF_PAIRED_TOKENS 4
#define QSF_MANY_TOKENS 8
#define QSF_MANY_ROWS 4
#define QSF_MANY_BLOCKS 4
#define MANY_FROM 8
#define IN_PLACE_TOKENS 2 /* at most so many tokens are faster without unpacking */

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "kernels/lanes_avx512.h"

#include "kernels/unpack_avx512.h"

#include "kernels/matmul_float_tmpl.h"

/* Two partial sums, because a vpdpbusd waits for the one before. */
typedef struct dots {
    __m512i part[2];
} dots;

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

/* As dot_tile for 2-bit codes, which are not shifted: sum b is 4^b * code * q. It needs no shifts;
 * with more tokens it would need too many sums. */
QSF_FORCED_INLINE void dot_2bit_in_place(const unsigned char *bytes, const int8_t *q,
                                         size_t q_stride, size_t n_tokens, dots *dot)
{
    __m512i sum[2][4];
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t b = 0; b < 4; b++)
            sum[t][b] = _mm512_setzero_si512();
    for (size_t p = 0; p < 4; p++) {
        const __m512i four = load64(bytes + p * 64);
        for (size_t b = 0; b < 4; b++) {
            const __m512i code = _mm512_and_si512(four, _mm512_set1_epi8((char)(3U << 2 * b)));
            for (size_t t = 0; t < n_tokens; t++)
                sum[t][b] = _mm512_dpbusd_epi32(sum[t][b], code,
                                                broadcast4(q + t * q_stride + 4 * (4 * b + p)));
        }
    }
    for (size_t t = 0; t < n_tokens; t++) {
        dot[t].part[0] = _mm512_add_epi32(sum[t][0], _mm512_srai_epi32(sum[t][1], 2));
        dot[t].part[1] =
            _mm512_add_epi32(_mm512_srai_epi32(sum[t][2], 4), _mm512_srai_epi32(sum[t][3], 6));
    }
}

/* As dot_tile for dense ternary, without computing digits. After a digit, the fraction is left' = 3
 * left - 256 digit, so 256 * sum(digit * q) = 3 * sum(left * q) - sum(left' * q), where each sum is
 * below 2^21. */
QSF_FORCED_INLINE void dot_dense_in_place(const unsigned char *bytes, const int8_t *q,
                                          size_t q_stride, size_t n_tokens, dots *dot)
{
    __m512i before[2][2];
    __m512i after[2][2];
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t i = 0; i < 2; i++)
            before[t][i] = after[t][i] = _mm512_setzero_si512();
    for (size_t p = 0; p < 4; p++) {
        __m512i left = p < 3 ? load64(bytes + p * 64) : last_trits(bytes + 192);
        for (size_t k = 0; k < (p < 3 ? 5 : 1); k++) {
            const __m512i next = after_trit(left);
            for (size_t t = 0; t < n_tokens; t++) {
                const __m512i four = broadcast4(q + t * q_stride + 4 * (5 * p + k));
                before[t][p % 2] = _mm512_dpbusd_epi32(before[t][p % 2], left, four);
                after[t][p % 2] = _mm512_dpbusd_epi32(after[t][p % 2], next, four);
            }
            left = next;
        }
    }
    for (size_t t = 0; t < n_tokens; t++) {
        const __m512i sum = _mm512_add_epi32(before[t][0], before[t][1]);
        const __m512i triple = _mm512_add_epi32(_mm512_add_epi32(sum, sum), sum);
        const __m512i rest = _mm512_add_epi32(after[t][0], after[t][1]);
        dot[t].part[0] = _mm512_srai_epi32(_mm512_sub_epi32(triple, rest), 8);
        dot[t].part[1] = _mm512_setzero_si512();
    }
}

/* dot [n_tokens]: exact sums of code * q, q [n_tokens, q_stride] */
QSF_FORCED_INLINE void dot_tile(qsf_dtype dtype, const unsigned char *tile, const int8_t *q,
                                size_t q_stride, size_t n_tokens, dots *dot)
{
    const planes layout = planes_of(dtype);
    const unsigned char *const bytes = tile + QSF_TILE_CODES_OFF(int_form_of(dtype).has_min);
    if (layout.n_in_plane == 4 && dtype != QSF_DTYPE_3BIT && n_tokens <= IN_PLACE_TOKENS) {
        dot_2bit_in_place(bytes, q, q_stride, n_tokens, dot);
        return;
    }
    if (dtype == QSF_DTYPE_TERNARY_DENSE && n_tokens <= IN_PLACE_TOKENS) {
        dot_dense_in_place(bytes, q, q_stride, n_tokens, dot);
        return;
    }
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
    for (size_t p = 0; p < layout.n_planes; p++) {
        __m512i codes[5];
        unpack_plane(dtype, tile, p, codes);
        for (size_t k = 0; k < layout.n_in_plane; k++)
            if (group_of(dtype, p, k) < QSF_TILE_GROUPS)
                add_group(codes[k], q + 4 * group_of(dtype, p, k), q_stride, n_tokens, k % 2, dot);
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

#include "kernels/matmul_many_tmpl.h"

QSF_FORCED_INLINE void unpack_codes(int_form form, const unsigned char *tile, unsigned char *codes)
{
    unpack_scaled(form, tile, 0, codes);
}

/* One block of n_tokens tokens, contiguous, so that one register addresses all. */
typedef struct token_block {
    _Alignas(64) int8_t q[QSF_MANY_TOKENS][QSF_BLOCK];
    int32_t start[QSF_MANY_TOKENS];
} token_block;

QSF_FORCED_INLINE __m512i load_dots(const int32_t *p)
{
    return _mm512_loadu_si512((const void *)p);
}

/* dots [n_rows, 8 tokens, 16] of one block: sum(code * q) + start; if is_second, plus 256 times the
 * dots already there. codes [n_rows, 16, 64]; n_rows, n_tokens, is_second are literals. */
QSF_FORCED_INLINE void block_dots(const many_codes *codes, const token_block *x, size_t r0,
                                  size_t t0, size_t n_rows, size_t n_tokens, bool is_second,
                                  many_dots *out)
{
    __m512i dot[2][QSF_MANY_TOKENS];
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t r = 0; r < n_rows; r++)
            dot[r][t] =
                is_second
                    ? _mm512_add_epi32(_mm512_set1_epi32(x->start[t0 + t]),
                                       _mm512_slli_epi32(load_dots(out->at[r0 + r][t0 + t]), 8))
                    : _mm512_set1_epi32(x->start[t0 + t]);
#pragma GCC unroll 16
    for (size_t g = 0; g < QSF_TILE_GROUPS; g++) {
        __m512i code[2];
        for (size_t r = 0; r < n_rows; r++)
            code[r] = load64(codes->at[r0 + r] + g * 64);
        for (size_t t = 0; t < n_tokens; t++) {
            const __m512i four = broadcast4(x->q[t0 + t] + 4 * g);
            for (size_t r = 0; r < n_rows; r++)
                dot[r][t] = _mm512_dpbusd_epi32(dot[r][t], code[r], four);
        }
    }
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < n_tokens; t++)
            _mm512_storeu_si512((void *)out->at[r0 + r][t0 + t], dot[r][t]);
}

/* Tokens t .. t + n_tokens - 1. One function for each number of rows and tokens, because compilers
 * allocate registers badly in larger ones. */
#define BLOCK_DOTS(n_rows, n_tokens)                                                       \
    static __attribute__((noinline)) void block_dots_##n_rows##_##n_tokens(                \
        const many_codes *codes, const token_block *x, size_t r, size_t t, bool is_second, \
        many_dots *out)                                                                    \
    {                                                                                      \
        if (is_second)                                                                     \
            block_dots(codes, x, r, t, n_rows, n_tokens, true, out);                       \
        else                                                                               \
            block_dots(codes, x, r, t, n_rows, n_tokens, false, out);                      \
    }

BLOCK_DOTS(2, 8)
BLOCK_DOTS(2, 4)
BLOCK_DOTS(2, 1)
BLOCK_DOTS(1, 8)
BLOCK_DOTS(1, 4)
BLOCK_DOTS(1, 1)

QSF_FORCED_INLINE void dots_of_tokens(const many_codes *codes, const token_block *x, size_t n_rows,
                                      size_t n_tokens, bool is_second, many_dots *out)
{
    const bool one = n_rows == 1;
    for (size_t r = 0; r < n_rows; r += 2) {
        size_t t = 0;
        for (; t + 8 <= n_tokens; t += 8)
            (one ? block_dots_1_8 : block_dots_2_8)(codes, x, r, t, is_second, out);
        for (; t + 4 <= n_tokens; t += 4)
            (one ? block_dots_1_4 : block_dots_2_4)(codes, x, r, t, is_second, out);
        for (; t < n_tokens; t++)
            (one ? block_dots_1_1 : block_dots_2_1)(codes, x, r, t, is_second, out);
    }
}

QSF_FORCED_INLINE void compute_dots(int_form form, many *m, size_t n_blocks, size_t n_rows,
                                    const qsf_acts *x, size_t block, size_t n_tokens)
{
    const bool is_fine = form.dtype == QSF_DTYPE_8BIT;
    for (size_t b = 0; b < n_blocks; b++) {
        token_block xb;
        for (size_t t = 0; t < n_tokens; t++) {
            const size_t i = block + t * x->n_blocks + b;
            memcpy(xb.q[t], x->q + i * QSF_BLOCK, QSF_BLOCK);
            xb.start[t] = form.has_min || is_fine ? 0 : -form.zero * x->sum[i];
        }
        dots_of_tokens(&m->codes[b], &xb, n_rows, n_tokens, false, &m->dots[b]);
        if (!is_fine)
            continue;
        for (size_t t = 0; t < n_tokens; t++) {
            const size_t i = block + t * x->n_blocks + b;
            memcpy(xb.q[t], x->q_low + i * QSF_BLOCK, QSF_BLOCK);
            xb.start[t] = -form.zero * x->fine_sum[i];
        }
        dots_of_tokens(&m->codes[b], &xb, n_rows, n_tokens, true, &m->dots[b]);
    }
}

#define BY_TOKENS(type, dtype)                                                      \
    static void matmul_##type##_any(const unsigned char *tiles, size_t n_tile_rows, \
                                    const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                               \
        if (x->n_tokens >= MANY_FROM)                                               \
            matmul_many(int_form_of(dtype), tiles, n_tile_rows, x, y, y_stride);    \
        else                                                                        \
            matmul_##type##_avx512(tiles, n_tile_rows, x, y, y_stride);             \
    }

BY_TOKENS(2bit_sym, QSF_DTYPE_2BIT_SYM)
BY_TOKENS(2bit, QSF_DTYPE_2BIT)
BY_TOKENS(3bit, QSF_DTYPE_3BIT)
BY_TOKENS(4bit, QSF_DTYPE_4BIT)
BY_TOKENS(4bit_sym, QSF_DTYPE_4BIT_SYM)
BY_TOKENS(ternary, QSF_DTYPE_TERNARY)
BY_TOKENS(ternary_dense, QSF_DTYPE_TERNARY_DENSE)
BY_TOKENS(8bit, QSF_DTYPE_8BIT)

QSF_TARGET_END

qsf_matmul_fn *qsf_matmul_avx512(qsf_dtype dtype)
{
    static qsf_matmul_fn *const by_dtype[QSF_DTYPE_COUNT] = {
        [QSF_DTYPE_2BIT_SYM] = matmul_2bit_sym_any,
        [QSF_DTYPE_2BIT] = matmul_2bit_any,
        [QSF_DTYPE_3BIT] = matmul_3bit_any,
        [QSF_DTYPE_4BIT] = matmul_4bit_any,
        [QSF_DTYPE_4BIT_SYM] = matmul_4bit_sym_any,
        [QSF_DTYPE_TERNARY] = matmul_ternary_any,
        [QSF_DTYPE_TERNARY_DENSE] = matmul_ternary_dense_any,
        [QSF_DTYPE_8BIT] = matmul_8bit_any,
    };
    return by_dtype[dtype];
}

void qsf_kernels_fill_avx512(qsf_kernels *k)
{
    fill_matmul_int_avx512(k);
    for (int d = 0; d < QSF_DTYPE_COUNT; d++)
        if (qsf_matmul_avx512((qsf_dtype)d) != NULL)
            k->matmul[d] = qsf_matmul_avx512((qsf_dtype)d);
    fill_matmul_float_avx512(k);
    qsf_vecops_fill_avx512(k);
}

#endif
