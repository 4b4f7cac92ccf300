/* matmul_amx.c - matrix products of many tokens with AMX tiles of int8.
 *
 * An unpacked tile of weights is an AMX tile without rearranging: its 16 groups of 4 columns are
 * the rows. With the blocks of 16 tokens as the other operand, one tdpbssd computes all 16 x 16
 * dots. They go to memory, and the float steps of kernels.h follow, while the next products run.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

#include <immintrin.h>

#define GROUP_TOKENS 16 /* tokens whose dots one product computes */
#define MOST_ROWS 4     /* tile rows of a chunk, and products of each: 16 KiB of codes, which */
#define MOST_STEPS 4    /* stay in the first-level cache for all tokens, */
#define MOST_TOKENS 256 /* tokens at a time: 64 KiB of sums, in the order of their use */
#define LAG 2           /* steps from the beginning of a product to its float steps */
#define VALUES_FROM 5   /* fewer rows of values are faster without AMX */
#define RING 4          /* products whose dots are kept: a power of two larger than LAG */

QSF_TARGET_BEGIN("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "kernels/avx512/lanes_avx512.h"

#include "kernels/part_scales.h"

#include "kernels/avx512/unpack_avx512.h"

/* Types with parts would multiply each part with tiles of its own, half or more of them zeros. */
QSF_FORCED_INLINE bool has_amx(qsf_form form)
{
    return form.scale_cols == QSF_BLOCK || form.codes == QSF_CODES_E2M1;
}

/* Fewer tokens are faster without AMX. */
QSF_FORCED_INLINE size_t amx_from(qsf_form form)
{
    if (form.codes == QSF_CODES_E2M1)
        return 32;
    return form.codes == QSF_CODES_4BIT && form.has_min ? 9 : 5;
}

/* The record that ldtilecfg reads. */
typedef struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} tile_config;

/* Tiles 0 and 1: dots; 2 and 3: codes; 4 .. 7: activations of the four blocks of a chunk; with 8
 * bits two blocks and their low parts; with MXFP4 two blocks, twice. */
QSF_FORCED_INLINE void configure_tiles(void)
{
    tile_config config = {.palette = 1};
    for (size_t i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.n_rows[i] = 16;
    }
    /* gcc assumes that ldtilecfg reads only 8 bytes. */
    __asm__ volatile("" : : "m"(config) : "memory");
    _tile_loadconfig(&config);
}

typedef struct product_dots {
    _Alignas(64) int32_t at[GROUP_TOKENS][QSF_TILE_ROWS];
} product_dots;

/* Some blocks of some tile rows, unpacked to a tile for each product; and the scales of 16
 * tokens. */
typedef struct chunk {
    _Alignas(64) unsigned char codes[MOST_ROWS][MOST_STEPS][QSF_TILE_ROWS * QSF_BLOCK];
    product_dots dots[RING];
    product_dots low_dots[RING]; /* with 8 bits */
    lanes scale[MOST_ROWS][MOST_STEPS];
    lanes min[MOST_ROWS][MOST_STEPS];
    _Alignas(64) float x_scale[MOST_STEPS][GROUP_TOKENS];
    _Alignas(64) float scaled_sum[MOST_STEPS][GROUP_TOKENS];
    int8_t q[2][MOST_STEPS][GROUP_TOKENS][QSF_BLOCK]; /* of fewer than 16 tokens; with low parts */
    lanes sums[MOST_TOKENS / GROUP_TOKENS][MOST_ROWS]
              [GROUP_TOKENS]; /* sums carried from chunk to chunk */
    size_t n_rows;
    size_t b0;
    size_t n_blocks;
    bool is_last;     /* its sums are the outputs */
    size_t row_bytes; /* distance of its tile rows in the file */
    uintptr_t next;   /* the next chunk, which the first group of tokens prefetches; or 0 */
} chunk;

/* A block is one product, of MXFP4 two: each sub-block has scales of its own. So step s of a tile
 * row is of block s / steps_of_block(). */
QSF_FORCED_INLINE size_t steps_of_block(qsf_form form)
{
    return form.scale_cols < QSF_BLOCK ? 2 : 1;
}

QSF_FORCED_INLINE size_t most_steps(qsf_form form)
{
    return form.codes == QSF_CODES_8BIT ? MOST_STEPS / 2 : MOST_STEPS;
}

/* Unpacks a tile of MXFP4 as two, each with zeros in place of the other sub-block. */
QSF_FORCED_INLINE void unpack_sub_blocks(qsf_form form, const unsigned char *tile,
                                         unsigned char (*codes)[QSF_TILE_ROWS * QSF_BLOCK],
                                         lanes *scale)
{
    const size_t half = sizeof codes[0] / 2;
    unpack_scaled(form, tile, form.zero, codes[0]);
    memcpy(codes[1] + half, codes[0] + half, half);
    memset(codes[0] + half, 0, half);
    memset(codes[1], 0, half);
    scale[0] = load_half_scales(tile, 0);
    scale[1] = load_half_scales(tile, 1);
}

/* Unpacks signed codes: the zero point is subtracted. tiles: the first tile of the chunk */
QSF_FORCED_INLINE void unpack_chunk(qsf_form form, const unsigned char *tiles, chunk *c)
{
    for (size_t r = 0; r < c->n_rows; r++)
        for (size_t b = 0; b < c->n_blocks; b++) {
            const unsigned char *const tile = tiles + r * c->row_bytes + b * form.tile_bytes;
            if (form.scale_cols < QSF_BLOCK) {
                unpack_sub_blocks(form, tile, &c->codes[r][2 * b], &c->scale[r][2 * b]);
                continue;
            }
            unpack_scaled(form, tile, form.zero, c->codes[r][b]);
            c->scale[r][b] = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
            if (form.unit != 1.0F)
                c->scale[r][b] = lanes_mul(c->scale[r][b], lanes_set(form.unit));
            if (form.has_min)
                c->min[r][b] = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
        }
}

/* Prefetches tile (r, b) of the next chunk. Past the end of the weights it has no effect. */
QSF_FORCED_INLINE void prefetch_next(qsf_form form, const chunk *c, size_t r, size_t b)
{
    const size_t tile_bytes = form.tile_bytes;
    const uintptr_t tile = c->next + r * c->row_bytes + b * tile_bytes;
    for (size_t i = 0; i < tile_bytes; i += 64)
        __builtin_prefetch((const void *)(tile + i));
}

/* Prefetches activations: of block b and tokens r, r + 4, ... of the group that begins at `next`: a
 * part for each product. */
QSF_FORCED_INLINE void prefetch_acts(uintptr_t next, size_t stride, size_t r, size_t b)
{
    for (size_t t = r; t < GROUP_TOKENS; t += MOST_ROWS)
        __builtin_prefetch((const void *)(next + t * stride + b * QSF_BLOCK));
}

/* to[b][t] = from[t * stride + b] of n_blocks blocks and n tokens, and 0 elsewhere */
QSF_FORCED_INLINE void transpose(const float *from, size_t stride, size_t n_blocks, size_t n,
                                 float (*to)[GROUP_TOKENS])
{
    const __mmask8 blocks = (__mmask8)((1U << n_blocks) - 1);
    __m512 z[4]; /* lane j of z[i]: token 4 j + i */
    QSF_UNROLL(4)
    for (size_t i = 0; i < 4; i++) {
        __m128 rows[4];
        QSF_UNROLL(4)
        for (size_t j = 0; j < 4; j++) {
            const size_t t = 4 * j + i;
            rows[j] = t < n ? _mm_maskz_loadu_ps(blocks, from + t * stride) : _mm_setzero_ps();
        }
        z[i] = _mm512_insertf32x4(_mm512_castps128_ps512(rows[0]), rows[1], 1);
        z[i] = _mm512_insertf32x4(z[i], rows[2], 2);
        z[i] = _mm512_insertf32x4(z[i], rows[3], 3);
    }
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(z[0], z[1]));
    const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(z[2], z[3]));
    const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(z[0], z[1]));
    const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(z[2], z[3]));
    _mm512_store_pd(to[0], _mm512_unpacklo_pd(low01, low23));
    _mm512_store_pd(to[1], _mm512_unpackhi_pd(low01, low23));
    _mm512_store_pd(to[2], _mm512_unpacklo_pd(high01, high23));
    _mm512_store_pd(to[3], _mm512_unpackhi_pd(high01, high23));
}

/* The activations of a chunk: 16 tokens, from one to the next `stride` bytes, `step` from block to
 * block. low: of 8 bits */
typedef struct group_acts {
    const int8_t *q;
    const int8_t *low;
    size_t stride;
    size_t step;
} group_acts;

/* Loads n tokens at `from`; fewer than 16 are copied first, so that no load passes the end. */
QSF_FORCED_INLINE group_acts whole_group(bool is_fine, chunk *c, group_acts from, size_t n)
{
    if (n == GROUP_TOKENS)
        return from;
    for (size_t t = 0; t < n; t++)
        for (size_t b = 0; b < c->n_blocks; b++) {
            const size_t i = t * from.stride + b * from.step;
            _mm512_store_si512(c->q[0][b][t], _mm512_loadu_si512(from.q + i));
            if (is_fine)
                _mm512_store_si512(c->q[1][b][t], _mm512_loadu_si512(from.low + i));
        }
    return (group_acts){c->q[0][0][0], c->q[1][0][0], QSF_BLOCK, sizeof c->q[0][0]};
}

/* to[2 b + h][t] = the scale of half h of block b of token t, of n tokens; 0 of the others */
QSF_FORCED_INLINE void gather_scales(const qsf_act_parts *from, size_t stride, size_t n_blocks,
                                     size_t n, float (*to)[GROUP_TOKENS])
{
    const __mmask16 tokens = (__mmask16)((1U << n) - 1);
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_mullo_epi32(
        order, _mm512_set1_epi32((int)(stride * sizeof *from / sizeof from->scale[0])));
    for (size_t s = 0; s < 2 * n_blocks; s++)
        lanes_store(to[s], _mm512_mask_i32gather_ps(_mm512_setzero_ps(), tokens, at,
                                                    &from[s / 2].scale[s % 2], 4));
}

/* Loads the activations of n tokens from t0 on into tiles, and their scales into the chunk. */
QSF_FORCED_INLINE void load_group(qsf_form form, chunk *c, const qsf_acts *x, size_t t0, size_t n)
{
    const bool is_fine = form.codes == QSF_CODES_8BIT;
    const size_t first = t0 * x->n_blocks + c->b0;
    if (form.scale_cols < QSF_BLOCK)
        gather_scales(x->parts + first, x->n_blocks, c->n_blocks, n, c->x_scale);
    else
        transpose(x->scale + first, x->n_blocks, c->n_blocks, n, c->x_scale);
    for (size_t b = 0; b < MOST_STEPS && is_fine; b++)
        lanes_store(c->x_scale[b], lanes_mul(lanes_load(c->x_scale[b]), lanes_set(0x1p-8F)));
    if (form.has_min)
        transpose(x->scaled_sum + first, x->n_blocks, c->n_blocks, n, c->scaled_sum);
    const group_acts at = {x->q + first * QSF_BLOCK, is_fine ? x->q_low + first * QSF_BLOCK : NULL,
                           x->n_blocks * QSF_BLOCK, QSF_BLOCK};
    const group_acts a = whole_group(is_fine, c, at, n);
    /* gcc does not know that tileloadd reads memory: the codes and the copies. */
    __asm__ volatile("" : : : "memory");
    _tile_loadd(4, a.q, a.stride);
    if (form.scale_cols < QSF_BLOCK) {
        _tile_loadd(5, a.q, a.stride);
        if (c->n_blocks > 1) {
            _tile_loadd(6, a.q + a.step, a.stride);
            _tile_loadd(7, a.q + a.step, a.stride);
        }
        return;
    }
    if (c->n_blocks > 1)
        _tile_loadd(5, a.q + a.step, a.stride);
    if (is_fine) {
        _tile_loadd(6, a.low, a.stride);
        if (c->n_blocks > 1)
            _tile_loadd(7, a.low + a.step, a.stride);
        return;
    }
    if (c->n_blocks > 2)
        _tile_loadd(6, a.q + 2 * a.step, a.stride);
    if (c->n_blocks > 3)
        _tile_loadd(7, a.q + 3 * a.step, a.stride);
}

QSF_FORCED_INLINE size_t ring_idx(qsf_form form, size_t r, size_t s)
{
    return (r * most_steps(form) + s) % RING;
}

/* Begins the product of the tokens in tile x with the codes in tile w, in tile d. */
#define MULTIPLY(d, x, w)      \
    do {                       \
        _tile_zero(d);         \
        _tile_dpbssd(d, x, w); \
    } while (0)

/* Begins the product of tile row r and step s. s is a literal, because names of tiles must be. With
 * 8 bits the product is stored at once: its two halves would need more tiles. */
QSF_FORCED_INLINE void start_product(qsf_form form, chunk *c, size_t r, size_t s)
{
    const size_t at = ring_idx(form, r, s);
    if (s % 2 == 0)
        _tile_loadd(2, c->codes[r][s], 64);
    else
        _tile_loadd(3, c->codes[r][s], 64);
    if (s == 0)
        MULTIPLY(0, 4, 2);
    else if (s == 1)
        MULTIPLY(1, 5, 3);
    else if (s == 2)
        MULTIPLY(0, 6, 2);
    else
        MULTIPLY(1, 7, 3);
    if (form.codes == QSF_CODES_8BIT && s == 0) {
        _tile_stored(0, c->dots[at].at[0], 64);
        MULTIPLY(1, 6, 2);
        _tile_stored(1, c->low_dots[at].at[0], 64);
    } else if (form.codes == QSF_CODES_8BIT) {
        _tile_stored(1, c->dots[at].at[0], 64);
        MULTIPLY(0, 7, 3);
        _tile_stored(0, c->low_dots[at].at[0], 64);
    }
}

/* Stores the dots of a product one step after it began, when they are nearly ready: a store that
 * waits for them would delay the next instructions. */
QSF_FORCED_INLINE void store_dots(qsf_form form, chunk *c, size_t r, size_t s)
{
    if (form.codes == QSF_CODES_8BIT)
        return;
    if (s % 2 == 0)
        _tile_stored(0, c->dots[ring_idx(form, r, s)].at[0], 64);
    else
        _tile_stored(1, c->dots[ring_idx(form, r, s)].at[0], 64);
}

/* Steps go through the tile rows of a chunk, and in each row through its products. Does the work
 * that is due `ahead` steps before the float steps: with LAG it begins the product, with 1 it
 * stores the product. */
QSF_FORCED_INLINE void run_ahead(qsf_form form, chunk *c, size_t r, size_t s, size_t ahead)
{
    const size_t most = most_steps(form);
    const size_t ahead_r = r + (s + ahead) / most;
    const size_t ahead_s = (s + ahead) % most;
    if (ahead_r >= c->n_rows || ahead_s / steps_of_block(form) >= c->n_blocks)
        return;
    if (ahead == LAG)
        start_product(form, c, ahead_r, ahead_s);
    else
        store_dots(form, c, ahead_r, ahead_s);
}

/* Does the float steps of tile row r and step s for n_tokens, a literal. */
QSF_FORCED_INLINE void add_dots(qsf_form form, const chunk *c, size_t r, size_t s, size_t n_tokens,
                                lanes *acc)
{
    const size_t at = ring_idx(form, r, s);
    const lanes scale = c->scale[r][s];
    for (size_t t = 0; t < n_tokens; t++) {
        __m512i dot = _mm512_load_si512(c->dots[at].at[t]);
        if (form.codes == QSF_CODES_8BIT)
            dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 8),
                                   _mm512_load_si512(c->low_dots[at].at[t]));
        const lanes factor = lanes_mul(scale, lanes_set(c->x_scale[s][t]));
        acc[t] = lanes_fma(_mm512_cvtepi32_ps(dot), factor, acc[t]);
    }
    const lanes min = form.has_min ? c->min[r][s] : lanes_set(0.0F);
    for (size_t t = 0; t < n_tokens && form.has_min; t++)
        acc[t] = lanes_fma(min, lanes_set(c->scaled_sum[s][t]), acc[t]);
}

/* Up to 16 tokens, their sums and outputs */
typedef struct group {
    size_t n;
    uintptr_t next; /* the first activations of the group after it, or 0 */
    size_t acts_stride;
    lanes (*sums)[GROUP_TOKENS];
    float *y; /* the output of the first tile row and token */
    size_t y_stride;
} group;

/* Prefetches the outputs of tile row r and tokens s, s + 4, ...: stores that wait for their
 * lines would delay the next instructions. */
QSF_FORCED_INLINE void prefetch_outputs(const group *g, size_t r, size_t s)
{
    for (size_t t = s; t < GROUP_TOKENS; t += MOST_STEPS)
        __builtin_prefetch(
            (const void *)((uintptr_t)g->y + (r * QSF_TILE_ROWS + t * g->y_stride) * sizeof *g->y),
            1);
}

/* Multiplies a chunk with the tokens loaded by load_group, at most n_tokens (a literal). The
 * first chunk of its rows begins their sums, the last one stores them. */
QSF_FORCED_INLINE void multiply_group(qsf_form form, chunk *c, const group *g, size_t n_tokens)
{
    const size_t most = most_steps(form);
    for (size_t s = 0; s < LAG; s++)
        if (s / steps_of_block(form) < c->n_blocks)
            start_product(form, c, 0, s);
    store_dots(form, c, 0, 0);
    for (size_t r = 0; r < c->n_rows; r++) {
        lanes acc[GROUP_TOKENS];
        QSF_UNROLL(16)
        for (size_t t = 0; t < n_tokens; t++)
            acc[t] = c->b0 == 0 ? lanes_set(0.0F) : g->sums[r][t];
        QSF_UNROLL(4)
        for (size_t s = 0; s < most; s++) {
            const size_t b = s / steps_of_block(form);
            run_ahead(form, c, r, s, LAG);
            run_ahead(form, c, r, s, 1);
            if (b >= c->n_blocks)
                continue;
            const bool is_first = s % steps_of_block(form) == 0; /* step within its block */
            if (is_first && c->next != 0)
                prefetch_next(form, c, r, b);
            if (is_first && g->next != 0)
                prefetch_acts(g->next, g->acts_stride, r, b);
            if (c->is_last && c->b0 != 0) /* few blocks: they are near */
                prefetch_outputs(g, r + 1, s);
            add_dots(form, c, r, s, n_tokens, acc);
        }
        QSF_UNROLL(16)
        for (size_t t = 0; t < n_tokens; t++)
            if (!c->is_last)
                g->sums[r][t] = acc[t];
            else if (t < g->n)
                lanes_store(g->y + r * QSF_TILE_ROWS + t * g->y_stride, acc[t]);
    }
}

/* Multiplies a chunk with tokens t0 .. end - 1. */
QSF_FORCED_INLINE void multiply_chunk(qsf_form form, chunk *c, const qsf_acts *x, size_t t0,
                                      size_t end, float *y, size_t y_stride)
{
    for (size_t t = t0; t < end; t += GROUP_TOKENS) {
        const size_t after = t + GROUP_TOKENS;
        const uintptr_t next = (uintptr_t)x->q + (after * x->n_blocks + c->b0) * QSF_BLOCK;
        const group g = {.n = end - t < GROUP_TOKENS ? end - t : GROUP_TOKENS,
                         .next = after < end && x->n_blocks > MOST_STEPS ? next : 0,
                         .acts_stride = x->n_blocks * QSF_BLOCK,
                         .sums = c->sums[(t - t0) / GROUP_TOKENS],
                         .y = y + t * y_stride,
                         .y_stride = y_stride};
        load_group(form, c, x, t, g.n);
        if (g.n > GROUP_TOKENS / 2)
            multiply_group(form, c, &g, GROUP_TOKENS);
        else
            multiply_group(form, c, &g, GROUP_TOKENS / 2);
        c->next = 0;
    }
}

/* Multiplies up to MOST_ROWS tile rows with tokens t0 .. end - 1, at most MOST_TOKENS. */
QSF_FORCED_INLINE void multiply_rows(qsf_form form, chunk *c, const unsigned char *tiles,
                                     const qsf_acts *x, size_t t0, size_t end, float *y,
                                     size_t y_stride)
{
    const size_t tile_bytes = form.tile_bytes;
    const size_t most = most_steps(form) / steps_of_block(form);
    for (c->b0 = 0; c->b0 < x->n_blocks; c->b0 += most) {
        const size_t blocks_left = x->n_blocks - c->b0;
        c->is_last = blocks_left <= most;
        c->n_blocks = c->is_last ? blocks_left : most;
        c->next = (uintptr_t)tiles +
                  (c->is_last ? MOST_ROWS * c->row_bytes : (c->b0 + most) * tile_bytes);
        unpack_chunk(form, tiles + c->b0 * tile_bytes, c);
        multiply_chunk(form, c, x, t0, end, y, y_stride);
    }
}

QSF_FORCED_INLINE void matmul_amx(qsf_form form, const unsigned char *tiles, size_t n_tile_rows,
                                  const qsf_acts *x, float *y, size_t y_stride)
{
    chunk c;
    c.row_bytes = x->n_blocks * form.tile_bytes;
    configure_tiles();
    for (size_t t = 0; t < x->n_tokens; t += MOST_TOKENS) {
        const size_t end = x->n_tokens - t < MOST_TOKENS ? x->n_tokens : t + MOST_TOKENS;
        for (size_t i = 0; i < n_tile_rows; i += MOST_ROWS) {
            c.n_rows = n_tile_rows - i < MOST_ROWS ? n_tile_rows - i : MOST_ROWS;
            multiply_rows(form, &c, tiles + i * c.row_bytes, x, t, end, y + i * QSF_TILE_ROWS,
                          y_stride);
        }
    }
    _tile_release();
}

/* The dots of 16 dims: of q and of q_low, [rows, dims]. */
typedef struct value_dots {
    product_dots at[2];
} value_dots;

/* Dims 16 g .. 16 g + 31 of 16 rows */
QSF_FORCED_INLINE void dot_values(const qsf_value_tiles *tiles, const qsf_value_weights *w,
                                  qsf_span_range parts, size_t g, value_dots *dots)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t b = parts.begin; b < parts.end; b++) {
        _tile_loadd(4, w->q[b], QSF_BLOCK);
        _tile_loadd(6, tiles->codes[g][b], 64);
        _tile_loadd(7, tiles->codes[g + 1][b], 64);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(2, 4, 7);
        _tile_loadd(5, w->q_low[b], QSF_BLOCK);
        _tile_dpbsud(1, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, dots[0].at[0].at[0], 64);
    _tile_stored(1, dots[0].at[1].at[0], 64);
    _tile_stored(2, dots[1].at[0].at[0], 64);
    _tile_stored(3, dots[1].at[1].at[0], 64);
}

static void value_products_amx(const qsf_value_tiles *tiles, const qsf_value_weights *w,
                               qsf_span_range parts, size_t n_rows, float *values, size_t stride)
{
    if (n_rows < VALUES_FROM) {
        qsf_value_products_avx512()(tiles, w, parts, n_rows, values, stride);
        return;
    }
    value_dots dots[QSF_BLOCK / QSF_TILE_ROWS];
    configure_tiles();
    /* gcc does not know that tileloadd reads memory. */
    __asm__ volatile("" : : : "memory");
    for (size_t g = 0; g < QSF_BLOCK / QSF_TILE_ROWS; g += 2)
        dot_values(tiles, w, parts, g, dots + g);
    _tile_release();
    for (size_t r = 0; r < n_rows; r++)
        for (size_t g = 0; g < QSF_BLOCK / QSF_TILE_ROWS; g++) {
            const __m512i high = _mm512_load_si512(dots[g].at[0].at[r]);
            const __m512i low = _mm512_load_si512(dots[g].at[1].at[r]);
            const __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
            lanes_store(values + r * stride + g * QSF_TILE_ROWS, values_of(dot, w, r));
        }
}

/* The chunk, 100 KiB, is on the stack of a separate function, so that it and the AVX-512 chunk
 * are never on the stack together. */
#define BY_TOKENS(id, symbol, type, ...)                                                      \
    static QSF_NOT_INLINED void matmul_##type##_chunks(const unsigned char *tiles,            \
                                                       size_t n_tile_rows, const qsf_acts *x, \
                                                       float *y, size_t y_stride)             \
    {                                                                                         \
        matmul_amx(qsf_form_of(id), tiles, n_tile_rows, x, y, y_stride);                      \
    }                                                                                         \
    static void matmul_##type##_amx(const unsigned char *tiles, size_t n_tile_rows,           \
                                    const qsf_acts *x, float *y, size_t y_stride)             \
    {                                                                                         \
        if (!has_amx(qsf_form_of(id)) || x->n_tokens < amx_from(qsf_form_of(id)))             \
            qsf_matmul_avx512(id)(tiles, n_tile_rows, x, y, y_stride);                        \
        else                                                                                  \
            matmul_##type##_chunks(tiles, n_tile_rows, x, y, y_stride);                       \
    }
QSF_CODED_TYPES(BY_TOKENS)

QSF_TARGET_END

void qsf_kernels_fill_amx(qsf_kernels *k)
{
#define FILL(id, symbol, type, ...) k->matmul[id] = matmul_##type##_amx;
    QSF_CODED_TYPES(FILL)
    k->value_products = value_products_amx;
}

#endif
