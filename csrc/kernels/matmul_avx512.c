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
#define QSF_GROUP_TOKENS 4 /* if there are fewer than WIDE_FROM */
#define QSF_PAIRED_TOKENS 4
#define WIDE_FROM 5
#define WIDE_BLOCKS 8     /* whose unpacked codes stay in the first-level cache */
#define WIDE_TILE_ROWS 4  /* whose tiles stay in the second-level cache for all tokens */
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

/* A block of activations of some tokens. */
typedef struct token_rows {
    const int8_t *q[QSF_GROUP_TOKENS];
} token_rows;

/* The addresses, which the empty asm hides: otherwise gcc keeps that of each group of columns in a
 * register of its own, and has too few. */
QSF_FORCED_INLINE token_rows rows_of(const int8_t *q, size_t q_stride, size_t n_tokens)
{
    token_rows rows;
    for (size_t t = 0; t < n_tokens; t++) {
        rows.q[t] = q + t * q_stride;
        __asm__("" : "+r"(rows.q[t]));
    }
    return rows;
}

/* Adds code * q of group `group` of columns, codes [16, 4]. */
QSF_FORCED_INLINE void add_group(__m512i codes, const token_rows *x, size_t group, size_t n_tokens,
                                 size_t part, dots *dot)
{
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[part] =
            _mm512_dpbusd_epi32(dot[t].part[part], codes, broadcast4(x->q[t] + 4 * group));
}

/* As dot_tile for 2-bit codes, which are not shifted: sum b is 4^b * code * q. It needs no shifts;
 * with more tokens it would need too many sums. */
QSF_FORCED_INLINE void dot_2bit_in_place(const unsigned char *bytes, const token_rows *x,
                                         size_t n_tokens, dots *dot)
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
                sum[t][b] =
                    _mm512_dpbusd_epi32(sum[t][b], code, broadcast4(x->q[t] + 4 * (4 * b + p)));
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
QSF_FORCED_INLINE void dot_dense_in_place(const unsigned char *bytes, const token_rows *x,
                                          size_t n_tokens, dots *dot)
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
                const __m512i four = broadcast4(x->q[t] + 4 * (5 * p + k));
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
    const token_rows x = rows_of(q, q_stride, n_tokens);
    if (layout.n_in_plane == 4 && dtype != QSF_DTYPE_3BIT && n_tokens <= IN_PLACE_TOKENS) {
        dot_2bit_in_place(bytes, &x, n_tokens, dot);
        return;
    }
    if (dtype == QSF_DTYPE_TERNARY_DENSE && n_tokens <= IN_PLACE_TOKENS) {
        dot_dense_in_place(bytes, &x, n_tokens, dot);
        return;
    }
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
    for (size_t p = 0; p < layout.n_planes; p++) {
        __m512i codes[5];
        unpack_plane(dtype, tile, p, codes);
        for (size_t k = 0; k < layout.n_in_plane; k++)
            if (group_of(dtype, p, k) < QSF_TILE_GROUPS)
                add_group(codes[k], &x, group_of(dtype, p, k), n_tokens, k % 2, dot);
    }
}

/* As dot_tile for 32 columns of MXFP4, values + 12 */
QSF_FORCED_INLINE void dot_sub_block(const unsigned char *tile, size_t sub, const int8_t *q,
                                     size_t q_stride, size_t n_tokens, dots *dot)
{
    const token_rows x = rows_of(q, q_stride, n_tokens);
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
    for (size_t p = 0; p < 8; p++) {
        __m512i codes[5];
        unpack_plane(QSF_DTYPE_MXFP4, tile, p, codes);
        add_group(codes[sub], &x, p, n_tokens, p % 2, dot);
    }
}

/* dot [n_tokens]: exact sums of code * (256 q + q_low) of an 8-bit tile */
QSF_FORCED_INLINE void dot_tile_fine(const unsigned char *tile, const int8_t *q,
                                     const int8_t *q_low, size_t q_stride, size_t n_tokens,
                                     dots *dot)
{
    const token_rows high = rows_of(q, q_stride, n_tokens);
    const token_rows low = rows_of(q_low, q_stride, n_tokens);
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
    for (size_t g = 0; g < 16; g++) {
        const __m512i codes = load64(tile + QSF_TILE_CODES_OFF(false) + g * 64);
        add_group(codes, &high, g, n_tokens, 0, dot);
        add_group(codes, &low, g, n_tokens, 1, dot);
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

/* Most tokens that share the codes of a tile, which stay in registers: their sums take 24 of 32. */
#define WIDE 12
#define NARROW 8

/* The same block of some tokens. Twelve addresses do not fit into registers beside the others, but
 * four, to which a multiple of the stride is added. */
typedef struct wide_rows {
    const int8_t *at[NARROW]; /* of token t, or of token 3 t */
    size_t stride;
} wide_rows;

/* add_four's asm needs its offset as a literal, which it becomes where gcc unrolls the loops: with
 * -O3, which CMakeLists.txt tells by QSF_IS_RELEASE, and without sanitizers. */
#if defined(QSF_IS_RELEASE) && defined(__OPTIMIZE__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define IS_ASM_FOLDED 1
#else
#define IS_ASM_FOLDED 0
#endif

/* sum += codes * four activations of token t, in one instruction: gcc makes it two. */
QSF_FORCED_INLINE __m512i add_four(__m512i sum, __m512i codes, const wide_rows *x, size_t n_tokens,
                                   size_t t, size_t off)
{
    const bool is_wide = n_tokens == WIDE;
    const int8_t *const q = x->at[is_wide ? t / 3 : t];
#if IS_ASM_FOLDED
    if (!is_wide || t % 3 == 0)
        __asm__("vpdpbusd %c3(%2)%{1to16%}, %1, %0"
                : "+v"(sum)
                : "v"(codes), "r"(q), "i"(off), "m"(*(const int8_t(*)[])q));
    else if (t % 3 == 1)
        __asm__("vpdpbusd %c3(%2,%4,1)%{1to16%}, %1, %0"
                : "+v"(sum)
                : "v"(codes), "r"(q), "i"(off), "r"(x->stride), "m"(*(const int8_t(*)[])q));
    else
        __asm__("vpdpbusd %c3(%2,%4,2)%{1to16%}, %1, %0"
                : "+v"(sum)
                : "v"(codes), "r"(q), "i"(off), "r"(x->stride), "m"(*(const int8_t(*)[])q));
#else
    int32_t four;
    memcpy(&four, q + (is_wide ? t % 3 : 0) * x->stride + off, sizeof four);
    sum = _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(four));
#endif
    return sum;
}

/* A tile row, or its blocks first .. end - 1 with the codes [n_blocks, 16, 64] unpacked. */
typedef struct wide_tiles {
    const unsigned char *tiles;
    const unsigned char *codes;
    size_t first;
    size_t end;
} wide_tiles;

/* True for the type whose codes take longer to unpack than to multiply: that is done once for all
 * tokens. */
QSF_FORCED_INLINE bool is_unpacked_once(qsf_dtype dtype)
{
    return dtype == QSF_DTYPE_TERNARY_DENSE;
}

/* dot [n_tokens] += codes of a tile, or unpacked codes, * a block of the activations; token t's is
 * at q + first[t] * 64. Of MXFP4 only sub-block `sub`, a literal. */
QSF_FORCED_INLINE void add_wide_dots(int_form form, const unsigned char *tile,
                                     const unsigned char *unpacked, const int8_t *q,
                                     const size_t *first, size_t sub, size_t n_tokens, __m512i *dot)
{
    const qsf_dtype dtype = is_unpacked_once(form.dtype) ? QSF_DTYPE_8BIT : form.dtype;
    const planes layout = planes_of(dtype);
    const bool is_wide = n_tokens == WIDE;
    wide_rows rows = {.stride = is_wide ? (first[1] - first[0]) * QSF_BLOCK : 0};
    for (size_t i = 0; i < (is_wide ? WIDE / 3 : NARROW); i++)
        rows.at[i] = q + first[is_wide ? 3 * i : i] * QSF_BLOCK;
#pragma GCC unroll 16
    for (size_t p = 0; p < layout.n_planes; p++) {
        __m512i codes[5];
        if (is_unpacked_once(form.dtype))
            codes[0] = load64(unpacked + p * 64);
        else
            unpack_plane(dtype, tile, p, codes);
        for (size_t k = 0; k < layout.n_in_plane; k++) {
            const size_t g = group_of(dtype, p, k);
            if (dtype == QSF_DTYPE_MXFP4 && k != sub)
                continue;
            if (form.factor == 2)
                codes[k] = _mm512_add_epi8(codes[k], codes[k]);
            for (size_t t = 0; t < n_tokens; t++)
                dot[t] = add_four(dot[t], codes[k], &rows, n_tokens, t, 4 * g);
        }
    }
}

/* Continues acc [n_tokens] over block b, or over one sub-block of MXFP4, of a tile row. */
QSF_FORCED_INLINE void wide_block(int_form form, const wide_tiles *w, const qsf_acts *x, size_t b,
                                  const size_t *first, size_t sub, size_t n_tokens, lanes *acc)
{
    const bool is_fine = form.dtype == QSF_DTYPE_8BIT;
    const bool is_mxfp4 = form.dtype == QSF_DTYPE_MXFP4;
    const int32_t *const sums = is_fine ? x->fine_sum : x->sum;
    const float x_unit = is_fine ? 0x1p-8F : 1.0F;
    const unsigned char *const tile = w->tiles + b * qsf_dtype_tile_bytes(form.dtype);
    const unsigned char *const codes =
        is_unpacked_once(form.dtype) ? w->codes + (b - w->first) * QSF_TILE_ROWS * QSF_BLOCK : NULL;
    __m512i dot[WIDE];
    for (size_t t = 0; t < n_tokens; t++)
        dot[t] = _mm512_setzero_si512();
    add_wide_dots(form, tile, codes, x->q + b * QSF_BLOCK, first, sub, n_tokens, dot);
    if (is_fine) {
        for (size_t t = 0; t < n_tokens; t++)
            dot[t] = _mm512_slli_epi32(dot[t], 8);
        add_wide_dots(form, tile, codes, x->q_low + b * QSF_BLOCK, first, sub, n_tokens, dot);
    }
    lanes scale;
    if (is_mxfp4) {
        float half_scales[QSF_TILE_ROWS];
        load_half_scales(tile + sub * QSF_TILE_ROWS, half_scales);
        scale = lanes_load(half_scales);
    } else {
        scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
    }
    if (form.unit != 1.0F)
        scale = lanes_mul(scale, lanes_set(form.unit));
    for (size_t t = 0; t < n_tokens; t++) {
        const size_t i = first[t] + b;
        int32_t sum = form.has_min ? 0 : sums[i];
        if (is_mxfp4)
            sum = sub == 0 ? x->first_sum[i] : sum - x->first_sum[i];
        if (!form.has_min)
            dot[t] = _mm512_sub_epi32(dot[t], _mm512_set1_epi32(form.zero * sum));
        const lanes factor = lanes_mul(scale, lanes_set(x->scale[i] * x_unit));
        acc[t] = lanes_fma(_mm512_cvtepi32_ps(dot[t]), factor, acc[t]);
    }
    if (!form.has_min)
        return;
    const lanes min = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = lanes_fma(min, lanes_set(x->scaled_sum[first[t] + b]), acc[t]);
}

/* Multiplies a tile row with n_tokens tokens, NARROW or WIDE (a literal), of which n are stored.
 * Token t's first block of x is first[t]. y: the output of the first; continued from block 1 on. */
QSF_FORCED_INLINE void wide_group(int_form form, const wide_tiles *w, const qsf_acts *x,
                                  const size_t *first, size_t n_tokens, size_t n, float *y,
                                  size_t y_stride)
{
    const size_t tile_bytes = qsf_dtype_tile_bytes(form.dtype);
    lanes acc[WIDE];
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = w->first == 0 || t >= n ? lanes_set(0.0F) : lanes_load(y + t * y_stride);
    for (size_t b = w->first; b < w->end; b++) {
        for (size_t i = 0; i < tile_bytes; i += 64)
            __builtin_prefetch(
                (const void *)((uintptr_t)w->tiles + b * tile_bytes + QSF_AHEAD_BYTES + i));
        wide_block(form, w, x, b, first, 0, n_tokens, acc);
        if (form.dtype == QSF_DTYPE_MXFP4)
            wide_block(form, w, x, b, first, 1, n_tokens, acc);
    }
    for (size_t t = 0; t < n_tokens; t++)
        if (t < n)
            lanes_store(y + t * y_stride, acc[t]);
}

/* Multiplies tile rows w [n_tile_rows] with n tokens from t0 on, at most n_tokens (a literal). Of
 * fewer the last is repeated. */
QSF_FORCED_INLINE void wide_tokens(int_form form, const wide_tiles *w, size_t n_tile_rows,
                                   const qsf_acts *x, size_t t0, size_t n_tokens, size_t n,
                                   float *y, size_t y_stride)
{
    size_t first[WIDE];
    for (size_t t = 0; t < n_tokens; t++)
        first[t] = (t0 + (t < n ? t : n - 1)) * x->n_blocks;
    for (size_t i = 0; i < n_tile_rows; i++)
        wide_group(form, &w[i], x, first, n_tokens, n, y + t0 * y_stride + i * QSF_TILE_ROWS,
                   y_stride);
}

QSF_FORCED_INLINE void wide_rows_of_tiles(int_form form, const wide_tiles *w, size_t n_tile_rows,
                                          const qsf_acts *x, float *y, size_t y_stride)
{
    for (size_t t = 0; t < x->n_tokens;) {
        const size_t n_left = x->n_tokens - t;
        if (n_left >= WIDE && n_left != 2 * NARROW) {
            wide_tokens(form, w, n_tile_rows, x, t, WIDE, WIDE, y, y_stride);
            t += WIDE;
        } else {
            const size_t n = n_left < NARROW ? n_left : NARROW;
            wide_tokens(form, w, n_tile_rows, x, t, NARROW, n, y, y_stride);
            t += n;
        }
    }
}

/* One tile row, some blocks at a time */
QSF_FORCED_INLINE void wide_unpacked(int_form form, const unsigned char *tiles, const qsf_acts *x,
                                     float *y, size_t y_stride)
{
    _Alignas(64) unsigned char codes[WIDE_BLOCKS * QSF_TILE_ROWS * QSF_BLOCK];
    for (size_t b0 = 0; b0 < x->n_blocks; b0 += WIDE_BLOCKS) {
        const size_t left = x->n_blocks - b0;
        const wide_tiles w = {tiles, codes, b0, b0 + (left < WIDE_BLOCKS ? left : WIDE_BLOCKS)};
        for (size_t b = w.first; b < w.end; b++)
            unpack_scaled(form, tiles + b * qsf_dtype_tile_bytes(form.dtype), 0,
                          codes + (b - b0) * QSF_TILE_ROWS * QSF_BLOCK);
        wide_rows_of_tiles(form, &w, 1, x, y, y_stride);
    }
}

QSF_FORCED_INLINE void matmul_wide(int_form form, const unsigned char *tiles, size_t n_tile_rows,
                                   const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t row_bytes = x->n_blocks * qsf_dtype_tile_bytes(form.dtype);
    for (size_t i = 0; i < n_tile_rows && is_unpacked_once(form.dtype); i++)
        wide_unpacked(form, tiles + i * row_bytes, x, y + i * QSF_TILE_ROWS, y_stride);
    for (size_t i = 0; i < n_tile_rows && !is_unpacked_once(form.dtype); i += WIDE_TILE_ROWS) {
        const size_t left = n_tile_rows - i;
        const size_t n_rows = left < WIDE_TILE_ROWS ? left : WIDE_TILE_ROWS;
        wide_tiles w[WIDE_TILE_ROWS];
        for (size_t r = 0; r < n_rows; r++)
            w[r] = (wide_tiles){tiles + (i + r) * row_bytes, NULL, 0, x->n_blocks};
        wide_rows_of_tiles(form, w, n_rows, x, y + i * QSF_TILE_ROWS, y_stride);
    }
}

#define BY_TOKENS(type, dtype)                                                      \
    static void matmul_##type##_any(const unsigned char *tiles, size_t n_tile_rows, \
                                    const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                               \
        if (x->n_tokens >= WIDE_FROM)                                               \
            matmul_wide(int_form_of(dtype), tiles, n_tile_rows, x, y, y_stride);    \
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
BY_TOKENS(mxfp4, QSF_DTYPE_MXFP4)

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
        [QSF_DTYPE_MXFP4] = matmul_mxfp4_any,
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
