/* matmul_int_tmpl.h - products in the integer form for every quantised type, over lanes.
 *
 * Lanes are the 16 rows of a tile row. A tile is unpacked once for a group of tokens; its
 * dots are exact integers, and the float steps after them are those of kernels.h. The
 * including file provides lanes_*.h, QSF_NAME(op) and
 *   QSF_GROUP_TOKENS   most tokens that share an unpacked tile: 8, 4 or 2
 *   dots               a type: the 16 row sums of a tile and a token, in any form
 *   dot_tile(form, tile, q, q_stride, n_tokens, dots *dot)
 *                      dot [n_tokens]: exact sums of code * q, q [n_tokens, q_stride]
 *   fine_acts          a type: a block of 16-bit activations of some tokens
 *   load_fine(q, q_low, q_stride, n_tokens, fine_acts *x)
 *   dot_fine(codes, first, n, x, n_tokens, dots *dot)
 *                      exact sums of code * (256 * q + q_low) of groups first .. first + n - 1 of
 *                      4 columns, literals, of an 8-bit tile, or of
 *                      (code - 128 + QSF_FINE_ZERO) * ... where that is defined
 *   QSF_FINE_TOKENS    most rows of values that share the codes of a tile, if not
 *                      QSF_GROUP_TOKENS: 8, 6, 4 or 2
 *   dots_add(a, b)     the sum of two dots
 *   dot_part(form, codes, part, q, q_stride, n_tokens, dots *dot)
 *                      as dot_tile for part `part`, a literal, of a tile's codes: form.scale_cols
 *                      columns of a type that has fewer than 64; q of the block. Sums of E2M1 and
 *                      IQ4 are of value * q if QSF_SIGNED_VALUES is defined, else of (value +
 *                      form.zero) * q
 *   dots_to_lanes(dots, int32_t factor, int32_t start)
 *                      (float)(factor * sum + start) for each row
 *
 * form and n_tokens are literals after inlining. If registers are few, also
 *   QSF_UNPACKED_TOKENS   from so many tokens on, tiles are unpacked to memory, once for all
 *   QSF_UNPACKED_BYTES    of a tile
 *   QSF_PANEL_TOKENS      most tokens that share an unpacked tile
 *   QSF_PANEL_PREFETCH    if defined, outputs and activations of the next tokens are prefetched
 *   unpack_tile(form, tile, to), dot_unpacked(codes, bytes, ...)
 *                         as dot_tile; not for 8 bits and types with parts
 */
/* SPDX-License-Identifier: Apache-2.0 */

#include "kernels/part_scales.h"

#ifndef QSF_FINE_ZERO
#define QSF_FINE_ZERO 128
#endif

#ifndef QSF_FINE_TOKENS
#define QSF_FINE_TOKENS QSF_GROUP_TOKENS
#endif

/* How far ahead tiles are prefetched: processors do not prefetch beyond a page of 4 KiB, and a tile
 * is computed quickly. Four tiles with common scales (1344 to 3360 bytes) are computed before
 * those of the other tile row, so they need a larger distance. Prefetching after the end has no
 * effect. */
#define AHEAD_BYTES 2048
#define HEAD_AHEAD_BYTES 4608

/* Most tokens for which two tile rows go at a time. */
#ifndef QSF_PAIRED_TOKENS
#define QSF_PAIRED_TOKENS 1
#endif

/* True for types that profit; narrower types spend more time computing than reading. */
QSF_FORCED_INLINE bool is_paired(qsf_form form)
{
    return qsf_code_bytes(form.codes) >= 512;
}

/* Does the float steps of one block, whose dots are dot [n_tokens]. */
QSF_FORCED_INLINE void add_dots(qsf_form form, const unsigned char *tile, const dots *dot,
                                const qsf_acts *x, size_t block, size_t n_tokens, lanes *acc)
{
    const size_t n_blocks = x->n_blocks;
    const bool is_fine = form.codes == QSF_CODES_8BIT;
    lanes scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
    if (form.unit != 1.0F)
        scale = lanes_mul(scale, lanes_set(form.unit));
    for (size_t t = 0; t < n_tokens; t++) {
        const size_t i = block + t * n_blocks;
        const float x_scale = is_fine ? x->scale[i] * 0x1p-8F : x->scale[i];
        const int32_t zero = is_fine ? QSF_FINE_ZERO : form.zero;
        const int32_t start = form.has_min ? 0 : -zero * (is_fine ? x->fine_sum[i] : x->sum[i]);
        const lanes dot_t = dots_to_lanes(dot[t], form.factor, start);
        acc[t] = lanes_fma(dot_t, lanes_mul(scale, lanes_set(x_scale)), acc[t]);
    }
    if (!form.has_min)
        return;
    const lanes min = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = lanes_fma(min, lanes_set(x->scaled_sum[block + t * n_blocks]), acc[t]);
}

/* Zero point of the sums of dot_part() and dot_fine() */
QSF_FORCED_INLINE int32_t part_zero(qsf_form form)
{
#ifdef QSF_SIGNED_VALUES
    if (form.codes == QSF_CODES_E2M1 || form.codes == QSF_CODES_IQ4)
        return 0;
#endif
    return form.codes == QSF_CODES_8BIT ? QSF_FINE_ZERO : form.zero;
}

/* Does the float steps of part `part` of a block, whose dots are dot [n_tokens]. */
QSF_FORCED_INLINE void add_part_dots(qsf_form form, lanes scale, lanes min, const dots *dot,
                                     const qsf_acts *x, size_t block, size_t part, size_t n_tokens,
                                     lanes *acc)
{
    const bool is_fine = form.codes == QSF_CODES_8BIT;
    const int32_t zero = part_zero(form);
    for (size_t t = 0; t < n_tokens; t++) {
        const size_t i = block + t * x->n_blocks;
        const float x_scale = part_act_scale(form, &x->parts[i], part);
        const int32_t sum = zero != 0 || form.has_min
                                ? part_sum(form, &x->parts[i], is_fine ? x->fine_sum[i] : 0, part)
                                : 0;
        const lanes dot_t = dots_to_lanes(dot[t], 1, -zero * sum);
        acc[t] = lanes_fma(dot_t, lanes_mul(scale, lanes_set(x_scale)), acc[t]);
        if (form.has_min)
            acc[t] = lanes_fma(min, lanes_set(x_scale * (float)sum), acc[t]);
    }
}

QSF_FORCED_INLINE void prefetch_tile(qsf_form form, uintptr_t at)
{
    for (size_t i = 0; i < form.tile_bytes; i += 64)
        __builtin_prefetch((const void *)(at + i));
}

/* As add_block for the tiles of a head, of a type whose scales are of fewer than 64 columns. Each
 * tile prefetches one tile: prefetching all at once would fill the queue of misses and delay
 * reads. */
QSF_FORCED_INLINE void add_head(qsf_form form, const unsigned char *head, uintptr_t ahead,
                                const qsf_acts *x, size_t block, size_t n_tokens, lanes *acc)
{
    const size_t q_stride = x->n_blocks * QSF_BLOCK;
    const size_t n_parts = QSF_BLOCK / form.scale_cols;
    part_scales scales;
    load_part_scales(form, head, &scales);
    QSF_UNROLL(1)
    for (size_t b = 0; b < qsf_tiles_per_head(form); b++) {
        prefetch_tile(form, ahead + b * form.tile_bytes);
        const unsigned char *const codes =
            head + qsf_codes_off(form) + b * qsf_code_bytes(form.codes);
        const int8_t *const q = x->q + (block + b) * QSF_BLOCK;
        fine_acts fine;
        if (form.codes == QSF_CODES_8BIT)
            load_fine(q, x->q_low + (block + b) * QSF_BLOCK, q_stride, n_tokens, &fine);
        QSF_UNROLL(4)
        for (size_t part = 0; part < n_parts; part++) {
            dots dot[QSF_GROUP_TOKENS];
            if (form.codes == QSF_CODES_8BIT)
                dot_fine(codes, part * 8, 8, &fine, n_tokens, dot);
            else
                dot_part(form, codes, part, q, q_stride, n_tokens, dot);
            add_part_dots(form, scales.scale[b * n_parts + part], scales.min[b * n_parts + part],
                          dot, x, block + b, part, n_tokens, acc);
        }
    }
}

/* Continues acc over one block, or over those of a head: token t0 + t is at x->scale[i] and so on,
 * i = block + t * n_blocks. Prefetches as many bytes from `ahead` on. */
QSF_FORCED_INLINE void add_block(qsf_form form, const unsigned char *tile, uintptr_t ahead,
                                 const qsf_acts *x, size_t block, size_t n_tokens, lanes *acc)
{
    if (form.scale_cols < QSF_BLOCK) {
        add_head(form, tile, ahead, x, block, n_tokens, acc);
        return;
    }
    prefetch_tile(form, ahead);
    const size_t q_stride = x->n_blocks * QSF_BLOCK;
    const int8_t *const q = x->q + block * QSF_BLOCK;
    dots dot[QSF_GROUP_TOKENS];
    if (form.codes == QSF_CODES_8BIT) {
        fine_acts fine;
        load_fine(q, x->q_low + block * QSF_BLOCK, q_stride, n_tokens, &fine);
        dot_fine(tile + QSF_TILE_CODES_OFF(false), 0, 16, &fine, n_tokens, dot);
    } else {
        dot_tile(form, tile, q, q_stride, n_tokens, dot);
    }
    add_dots(form, tile, dot, x, block, n_tokens, acc);
}

/* Multiplies n_rows tile rows, 1 or 2, with tokens t0 .. t0 + n_tokens - 1 (literals, n_tokens <=
 * QSF_GROUP_TOKENS); y: their first output of token t0. Two streams of reads are faster than one.
 * The second tile row follows the first in memory, so its end prefetches the next two. */
QSF_FORCED_INLINE void int_group(qsf_form form, const unsigned char *tiles, size_t n_rows,
                                 const qsf_acts *x, size_t t0, size_t n_tokens, float *y,
                                 size_t y_stride)
{
    const size_t n_together = qsf_tiles_per_head(form);
    const size_t ahead_bytes = n_together > 1 ? HEAD_AHEAD_BYTES : AHEAD_BYTES;
    const size_t n_ahead = (ahead_bytes + form.tile_bytes - 1) / form.tile_bytes;
    const size_t row_bytes = x->n_blocks * form.tile_bytes;
    lanes acc[2][QSF_GROUP_TOKENS];
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < n_tokens; t++)
            acc[r][t] = lanes_set(0.0F);
    for (size_t b = 0; b < x->n_blocks; b += n_together) {
        const unsigned char *const tile = tiles + b * form.tile_bytes;
        const bool is_end = b + n_ahead >= x->n_blocks;
        const uintptr_t ahead =
            (uintptr_t)tile + n_ahead * form.tile_bytes + (is_end ? (n_rows - 1) * row_bytes : 0);
        for (size_t r = 0; r < n_rows; r++)
            add_block(form, tile + r * row_bytes, ahead + r * row_bytes, x, t0 * x->n_blocks + b,
                      n_tokens, acc[r]);
    }
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < n_tokens; t++)
            lanes_store(y + t * y_stride + r * QSF_TILE_ROWS, acc[r][t]);
}

/* Multiplies pairs of tile rows with few tokens; returns the number of tile rows done. */
QSF_FORCED_INLINE size_t int_pairs(qsf_form form, const unsigned char *tiles, size_t n_tile_rows,
                                   const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t tile_bytes = form.tile_bytes;
    size_t i = 0;
    for (; i + 2 <= n_tile_rows; i += 2) {
        const unsigned char *const rows = tiles + i * x->n_blocks * tile_bytes;
        float *const yi = y + i * QSF_TILE_ROWS;
        size_t t = 0;
#if QSF_PAIRED_TOKENS >= 4
        for (; t + 4 <= x->n_tokens; t += 4)
            int_group(form, rows, 2, x, t, 4, yi + t * y_stride, y_stride);
        if (t + 3 == x->n_tokens) {
            int_group(form, rows, 2, x, t, 3, yi + t * y_stride, y_stride);
            t += 3;
        }
        for (; t + 2 <= x->n_tokens; t += 2)
            int_group(form, rows, 2, x, t, 2, yi + t * y_stride, y_stride);
#endif
        for (; t < x->n_tokens; t++)
            int_group(form, rows, 2, x, t, 1, yi + t * y_stride, y_stride);
    }
    return i;
}

#ifdef QSF_UNPACKED_TOKENS

#define QSF_PANEL_BLOCKS 8 /* unpacked at a time: 8 KiB of codes fit the first-level cache */

/* As int_group, for blocks b0 .. b0 + n_panel - 1, whose codes are unpacked; continues y unless b0
 * is 0. */
QSF_FORCED_INLINE void panel_group(qsf_form form, const unsigned char *tiles, size_t tile_bytes,
                                   const unsigned char *codes, size_t b0, size_t n_panel,
                                   const qsf_acts *x, size_t t0, size_t n_tokens, float *y,
                                   size_t y_stride)
{
    lanes acc[QSF_PANEL_TOKENS];
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = b0 == 0 ? lanes_set(0.0F) : lanes_load(y + t * y_stride);
#ifdef QSF_PANEL_PREFETCH /* bytes past the end have no effect */
    for (size_t t = n_tokens; t < 2 * n_tokens; t++)
        __builtin_prefetch((const void *)((uintptr_t)y + t * y_stride * sizeof *y), 1);
#endif
    for (size_t b = 0; b < n_panel; b++) {
        const size_t block = t0 * x->n_blocks + b0 + b;
#ifdef QSF_PANEL_PREFETCH
        const uintptr_t acts = (uintptr_t)x->q + block * QSF_BLOCK;
        for (size_t t = n_tokens; t < 2 * n_tokens; t++)
            __builtin_prefetch((const void *)(acts + t * x->n_blocks * QSF_BLOCK));
#endif
        dots dot[QSF_PANEL_TOKENS];
        dot_unpacked(form.codes, codes + b * QSF_UNPACKED_BYTES, x->q + block * QSF_BLOCK,
                     x->n_blocks * QSF_BLOCK, n_tokens, dot);
        add_dots(form, tiles + (b0 + b) * tile_bytes, dot, x, block, n_tokens, acc);
    }
    for (size_t t = 0; t < n_tokens; t++)
        lanes_store(y + t * y_stride, acc[t]);
}

/* One tile row */
QSF_FORCED_INLINE void int_row_by_panels(qsf_form form, const unsigned char *tiles,
                                         size_t tile_bytes, const qsf_acts *x, float *y,
                                         size_t y_stride)
{
    unsigned char codes[QSF_PANEL_BLOCKS * QSF_UNPACKED_BYTES];
    for (size_t b0 = 0; b0 < x->n_blocks; b0 += QSF_PANEL_BLOCKS) {
        const size_t n_left = x->n_blocks - b0;
        const size_t n = n_left < QSF_PANEL_BLOCKS ? n_left : QSF_PANEL_BLOCKS;
        for (size_t b = 0; b < n; b++)
            unpack_tile(form, tiles + (b0 + b) * tile_bytes, codes + b * QSF_UNPACKED_BYTES);
        size_t t = 0;
        for (; t + QSF_PANEL_TOKENS <= x->n_tokens; t += QSF_PANEL_TOKENS)
            panel_group(form, tiles, tile_bytes, codes, b0, n, x, t, QSF_PANEL_TOKENS,
                        y + t * y_stride, y_stride);
        for (; t + 2 <= x->n_tokens; t += 2)
            panel_group(form, tiles, tile_bytes, codes, b0, n, x, t, 2, y + t * y_stride, y_stride);
        if (t < x->n_tokens)
            panel_group(form, tiles, tile_bytes, codes, b0, n, x, t, 1, y + t * y_stride, y_stride);
    }
}

#endif

QSF_FORCED_INLINE void matmul_int(qsf_form form, const unsigned char *tiles, size_t n_tile_rows,
                                  const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t tile_bytes = form.tile_bytes;
#ifdef QSF_UNPACKED_TOKENS
    if (x->n_tokens >= QSF_UNPACKED_TOKENS && form.codes != QSF_CODES_8BIT &&
        form.scale_cols == QSF_BLOCK) {
        for (size_t i = 0; i < n_tile_rows; i++)
            int_row_by_panels(form, tiles + i * x->n_blocks * tile_bytes, tile_bytes, x,
                              y + i * QSF_TILE_ROWS, y_stride);
        return;
    }
#endif
    size_t i = 0;
    if (is_paired(form) && x->n_tokens <= QSF_PAIRED_TOKENS)
        i = int_pairs(form, tiles, n_tile_rows, x, y, y_stride);
    for (; i < n_tile_rows; i++) {
        const unsigned char *const row = tiles + i * x->n_blocks * tile_bytes;
        float *const yi = y + i * QSF_TILE_ROWS;
        size_t t = 0;
#if QSF_GROUP_TOKENS >= 8
        for (; t + 8 <= x->n_tokens; t += 8)
            int_group(form, row, 1, x, t, 8, yi + t * y_stride, y_stride);
#endif
#if QSF_GROUP_TOKENS >= 4
        for (; t + 4 <= x->n_tokens; t += 4)
            int_group(form, row, 1, x, t, 4, yi + t * y_stride, y_stride);
#endif
        for (; t + 2 <= x->n_tokens; t += 2)
            int_group(form, row, 1, x, t, 2, yi + t * y_stride, y_stride);
        for (; t < x->n_tokens; t++)
            int_group(form, row, 1, x, t, 1, yi + t * y_stride, y_stride);
    }
}

/* Rows r0 .. r0 + n_rows - 1 of values (n_rows a literal <= QSF_GROUP_TOKENS) */
QSF_FORCED_INLINE void value_group(const qsf_value_tiles *tiles, const qsf_value_weights *w,
                                   qsf_span_range parts, size_t r0, size_t n_rows, float *values,
                                   size_t stride)
{
    fine_acts fine[QSF_KV_SPAN_TOKENS / QSF_BLOCK];
    for (size_t b = parts.begin; b < parts.end; b++)
        load_fine(w->q[b][r0], w->q_low[b][r0], QSF_BLOCK, n_rows, &fine[b]);
    for (size_t g = 0; g < QSF_BLOCK / QSF_TILE_ROWS; g++) {
        dots sum[QSF_GROUP_TOKENS];
        dot_fine(tiles->codes[g][parts.begin], 0, 16, &fine[parts.begin], n_rows, sum);
        for (size_t b = parts.begin + 1; b < parts.end; b++) {
            dots dot[QSF_GROUP_TOKENS];
            dot_fine(tiles->codes[g][b], 0, 16, &fine[b], n_rows, dot);
            for (size_t r = 0; r < n_rows; r++)
                sum[r] = dots_add(sum[r], dot[r]);
        }
        for (size_t r = 0; r < n_rows; r++) {
            const lanes dot = dots_to_lanes(sum[r], 1, -QSF_FINE_ZERO * w->fine_sum[r0 + r]);
            lanes_store(values + r * stride + g * QSF_TILE_ROWS,
                        lanes_fma(dot, lanes_set(w->factor[r0 + r]), lanes_set(w->start[r0 + r])));
        }
    }
}

static void QSF_NAME(value_products)(const qsf_value_tiles *tiles, const qsf_value_weights *w,
                                     qsf_span_range parts, size_t n_rows, float *values,
                                     size_t stride)
{
    size_t r = 0;
    for (; r + QSF_FINE_TOKENS <= n_rows; r += QSF_FINE_TOKENS)
        value_group(tiles, w, parts, r, QSF_FINE_TOKENS, values + r * stride, stride);
    for (; r + 2 <= n_rows; r += 2)
        value_group(tiles, w, parts, r, 2, values + r * stride, stride);
    for (; r < n_rows; r++)
        value_group(tiles, w, parts, r, 1, values + r * stride, stride);
}

#define INT_MATMUL(id, symbol, type, ...)                                               \
    static void QSF_NAME(matmul_##type)(const unsigned char *tiles, size_t n_tile_rows, \
                                        const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                                   \
        matmul_int(qsf_form_of(id), tiles, n_tile_rows, x, y, y_stride);                \
    }
QSF_CODED_TYPES(INT_MATMUL)

/* The fill function's part for the integer form. */
static void QSF_NAME(fill_matmul_int)(qsf_kernels *k)
{
#define FILL_INT(id, symbol, type, ...) k->matmul[id] = QSF_NAME(matmul_##type);
    QSF_CODED_TYPES(FILL_INT)
    k->value_products = QSF_NAME(value_products);
}
