/* attend_tmpl.h - the steps of attention over one span of pages, and the fill function, over lanes.
 *
 * Included after exp_tmpl.h and vecops_tmpl.h. Contracts at "KV pages and attention" in kernels.h;
 * the scores themselves are matrix products.
 *
 * Values of f16 and f32 are decoded once for all query rows: a block of two pages becomes [64, 64]
 * floats, which stay in the first-level cache. A single row decodes V pages while it adds. Values
 * stored as codes become products (values_tmpl.h).
 */
/* SPDX-License-Identifier: Apache-2.0 */

#include "kernels/kv_tmpl.h"

/* Returns the number of lanes of positions p .. p + 15 that are below `position`. */
static inline size_t lane_of(size_t position, size_t p)
{
    if (position <= p)
        return 0;
    return position - p < QSF_LANES ? position - p : QSF_LANES;
}

/* Lanes of positions p .. p + 15 inside the range come from v, the others from `out`. Most
 * vectors are wholly inside: the branch is cheaper than a mask. is_whole, a literal: all are
 * inside. */
QSF_FORCED_INLINE lanes lanes_in(bool is_whole, qsf_span_range range, size_t p, lanes v, lanes out)
{
    if (is_whole || (range.begin <= p && p + QSF_LANES <= range.end))
        return v;
    return lanes_between(lane_of(range.begin, p), lane_of(range.end, p), v, out);
}

static inline bool is_whole_span(qsf_span_range range)
{
    return range.begin == 0 && range.end == QSF_KV_SPAN_TOKENS;
}

#include "kernels/values_tmpl.h"

/* Rows and groups of 16 dims whose sums are in registers at the same time: QSF_SUM_ROWS *
 * QSF_SUM_GROUPS lanes of sums, one of values and one of e. */
#define QSF_SUM_ROWS 6
#ifndef QSF_SUM_GROUPS
#define QSF_SUM_GROUPS 1
#endif

/* Pages that are decoded at a time, and their slots. */
#define QSF_PIECE_PAGES 2
#define QSF_PIECE_TOKENS (QSF_PIECE_PAGES * QSF_KV_PAGE_TOKENS)

/* Multiplies the scores of a row by the scale; returns the largest. */
QSF_FORCED_INLINE float scale_scores(bool is_whole, float *scores, qsf_span_range range,
                                     float scale)
{
    const lanes lowest = lanes_set(-INFINITY);
    /* Two chains, because each maximum waits for the previous one. */
    lanes largest[2] = {lowest, lowest};
    for (size_t p = range.begin / (2 * QSF_LANES) * (2 * QSF_LANES); p < range.end;
         p += 2 * QSF_LANES)
        for (size_t i = 0; i < 2; i++) {
            const size_t at = p + i * QSF_LANES;
            const lanes s = lanes_mul(lanes_load(scores + at), lanes_set(scale));
            lanes_store(scores + at, s);
            largest[i] = lanes_max(lanes_in(is_whole, range, at, s, lowest), largest[i]);
        }
    return lanes_top(lanes_max(largest[0], largest[1]));
}

/* Replaces the scores of a row by e; returns their sum. */
QSF_FORCED_INLINE float exp_scores(bool is_whole, float *scores, qsf_span_range range, float max)
{
    const lanes zero = lanes_set(0.0F);
    lanes total = zero;
    for (size_t p = range.begin / QSF_LANES * QSF_LANES; p < range.end; p += QSF_LANES) {
        const lanes e = lanes_exp(lanes_sub(lanes_load(scores + p), lanes_set(max)));
        lanes_store(scores + p, e);
        total = lanes_add(total, lanes_in(is_whole, range, p, e, zero));
    }
    return lanes_sum(total);
}

/* Scales the next row before computing a row's exponentials, so that no exponential waits for
 * its row's largest score. */
static void QSF_NAME(span_softmax)(float *scores, const qsf_span_range *ranges, size_t n_rows,
                                   float scale, qsf_span_sums *sums)
{
    const qsf_span_range whole = {0, QSF_KV_SPAN_TOKENS};
    for (size_t r = 0; r <= n_rows; r++) {
        float *const row = scores + r * QSF_KV_SPAN_TOKENS;
        if (r < n_rows)
            sums[r].max = is_whole_span(ranges[r]) ? scale_scores(true, row, whole, scale)
                                                   : scale_scores(false, row, ranges[r], scale);
        if (r == 0)
            continue;
        const float max = sums[r - 1].max;
        float *const before = row - QSF_KV_SPAN_TOKENS;
        sums[r - 1].total = is_whole_span(ranges[r - 1])
                                ? exp_scores(true, before, whole, max)
                                : exp_scores(false, before, ranges[r - 1], max);
    }
}

static void QSF_NAME(alibi)(float *scores, float scale, float slope, uint32_t distance, size_t n)
{
    static const float steps[QSF_LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (size_t i = 0; i < n; i += QSF_LANES) {
        const size_t m = lanes_left(n, i);
        const lanes first = lanes_set((float)distance - (float)i);
        const lanes s = lanes_mul(lanes_load_part(scores + i, m), lanes_set(scale));
        const lanes distances = lanes_sub(first, lanes_load(steps));
        lanes_store_part(scores + i, lanes_fma(lanes_set(-slope), distances, s), m);
    }
}

/* Dims 16 i .. 16 i + 15 of slot `slot` of a block of f16 or f32 */
QSF_FORCED_INLINE lanes values_at(qsf_dtype dtype, const unsigned char *block, size_t slot,
                                  size_t i)
{
    const size_t at = slot * QSF_BLOCK + i * QSF_LANES;
    return dtype == QSF_DTYPE_F32 ? lanes_load((const float *)(const void *)block + at)
                                  : lanes_load_f16(block + 2 * at);
}

/* Adds slots begin .. end - 1 of a block to values [64] of one row. */
QSF_FORCED_INLINE void add_slots(qsf_dtype dtype, const unsigned char *block, const float *e,
                                 size_t begin, size_t end, float *values)
{
    lanes acc[QSF_BLOCK / QSF_LANES];
    for (size_t i = 0; i < QSF_BLOCK / QSF_LANES; i++)
        acc[i] = lanes_load(values + i * QSF_LANES);
    for (size_t slot = begin; slot < end; slot++)
        for (size_t i = 0; i < QSF_BLOCK / QSF_LANES; i++)
            acc[i] = lanes_fma(lanes_set(e[slot]), values_at(dtype, block, slot, i), acc[i]);
    for (size_t i = 0; i < QSF_BLOCK / QSF_LANES; i++)
        lanes_store(values + i * QSF_LANES, acc[i]);
}

/* Adds the same slots of decoded values [64, 64] to n (a literal) rows; values [n, stride], e [n,
 * 256]. */
QSF_FORCED_INLINE void add_slots_of_rows(const float *decoded, const float *e, size_t n,
                                         size_t begin, size_t end, float *values, size_t stride)
{
    for (size_t d = 0; d < QSF_BLOCK; d += QSF_SUM_GROUPS * QSF_LANES) {
        lanes acc[QSF_SUM_ROWS][QSF_SUM_GROUPS];
        for (size_t r = 0; r < n; r++)
            for (size_t i = 0; i < QSF_SUM_GROUPS; i++)
                acc[r][i] = lanes_load(values + r * stride + d + i * QSF_LANES);
        for (size_t slot = begin; slot < end; slot++) {
            lanes v[QSF_SUM_GROUPS];
            for (size_t i = 0; i < QSF_SUM_GROUPS; i++)
                v[i] = lanes_load(decoded + slot * QSF_BLOCK + d + i * QSF_LANES);
            for (size_t r = 0; r < n; r++) {
                const lanes er = lanes_set(e[r * QSF_KV_SPAN_TOKENS + slot]);
                for (size_t i = 0; i < QSF_SUM_GROUPS; i++)
                    acc[r][i] = lanes_fma(er, v[i], acc[r][i]);
            }
        }
        for (size_t r = 0; r < n; r++)
            for (size_t i = 0; i < QSF_SUM_GROUPS; i++)
                lanes_store(values + r * stride + d + i * QSF_LANES, acc[r][i]);
    }
}

/* Returns the part of a range within n_slots slots, of which the first is `first` in the span;
 * the result counts from there. */
static inline qsf_span_range range_in(qsf_span_range range, size_t first, uint32_t n_slots)
{
    const uint32_t at = (uint32_t)first;
    const uint32_t begin = range.begin > at ? range.begin - at : 0;
    const uint32_t end = range.end > at ? range.end - at : 0;
    return (qsf_span_range){begin < n_slots ? begin : n_slots, end < n_slots ? end : n_slots};
}

static inline uint32_t smaller_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline uint32_t larger_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static inline void add_slots_of_row(const float *decoded, const float *e, size_t begin, size_t end,
                                    float *values)
{
    if (begin < end)
        add_slots(QSF_DTYPE_F32, (const unsigned char *)decoded, e, begin, end, values);
}

/* Adds a piece, whose first slot in the span is `first`, to n (a literal) rows, each with its
 * range: together for slots in all ranges, one by one before and after these. */
QSF_FORCED_INLINE void add_piece_of_rows(const float *decoded, const float *e,
                                         const qsf_span_range *ranges, size_t first, size_t n,
                                         float *values, size_t stride)
{
    uint32_t begin = 0;
    uint32_t end = QSF_PIECE_TOKENS;
    for (size_t r = 0; r < n; r++) {
        const qsf_span_range range = range_in(ranges[r], first, QSF_PIECE_TOKENS);
        begin = larger_u32(begin, range.begin);
        end = smaller_u32(end, range.end);
    }
    if (begin >= end) /* no slot is in all ranges */
        begin = end = QSF_PIECE_TOKENS;
    for (size_t r = 0; r < n; r++) {
        const qsf_span_range range = range_in(ranges[r], first, QSF_PIECE_TOKENS);
        add_slots_of_row(decoded, e + r * QSF_KV_SPAN_TOKENS, range.begin,
                         smaller_u32(begin, range.end), values + r * stride);
    }
    if (begin < end)
        add_slots_of_rows(decoded, e, n, begin, end, values, stride);
    for (size_t r = 0; r < n; r++) {
        const qsf_span_range range = range_in(ranges[r], first, QSF_PIECE_TOKENS);
        add_slots_of_row(decoded, e + r * QSF_KV_SPAN_TOKENS, end, range.end, values + r * stride);
    }
}

/* Decodes the slots of `range` of a block to floats [32, 64]. */
QSF_FORCED_INLINE void decode_slots(qsf_dtype dtype, const unsigned char *block,
                                    qsf_span_range range, float *decoded)
{
    for (size_t slot = range.begin; slot < range.end; slot++)
        for (size_t i = 0; i < QSF_BLOCK / QSF_LANES; i++)
            lanes_store(decoded + slot * QSF_BLOCK + i * QSF_LANES,
                        values_at(dtype, block, slot, i));
}

/* Decodes both tiles of a block of a K page, columns [64, 16], to floats [32, 64]. */
QSF_FORCED_INLINE void decode_keys(qsf_dtype dtype, const unsigned char *tile, size_t tile_step,
                                   float *decoded)
{
    for (size_t d = 0; d < 2 * (size_t)QSF_BLOCK; d++) {
        const size_t at = d % QSF_BLOCK * QSF_TILE_ROWS;
        const unsigned char *const from = tile + d / QSF_BLOCK * tile_step;
        float *const to = decoded + d / QSF_BLOCK * QSF_TILE_ROWS * QSF_BLOCK + d % QSF_BLOCK;
        float column[QSF_LANES];
        lanes_store(column, dtype == QSF_DTYPE_F32
                                ? lanes_load((const float *)(const void *)from + at)
                                : lanes_load_f16(from + 2 * at));
        for (size_t i = 0; i < QSF_LANES; i++)
            to[i * QSF_BLOCK] = column[i];
    }
}

/* Adds two pages, from first_page on, to all rows; `all` are the slots in any row's range. Pages
 * outside need not exist. */
QSF_FORCED_INLINE void add_piece(qsf_dtype dtype, const qsf_value_blocks *blocks, size_t first_page,
                                 const float *e, const qsf_span_range *ranges, qsf_span_range all,
                                 size_t first, size_t n_rows, float *values, size_t stride)
{
    _Alignas(64) float decoded[QSF_PIECE_TOKENS * QSF_BLOCK]; /* no load spans two cache lines */
    for (size_t page = 0; page < QSF_PIECE_PAGES; page++) {
        const size_t slot = page * QSF_KV_PAGE_TOKENS;
        const qsf_span_range range = range_in(all, slot, QSF_KV_PAGE_TOKENS);
        if (range.begin < range.end && blocks->tile_step != 0)
            decode_keys(dtype, blocks->pages[first_page + page], blocks->tile_step,
                        decoded + slot * QSF_BLOCK);
        else if (range.begin < range.end)
            decode_slots(dtype, blocks->pages[first_page + page], range,
                         decoded + slot * QSF_BLOCK);
    }
    size_t r = 0;
    for (; r + QSF_SUM_ROWS <= n_rows; r += QSF_SUM_ROWS)
        add_piece_of_rows(decoded, e + r * QSF_KV_SPAN_TOKENS, ranges + r, first, QSF_SUM_ROWS,
                          values + r * stride, stride);
    for (; r + 4 <= n_rows; r += 4)
        add_piece_of_rows(decoded, e + r * QSF_KV_SPAN_TOKENS, ranges + r, first, 4,
                          values + r * stride, stride);
    for (; r + 2 <= n_rows; r += 2)
        add_piece_of_rows(decoded, e + r * QSF_KV_SPAN_TOKENS, ranges + r, first, 2,
                          values + r * stride, stride);
    for (; r < n_rows; r++)
        add_piece_of_rows(decoded, e + r * QSF_KV_SPAN_TOKENS, ranges + r, first, 1,
                          values + r * stride, stride);
}

QSF_FORCED_INLINE void add_values(qsf_dtype dtype, const qsf_value_blocks *blocks, const float *e,
                                  const qsf_span_range *ranges, size_t n_rows, float *values,
                                  size_t stride)
{
    const bool is_by_slot = n_rows == 1 && blocks->tile_step == 0;
    for (size_t page = 0; page < QSF_KV_SPAN_PAGES && is_by_slot; page++) {
        const size_t first = page * QSF_KV_PAGE_TOKENS;
        const qsf_span_range range = range_in(ranges[0], first, QSF_KV_PAGE_TOKENS);
        if (range.begin < range.end)
            add_slots(dtype, blocks->pages[page], e + first, range.begin, range.end, values);
    }
    for (size_t page = 0; page < QSF_KV_SPAN_PAGES && !is_by_slot; page += QSF_PIECE_PAGES) {
        const size_t first = page * QSF_KV_PAGE_TOKENS;
        qsf_span_range all = {QSF_PIECE_TOKENS, 0};
        for (size_t r = 0; r < n_rows; r++) {
            const qsf_span_range range = range_in(ranges[r], first, QSF_PIECE_TOKENS);
            if (range.begin >= range.end)
                continue;
            all.begin = smaller_u32(all.begin, range.begin);
            all.end = larger_u32(all.end, range.end);
        }
        if (all.begin < all.end)
            add_piece(dtype, blocks, page, e + first, ranges, all, first, n_rows, values, stride);
    }
}

static void QSF_NAME(add_values_f32)(const qsf_value_blocks *blocks, const float *e,
                                     const qsf_span_range *ranges, size_t n_rows, float *values,
                                     size_t stride)
{
    add_values(QSF_DTYPE_F32, blocks, e, ranges, n_rows, values, stride);
}

static void QSF_NAME(add_values_f16)(const qsf_value_blocks *blocks, const float *e,
                                     const qsf_span_range *ranges, size_t n_rows, float *values,
                                     size_t stride)
{
    add_values(QSF_DTYPE_F16, blocks, e, ranges, n_rows, values, stride);
}

/* e^x of one number, with the same bits as lanes_exp */
static inline float exp_of(float x)
{
    float by_lane[QSF_LANES];
    lanes_store(by_lane, lanes_exp(lanes_set(x)));
    return by_lane[0];
}

static void QSF_NAME(span_merge)(qsf_span_sums *sums, float *values, const qsf_span_sums *next_sums,
                                 const float *next_values, size_t n)
{
    const float max = next_sums->max > sums->max ? next_sums->max : sums->max;
    const float a = exp_of(sums->max - max);
    const float b = exp_of(next_sums->max - max);
    sums->max = max;
    sums->total = lane_fma(next_sums->total, b, sums->total * a);
    for (size_t d = 0; d < n; d += QSF_LANES) {
        const lanes before = lanes_mul(lanes_load(values + d), lanes_set(a));
        lanes_store(values + d, lanes_fma(lanes_load(next_values + d), lanes_set(b), before));
    }
}

static void QSF_NAME(span_sink)(qsf_span_sums *sums, float *values, float sink, size_t n)
{
    const float max = sums->max > sink ? sums->max : sink;
    const float b = exp_of(sums->max - max);
    sums->total = lane_fma(sums->total, b, exp_of(sink - max));
    sums->max = max;
    for (size_t d = 0; d < n; d += QSF_LANES)
        lanes_store(values + d, lanes_mul(lanes_load(values + d), lanes_set(b)));
}

static void QSF_NAME(span_normalise)(const qsf_span_sums *sums, const float *values, size_t n,
                                     float *out)
{
    const lanes factor = lanes_set(1.0F / sums->total);
    STORE_EACH(out, n, lanes_mul(AT(values), factor));
}

/* The fill function's body. */
static void QSF_NAME(fill)(qsf_kernels *k)
{
#define FILL(type, name) k->name = QSF_NAME(name);
    QSF_VECTOR_KERNELS(FILL)
#undef FILL
    k->k_store[QSF_DTYPE_F32] = QSF_NAME(k_store_f32);
    k->k_store[QSF_DTYPE_F16] = QSF_NAME(k_store_f16);
    k->k_store[QSF_DTYPE_8BIT] = QSF_NAME(k_store_8bit);
    k->k_store[QSF_DTYPE_4BIT] = QSF_NAME(k_store_4bit);
    k->k_store[QSF_DTYPE_2BIT] = QSF_NAME(k_store_2bit);
    k->v_store[QSF_DTYPE_F32] = QSF_NAME(v_store_f32);
    k->v_store[QSF_DTYPE_F16] = QSF_NAME(v_store_f16);
    k->v_store[QSF_DTYPE_8BIT] = QSF_NAME(v_store_8bit);
    k->v_store[QSF_DTYPE_4BIT] = QSF_NAME(v_store_4bit);
    k->v_store[QSF_DTYPE_2BIT] = QSF_NAME(v_store_2bit);
    k->add_values[QSF_DTYPE_F32] = QSF_NAME(add_values_f32);
    k->add_values[QSF_DTYPE_F16] = QSF_NAME(add_values_f16);
    k->value_tiles[QSF_DTYPE_8BIT] = QSF_NAME(value_tiles_8bit);
    k->value_tiles[QSF_DTYPE_4BIT] = QSF_NAME(value_tiles_4bit);
    k->value_tiles[QSF_DTYPE_2BIT] = QSF_NAME(value_tiles_2bit);
}
