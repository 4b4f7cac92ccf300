/* wide_avx512.h - products of five and more tokens with AVX-512: copies their activations side
 * by side, and multiplies each unpacked register of codes with up to 16 tokens.
 *
 * Included inside a target region, after unpack_avx512.h; the including file provides
 * add_four(). */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "kernels/part_scales.h"

#define WIDE_BLOCKS 32    /* blocks whose activations are copied side by side; a multiple of 16 */
#define WIDE_TILE_ROWS 32 /* multiplied with them; stay in the second-level cache */
#define UNPACKED_BLOCKS 8 /* the same if codes are unpacked first */
#define UNPACKED_TILE_ROWS 4
#define UNPACKED_BYTES (QSF_TILE_ROWS * QSF_BLOCK) /* of a tile */
#define AHEAD_TILES 4                              /* prefetch distance in tiles */

/* Most tokens that share the codes of a tile, which stay in registers with their dots; fewer go as
 * MEDIUM or NARROW. */
#define WIDE 16 /* the sums are in the first-level cache, which costs less than two passes */
#define MEDIUM 12
#define NARROW 8
#define WIDE_STREAMS 2 /* tile rows processed side by side: two streams of reads are faster */

/* Activations of up to WIDE tokens over some blocks, side by side, so that one address and
 * literal offsets reach all of them: separate addresses would need too many registers, and an
 * index in an address costs a slot of the front end. */
typedef struct panel {
    _Alignas(64) int8_t q[WIDE_BLOCKS][WIDE][QSF_BLOCK];
    int8_t q_low[WIDE_BLOCKS][WIDE][QSF_BLOCK]; /* of 8 bits */
    float scale[WIDE][WIDE_BLOCKS];             /* of parts: of the first half of a block */
    float second_scale[WIDE][WIDE_BLOCKS];
    float scaled_sum[WIDE][WIDE_BLOCKS];  /* with a min */
    int32_t start[4][WIDE][WIDE_BLOCKS];  /* -zero point * sum: without; by parts */
    float part_sum[4][WIDE][WIDE_BLOCKS]; /* of parts with a min: scaled */
} panel;

/* True for the types whose codes take longer to unpack than to multiply: these are unpacked once
 * for all tokens. */
QSF_FORCED_INLINE bool is_unpacked_once(qsf_codes codes)
{
    return codes == QSF_CODES_TRITS;
}

/* Copies the scales and sums of up to 16 blocks, from block i of x on, to block b of token t. */
QSF_FORCED_INLINE void panel_scales(qsf_form form, const qsf_acts *x, size_t i, size_t n_blocks,
                                    size_t t, size_t b, panel *p)
{
    const bool is_fine = form.codes == QSF_CODES_8BIT;
    const __mmask16 some = (__mmask16)(n_blocks < 16 ? (1U << n_blocks) - 1 : 0xFFFFU);
    const __m512i zero = _mm512_set1_epi32(-form.zero);
    const lanes scale = _mm512_maskz_loadu_ps(some, x->scale + i);
    lanes_store(&p->scale[t][b], is_fine ? lanes_mul(scale, lanes_set(0x1p-8F)) : scale);
    if (form.has_min) {
        lanes_store(&p->scaled_sum[t][b], _mm512_maskz_loadu_ps(some, x->scaled_sum + i));
        return;
    }
    const __m512i sum = _mm512_maskz_loadu_epi32(some, (is_fine ? x->fine_sum : x->sum) + i);
    _mm512_store_si512(&p->start[0][t][b], _mm512_mullo_epi32(sum, zero));
}

/* The same of block i for a type with parts */
QSF_FORCED_INLINE void panel_parts(qsf_form form, const qsf_acts *x, size_t i, size_t t, size_t b,
                                   panel *p)
{
    const bool is_fine = form.codes == QSF_CODES_8BIT;
    const size_t n_parts = QSF_BLOCK / form.scale_cols;
    p->scale[t][b] = part_act_scale(form, &x->parts[i], 0);
    p->second_scale[t][b] = part_act_scale(form, &x->parts[i], n_parts - 1);
    for (size_t part = 0; part < n_parts; part++) {
        const int32_t sum = part_sum(form, &x->parts[i], is_fine ? x->fine_sum[i] : 0, part);
        if (form.has_min)
            p->part_sum[part][t][b] = part_act_scale(form, &x->parts[i], part) * (float)sum;
        else
            p->start[part][t][b] = -form.zero * sum;
    }
}

/* Copies blocks b0 .. b0 + n_blocks - 1 of n tokens from t0 on; up to n_tokens the last again. One
 * copy of it serves all types. It takes parts of a qsf_form: a whole one, passed by address, would
 * not be a literal any more. */
static QSF_NOT_INLINED void panel_fill(qsf_codes codes, size_t scale_cols, bool has_min,
                                       int32_t zero, const qsf_acts *x, size_t b0, size_t n_blocks,
                                       size_t t0, size_t n, size_t n_tokens, panel *p)
{
    const qsf_form form = {
        .codes = codes, .scale_cols = scale_cols, .has_min = has_min, .zero = zero};
    for (size_t t = 0; t < n_tokens; t++) {
        const size_t i = (t0 + (t < n ? t : n - 1)) * x->n_blocks + b0;
        for (size_t b = 0; b < n_blocks; b++) {
            const size_t at = (i + b) * QSF_BLOCK;
            _mm512_store_si512(p->q[b][t], _mm512_loadu_si512(x->q + at));
            if (codes == QSF_CODES_8BIT)
                _mm512_store_si512(p->q_low[b][t], _mm512_loadu_si512(x->q_low + at));
        }
        for (size_t b = 0; b < n_blocks && scale_cols < QSF_BLOCK; b++)
            panel_parts(form, x, i + b, t, b, p);
        for (size_t b = 0; b < n_blocks && scale_cols == QSF_BLOCK; b += 16)
            panel_scales(form, x, i + b, n_blocks - b, t, b, p);
    }
}

/* dot [n_tokens] += codes of a part of a tile * a block of activations q [WIDE, 64] */
QSF_FORCED_INLINE void add_wide_part(qsf_form form, const unsigned char *codes, const int8_t *q,
                                     size_t part, size_t n_tokens, __m512i *dot)
{
    const size_t n = form.scale_cols / 4;
    QSF_UNROLL(8)
    for (size_t g = part * n; g < (part + 1) * n; g++) {
        const __m512i group = form.codes == QSF_CODES_8BIT ? load64(codes + g * 64)
                                                           : unpack_group(form.codes, codes, g);
        QSF_UNROLLED
        for (size_t t = 0; t < n_tokens; t++)
            dot[t] = add_four(dot[t], group, q, t * QSF_BLOCK + 4 * g);
    }
}

/* Continues acc [n_tokens] over the blocks of a group of tiles, from block b of the panel on. */
QSF_FORCED_INLINE void wide_head(qsf_form form, const unsigned char *head, const panel *p,
                                 size_t b0, size_t n_tokens, lanes *acc)
{
    const bool is_fine = form.codes == QSF_CODES_8BIT;
    const size_t n_parts = QSF_BLOCK / form.scale_cols;
    part_scales scales;
    load_part_scales(form, head, &scales);
    QSF_UNROLL(1)
    for (size_t i = 0; i < qsf_tiles_per_head(form); i++) {
        const size_t b = b0 + i;
        const unsigned char *const codes =
            head + qsf_codes_off(form) + i * qsf_code_bytes(form.codes);
        QSF_UNROLL(4)
        for (size_t part = 0; part < n_parts; part++) {
            __m512i dot[WIDE];
            QSF_UNROLLED
            for (size_t t = 0; t < n_tokens; t++)
                dot[t] = form.has_min || is_fine ? _mm512_setzero_si512()
                                                 : _mm512_set1_epi32(p->start[part][t][b]);
            add_wide_part(form, codes, p->q[b][0], part, n_tokens, dot);
            if (is_fine) {
                QSF_UNROLLED
                for (size_t t = 0; t < n_tokens; t++)
                    dot[t] = _mm512_add_epi32(_mm512_slli_epi32(dot[t], 8),
                                              _mm512_set1_epi32(p->start[part][t][b]));
                add_wide_part(form, codes, p->q_low[b][0], part, n_tokens, dot);
            }
            const lanes scale = scales.scale[i * n_parts + part];
            const float(*const x_scale)[WIDE_BLOCKS] =
                part < n_parts / 2 ? p->scale : p->second_scale;
            QSF_UNROLLED
            for (size_t t = 0; t < n_tokens; t++) {
                const lanes factor = lanes_mul(scale, lanes_set(x_scale[t][b]));
                acc[t] = lanes_fma(_mm512_cvtepi32_ps(dot[t]), factor, acc[t]);
            }
            QSF_UNROLLED
            for (size_t t = 0; t < n_tokens && form.has_min; t++)
                acc[t] = lanes_fma(scales.min[i * n_parts + part],
                                   lanes_set(p->part_sum[part][t][b]), acc[t]);
        }
    }
}

/* dot [n_tokens] += codes of a tile, or unpacked codes, * a block of activations q [WIDE, 64] */
QSF_FORCED_INLINE void add_wide_dots(qsf_form form, const unsigned char *tile,
                                     const unsigned char *unpacked, const int8_t *q,
                                     size_t n_tokens, __m512i *dot)
{
    const qsf_codes kind = is_unpacked_once(form.codes) ? QSF_CODES_8BIT : form.codes;
    const unsigned char *const bytes = tile + qsf_codes_off(form);
    const planes layout = planes_of(kind);
    QSF_UNROLL(16)
    for (size_t p = 0; p < layout.n_planes; p++) {
        __m512i codes[5];
        if (is_unpacked_once(form.codes))
            codes[0] = load64(unpacked + p * 64);
        else
            unpack_plane(kind, bytes, p, codes);
        for (size_t k = 0; k < layout.n_in_plane; k++) {
            const size_t g = group_of(kind, p, k);
            if (form.factor == 2)
                codes[k] = _mm512_add_epi8(codes[k], codes[k]);
            QSF_UNROLLED
            for (size_t t = 0; t < n_tokens; t++)
                dot[t] = add_four(dot[t], codes[k], q, t * QSF_BLOCK + 4 * g);
        }
    }
}

/* Continues acc [n_tokens] over block b of the panel. */
QSF_FORCED_INLINE void wide_block(qsf_form form, const unsigned char *tile,
                                  const unsigned char *codes, const panel *p, size_t b,
                                  size_t n_tokens, lanes *acc)
{
    const bool is_fine = form.codes == QSF_CODES_8BIT;
    __m512i dot[WIDE];
    QSF_UNROLLED
    for (size_t t = 0; t < n_tokens; t++)
        dot[t] =
            form.has_min || is_fine ? _mm512_setzero_si512() : _mm512_set1_epi32(p->start[0][t][b]);
    add_wide_dots(form, tile, codes, p->q[b][0], n_tokens, dot);
    if (is_fine) {
        QSF_UNROLLED
        for (size_t t = 0; t < n_tokens; t++)
            dot[t] = _mm512_add_epi32(_mm512_slli_epi32(dot[t], 8),
                                      _mm512_set1_epi32(p->start[0][t][b]));
        add_wide_dots(form, tile, codes, p->q_low[b][0], n_tokens, dot);
    }
    lanes scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
    if (form.unit != 1.0F)
        scale = lanes_mul(scale, lanes_set(form.unit));
    QSF_UNROLLED
    for (size_t t = 0; t < n_tokens; t++) {
        const lanes factor = lanes_mul(scale, lanes_set(p->scale[t][b]));
        acc[t] = lanes_fma(_mm512_cvtepi32_ps(dot[t]), factor, acc[t]);
    }
    if (!form.has_min)
        return;
    const lanes min = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
    QSF_UNROLLED
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = lanes_fma(min, lanes_set(p->scaled_sum[t][b]), acc[t]);
}

/* Tiles of up to WIDE_STREAMS tile rows, and the addresses to prefetch after them. */
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
QSF_FORCED_INLINE void wide_prefetch(qsf_form form, const wide_rows *w, size_t r, size_t b)
{
    const size_t tile_bytes = form.tile_bytes;
    const size_t later = b + AHEAD_TILES;
    const uintptr_t ahead = later < w->n_blocks
                                ? (uintptr_t)w->tiles + later * tile_bytes
                                : (uintptr_t)w->next + (later - w->n_blocks) * tile_bytes;
    for (size_t i = 0; i < qsf_tiles_per_head(form) * tile_bytes; i += 64)
        __builtin_prefetch((const void *)(ahead + r * w->row_bytes + i));
}

/* Multiplies them with a panel of n_tokens tokens, of which n are stored. y: the output of the
 * first. n_streams (most rows) and n_tokens are literals. */
QSF_FORCED_INLINE void wide_group(qsf_form form, const wide_rows *w, const panel *p,
                                  size_t n_streams, size_t n_tokens, size_t n, float *y,
                                  size_t y_stride)
{
    const size_t tile_bytes = form.tile_bytes;
    const size_t n_rows = n_streams == 1 ? 1 : w->n_rows;
    lanes acc[WIDE_STREAMS][WIDE];
    for (size_t r = 0; r < n_rows; r++)
        QSF_UNROLLED
    for (size_t t = 0; t < n_tokens; t++)
        acc[r][t] = w->is_first || t >= n ? lanes_set(0.0F)
                                          : lanes_load(y + r * QSF_TILE_ROWS + t * y_stride);
    for (size_t b = 0; b < w->n_blocks; b += qsf_tiles_per_head(form))
        for (size_t r = 0; r < n_rows; r++) {
            const unsigned char *const tile = w->tiles + r * w->row_bytes + b * tile_bytes;
            const panel *same = p;
            /* Otherwise gcc loads all scales of the block before the loop, and has too few
             * registers. */
            __asm__("" : "+r"(same));
            wide_prefetch(form, w, r, b);
            if (form.scale_cols < QSF_BLOCK) {
                wide_head(form, tile, same, b, n_tokens, acc[r]);
                continue;
            }
            const unsigned char *const codes =
                is_unpacked_once(form.codes) ? w->codes + (r * w->n_blocks + b) * UNPACKED_BYTES
                                             : NULL;
            wide_block(form, tile, codes, same, b, n_tokens, acc[r]);
        }
    for (size_t r = 0; r < n_rows; r++)
        QSF_UNROLLED
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

/* Multiplies them with n tokens from t0 on, at most n_tokens, through the panel p. n_streams and
 * n_tokens are literals. */
QSF_FORCED_INLINE void wide_tokens(qsf_form form, const wide_tiles *w, const qsf_acts *x, panel *p,
                                   size_t t0, size_t n_streams, size_t n_tokens, size_t n, float *y,
                                   size_t y_stride)
{
    const size_t tile_bytes = form.tile_bytes;
    const size_t row_bytes = x->n_blocks * tile_bytes;
    panel_fill(form.codes, form.scale_cols, form.has_min, form.zero, x, w->b0, w->n_blocks, t0, n,
               n_tokens, p);
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
        if (is_unpacked_once(form.codes))
            rows.codes += rows.n_rows * w->n_blocks * UNPACKED_BYTES;
    }
}

/* The first tokens read the tiles from memory. For the others the tiles are in the second-level
 * cache, where one stream is faster. */
QSF_FORCED_INLINE void wide_part(qsf_form form, const wide_tiles *w, const qsf_acts *x, panel *p,
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

QSF_FORCED_INLINE void matmul_wide(qsf_form form, const unsigned char *tiles, size_t n_tile_rows,
                                   const qsf_acts *x, float *y, size_t y_stride)
{
    const bool is_unpacked = is_unpacked_once(form.codes);
    const size_t most_rows = is_unpacked ? UNPACKED_TILE_ROWS : WIDE_TILE_ROWS;
    const size_t most_blocks = is_unpacked ? UNPACKED_BLOCKS : WIDE_BLOCKS;
    const size_t tile_bytes = form.tile_bytes;
    panel p; /* one buffer for all callers, because stacks are small */
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
