/* attention.c - tiles of query rows walk the spans of pages, and the parallel loops over them.
 *
 * A tile is up to 16 query rows of one segment and KV head: row i is head i % heads_per_kv of
 * the group, of token i / heads_per_kv. It either walks its spans one after another, merging as
 * it goes, or, where tiles are too few for the threads, a few spans are an item of their own and
 * a second loop merges; the bits are the same (kernels.h).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/attention.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/checked.h"

/* The heads of all rows of one of q, k, v, turned by RoPE and, if the cache is, by Hadamard. */
static void turn(const qsf_ops *o, float *x, size_t stride, uint32_t head, bool has_positions)
{
    const qsf_config *const c = o->config;
    const qsf_scratch *const s = o->scratch;
    const size_t n_pairs = has_positions ? c->rope_dims / 2 : 0;
    qsf_rope_fn *const rope =
        c->is_rope_interleaved ? o->kernels->rope_interleaved : o->kernels->rope_split;
    if (n_pairs == 0 && !s->kv_form.is_rotated)
        return;
    for (size_t t = 0; t < o->n_tokens; t++) {
        float *const row = x + t * stride + (size_t)head * c->head_dim;
        if (n_pairs > 0)
            rope(row, s->rope_cos + t * n_pairs, s->rope_sin + t * n_pairs, n_pairs);
        if (s->kv_form.is_rotated)
            o->kernels->hadamard(row, c->head_dim);
    }
}

void qsf_attention_finish_q(const qsf_ops *o, uint32_t head)
{
    turn(o, o->scratch->q, o->scratch->q_stride, head, true);
}

typedef void store_fn(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                      uint32_t position, const float *x);

static void store_rows(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer, uint32_t kv_head,
                       const float *x, store_fn *store)
{
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const qsf_segment *const g = &chunk->segments[i];
        for (uint32_t t = 0; t < g->n_tokens; t++)
            store(g->kv, o->kernels, layer, kv_head, g->first_position + t,
                  x + (g->first_row + t) * o->scratch->kv_stride +
                      (size_t)kv_head * o->config->head_dim);
    }
}

void qsf_attention_finish_k(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                            uint32_t kv_head)
{
    turn(o, o->scratch->k, o->scratch->kv_stride, kv_head, true);
    store_rows(o, chunk, layer, kv_head, o->scratch->k, qsf_kvcache_store_k);
}

void qsf_attention_finish_v(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                            uint32_t kv_head)
{
    turn(o, o->scratch->v, o->scratch->kv_stride, kv_head, false);
    store_rows(o, chunk, layer, kv_head, o->scratch->v, qsf_kvcache_store_v);
}

typedef struct attention_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer;
    size_t item_spans; /* of a tile make an item; 0: a whole tile does */
} attention_job;

/* Positions first .. end - 1 */
typedef struct positions {
    size_t first;
    size_t end;
} positions;

/* A tile and how far its rows see. */
typedef struct tile {
    const qsf_segment *segment;
    uint32_t kv_head;
    size_t first_row; /* in the numbering of the head comment */
    size_t n_rows;
    positions seen[QSF_ATTEND_ROWS];
    positions seen_by_any;
} tile;

static uint32_t heads_per_kv(const qsf_config *c)
{
    return c->n_heads / c->n_kv_heads;
}

static size_t tiles_of(const qsf_config *c, const qsf_segment *g)
{
    return qsf_ceil_div((size_t)g->n_tokens * heads_per_kv(c), QSF_ATTEND_ROWS);
}

/* What token t of a segment sees: itself and what is before, within the window. */
static positions seen_by(const qsf_config *c, const qsf_segment *g, size_t t)
{
    const size_t end = (size_t)g->first_position + t + 1;
    const size_t window = c->window_tokens;
    return (positions){window != 0 && end > window ? end - window : 0, end};
}

static size_t first_span(positions seen)
{
    return seen.first / QSF_KV_SPAN_TOKENS;
}

static size_t end_span(positions seen)
{
    return qsf_ceil_div(seen.end, QSF_KV_SPAN_TOKENS);
}

/* Spans that some row of the segment sees a part of. */
static size_t spans_of(const qsf_config *c, const qsf_segment *g)
{
    return end_span(seen_by(c, g, g->n_tokens - 1)) - first_span(seen_by(c, g, 0));
}

/* How many items a tile of segment g makes. */
static size_t parts_of(const attention_job *job, const qsf_segment *g)
{
    return job->item_spans != 0 ? qsf_ceil_div(spans_of(job->ops->config, g), job->item_spans) : 1;
}

static size_t items_of(const attention_job *job, const qsf_segment *g)
{
    const qsf_config *const c = job->ops->config;
    return tiles_of(c, g) * c->n_kv_heads * parts_of(job, g);
}

/* Item `item` of segment g; *span is its first one when split. */
static tile tile_of(const attention_job *job, const qsf_segment *g, size_t item, size_t *span)
{
    const qsf_config *const c = job->ops->config;
    const size_t n_parts = parts_of(job, g);
    const size_t n_tiles = tiles_of(c, g);
    *span = first_span(seen_by(c, g, 0)) + item % n_parts * job->item_spans;
    const size_t first_row = item / n_parts % n_tiles * QSF_ATTEND_ROWS;
    const size_t left = (size_t)g->n_tokens * heads_per_kv(c) - first_row;
    tile t = {
        .segment = g,
        .kv_head = (uint32_t)(item / n_parts / n_tiles),
        .first_row = first_row,
        .n_rows = left < QSF_ATTEND_ROWS ? left : QSF_ATTEND_ROWS,
    };
    for (size_t r = 0; r < t.n_rows; r++)
        t.seen[r] = seen_by(c, g, (first_row + r) / heads_per_kv(c));
    t.seen_by_any = (positions){t.seen[0].first, t.seen[t.n_rows - 1].end};
    return t;
}

/* Row r of a tile as the chunk numbers it: row of the chunk times heads, plus head. */
static size_t chunk_row(const qsf_config *c, const tile *t, size_t r)
{
    const uint32_t group = heads_per_kv(c);
    const size_t row = t->first_row + r;
    return (t->segment->first_row + row / group) * c->n_heads + (size_t)t->kv_head * group +
           row % group;
}

/* Where head % n_heads of a row of q or of the attended values lies. */
static size_t head_off(const qsf_ops *o, size_t row)
{
    const qsf_config *const c = o->config;
    return row / c->n_heads * o->scratch->q_stride + row % c->n_heads * c->head_dim;
}

/* The tile's query rows as matmul input, in the worker's scratch. */
static qsf_acts gather_queries(const qsf_ops *o, const tile *t, size_t worker_idx)
{
    const qsf_config *const c = o->config;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t n_blocks = s->head_stride / QSF_BLOCK;
    const size_t value_off = worker_idx * QSF_ATTEND_ROWS * s->head_stride;
    const size_t block_off = value_off / QSF_BLOCK;
    for (size_t r = 0; r < t->n_rows; r++) {
        float *const q = s->q + value_off + r * s->head_stride;
        memcpy(q, o->scratch->q + head_off(o, chunk_row(c, t, r)), c->head_dim * sizeof *q);
        memset(q + c->head_dim, 0, (s->head_stride - c->head_dim) * sizeof *q);
    }
    const qsf_act_row rows = {
        .q = s->act_q + value_off,
        .q_low = s->act_q_low + value_off,
        .scale = s->act_scale + block_off,
        .sum = s->act_sum + block_off,
        .scaled_sum = s->act_scaled_sum + block_off,
        .fine_sum = s->act_fine_sum + block_off,
    };
    if (qsf_dtype_is_quantised(o->scratch->kv_form.k_type)) /* rows follow each other, blocks too */
        o->kernels->quantise(s->q + value_off, t->n_rows * n_blocks, &rows);
    return (qsf_acts){
        .n_tokens = t->n_rows,
        .n_blocks = n_blocks,
        .f32 = s->q + value_off,
        .q = rows.q,
        .q_low = rows.q_low,
        .scale = rows.scale,
        .sum = rows.sum,
        .scaled_sum = rows.scaled_sum,
        .fine_sum = rows.fine_sum,
    };
}

/* scores [n_rows, 256] of pages first .. end - 1 of a span; pages that lie one behind the other
 * in memory are one product. */
static void score_pages(const qsf_kernels *k, const qsf_kvcache *kv, const void *const *pages,
                        size_t first, size_t end, const qsf_acts *x, float *scores)
{
    const size_t tile_rows = QSF_KV_PAGE_TOKENS / QSF_TILE_ROWS;
    for (size_t i = first; i < end;) {
        const unsigned char *const tiles = pages[i];
        size_t n = 1;
        while (i + n < end && pages[i + n] == tiles + n * kv->k_page_bytes)
            n++;
        k->matmul[kv->form.k_type](tiles, n * tile_rows, x, scores + i * QSF_KV_PAGE_TOKENS,
                                   QSF_KV_SPAN_TOKENS);
        i += n;
    }
}

#define CACHE_LINE_BYTES 64

/* Asks for pages that will be read soon: each is too short for a processor to read ahead in. */
static void prefetch_pages(const void *const *pages, size_t first, size_t end, size_t page_bytes)
{
    for (size_t i = first; i < end; i++)
        for (size_t off = 0; off < page_bytes; off += CACHE_LINE_BYTES)
            __builtin_prefetch((const unsigned char *)pages[i] + off);
}

/* The sums and values of all rows of a tile over one span, into the worker's span_values;
 * ranges say which rows have a part in it. */
static void attend_span(const attention_job *job, const tile *t, const qsf_acts *x, size_t span,
                        size_t worker_idx, qsf_span_range *ranges, qsf_span_sums *sums)
{
    const qsf_ops *const o = job->ops;
    const qsf_kernels *const k = o->kernels;
    const qsf_kvcache *const kv = t->segment->kv;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t begin = span * QSF_KV_SPAN_TOKENS;
    float *const scores = s->scores + worker_idx * QSF_ATTEND_ROWS * QSF_KV_SPAN_TOKENS;
    const float scale = 1.0f / sqrtf((float)o->config->head_dim);
    size_t first_slot = QSF_KV_SPAN_TOKENS;
    size_t end_slot = 0;
    for (size_t r = 0; r < t->n_rows; r++) {
        const size_t first = t->seen[r].first > begin ? t->seen[r].first - begin : 0;
        const size_t end = t->seen[r].end > begin ? t->seen[r].end - begin : 0;
        const size_t last = end < QSF_KV_SPAN_TOKENS ? end : QSF_KV_SPAN_TOKENS;
        ranges[r] = first < last ? (qsf_span_range){(uint32_t)first, (uint32_t)last}
                                 : (qsf_span_range){0, 0};
        if (first >= last)
            continue;
        first_slot = first < first_slot ? first : first_slot;
        end_slot = last > end_slot ? last : end_slot;
    }
    if (first_slot >= end_slot)
        return;
    const size_t page = span * QSF_KV_SPAN_PAGES;
    const void *const *const k_pages = qsf_kvcache_k_pages(kv, job->layer, t->kv_head) + page;
    const void *const *const v_pages = qsf_kvcache_v_pages(kv, job->layer, t->kv_head) + page;
    const size_t first_page = first_slot / QSF_KV_PAGE_TOKENS;
    const size_t end_page = qsf_ceil_div(end_slot, QSF_KV_PAGE_TOKENS);
    prefetch_pages(k_pages, first_page, end_page, kv->k_page_bytes);
    prefetch_pages(v_pages, first_page, end_page, kv->v_page_bytes);
    score_pages(k, kv, k_pages, first_page, end_page, x, scores);
    for (size_t r = 0; r < t->n_rows; r++)
        if (ranges[r].begin < ranges[r].end)
            sums[r] = k->span_softmax(scores + r * QSF_KV_SPAN_TOKENS, ranges[r], scale);
    k->span_values[kv->form.v_type](v_pages, x->n_blocks, scores, ranges, t->n_rows,
                                    s->span_values + worker_idx * QSF_ATTEND_ROWS * s->head_stride);
}

/* attended = values / total, turned back. */
static void finish_row(const qsf_ops *o, size_t row, const qsf_span_sums *sums, const float *values)
{
    float *const out = o->scratch->attended + head_off(o, row);
    o->kernels->span_finish(sums, values, o->config->head_dim, out);
    if (o->scratch->kv_form.is_rotated)
        o->kernels->hadamard(out, o->config->head_dim);
}

/* A whole tile: its spans in ascending order. */
static void attend_tile(const attention_job *job, const tile *t, size_t worker_idx)
{
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t worker_off = worker_idx * QSF_ATTEND_ROWS * s->head_stride;
    const qsf_acts x = gather_queries(o, t, worker_idx);
    qsf_span_sums sums[QSF_ATTEND_ROWS];
    for (size_t span = first_span(t->seen_by_any); span < end_span(t->seen_by_any); span++) {
        qsf_span_range ranges[QSF_ATTEND_ROWS];
        qsf_span_sums next[QSF_ATTEND_ROWS];
        attend_span(job, t, &x, span, worker_idx, ranges, next);
        for (size_t r = 0; r < t->n_rows; r++) {
            const float *const from = s->span_values + worker_off + r * s->head_stride;
            float *const to = s->values + worker_off + r * s->head_stride;
            if (ranges[r].begin == ranges[r].end)
                continue;
            if (span == first_span(t->seen[r])) {
                memcpy(to, from, s->head_stride * sizeof *to);
                sums[r] = next[r];
            } else {
                o->kernels->span_merge(&sums[r], to, &next[r], from, s->head_stride);
            }
        }
    }
    for (size_t r = 0; r < t->n_rows; r++)
        finish_row(o, chunk_row(o->config, t, r), &sums[r],
                   s->values + worker_off + r * s->head_stride);
}

/* Spans first .. of a tile, as many as make an item, kept for merge_rows. */
static void attend_part(const attention_job *job, const tile *t, size_t first, size_t worker_idx)
{
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t item_end = first + job->item_spans;
    const size_t tile_end = end_span(t->seen_by_any);
    const size_t end = item_end < tile_end ? item_end : tile_end;
    if (first >= end)
        return;
    const qsf_acts x = gather_queries(o, t, worker_idx);
    for (size_t span = first; span < end; span++) {
        qsf_span_range ranges[QSF_ATTEND_ROWS];
        qsf_span_sums sums[QSF_ATTEND_ROWS];
        attend_span(job, t, &x, span, worker_idx, ranges, sums);
        for (size_t r = 0; r < t->n_rows; r++) {
            if (ranges[r].begin == ranges[r].end)
                continue;
            const size_t part = chunk_row(o->config, t, r) * s->n_spans + span;
            s->partial_sums[part] = sums[r];
            memcpy(s->partial_values + part * s->head_stride,
                   s->span_values + (worker_idx * QSF_ATTEND_ROWS + r) * s->head_stride,
                   s->head_stride * sizeof *s->partial_values);
        }
    }
}

static void attend_items(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const attention_job *const job = arg;
    size_t first_item = 0; /* of the segment */
    for (uint32_t i = 0; i < job->chunk->n_segments; i++) {
        const qsf_segment *const g = &job->chunk->segments[i];
        const size_t end_item = first_item + items_of(job, g);
        for (; begin < end && begin < end_item; begin++) {
            size_t span;
            const tile t = tile_of(job, g, begin - first_item, &span);
            if (job->item_spans != 0)
                attend_part(job, &t, span, worker_idx);
            else
                attend_tile(job, &t, worker_idx);
        }
        first_item = end_item;
    }
}

/* Rows of the chunk times heads: the spans of each, merged in ascending order. The parts of the
 * first span become the sum. */
static void merge_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const attention_job *const job = arg;
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    (void)worker_idx;
    for (uint32_t i = 0; i < job->chunk->n_segments; i++) {
        const qsf_segment *const g = &job->chunk->segments[i];
        const size_t end_row = ((size_t)g->first_row + g->n_tokens) * o->config->n_heads;
        for (; begin < end && begin < end_row; begin++) {
            const positions seen = seen_by(o->config, g, begin / o->config->n_heads - g->first_row);
            qsf_span_sums *const sums = s->partial_sums + begin * s->n_spans;
            float *const values = s->partial_values + begin * s->n_spans * s->head_stride;
            const size_t first = first_span(seen);
            for (size_t span = first + 1; span < end_span(seen); span++)
                o->kernels->span_merge(&sums[first], values + first * s->head_stride, &sums[span],
                                       values + span * s->head_stride, s->head_stride);
            finish_row(o, begin, &sums[first], values + first * s->head_stride);
        }
    }
}

/* Enough items for all threads to find some, however fast each is. */
#define ITEMS_PER_THREAD 4

/* Decides how many spans make an item: few tiles are split, so that all threads have work. */
static size_t choose_item_spans(const qsf_ops *o, const qsf_chunk *chunk, size_t most_spans)
{
    const size_t wanted = (size_t)ITEMS_PER_THREAD * qsf_pool_thread_count(o->pool);
    size_t n_tiles = 0;
    for (uint32_t i = 0; i < chunk->n_segments; i++)
        n_tiles += tiles_of(o->config, &chunk->segments[i]) * o->config->n_kv_heads;
    if (most_spans < 2 || qsf_pool_thread_count(o->pool) == 1 || n_tiles >= wanted ||
        chunk->n_tokens > o->scratch->attend.split_tokens)
        return 0;
    const size_t n_spans = most_spans * n_tiles / wanted; /* rounded down: rather more items */
    return n_spans > 0 ? n_spans : 1;
}

void qsf_attention_run(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer)
{
    const qsf_config *const c = o->config;
    attention_job job = {.ops = o, .chunk = chunk, .layer = layer};
    size_t most_spans = 0;
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const size_t n = spans_of(c, &chunk->segments[i]);
        most_spans = n > most_spans ? n : most_spans;
    }
    job.item_spans = choose_item_spans(o, chunk, most_spans);
    size_t n_items = 0;
    size_t n_scores = 0; /* about */
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const qsf_segment *const g = &chunk->segments[i];
        const positions last = seen_by(c, g, g->n_tokens - 1);
        n_items += items_of(&job, g);
        n_scores += (last.end - last.first) * g->n_tokens * c->n_heads;
    }
    qsf_pool_run(o->pool, n_items, qsf_ops_piece(n_scores * 2 * c->head_dim / n_items),
                 attend_items, &job);
    if (job.item_spans != 0)
        qsf_pool_run(o->pool, (size_t)chunk->n_tokens * c->n_heads,
                     qsf_ops_piece(2 * most_spans * c->head_dim), merge_rows, &job);
}
