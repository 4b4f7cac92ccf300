/* values_tmpl.h - values that are codes, and their weights, as integers for products; over lanes.
 *
 * Included by attend_tmpl.h. Contracts at qsf_value_tiles in kernels.h.
 */
/* SPDX-License-Identifier: Apache-2.0 */

/* Codes of a slot's 64 dims: pieces of 16 bytes. Byte i of piece j holds those of dims 16 j + i, 16
 * (j + n_pieces) + i and so on, low bits first. */
QSF_FORCED_INLINE void row_tiles(size_t bits, const qsf_value_blocks *blocks, qsf_span_range range,
                                 qsf_value_tiles *out)
{
    const bool has_min = bits < 8;
    const size_t n_pieces = bits / 2;
    const size_t stride = 16 * n_pieces;
    for (size_t p = range.begin / 4 * 4; p < range.end; p += 4) {
        const unsigned char *const codes = blocks->pages[p / QSF_KV_PAGE_TOKENS] +
                                           (has_min ? 4 : 2) * QSF_KV_PAGE_TOKENS +
                                           p % QSF_KV_PAGE_TOKENS * stride;
        for (size_t j = 0; j < n_pieces; j++)
            lanes_spread_codes(codes + 16 * j, stride, bits,
                               out->codes[j][p / QSF_BLOCK] + p % QSF_BLOCK * QSF_TILE_ROWS,
                               n_pieces * sizeof out->codes[0]);
    }
    for (size_t p = range.begin / QSF_LANES * QSF_LANES; p < range.end; p += QSF_LANES) {
        const unsigned char *const scales =
            blocks->pages[p / QSF_KV_PAGE_TOKENS] + 2 * (p % QSF_KV_PAGE_TOKENS);
        lanes_store(out->scale + p, lanes_load_f16(scales));
        lanes_store(out->min + p,
                    has_min ? lanes_load_f16(scales + 2 * QSF_KV_PAGE_TOKENS) : lanes_set(0.0F));
    }
}

/* The same of keys: 16 positions at a time, each a tile. A plane of 64 bytes is [16, 4]: four dims,
 * and with more than one code a byte as many more, n_pieces * 16 dims further. */
QSF_FORCED_INLINE void key_tiles(size_t bits, const qsf_value_blocks *blocks, qsf_span_range range,
                                 qsf_value_tiles *out)
{
    const bool has_min = bits < 8;
    const size_t n_pieces = bits / 2;
    for (size_t p = range.begin / QSF_LANES * QSF_LANES; p < range.end; p += QSF_LANES) {
        const unsigned char *const tile =
            blocks->pages[p / QSF_KV_PAGE_TOKENS] +
            p % QSF_KV_PAGE_TOKENS / QSF_TILE_ROWS * blocks->tile_step;
        for (size_t j = 0; j < n_pieces; j++)
            lanes_turn_codes(tile + QSF_TILE_CODES_OFF(has_min) + 256 * j, bits,
                             out->codes[j][p / QSF_BLOCK] + p % QSF_BLOCK * QSF_TILE_ROWS,
                             n_pieces * sizeof out->codes[0]);
        lanes_store(out->scale + p, lanes_load_f16(tile + QSF_TILE_SCALES_OFF));
        lanes_store(out->min + p,
                    has_min ? lanes_load_f16(tile + QSF_TILE_MINS_OFF) : lanes_set(0.0F));
    }
}

#define VALUE_TILES(type, bits)                                                                    \
    static void QSF_NAME(value_tiles_##type)(const qsf_value_blocks *blocks, qsf_span_range range, \
                                             qsf_value_tiles *tiles)                               \
    {                                                                                              \
        if (blocks->tile_step != 0)                                                                \
            key_tiles(bits, blocks, range, tiles);                                                 \
        else                                                                                       \
            row_tiles(bits, blocks, range, tiles);                                                 \
    }

VALUE_TILES(8bit, 8)
VALUE_TILES(4bit, 4)
VALUE_TILES(2bit, 2)

/* A row's weights before they are rounded */
typedef struct scaled_weights {
    _Alignas(64) float at[QSF_KV_SPAN_TOKENS];
    float largest; /* magnitude */
} scaled_weights;

/* out = e * scale where the row attends; returns the sum of e * min. is_whole, a literal: the row
 * attends to all positions. */
QSF_FORCED_INLINE float scale_weights(bool is_whole, const float *e, qsf_span_range range,
                                      size_t begin, size_t end, const qsf_value_tiles *tiles,
                                      scaled_weights *out)
{
    const lanes zero = lanes_set(0.0F);
    lanes magnitude = zero;
    lanes start = zero;
    for (size_t p = begin; p < end; p += QSF_LANES) {
        const lanes ep = lanes_load(e + p);
        const lanes scaled = lanes_mul(ep, lanes_load(tiles->scale + p));
        const lanes w = lanes_in(is_whole, range, p, scaled, zero);
        lanes_store(out->at + p, w);
        magnitude = lanes_larger_magnitude(magnitude, lanes_abs(w));
        const lanes next = lanes_fma(ep, lanes_load(tiles->min + p), start);
        start = lanes_in(is_whole, range, p, next, start);
    }
    out->largest = lanes_top_magnitude(magnitude);
    return lanes_sum(start);
}

static inline void round_weights(const scaled_weights *w, size_t begin, size_t end, size_t r,
                                 qsf_value_weights *out)
{
    const bool is_usable = w->largest >= QSF_QUANTISE_MIN && w->largest <= FLT_MAX;
    const lanes factor = lanes_set(is_usable ? 32512.0F / w->largest : 0.0F);
    lanes sums = lanes_set(0.0F); /* of integers whose sum is below 2^24: exact in any order */
    for (size_t p = begin; p < end; p += QSF_BLOCK) {
        int8_t *const q = out->q[p / QSF_BLOCK][r];
        int8_t *const q_low = out->q_low[p / QSF_BLOCK][r];
        if (is_usable) {
            lanes_store_fine(q, q_low, w->at + p, factor, &sums);
        } else {
            memset(q, 0, QSF_BLOCK);
            memset(q_low, 0, QSF_BLOCK);
        }
    }
    out->factor[r] = w->largest / 32512.0F;
    out->fine_sum[r] = (int32_t)lanes_sum(sums);
}

/* The next row is scaled before a row is rounded: so no rounding waits for its row's largest
 * weight. */
static void QSF_NAME(value_weights)(const float *e, const qsf_span_range *ranges, size_t n_rows,
                                    qsf_span_range parts, const qsf_value_tiles *tiles,
                                    qsf_value_weights *out)
{
    const size_t begin = parts.begin * QSF_BLOCK;
    const size_t end = parts.end * QSF_BLOCK;
    scaled_weights scaled[2];
    for (size_t r = 0; r <= n_rows; r++) {
        if (r < n_rows) {
            const float *const row = e + r * QSF_KV_SPAN_TOKENS;
            scaled_weights *const to = &scaled[r % 2];
            out->start[r] =
                is_whole_span(ranges[r])
                    ? scale_weights(true, row, ranges[r], 0, QSF_KV_SPAN_TOKENS, tiles, to)
                    : scale_weights(false, row, ranges[r], begin, end, tiles, to);
        }
        if (r > 0)
            round_weights(&scaled[(r - 1) % 2], begin, end, r - 1, out);
    }
}
