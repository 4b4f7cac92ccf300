/* attend_tmpl.h - the steps of attention over one span of pages, and the fill function, over lanes.
 *
 * Included after exp_tmpl.h and vecops_tmpl.h. Contracts at "KV pages and attention" in kernels.h;
 * the scores themselves are matrix products.
 *
 * Values are decoded once for all query rows: a block of two pages becomes [64, 64] floats, which
 * stay in the first-level cache. A single row decodes while it adds.
 */
/* SPDX-License-Identifier: Apache-2.0 */

#include "kernels/kv_tmpl.h"

/* Rows and groups of 16 dims whose sums are in registers together: QSF_VALUE_ROWS *
 * QSF_VALUE_GROUPS lanes of sums, one of values and one of e. */
#define QSF_VALUE_ROWS 6
#ifndef QSF_VALUE_GROUPS
#define QSF_VALUE_GROUPS 1
#endif

/* Pages that are decoded at a time, and their slots. */
#define QSF_PIECE_PAGES 2
#define QSF_PIECE_TOKENS (QSF_PIECE_PAGES * QSF_KV_PAGE_TOKENS)

/* Returns the number of lanes of positions p .. p + 15 that are below `position`. */
static inline size_t lane_of(size_t position, size_t p)
{
    if (position <= p)
        return 0;
    return position - p < QSF_LANES ? position - p : QSF_LANES;
}

/* The lanes of positions p .. p + 15 that are in the range from v, the others from `out`. Most
 * vectors lie inside: the branch is cheaper than a mask. */
QSF_FORCED_INLINE lanes lanes_in(qsf_span_range range, size_t p, lanes v, lanes out)
{
    if (range.begin <= p && p + QSF_LANES <= range.end)
        return v;
    return lanes_between(lane_of(range.begin, p), lane_of(range.end, p), v, out);
}

static qsf_span_sums QSF_NAME(span_softmax)(float *scores, qsf_span_range range, float scale)
{
    const size_t begin = range.begin / QSF_LANES * QSF_LANES;
    const lanes lowest = lanes_set(-INFINITY);
    const lanes zero = lanes_set(0.0F);
    /* Two chains, because a maximum waits for the one before. */
    lanes largest[2] = {lowest, lowest};
    for (size_t p = range.begin / (2 * QSF_LANES) * (2 * QSF_LANES); p < range.end;
         p += 2 * QSF_LANES)
        for (size_t i = 0; i < 2; i++) {
            const size_t at = p + i * QSF_LANES;
            const lanes s = lanes_mul(lanes_load(scores + at), lanes_set(scale));
            lanes_store(scores + at, s);
            largest[i] = lanes_max(lanes_in(range, at, s, lowest), largest[i]);
        }
    const float max = lanes_top(lanes_max(largest[0], largest[1]));
    lanes total = zero;
    for (size_t p = begin; p < range.end; p += QSF_LANES) {
        const lanes e = lanes_exp(lanes_sub(lanes_load(scores + p), lanes_set(max)));
        lanes_store(scores + p, e);
        total = lanes_add(total, lanes_in(range, p, e, zero));
    }
    return (qsf_span_sums){max, lanes_sum(total)};
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

/* True if values are codes with scales. */
static inline bool is_coded(qsf_dtype dtype)
{
    return dtype != QSF_DTYPE_F32 && dtype != QSF_DTYPE_F16;
}

/* A slot of a block of a V page. */
typedef struct value_slot {
    const unsigned char *codes; /* or values */
    lanes scale;
    lanes min;
} value_slot;

/* scales [32], and mins [32] of the types that have them, of a block of a V page */
QSF_FORCED_INLINE void load_scales(qsf_dtype dtype, const unsigned char *block, float *scales,
                                   float *mins)
{
    if (!is_coded(dtype))
        return;
    for (size_t i = 0; i < QSF_KV_PAGE_TOKENS; i += QSF_LANES) {
        lanes_store(scales + i, lanes_load_f16(block + 2 * i));
        if (dtype != QSF_DTYPE_8BIT)
            lanes_store(mins + i, lanes_load_f16(block + 2 * (QSF_KV_PAGE_TOKENS + i)));
    }
}

QSF_FORCED_INLINE value_slot slot_at(qsf_dtype dtype, const unsigned char *block,
                                     const float *scales, const float *mins, size_t slot)
{
    const bool has_min = dtype == QSF_DTYPE_4BIT || dtype == QSF_DTYPE_2BIT;
    const size_t bits = dtype == QSF_DTYPE_F32    ? 32
                        : dtype == QSF_DTYPE_F16  ? 16
                        : dtype == QSF_DTYPE_8BIT ? 8
                        : dtype == QSF_DTYPE_4BIT ? 4
                                                  : 2;
    const size_t codes_off = is_coded(dtype) ? (size_t)(has_min ? 4 : 2) * QSF_KV_PAGE_TOKENS : 0;
    value_slot s = {.codes = block + codes_off + slot * (QSF_BLOCK / 8) * bits};
    s.scale = lanes_set(is_coded(dtype) ? scales[slot] : 0.0F);
    s.min = lanes_set(has_min ? mins[slot] : 0.0F);
#ifdef QSF_LANES_HAVE_LOOKUP
    /* The few values of this slot: lane l has that of code l; for 2 bits of code l % 4. */
    static const float codes[2][QSF_LANES] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
        {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3},
    };
    if (has_min)
        s.scale = lanes_fma(lanes_load(codes[dtype == QSF_DTYPE_2BIT]), s.scale, s.min);
#endif
    return s;
}

/* Dims 16 i .. 16 i + 15 of a slot */
QSF_FORCED_INLINE lanes values_at(qsf_dtype dtype, const value_slot *s, size_t i)
{
    if (dtype == QSF_DTYPE_F32)
        return lanes_load((const float *)(const void *)s->codes + i * QSF_LANES);
    if (dtype == QSF_DTYPE_F16)
        return lanes_load_f16(s->codes + i * QSF_LANES * 2);
    if (dtype == QSF_DTYPE_8BIT)
        return lanes_mul(
            lanes_sub(lanes_load_bytes(s->codes + i * QSF_LANES, 0, 255), lanes_set(128.0F)),
            s->scale);
    const bool is_4bit = dtype == QSF_DTYPE_4BIT;
    const unsigned char *const codes = s->codes + (is_4bit ? i % 2 * QSF_LANES : 0);
    const unsigned shift = is_4bit ? 4 * (unsigned)(i / 2) : 2 * (unsigned)i;
#ifdef QSF_LANES_HAVE_LOOKUP
    return lanes_lookup(s->scale, codes, shift);
#else
    return lanes_fma(lanes_load_bytes(codes, shift, is_4bit ? 15 : 3), s->scale, s->min);
#endif
}

/* Adds slots begin .. end - 1 of a block to values [64] of one row. */
QSF_FORCED_INLINE void add_slots(qsf_dtype dtype, const unsigned char *block, const float *scales,
                                 const float *mins, const float *e, size_t begin, size_t end,
                                 float *values)
{
    lanes acc[QSF_BLOCK / QSF_LANES];
    for (size_t i = 0; i < QSF_BLOCK / QSF_LANES; i++)
        acc[i] = lanes_load(values + i * QSF_LANES);
    for (size_t slot = begin; slot < end; slot++) {
        const value_slot s = slot_at(dtype, block, scales, mins, slot);
        for (size_t i = 0; i < QSF_BLOCK / QSF_LANES; i++)
            acc[i] = lanes_fma(lanes_set(e[slot]), values_at(dtype, &s, i), acc[i]);
    }
    for (size_t i = 0; i < QSF_BLOCK / QSF_LANES; i++)
        lanes_store(values + i * QSF_LANES, acc[i]);
}

/* Adds the same slots of decoded values [64, 64] to n (a literal) rows; values [n, stride], e [n,
 * 256]. */
QSF_FORCED_INLINE void add_slots_of_rows(const float *decoded, const float *e, size_t n,
                                         size_t begin, size_t end, float *values, size_t stride)
{
    for (size_t d = 0; d < QSF_BLOCK; d += QSF_VALUE_GROUPS * QSF_LANES) {
        lanes acc[QSF_VALUE_ROWS][QSF_VALUE_GROUPS];
        for (size_t r = 0; r < n; r++)
            for (size_t i = 0; i < QSF_VALUE_GROUPS; i++)
                acc[r][i] = lanes_load(values + r * stride + d + i * QSF_LANES);
        for (size_t slot = begin; slot < end; slot++) {
            lanes v[QSF_VALUE_GROUPS];
            for (size_t i = 0; i < QSF_VALUE_GROUPS; i++)
                v[i] = lanes_load(decoded + slot * QSF_BLOCK + d + i * QSF_LANES);
            for (size_t r = 0; r < n; r++) {
                const lanes er = lanes_set(e[r * QSF_KV_SPAN_TOKENS + slot]);
                for (size_t i = 0; i < QSF_VALUE_GROUPS; i++)
                    acc[r][i] = lanes_fma(er, v[i], acc[r][i]);
            }
        }
        for (size_t r = 0; r < n; r++)
            for (size_t i = 0; i < QSF_VALUE_GROUPS; i++)
                lanes_store(values + r * stride + d + i * QSF_LANES, acc[r][i]);
    }
}

/* Returns the part of a range in the n_slots slots whose first one in the span is `first`, numbered
 * from there. */
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
        add_slots(QSF_DTYPE_F32, (const unsigned char *)decoded, NULL, NULL, e, begin, end, values);
}

/* Adds a piece, whose first slot in the span is `first`, to n (a literal) rows with a range each:
 * together where all attend, one by one before and after. */
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

/* Decodes the slots of `range` of a block to floats [32, 64]. f32 pages need no decoding. */
QSF_FORCED_INLINE void decode_slots(qsf_dtype dtype, const unsigned char *block,
                                    qsf_span_range range, float *decoded)
{
    float scales[QSF_KV_PAGE_TOKENS];
    float mins[QSF_KV_PAGE_TOKENS];
    load_scales(dtype, block, scales, mins);
    for (size_t slot = range.begin; slot < range.end; slot++) {
        const value_slot s = slot_at(dtype, block, scales, mins, slot);
        for (size_t i = 0; i < QSF_BLOCK / QSF_LANES; i++)
            lanes_store(decoded + slot * QSF_BLOCK + i * QSF_LANES, values_at(dtype, &s, i));
    }
}

/* Adds a piece of 64 dims, block_off bytes into its pages, to all rows; `all` are its slots that
 * any row attends to. Pages outside may not exist. */
QSF_FORCED_INLINE void add_piece(qsf_dtype dtype, const void *const *pages, size_t block_off,
                                 const float *e, const qsf_span_range *ranges, qsf_span_range all,
                                 size_t first, size_t n_rows, float *values, size_t stride)
{
    _Alignas(64) float decoded[QSF_PIECE_TOKENS * QSF_BLOCK]; /* no load spans two cache lines */
    for (size_t page = 0; page < QSF_PIECE_PAGES; page++) {
        const size_t slot = page * QSF_KV_PAGE_TOKENS;
        const qsf_span_range range = range_in(all, slot, QSF_KV_PAGE_TOKENS);
        if (range.begin < range.end)
            decode_slots(dtype, (const unsigned char *)pages[page] + block_off, range,
                         decoded + slot * QSF_BLOCK);
    }
    size_t r = 0;
    for (; r + QSF_VALUE_ROWS <= n_rows; r += QSF_VALUE_ROWS)
        add_piece_of_rows(decoded, e + r * QSF_KV_SPAN_TOKENS, ranges + r, first, QSF_VALUE_ROWS,
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

/* Adds a page, whose first slot in the span is `first`, to the values of one row. */
QSF_FORCED_INLINE void add_page(qsf_dtype dtype, const unsigned char *block, const float *e,
                                qsf_span_range range, float *values)
{
    float scales[QSF_KV_PAGE_TOKENS];
    float mins[QSF_KV_PAGE_TOKENS];
    load_scales(dtype, block, scales, mins);
    add_slots(dtype, block, scales, mins, e, range.begin, range.end, values);
}

/* As span_values for one row */
QSF_FORCED_INLINE void span_values_of_row(qsf_dtype dtype, size_t block_bytes,
                                          const void *const *v_pages, size_t n_blocks,
                                          const float *e, qsf_span_range all, float *values)
{
    for (size_t page = 0; page < QSF_KV_SPAN_PAGES; page++) {
        const size_t first = page * QSF_KV_PAGE_TOKENS;
        const qsf_span_range range = range_in(all, first, QSF_KV_PAGE_TOKENS);
        for (size_t b = 0; range.begin < range.end && b < n_blocks; b++)
            add_page(dtype, (const unsigned char *)v_pages[page] + b * block_bytes, e + first,
                     range, values + b * QSF_BLOCK);
    }
}

QSF_FORCED_INLINE void span_values(qsf_dtype dtype, size_t block_bytes, const void *const *v_pages,
                                   size_t n_blocks, const float *e, const qsf_span_range *ranges,
                                   size_t n_rows, float *values)
{
    const size_t stride = n_blocks * QSF_BLOCK;
    if (n_rows == 1) {
        span_values_of_row(dtype, block_bytes, v_pages, n_blocks, e, ranges[0], values);
        return;
    }
    for (size_t page = 0; page < QSF_KV_SPAN_PAGES; page += QSF_PIECE_PAGES) {
        const size_t first = page * QSF_KV_PAGE_TOKENS;
        qsf_span_range all = {QSF_PIECE_TOKENS, 0};
        for (size_t r = 0; r < n_rows; r++) {
            const qsf_span_range range = range_in(ranges[r], first, QSF_PIECE_TOKENS);
            if (range.begin >= range.end)
                continue;
            all.begin = smaller_u32(all.begin, range.begin);
            all.end = larger_u32(all.end, range.end);
        }
        for (size_t b = 0; all.begin < all.end && b < n_blocks; b++)
            add_piece(dtype, v_pages + page, b * block_bytes, e + first, ranges, all, first, n_rows,
                      values + b * QSF_BLOCK, stride);
    }
}

#define SPAN_VALUES(type, dtype)                                                                  \
    static void QSF_NAME(span_values_##type)(const void *const *v_pages, size_t n_blocks,         \
                                             const float *e, const qsf_span_range *ranges,        \
                                             size_t n_rows, float *values)                        \
    {                                                                                             \
        span_values(dtype, qsf_kv_value_block_bytes(dtype), v_pages, n_blocks, e, ranges, n_rows, \
                    values);                                                                      \
    }

SPAN_VALUES(f32, QSF_DTYPE_F32)
SPAN_VALUES(f16, QSF_DTYPE_F16)
SPAN_VALUES(8bit, QSF_DTYPE_8BIT)
SPAN_VALUES(4bit, QSF_DTYPE_4BIT)
SPAN_VALUES(2bit, QSF_DTYPE_2BIT)

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
    sums->total = fmaf(next_sums->total, b, sums->total * a);
    for (size_t d = 0; d < n; d += QSF_LANES) {
        const lanes before = lanes_mul(lanes_load(values + d), lanes_set(a));
        lanes_store(values + d, lanes_fma(lanes_load(next_values + d), lanes_set(b), before));
    }
}

static void QSF_NAME(span_sink)(qsf_span_sums *sums, float *values, float sink, size_t n)
{
    const float max = sums->max > sink ? sums->max : sink;
    const float b = exp_of(sums->max - max);
    sums->total = fmaf(sums->total, b, exp_of(sink - max));
    sums->max = max;
    for (size_t d = 0; d < n; d += QSF_LANES)
        lanes_store(values + d, lanes_mul(lanes_load(values + d), lanes_set(b)));
}

static void QSF_NAME(span_normalise)(const qsf_span_sums *sums, const float *values, size_t n,
                                     float *out)
{
    const lanes factor = lanes_set(1.0F / sums->total);
    for (size_t d = 0; d < n; d += QSF_LANES) {
        const size_t m = lanes_left(n, d);
        lanes_store_part(out + d, lanes_mul(lanes_load_part(values + d, m), factor), m);
    }
}

static void QSF_NAME(fill_kv)(qsf_kernels *k)
{
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
    k->span_values[QSF_DTYPE_F32] = QSF_NAME(span_values_f32);
    k->span_values[QSF_DTYPE_F16] = QSF_NAME(span_values_f16);
    k->span_values[QSF_DTYPE_8BIT] = QSF_NAME(span_values_8bit);
    k->span_values[QSF_DTYPE_4BIT] = QSF_NAME(span_values_4bit);
    k->span_values[QSF_DTYPE_2BIT] = QSF_NAME(span_values_2bit);
    k->alibi = QSF_NAME(alibi);
    k->span_softmax = QSF_NAME(span_softmax);
    k->span_sink = QSF_NAME(span_sink);
    k->span_merge = QSF_NAME(span_merge);
    k->span_normalise = QSF_NAME(span_normalise);
    k->hadamard = QSF_NAME(hadamard);
}

/* The fill function's body. */
static void QSF_NAME(fill)(qsf_kernels *k)
{
    k->quantise = QSF_NAME(quantise);
    k->add_outliers = QSF_NAME(add_outliers);
    k->rmsnorm = QSF_NAME(rmsnorm);
    k->layernorm = QSF_NAME(layernorm);
    k->rope_split = QSF_NAME(rope_split);
    k->rope_interleaved = QSF_NAME(rope_interleaved);
    k->gelu_tanh = QSF_NAME(gelu_tanh);
    k->gelu_erf = QSF_NAME(gelu_erf);
    k->silu = QSF_NAME(silu);
    k->relu = QSF_NAME(relu);
    k->relu_squared = QSF_NAME(relu_squared);
    k->silu_clamped = QSF_NAME(silu_clamped);
    k->gelu_tanh_mul = QSF_NAME(gelu_tanh_mul);
    k->gelu_erf_mul = QSF_NAME(gelu_erf_mul);
    k->silu_mul = QSF_NAME(silu_mul);
    k->relu_mul = QSF_NAME(relu_mul);
    k->relu_squared_mul = QSF_NAME(relu_squared_mul);
    k->silu_clamped_mul = QSF_NAME(silu_clamped_mul);
    k->add = QSF_NAME(add);
    k->add_scaled = QSF_NAME(add_scaled);
    k->scale = QSF_NAME(scale);
    k->clamp = QSF_NAME(clamp);
    k->cap = QSF_NAME(cap);
    QSF_NAME(fill_kv)(k);
}
