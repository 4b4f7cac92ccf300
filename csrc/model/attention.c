/* attention.c - attention over the pages, by row groups and spans, on the pool.
 *
 * A row group is up to 16 query rows of one segment and KV head: row i is query head i %
 * heads_per_kv of token i / heads_per_kv. One item of the parallel loop attends a whole row group,
 * span after span. If there are too few row groups for the threads, an item is a few spans of one,
 * and a second loop merges them. Both ways give the same bits (kernels.h).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/attention.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/checked.h"

/* Rotates one head of q, k or v in all rows: by RoPE, and by Hadamard if the cache is rotated. */
static void rotate_head(const qsf_ops *o, float *x, size_t stride, uint32_t head,
                        bool has_positions)
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

void qsf_attention_rotate_q(const qsf_ops *o, uint32_t head)
{
    rotate_head(o, o->scratch->q, o->scratch->q_stride, head, true);
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

void qsf_attention_store_k(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                           uint32_t kv_head)
{
    rotate_head(o, o->scratch->k, o->scratch->kv_stride, kv_head, true);
    store_rows(o, chunk, layer, kv_head, o->scratch->k, qsf_kvcache_store_k);
}

void qsf_attention_store_v(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                           uint32_t kv_head)
{
    rotate_head(o, o->scratch->v, o->scratch->kv_stride, kv_head, false);
    store_rows(o, chunk, layer, kv_head, o->scratch->v, qsf_kvcache_store_v);
}

typedef struct attention_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer;
    size_t item_spans; /* spans of a row group in an item; 0: all of them */
} attention_job;

/* Positions first .. end - 1 */
typedef struct positions {
    size_t first;
    size_t end;
} positions;

/* A row group, and the positions that its rows see. */
typedef struct row_group {
    const qsf_segment *segment;
    uint32_t kv_head;
    size_t first_row; /* numbered as in the comment at the top */
    size_t n_rows;
    positions seen[QSF_ATTEND_ROWS];
    positions seen_by_any;
} row_group;

static uint32_t heads_per_kv(const qsf_config *c)
{
    return c->n_heads / c->n_kv_heads;
}

static size_t row_groups_of(const qsf_config *c, const qsf_segment *g)
{
    return qsf_ceil_div((size_t)g->n_tokens * heads_per_kv(c), QSF_ATTEND_ROWS);
}

/* Returns the positions that token t of a segment sees: itself and those before, within the
 * window. */
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

/* Returns the number of spans that the rows of the segment see. */
static size_t spans_of(const qsf_config *c, const qsf_segment *g)
{
    return end_span(seen_by(c, g, g->n_tokens - 1)) - first_span(seen_by(c, g, 0));
}

/* Returns the items of a row group of segment g. */
static size_t parts_of(const attention_job *job, const qsf_segment *g)
{
    return job->item_spans != 0 ? qsf_ceil_div(spans_of(job->ops->config, g), job->item_spans) : 1;
}

static size_t items_of(const attention_job *job, const qsf_segment *g)
{
    const qsf_config *const c = job->ops->config;
    return row_groups_of(c, g) * c->n_kv_heads * parts_of(job, g);
}

/* Returns the row group of item `item` of segment g; *span becomes the item's first span. */
static row_group row_group_of(const attention_job *job, const qsf_segment *g, size_t item,
                              size_t *span)
{
    const qsf_config *const c = job->ops->config;
    const size_t n_parts = parts_of(job, g);
    const size_t n_groups = row_groups_of(c, g);
    *span = first_span(seen_by(c, g, 0)) + item % n_parts * job->item_spans;
    const size_t first_row = item / n_parts % n_groups * QSF_ATTEND_ROWS;
    const size_t left = (size_t)g->n_tokens * heads_per_kv(c) - first_row;
    row_group group = {
        .segment = g,
        .kv_head = (uint32_t)(item / n_parts / n_groups),
        .first_row = first_row,
        .n_rows = left < QSF_ATTEND_ROWS ? left : QSF_ATTEND_ROWS,
    };
    for (size_t r = 0; r < group.n_rows; r++)
        group.seen[r] = seen_by(c, g, (first_row + r) / heads_per_kv(c));
    group.seen_by_any = (positions){group.seen[0].first, group.seen[group.n_rows - 1].end};
    return group;
}

/* Returns the index of row r in the chunk: row of the chunk times heads, plus head. */
static size_t chunk_row(const qsf_config *c, const row_group *group, size_t r)
{
    const uint32_t n_heads = heads_per_kv(c);
    const size_t row = group->first_row + r;
    return (group->segment->first_row + row / n_heads) * c->n_heads +
           (size_t)group->kv_head * n_heads + row % n_heads;
}

/* Returns the offset of head row % n_heads in q or in the attended values. */
static size_t head_off(const qsf_ops *o, size_t row)
{
    const qsf_config *const c = o->config;
    return row / c->n_heads * o->scratch->q_stride + row % c->n_heads * c->head_dim;
}

/* Copies the query rows to the worker's scratch, as matmul input. */
static qsf_acts gather_queries(const qsf_ops *o, const row_group *group, size_t worker_idx)
{
    const qsf_config *const c = o->config;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t n_blocks = s->head_stride / QSF_BLOCK;
    const size_t value_off = worker_idx * QSF_ATTEND_ROWS * s->head_stride;
    const size_t block_off = value_off / QSF_BLOCK;
    for (size_t r = 0; r < group->n_rows; r++) {
        float *const q = s->q + value_off + r * s->head_stride;
        memcpy(q, o->scratch->q + head_off(o, chunk_row(c, group, r)), c->head_dim * sizeof *q);
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
    if (qsf_dtype_is_quantised(o->scratch->kv_form.k_type)) /* rows and blocks are contiguous */
        o->kernels->quantise(s->q + value_off, group->n_rows * n_blocks, &rows);
    return (qsf_acts){
        .n_tokens = group->n_rows,
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

/* Computes scores [n_rows, 256] of pages first .. end - 1 of a span. Pages that are contiguous in
 * memory are one product. */
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

/* Prefetches pages: each is too short for the processor's own prefetcher. */
static void prefetch_pages(const void *const *pages, size_t first, size_t end, size_t page_bytes)
{
    for (size_t i = first; i < end; i++)
        for (size_t off = 0; off < page_bytes; off += CACHE_LINE_BYTES)
            __builtin_prefetch((const unsigned char *)pages[i] + off);
}

/* Computes the sums, and in the worker's span_values the values, of all rows over one span. ranges
 * [n_rows] receives the slots that each row sees. */
static void attend_span(const attention_job *job, const row_group *group, const qsf_acts *x,
                        size_t span, size_t worker_idx, qsf_span_range *ranges, qsf_span_sums *sums)
{
    const qsf_ops *const o = job->ops;
    const qsf_kernels *const k = o->kernels;
    const qsf_kvcache *const kv = group->segment->kv;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t begin = span * QSF_KV_SPAN_TOKENS;
    float *const scores = s->scores + worker_idx * QSF_ATTEND_ROWS * QSF_KV_SPAN_TOKENS;
    const float scale = 1.0f / sqrtf((float)o->config->head_dim);
    size_t first_slot = QSF_KV_SPAN_TOKENS;
    size_t end_slot = 0;
    for (size_t r = 0; r < group->n_rows; r++) {
        const size_t first = group->seen[r].first > begin ? group->seen[r].first - begin : 0;
        const size_t end = group->seen[r].end > begin ? group->seen[r].end - begin : 0;
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
    const void *const *const k_pages = qsf_kvcache_k_pages(kv, job->layer, group->kv_head) + page;
    const void *const *const v_pages = qsf_kvcache_v_pages(kv, job->layer, group->kv_head) + page;
    const size_t first_page = first_slot / QSF_KV_PAGE_TOKENS;
    const size_t end_page = qsf_ceil_div(end_slot, QSF_KV_PAGE_TOKENS);
    prefetch_pages(k_pages, first_page, end_page, kv->k_page_bytes);
    prefetch_pages(v_pages, first_page, end_page, kv->v_page_bytes);
    score_pages(k, kv, k_pages, first_page, end_page, x, scores);
    for (size_t r = 0; r < group->n_rows; r++)
        if (ranges[r].begin < ranges[r].end)
            sums[r] = k->span_softmax(scores + r * QSF_KV_SPAN_TOKENS, ranges[r], scale);
    k->span_values[kv->form.v_type](v_pages, x->n_blocks, scores, ranges, group->n_rows,
                                    s->span_values + worker_idx * QSF_ATTEND_ROWS * s->head_stride);
}

/* attended = values / total, rotated back */
static void write_row(const qsf_ops *o, size_t row, const qsf_span_sums *sums, const float *values)
{
    float *const out = o->scratch->attended + head_off(o, row);
    o->kernels->span_normalise(sums, values, o->config->head_dim, out);
    if (o->scratch->kv_form.is_rotated)
        o->kernels->hadamard(out, o->config->head_dim);
}

/* Attends a whole row group, its spans in ascending order. */
static void attend_row_group(const attention_job *job, const row_group *group, size_t worker_idx)
{
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t worker_off = worker_idx * QSF_ATTEND_ROWS * s->head_stride;
    const qsf_acts x = gather_queries(o, group, worker_idx);
    qsf_span_sums sums[QSF_ATTEND_ROWS];
    for (size_t span = first_span(group->seen_by_any); span < end_span(group->seen_by_any);
         span++) {
        qsf_span_range ranges[QSF_ATTEND_ROWS];
        qsf_span_sums next[QSF_ATTEND_ROWS];
        attend_span(job, group, &x, span, worker_idx, ranges, next);
        for (size_t r = 0; r < group->n_rows; r++) {
            const float *const from = s->span_values + worker_off + r * s->head_stride;
            float *const to = s->values + worker_off + r * s->head_stride;
            if (ranges[r].begin == ranges[r].end)
                continue;
            if (span == first_span(group->seen[r])) {
                memcpy(to, from, s->head_stride * sizeof *to);
                sums[r] = next[r];
            } else {
                o->kernels->span_merge(&sums[r], to, &next[r], from, s->head_stride);
            }
        }
    }
    for (size_t r = 0; r < group->n_rows; r++)
        write_row(o, chunk_row(o->config, group, r), &sums[r],
                  s->values + worker_off + r * s->head_stride);
}

/* Attends item_spans spans of a row group from `first` on; merge_rows merges the results. */
static void attend_part(const attention_job *job, const row_group *group, size_t first,
                        size_t worker_idx)
{
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t item_end = first + job->item_spans;
    const size_t group_end = end_span(group->seen_by_any);
    const size_t end = item_end < group_end ? item_end : group_end;
    if (first >= end)
        return;
    const qsf_acts x = gather_queries(o, group, worker_idx);
    for (size_t span = first; span < end; span++) {
        qsf_span_range ranges[QSF_ATTEND_ROWS];
        qsf_span_sums sums[QSF_ATTEND_ROWS];
        attend_span(job, group, &x, span, worker_idx, ranges, sums);
        for (size_t r = 0; r < group->n_rows; r++) {
            if (ranges[r].begin == ranges[r].end)
                continue;
            const size_t part = chunk_row(o->config, group, r) * s->n_spans + span;
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
    size_t first_item = 0; /* first item of the segment */
    for (uint32_t i = 0; i < job->chunk->n_segments; i++) {
        const qsf_segment *const g = &job->chunk->segments[i];
        const size_t end_item = first_item + items_of(job, g);
        for (; begin < end && begin < end_item; begin++) {
            size_t span;
            const row_group group = row_group_of(job, g, begin - first_item, &span);
            if (job->item_spans != 0)
                attend_part(job, &group, span, worker_idx);
            else
                attend_row_group(job, &group, worker_idx);
        }
        first_item = end_item;
    }
}

/* Merges the spans of rows begin .. end - 1 (rows of the chunk times heads) in ascending order,
 * into the results of the first span. */
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
            write_row(o, begin, &sums[first], values + first * s->head_stride);
        }
    }
}

/* So that fast threads find more items while slow ones work. */
#define ITEMS_PER_THREAD 4

/* Chooses the spans of an item: few row groups are split, so that all threads have work. */
static size_t choose_item_spans(const qsf_ops *o, const qsf_chunk *chunk, size_t most_spans)
{
    const size_t wanted = (size_t)ITEMS_PER_THREAD * qsf_pool_thread_count(o->pool);
    size_t n_groups = 0;
    for (uint32_t i = 0; i < chunk->n_segments; i++)
        n_groups += row_groups_of(o->config, &chunk->segments[i]) * o->config->n_kv_heads;
    if (most_spans < 2 || qsf_pool_thread_count(o->pool) == 1 || n_groups >= wanted ||
        chunk->n_tokens > o->scratch->attend.split_tokens)
        return 0;
    const size_t n_spans =
        most_spans * n_groups / wanted; /* rounded down: more items rather than fewer */
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
    size_t n_scores = 0; /* approximate */
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
