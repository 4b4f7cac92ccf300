/* matmul_avx512.c - matrix products with AVX-512 and VNNI: one register holds the 16 rows.
 *
 * A 64-byte load of codes is 16 rows x 4 columns; vpdpbusd multiplies it with four
 * activations broadcast to all rows and adds to 16 row sums. Codes are the unsigned operand.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

#include <immintrin.h>

#define QSF_NAME(op) op##_avx512
#define QSF_FLOAT_SUMS 8   /* in 8 of 32 registers */
#define QSF_GROUP_TOKENS 4 /* if there are fewer than WIDE_FROM */
#define QSF_PAIRED_TOKENS 4
#define WIDE_FROM 5
#define IN_PLACE_TOKENS 2 /* most tokens for which not unpacking is faster */

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "kernels/avx512/lanes_avx512.h"

#include "kernels/avx512/unpack_avx512.h"

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

/* add_four's asm needs its offset as a literal. It is one after gcc unrolls the loops: with -O3,
 * for which CMakeLists.txt defines QSF_IS_RELEASE, and without sanitizers. */
#if defined(QSF_IS_RELEASE) && defined(__OPTIMIZE__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define IS_ASM_FOLDED 1
#else
#define IS_ASM_FOLDED 0
#endif

/* sum += codes * the four activations at q + off, in one instruction: gcc makes it two. */
QSF_FORCED_INLINE __m512i add_four(__m512i sum, __m512i codes, const int8_t *q, size_t off)
{
#if IS_ASM_FOLDED
    __asm__("vpdpbusd %c3(%2)%{1to16%}, %1, %0"
            : "+v"(sum)
            : "v"(codes), "r"(q), "i"(off), "m"(*(const int8_t(*)[])q));
    return sum;
#else
    return _mm512_dpbusd_epi32(sum, codes, broadcast4(q + off));
#endif
}

/* A block of activations of some tokens. */
typedef struct token_rows {
    const int8_t *q[QSF_GROUP_TOKENS];
} token_rows;

/* The empty asm hides the addresses: otherwise gcc keeps an address for each group of columns in
 * a register, and has too few registers. */
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
    QSF_UNROLL(4)
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[part] = add_four(dot[t].part[part], codes, x->q[t], 4 * group);
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
QSF_FORCED_INLINE void dot_tile(qsf_form form, const unsigned char *tile, const int8_t *q,
                                size_t q_stride, size_t n_tokens, dots *dot)
{
    const planes layout = planes_of(form.codes);
    const unsigned char *const bytes = tile + qsf_codes_off(form);
    const token_rows x = rows_of(q, q_stride, n_tokens);
    if (form.codes == QSF_CODES_2BIT && n_tokens <= IN_PLACE_TOKENS) {
        dot_2bit_in_place(bytes, &x, n_tokens, dot);
        return;
    }
    if (form.codes == QSF_CODES_TRITS && n_tokens <= IN_PLACE_TOKENS) {
        dot_dense_in_place(bytes, &x, n_tokens, dot);
        return;
    }
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
    QSF_UNROLL(16)
    for (size_t p = 0; p < layout.n_planes; p++) {
        __m512i codes[5];
        unpack_plane(form.codes, bytes, p, codes);
        QSF_UNROLL(8)
        for (size_t k = 0; k < layout.n_in_plane; k++)
            if (group_of(form.codes, p, k) < QSF_TILE_GROUPS)
                add_group(codes[k], &x, group_of(form.codes, p, k), n_tokens, k % 2, dot);
    }
}

QSF_FORCED_INLINE void dot_part(qsf_form form, const unsigned char *codes, size_t part,
                                const int8_t *q, size_t q_stride, size_t n_tokens, dots *dot)
{
    const size_t n = form.scale_cols / 4;
    const token_rows x = rows_of(q, q_stride, n_tokens);
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
    QSF_UNROLL(8)
    for (size_t g = part * n; g < (part + 1) * n; g++)
        add_group(unpack_group(form.codes, codes, g), &x, g, n_tokens, g % 2, dot);
}

#include "kernels/fine_acts.h"

/* dot [n_tokens]: exact sums of code * x of the codes of an 8-bit tile */
QSF_FORCED_INLINE void dot_fine(const unsigned char *bytes, size_t first, size_t n,
                                const fine_acts *x, size_t n_tokens, dots *dot)
{
    const token_rows high = rows_of(x->q, x->q_stride, n_tokens);
    const token_rows low = rows_of(x->q_low, x->q_stride, n_tokens);
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
    QSF_UNROLL(16)
    for (size_t g = first; g < first + n; g++) {
        const __m512i codes = load64(bytes + g * 64);
        add_group(codes, &high, g, n_tokens, 0, dot);
        add_group(codes, &low, g, n_tokens, 1, dot);
    }
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = _mm512_slli_epi32(dot[t].part[0], 8);
}

QSF_FORCED_INLINE dots dots_add(dots a, dots b)
{
    return (dots){{_mm512_add_epi32(a.part[0], b.part[0]), _mm512_add_epi32(a.part[1], b.part[1])}};
}

QSF_FORCED_INLINE lanes dots_to_lanes(dots d, int32_t factor, int32_t start)
{
    __m512i sum = _mm512_add_epi32(d.part[0], d.part[1]);
    if (factor == 2)
        sum = _mm512_add_epi32(sum, sum);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(start)));
}

#include "kernels/matmul_int_tmpl.h"

#include "kernels/avx512/wide_avx512.h"

#define BY_TOKENS(id, symbol, type, ...)                                            \
    static void matmul_##type##_any(const unsigned char *tiles, size_t n_tile_rows, \
                                    const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                               \
        if (x->n_tokens >= WIDE_FROM)                                               \
            matmul_wide(qsf_form_of(id), tiles, n_tile_rows, x, y, y_stride);       \
        else                                                                        \
            matmul_##type##_avx512(tiles, n_tile_rows, x, y, y_stride);             \
    }
QSF_CODED_TYPES(BY_TOKENS)

/* dot [n_rows] += codes of a tile * q [WIDE, 64] */
QSF_FORCED_INLINE void add_value_dots(const unsigned char *codes, const int8_t *q, size_t n_rows,
                                      __m512i *dot)
{
    QSF_UNROLL(16)
    for (size_t g = 0; g < QSF_TILE_GROUPS; g++) {
        const __m512i four = load64(codes + g * 64);
        for (size_t r = 0; r < n_rows; r++)
            dot[r] = add_four(dot[r], four, q, r * QSF_BLOCK + 4 * g);
    }
}

/* As value_group, for the first n of n_rows rows, a literal up to WIDE */
QSF_FORCED_INLINE void wide_values(const qsf_value_tiles *tiles, const qsf_value_weights *w,
                                   qsf_span_range parts, size_t n, size_t n_rows, float *values,
                                   size_t stride)
{
    for (size_t g = 0; g < QSF_BLOCK / QSF_TILE_ROWS; g++) {
        __m512i dot[WIDE];
        for (size_t r = 0; r < n_rows; r++)
            dot[r] = _mm512_setzero_si512();
        for (size_t b = parts.begin; b < parts.end; b++)
            add_value_dots(tiles->codes[g][b], w->q[b][0], n_rows, dot);
        for (size_t r = 0; r < n_rows; r++)
            dot[r] = _mm512_slli_epi32(dot[r], 8);
        for (size_t b = parts.begin; b < parts.end; b++)
            add_value_dots(tiles->codes[g][b], w->q_low[b][0], n_rows, dot);
        for (size_t r = 0; r < n; r++)
            lanes_store(values + r * stride + g * QSF_TILE_ROWS, values_of(dot[r], w, r));
    }
}

static void value_products_any(const qsf_value_tiles *tiles, const qsf_value_weights *w,
                               qsf_span_range parts, size_t n_rows, float *values, size_t stride)
{
    if (n_rows < WIDE_FROM)
        value_products_avx512(tiles, w, parts, n_rows, values, stride);
    else if (n_rows <= NARROW)
        wide_values(tiles, w, parts, n_rows, NARROW, values, stride);
    else
        wide_values(tiles, w, parts, n_rows, WIDE, values, stride);
}

QSF_TARGET_END

qsf_matmul_fn *qsf_matmul_avx512(qsf_dtype dtype)
{
#define ANY(id, symbol, type, ...) [id] = matmul_##type##_any,
    static qsf_matmul_fn *const by_dtype[QSF_DTYPE_COUNT] = {QSF_CODED_TYPES(ANY)};
    return by_dtype[dtype];
}

qsf_value_products_fn *qsf_value_products_avx512(void)
{
    return value_products_any;
}

void qsf_kernels_fill_avx512(qsf_kernels *k)
{
    fill_matmul_int_avx512(k);
    for (int d = 0; d < QSF_DTYPE_COUNT; d++)
        if (qsf_matmul_avx512((qsf_dtype)d) != NULL)
            k->matmul[d] = qsf_matmul_avx512((qsf_dtype)d);
    k->value_products = value_products_any;
    fill_matmul_float_avx512(k);
    qsf_vecops_fill_avx512(k);
}

#endif
