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
#define WIDE_BLOCKS 16    /* whose activations are copied side by side */
#define WIDE_TILE_ROWS 16 /* that meet them, and stay in the second-level cache for all tokens */
#define UNPACKED_BLOCKS 8 /* the same where codes are unpacked first */
#define UNPACKED_TILE_ROWS 4
#define UNPACKED_BYTES (QSF_TILE_ROWS * QSF_BLOCK) /* of a tile */
#define AHEAD_TILES 4                              /* so far ahead tiles are prefetched */
#define IN_PLACE_TOKENS 2 /* at most so many tokens are faster without unpacking */

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "kernels/lanes_avx512.h"

#include "kernels/unpack_avx512.h"

#include "kernels/values_avx512.h"

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

/* add_four's asm needs its offset as a literal, which it becomes where gcc unrolls the loops: with
 * -O3, which CMakeLists.txt tells by QSF_IS_RELEASE, and without sanitizers. */
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
#pragma GCC unroll 4
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
#pragma GCC unroll 16
    for (size_t p = 0; p < layout.n_planes; p++) {
        __m512i codes[5];
        unpack_plane(dtype, tile, p, codes);
#pragma GCC unroll 8
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
#pragma GCC unroll 8
    for (size_t p = 0; p < 8; p++) {
        __m512i codes[5];
        unpack_plane(QSF_DTYPE_MXFP4, tile, p, codes);
        add_group(codes[sub], &x, p, n_tokens, p % 2, dot);
    }
}

#include "kernels/fine_acts.h"

/* dot [n_tokens]: exact sums of code * x of the codes of an 8-bit tile */
QSF_FORCED_INLINE void dot_fine(const unsigned char *bytes, const fine_acts *x, size_t n_tokens,
                                dots *dot)
{
    const token_rows high = rows_of(x->q, x->q_stride, n_tokens);
    const token_rows low = rows_of(x->q_low, x->q_stride, n_tokens);
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].part[0] = dot[t].part[1] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (size_t g = 0; g < 16; g++) {
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

/* Most tokens that share the codes of a tile, which stay in registers with their dots; fewer go as
 * MEDIUM or NARROW. */
#define WIDE 16 /* their sums lie in the first-level cache, which costs less than two passes */
#define MEDIUM 12
#define NARROW 8
#define WIDE_STREAMS 2 /* tile rows that go side by side: two streams of reads are faster */

/* Activations of up to WIDE tokens over some blocks, side by side, so that one address and literal
 * offsets reach them all: their addresses do not fit into registers beside the others, and an
 * index in an address costs a slot of the front end. */
typedef struct panel {
    _Alignas(64) int8_t q[WIDE_BLOCKS][WIDE][QSF_BLOCK];
    int8_t q_low[WIDE_BLOCKS][WIDE][QSF_BLOCK]; /* of 8 bits */
    float scale[WIDE_BLOCKS][WIDE];
    float scaled_sum[WIDE_BLOCKS][WIDE]; /* with a min */
    int32_t zeros[2][WIDE_BLOCKS][WIDE]; /* zero point * sum: without; of MXFP4 of each sub-block */
} panel;

/* True for the type whose codes take longer to unpack than to multiply: that is done once for all
 * tokens. */
QSF_FORCED_INLINE bool is_unpacked_once(qsf_dtype dtype)
{
    return dtype == QSF_DTYPE_TERNARY_DENSE;
}

/* Copies blocks b0 .. b0 + n_blocks - 1 of n tokens from t0 on; up to n_tokens the last again. */
QSF_FORCED_INLINE void panel_fill(int_form form, const qsf_acts *x, size_t b0, size_t n_blocks,
                                  size_t t0, size_t n, size_t n_tokens, panel *p)
{
    const bool is_fine = form.dtype == QSF_DTYPE_8BIT;
    for (size_t t = 0; t < n_tokens; t++) {
        const size_t first = (t0 + (t < n ? t : n - 1)) * x->n_blocks + b0;
        for (size_t b = 0; b < n_blocks; b++) {
            const size_t i = first + b;
            _mm512_store_si512(p->q[b][t], _mm512_loadu_si512(x->q + i * QSF_BLOCK));
            if (is_fine)
                _mm512_store_si512(p->q_low[b][t], _mm512_loadu_si512(x->q_low + i * QSF_BLOCK));
            p->scale[b][t] = x->scale[i] * (is_fine ? 0x1p-8F : 1.0F);
            if (form.has_min)
                p->scaled_sum[b][t] = x->scaled_sum[i];
            else if (form.dtype == QSF_DTYPE_MXFP4) {
                p->zeros[0][b][t] = form.zero * x->first_sum[i];
                p->zeros[1][b][t] = form.zero * (x->sum[i] - x->first_sum[i]);
            } else
                p->zeros[0][b][t] = form.zero * (is_fine ? x->fine_sum[i] : x->sum[i]);
        }
    }
}

/* dot [n_tokens] += codes of a tile, or unpacked codes, * a block of activations q [WIDE, 64]. Of
 * MXFP4 only sub-block `sub`, a literal. */
QSF_FORCED_INLINE void add_wide_dots(int_form form, const unsigned char *tile,
                                     const unsigned char *unpacked, const int8_t *q, size_t sub,
                                     size_t n_tokens, __m512i *dot)
{
    const qsf_dtype dtype = is_unpacked_once(form.dtype) ? QSF_DTYPE_8BIT : form.dtype;
    const planes layout = planes_of(dtype);
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
                dot[t] = add_four(dot[t], codes[k], q, t * QSF_BLOCK + 4 * g);
        }
    }
}

/* Continues acc [n_tokens] over block b of the panel, or over one sub-block of MXFP4. */
QSF_FORCED_INLINE void wide_block(int_form form, const unsigned char *tile,
                                  const unsigned char *codes, const panel *p, size_t b, size_t sub,
                                  size_t n_tokens, lanes *acc)
{
    __m512i dot[WIDE];
    for (size_t t = 0; t < n_tokens; t++)
        dot[t] = _mm512_setzero_si512();
    add_wide_dots(form, tile, codes, p->q[b][0], sub, n_tokens, dot);
    if (form.dtype == QSF_DTYPE_8BIT) {
        for (size_t t = 0; t < n_tokens; t++)
            dot[t] = _mm512_slli_epi32(dot[t], 8);
        add_wide_dots(form, tile, codes, p->q_low[b][0], sub, n_tokens, dot);
    }
    lanes scale;
    if (form.dtype == QSF_DTYPE_MXFP4) {
        float half_scales[QSF_TILE_ROWS];
        load_half_scales(tile + sub * QSF_TILE_ROWS, half_scales);
        scale = lanes_load(half_scales);
    } else {
        scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
    }
    if (form.unit != 1.0F)
        scale = lanes_mul(scale, lanes_set(form.unit));
    for (size_t t = 0; t < n_tokens; t++) {
        if (!form.has_min)
            dot[t] = _mm512_sub_epi32(dot[t], _mm512_set1_epi32(p->zeros[sub][b][t]));
        const lanes factor = lanes_mul(scale, lanes_set(p->scale[b][t]));
        acc[t] = lanes_fma(_mm512_cvtepi32_ps(dot[t]), factor, acc[t]);
    }
    if (!form.has_min)
        return;
    const lanes min = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = lanes_fma(min, lanes_set(p->scaled_sum[b][t]), acc[t]);
}

/* Tiles of up to WIDE_STREAMS tile rows, and where reading goes on after them. */
typedef struct wide_rows {
    const unsigned char *tiles; /* from one row to the next row_bytes */
    const unsigned char *codes; /* [n_rows, n_blocks, 16, 64], unpacked, or NULL */
    const unsigned char *next;
    size_t n_rows;
    size_t row_bytes;
    size_t n_blocks;
    bool is_first; /* y begins here, and is continued otherwise */
} wide_rows;

/* Prefetches the tile of row r that comes AHEAD_TILES after that of block b. */
QSF_FORCED_INLINE void wide_prefetch(qsf_dtype dtype, const wide_rows *w, size_t r, size_t b)
{
    const size_t tile_bytes = qsf_dtype_tile_bytes(dtype);
    const size_t later = b + AHEAD_TILES;
    const uintptr_t ahead = later < w->n_blocks
                                ? (uintptr_t)w->tiles + later * tile_bytes
                                : (uintptr_t)w->next + (later - w->n_blocks) * tile_bytes;
    for (size_t i = 0; i < tile_bytes; i += 64)
        __builtin_prefetch((const void *)(ahead + r * w->row_bytes + i));
}

/* Multiplies them with a panel of n_tokens tokens, of which n are stored. y: the output of the
 * first. n_streams (most rows) and n_tokens are literals. */
QSF_FORCED_INLINE void wide_group(int_form form, const wide_rows *w, const panel *p,
                                  size_t n_streams, size_t n_tokens, size_t n, float *y,
                                  size_t y_stride)
{
    const size_t tile_bytes = qsf_dtype_tile_bytes(form.dtype);
    const size_t n_rows = n_streams == 1 ? 1 : w->n_rows;
    lanes acc[WIDE_STREAMS][WIDE];
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < n_tokens; t++)
            acc[r][t] = w->is_first || t >= n ? lanes_set(0.0F)
                                              : lanes_load(y + r * QSF_TILE_ROWS + t * y_stride);
    for (size_t b = 0; b < w->n_blocks; b++)
        for (size_t r = 0; r < n_rows; r++) {
            const unsigned char *const tile = w->tiles + r * w->row_bytes + b * tile_bytes;
            const unsigned char *const codes =
                is_unpacked_once(form.dtype) ? w->codes + (r * w->n_blocks + b) * UNPACKED_BYTES
                                             : NULL;
            const panel *same = p;
            /* Otherwise gcc loads all scales of the block before the loop, and has too few
             * registers. */
            __asm__("" : "+r"(same));
            wide_prefetch(form.dtype, w, r, b);
            wide_block(form, tile, codes, same, b, 0, n_tokens, acc[r]);
            if (form.dtype == QSF_DTYPE_MXFP4)
                wide_block(form, tile, codes, same, b, 1, n_tokens, acc[r]);
        }
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < n_tokens; t++)
            if (t < n)
                lanes_store(y + r * QSF_TILE_ROWS + t * y_stride, acc[r][t]);
}

/* Blocks b0 .. b0 + n_blocks - 1 of some tile rows. */
typedef struct wide_tiles {
    const unsigned char *tiles; /* the first tile row's tile of block b0 */
    const unsigned char *codes; /* [n_tile_rows, n_blocks, 16, 64], unpacked, or NULL */
    size_t n_tile_rows;
    size_t b0;
    size_t n_blocks;
} wide_tiles;

/* Multiplies them with n tokens from t0 on, at most n_tokens, by way of the panel p. n_streams and
 * n_tokens are literals. */
QSF_FORCED_INLINE void wide_tokens(int_form form, const wide_tiles *w, const qsf_acts *x, panel *p,
                                   size_t t0, size_t n_streams, size_t n_tokens, size_t n, float *y,
                                   size_t y_stride)
{
    const size_t tile_bytes = qsf_dtype_tile_bytes(form.dtype);
    const size_t row_bytes = x->n_blocks * tile_bytes;
    panel_fill(form, x, w->b0, w->n_blocks, t0, n, n_tokens, p);
    wide_rows rows = {.tiles = w->tiles,
                      .codes = w->codes,
                      .row_bytes = row_bytes,
                      .n_blocks = w->n_blocks,
                      .is_first = w->b0 == 0};
    for (size_t i = 0; i < w->n_tile_rows; i += n_streams) {
        const size_t n_left = w->n_tile_rows - i;
        const bool is_last = n_left <= n_streams;
        rows.n_rows = is_last ? n_left : n_streams;
        rows.next =
            is_last ? w->tiles + w->n_blocks * tile_bytes : rows.tiles + n_streams * row_bytes;
        wide_group(form, &rows, p, n_streams, n_tokens, n, y + t0 * y_stride + i * QSF_TILE_ROWS,
                   y_stride);
        rows.tiles = rows.next;
        if (is_unpacked_once(form.dtype))
            rows.codes += rows.n_rows * w->n_blocks * UNPACKED_BYTES;
    }
}

/* The first tokens read the tiles from memory; the others find them in the second-level cache,
 * where one stream is faster. */
QSF_FORCED_INLINE void wide_part(int_form form, const wide_tiles *w, const qsf_acts *x, panel *p,
                                 float *y, size_t y_stride)
{
    const size_t n_first = x->n_tokens < WIDE ? x->n_tokens : WIDE;
    if (n_first > MEDIUM)
        wide_tokens(form, w, x, p, 0, WIDE_STREAMS, WIDE, n_first, y, y_stride);
    else if (n_first > NARROW)
        wide_tokens(form, w, x, p, 0, WIDE_STREAMS, MEDIUM, n_first, y, y_stride);
    else
        wide_tokens(form, w, x, p, 0, WIDE_STREAMS, NARROW, n_first, y, y_stride);
    for (size_t t = WIDE; t < x->n_tokens; t += WIDE) {
        const size_t n_left = x->n_tokens - t;
        if (n_left > NARROW)
            wide_tokens(form, w, x, p, t, 1, WIDE, n_left < WIDE ? n_left : WIDE, y, y_stride);
        else
            wide_tokens(form, w, x, p, t, 1, NARROW, n_left, y, y_stride);
    }
}

QSF_FORCED_INLINE void matmul_wide(int_form form, const unsigned char *tiles, size_t n_tile_rows,
                                   const qsf_acts *x, float *y, size_t y_stride)
{
    const bool is_unpacked = is_unpacked_once(form.dtype);
    const size_t most_rows = is_unpacked ? UNPACKED_TILE_ROWS : WIDE_TILE_ROWS;
    const size_t most_blocks = is_unpacked ? UNPACKED_BLOCKS : WIDE_BLOCKS;
    const size_t tile_bytes = qsf_dtype_tile_bytes(form.dtype);
    panel p; /* one for all who fill it: stacks are small */
    _Alignas(64) unsigned char codes[UNPACKED_TILE_ROWS * UNPACKED_BLOCKS * UNPACKED_BYTES];
    for (size_t i = 0; i < n_tile_rows; i += most_rows)
        for (size_t b0 = 0; b0 < x->n_blocks; b0 += most_blocks) {
            const size_t rows_left = n_tile_rows - i;
            const size_t blocks_left = x->n_blocks - b0;
            const wide_tiles w = {tiles + (i * x->n_blocks + b0) * tile_bytes,
                                  is_unpacked ? codes : NULL,
                                  rows_left < most_rows ? rows_left : most_rows, b0,
                                  blocks_left < most_blocks ? blocks_left : most_blocks};
            for (size_t r = 0; r < w.n_tile_rows && is_unpacked; r++)
                for (size_t b = 0; b < w.n_blocks; b++)
                    unpack_scaled(form, w.tiles + (r * x->n_blocks + b) * tile_bytes, 0,
                                  codes + (r * w.n_blocks + b) * UNPACKED_BYTES);
            wide_part(form, &w, x, &p, y + i * QSF_TILE_ROWS, y_stride);
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

/* dot [n_rows] += codes of a tile * q [WIDE, 64] */
QSF_FORCED_INLINE void add_value_dots(const unsigned char *codes, const int8_t *q, size_t n_rows,
                                      __m512i *dot)
{
#pragma GCC unroll 16
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
