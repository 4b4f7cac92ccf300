/* attention.c - attention over the pages, by row groups and spans, on the pool.
 *
 * A row group is up to 64 query rows of one segment and KV head: row i is query head i %
 * heads_per_kv of token i / heads_per_kv. One item of the parallel loop attends a whole row group,
 * span after span. If there are too few row groups for the threads, groups become smaller; then an
 * item is a few spans of one, and a second loop merges them. All ways give the same bits
 * (kernels.h).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/attention.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/checked.h"
#include "model/branch.h"
#include "model/seen.h"

/* Turns one head of a row by the position, and by Hadamard if the cache is rotated. */
static void rotate_row(const qsf_ops *o, float *x, size_t t, bool has_positions)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_scratch *const s = o->scratch;
    if (has_positions && kind->rope_set != QSF_ROPE_NONE) {
        const qsf_rope *const rope = &o->ropes[kind->rope_set];
        const size_t row = s->chunk_tokens * rope->first_pair + t * rope->n_pairs;
        (rope->is_interleaved ? o->kernels->rope_interleaved : o->kernels->rope_split)(
            x, s->rope_cos + row, s->rope_sin + row, rope->n_pairs);
    }
    if (s->kv_form.is_rotated)
        o->kernels->hadamard(x, kind->head_dim);
}

/* Returns 1 + beta * ln(1 + floor(position / step)). */
static float temperature_at(const qsf_layer_kind *kind, uint32_t position)
{
    return 1.0F + kind->temperature_beta * logf(1.0F + (float)(position / kind->temperature_step));
}

/* Returns the norm of a head; its weight is NULL if heads have none by themselves. */
static qsf_norm_weights head_norm(const qsf_layer_kind *kind, const float *weight, uint32_t head)
{
    const bool is_own = kind->qk_norm == QSF_QK_NORM_OWN_WEIGHTS;
    const bool is_shared = kind->qk_norm == QSF_QK_NORM_PER_HEAD;
    return (qsf_norm_weights){
        .weight = is_own      ? weight + (size_t)head * kind->head_dim
                  : is_shared ? weight
                              : NULL,
    };
}

void qsf_attention_finish_q(const qsf_ops *o, const float *weight, uint32_t head, size_t begin,
                            size_t end)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_scratch *const s = o->scratch;
    const qsf_norm_weights norm = head_norm(kind, weight, head);
    for (size_t t = begin; t < end; t++) {
        float *const q = s->q + t * qsf_stride(qsf_q_dim(kind)) + (size_t)head * kind->head_dim;
        if (norm.weight != NULL)
            qsf_ops_norm_row(o, q, &norm, kind->head_dim, q);
        if (kind->temperature_step != 0 && s->positions[t] >= kind->temperature_step)
            o->kernels->scale(q, temperature_at(kind, s->positions[t]), kind->head_dim);
        rotate_row(o, q, t, true);
    }
}

/* Returns the segment of a row of the chunk. */
static const qsf_segment *segment_of(const qsf_chunk *chunk, size_t row)
{
    const qsf_segment *g = chunk->segments;
    while (row >= (size_t)g->first_row + g->n_tokens)
        g++;
    return g;
}

void qsf_attention_store_k(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                           const float *weight, uint32_t kv_head, size_t begin, size_t end)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_scratch *const s = o->scratch;
    const qsf_norm_weights norm = head_norm(kind, weight, kv_head);
    for (size_t t = begin; t < end; t++) {
        float *const k = s->k + t * qsf_stride(qsf_kv_dim(kind)) + (size_t)kv_head * kind->head_dim;
        if (norm.weight != NULL)
            qsf_ops_norm_row(o, k, &norm, kind->head_dim, k);
        rotate_row(o, k, t, true);
        const qsf_segment *const g = segment_of(chunk, t);
        qsf_kvcache_store_k(g->kv, o->kernels, layer, kv_head, s->positions[t] + g->n_behind, k);
    }
}

void qsf_attention_store_v(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                           uint32_t kv_head)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_scratch *const s = o->scratch;
    for (size_t t = 0; t < o->n_tokens; t++) {
        float *const v = s->v + t * qsf_stride(qsf_kv_dim(kind)) + (size_t)kv_head * kind->head_dim;
        rotate_row(o, v, t, false);
        const qsf_segment *const g = segment_of(chunk, t);
        qsf_kvcache_store_v(g->kv, o->kernels, layer, kv_head, s->positions[t] + g->n_behind, v);
    }
}

/* The argument of finish_tokens */
typedef struct whole_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer;
    qsf_norm_weights q_norm;
    qsf_norm_weights k_norm;
} whole_job;

static void finish_tokens(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const whole_job *const job = arg;
    const qsf_ops *const o = job->ops;
    const qsf_layer_kind *const kind = o->kind;
    const uint32_t q_dim = qsf_q_dim(kind);
    const uint32_t kv_dim = qsf_kv_dim(kind);
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        float *const q = o->scratch->q + t * qsf_stride(q_dim);
        float *const k = o->scratch->k + t * qsf_stride(kv_dim);
        qsf_ops_norm_row(o, q, &job->q_norm, q_dim, q);
        qsf_ops_norm_row(o, k, &job->k_norm, kv_dim, k);
        for (uint32_t head = 0; head < kind->n_heads; head++)
            qsf_attention_finish_q(o, NULL, head, t, t + 1);
        for (uint32_t head = 0; head < kind->n_kv_heads; head++)
            qsf_attention_store_k(o, job->chunk, job->layer, NULL, head, t, t + 1);
    }
}

void qsf_attention_finish_whole(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                                const float *q_weight, const float *k_weight)
{
    whole_job job = {o, chunk, layer, {q_weight, NULL}, {k_weight, NULL}};
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(2 * (size_t)qsf_q_dim(o->kind)), finish_tokens,
                 &job);
}

typedef struct attention_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer;
    const float *sinks; /* [n_heads], or NULL */
    size_t group_rows;  /* most rows of a row group */
    size_t item_spans;  /* spans of a row group in an item; 0: all of them */
} attention_job;

/* A row group, and the positions that its rows see. */
typedef struct row_group {
    const qsf_segment *segment;
    uint32_t kv_head;
    size_t first_row; /* numbered as in the comment at the top */
    size_t n_rows;
    qsf_seen seen[QSF_ATTEND_ROWS]; /* in ascending order */
} row_group;

static uint32_t heads_per_kv(const qsf_layer_kind *k)
{
    return k->n_heads / k->n_kv_heads;
}

/* Returns the row groups of a KV head of segment g. */
static size_t row_groups_of(const attention_job *job, const qsf_segment *g)
{
    return qsf_ceil_div((size_t)g->n_tokens * heads_per_kv(job->ops->kind), job->group_rows);
}

/* Returns the items of a row group of segment g. */
static size_t parts_of(const attention_job *job, const qsf_segment *g)
{
    return job->item_spans != 0 ? qsf_ceil_div(qsf_seen_spans(job->ops->kind, g).n, job->item_spans)
                                : 1;
}

static size_t items_of(const attention_job *job, const qsf_segment *g)
{
    return row_groups_of(job, g) * job->ops->kind->n_kv_heads * parts_of(job, g);
}

/* Returns the row group of item `item` of segment g; *first becomes the item's first span, of
 * qsf_seen_spans(). */
static row_group row_group_of(const attention_job *job, const qsf_segment *g, size_t item,
                              size_t *first)
{
    const qsf_layer_kind *const kind = job->ops->kind;
    const size_t n_parts = parts_of(job, g);
    const size_t n_groups = row_groups_of(job, g);
    *first = item % n_parts * job->item_spans;
    const size_t first_row = item / n_parts % n_groups * job->group_rows;
    const size_t left = (size_t)g->n_tokens * heads_per_kv(kind) - first_row;
    row_group group = {
        .segment = g,
        .kv_head = (uint32_t)(item / n_parts / n_groups),
        .first_row = first_row,
        .n_rows = left < job->group_rows ? left : job->group_rows,
    };
    for (size_t r = 0; r < group.n_rows; r++)
        group.seen[r] = qsf_seen_by(kind, g, (first_row + r) / heads_per_kv(kind));
    return group;
}

/* Returns the index of row r in the chunk: row of the chunk times heads, plus head. */
static size_t chunk_row(const qsf_layer_kind *k, const row_group *group, size_t r)
{
    const uint32_t n_heads = heads_per_kv(k);
    const size_t row = group->first_row + r;
    return (group->segment->first_row + row / n_heads) * k->n_heads +
           (size_t)group->kv_head * n_heads + row % n_heads;
}

/* Returns the offset of head row % n_heads in q or in the attended values. */
static size_t head_off(const qsf_ops *o, size_t row)
{
    const qsf_layer_kind *const k = o->kind;
    return row / k->n_heads * qsf_stride(qsf_q_dim(k)) + row % k->n_heads * k->head_dim;
}

/* Copies the query rows to the worker's scratch, as matmul input. */
static qsf_acts gather_queries(const qsf_ops *o, const row_group *group, size_t worker_idx)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t stride = qsf_stride(kind->head_dim);
    const size_t n_blocks = stride / QSF_BLOCK;
    const size_t value_off = worker_idx * QSF_ATTEND_ROWS * stride;
    const size_t block_off = value_off / QSF_BLOCK;
    for (size_t r = 0; r < group->n_rows; r++) {
        float *const q = s->q + value_off + r * stride;
        memcpy(q, o->scratch->q + head_off(o, chunk_row(kind, group, r)),
               kind->head_dim * sizeof *q);
        memset(q + kind->head_dim, 0, (stride - kind->head_dim) * sizeof *q);
    }
    const qsf_act_row rows = {
        .q = s->act_q + value_off,
        .q_low = s->act_q_low + value_off,
        .scale = s->act_scale + block_off,
        .sum = s->act_sum + block_off,
        .first_sum = s->act_first_sum + block_off,
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
        .first_sum = rows.first_sum,
        .scaled_sum = rows.scaled_sum,
        .fine_sum = rows.fine_sum,
    };
}

/* Computes scores [n_rows, 256] of pages first .. end - 1 of a span. Pages that are contiguous in
 * memory are one product. */
static void score_pages(qsf_matmul_fn *matmul, size_t page_bytes, const void *const *pages,
                        size_t first, size_t end, const qsf_acts *x, float *scores)
{
    const size_t tile_rows = QSF_KV_PAGE_TOKENS / QSF_TILE_ROWS;
    for (size_t i = first; i < end;) {
        const unsigned char *const tiles = pages[i];
        size_t n = 1;
        while (i + n < end && pages[i + n] == tiles + n * page_bytes)
            n++;
        matmul(tiles, n * tile_rows, x, scores + i * QSF_KV_PAGE_TOKENS, QSF_KV_SPAN_TOKENS);
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

/* Turns the scores [256] of row r into exponentials. `begin` is the first position of the span. */
static qsf_span_sums weigh_scores(const qsf_ops *o, const row_group *group, size_t r, size_t begin,
                                  qsf_span_range range, float *scores)
{
    const qsf_layer_kind *const kind = o->kind;
    float *const first = scores + range.begin;
    const size_t n = range.end - range.begin;
    float scale = kind->score_scale;
    if (kind->alibi_slopes.n != 0) {
        const size_t head = chunk_row(kind, group, r) % kind->n_heads;
        const size_t distance = group->seen[r].end - 1 - (begin + range.begin);
        o->kernels->alibi(first, scale, kind->alibi_slopes.values[head], (uint32_t)distance, n);
        scale = 1.0F;
    }
    if (kind->score_cap != 0.0F) {
        o->kernels->cap(first, scale / kind->score_cap, kind->score_cap, n);
        scale = 1.0F;
    }
    const qsf_seen *const seen = &group->seen[r];
    size_t p = begin + range.begin > seen->pinned ? begin + range.begin : seen->pinned;
    for (; p < seen->first && p < begin + range.end; p++)
        scores[p - begin] = -INFINITY;
    return o->kernels->span_softmax(scores, range, scale);
}

/* Finds pages first .. end - 1 of a span. Those between pinned positions and the window may be
 * gone: they become page `first`, whose values get no weight. */
static void find_pages(const attention_job *job, const row_group *group, size_t page, size_t first,
                       size_t end, const void **k_pages, const void **v_pages)
{
    const qsf_kvcache *const kv = group->segment->kv;
    const qsf_seen *const seen = &group->seen[0];
    const size_t pinned_end = qsf_ceil_div(seen->pinned, QSF_KV_PAGE_TOKENS);
    const size_t window = seen->first / QSF_KV_PAGE_TOKENS;
    size_t gone = pinned_end > page + first ? pinned_end - page : first;
    gone = gone < end ? gone : end;
    size_t back = window > page + gone ? window - page : gone;
    back = back < end ? back : end;
    qsf_kvcache_find_pages(kv, job->layer, group->kv_head, page, first, gone, k_pages, v_pages);
    for (size_t i = gone; i < back; i++) {
        k_pages[i] = k_pages[first];
        v_pages[i] = v_pages[first];
    }
    qsf_kvcache_find_pages(kv, job->layer, group->kv_head, page, back, end, k_pages, v_pages);
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
    size_t first_slot = QSF_KV_SPAN_TOKENS;
    size_t end_slot = 0;
    for (size_t r = 0; r < group->n_rows; r++) {
        ranges[r] = qsf_seen_slots(group->seen[r], begin);
        if (ranges[r].begin >= ranges[r].end)
            continue;
        first_slot = ranges[r].begin < first_slot ? ranges[r].begin : first_slot;
        end_slot = ranges[r].end > end_slot ? ranges[r].end : end_slot;
    }
    if (first_slot >= end_slot)
        return;
    const size_t page = span * QSF_KV_SPAN_PAGES;
    const qsf_kv_layer *const layer = &kv->pool->layers[job->layer];
    const size_t first_page = first_slot / QSF_KV_PAGE_TOKENS;
    const size_t end_page = qsf_ceil_div(end_slot, QSF_KV_PAGE_TOKENS);
    const void *k_pages[QSF_KV_SPAN_PAGES];
    const void *v_pages[QSF_KV_SPAN_PAGES];
    find_pages(job, group, page, first_page, end_page, k_pages, v_pages);
    if (group->segment->trunk != NULL)
        qsf_branch_compose_pages(s, group->segment, job->layer, group->kv_head, page, first_page,
                                 end_page, worker_idx, k_pages, v_pages);
    prefetch_pages(k_pages, first_page, end_page, layer->k_page_bytes);
    prefetch_pages(v_pages, first_page, end_page, layer->v_page_bytes);
    score_pages(k->matmul[kv->pool->form.k_type], layer->k_page_bytes, k_pages, first_page,
                end_page, x, scores);
    for (size_t r = 0; r < group->n_rows; r++)
        if (ranges[r].begin < ranges[r].end)
            sums[r] = weigh_scores(o, group, r, begin, ranges[r], scores + r * QSF_KV_SPAN_TOKENS);
    k->span_values[kv->pool->form.v_type](v_pages, x->n_blocks, scores, ranges, group->n_rows,
                                          s->span_values + worker_idx * QSF_ATTEND_ROWS *
                                                               x->n_blocks * QSF_BLOCK);
}

/* attended = values / total, rotated back */
static void write_row(const qsf_ops *o, size_t row, const qsf_span_sums *sums, const float *values)
{
    float *const out = o->scratch->attended + head_off(o, row);
    o->kernels->span_normalise(sums, values, o->kind->head_dim, out);
    if (o->scratch->kv_form.is_rotated)
        o->kernels->hadamard(out, o->kind->head_dim);
}

/* Adds the sink of a row of the chunk (times heads) to its first span. */
static void add_sink(const attention_job *job, size_t row, qsf_span_sums *sums, float *values)
{
    const qsf_layer_kind *const kind = job->ops->kind;
    if (job->sinks != NULL)
        job->ops->kernels->span_sink(sums, values, job->sinks[row % kind->n_heads],
                                     qsf_stride(kind->head_dim));
}

/* Attends a whole row group, its spans in ascending order. */
static void attend_row_group(const attention_job *job, const row_group *group, size_t worker_idx)
{
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t stride = qsf_stride(o->kind->head_dim);
    const size_t worker_off = worker_idx * QSF_ATTEND_ROWS * stride;
    const qsf_acts x = gather_queries(o, group, worker_idx);
    const qsf_spans all = qsf_seen_spans(o->kind, group->segment);
    bool is_begun[QSF_ATTEND_ROWS] = {false};
    qsf_span_sums sums[QSF_ATTEND_ROWS];
    for (size_t i = 0; i < all.n; i++) {
        const size_t span = qsf_span_at(&all, i);
        qsf_span_range ranges[QSF_ATTEND_ROWS];
        qsf_span_sums next[QSF_ATTEND_ROWS];
        attend_span(job, group, &x, span, worker_idx, ranges, next);
        for (size_t r = 0; r < group->n_rows; r++) {
            const float *const from = s->span_values + worker_off + r * stride;
            float *const to = s->values + worker_off + r * stride;
            if (ranges[r].begin == ranges[r].end)
                continue;
            if (!is_begun[r]) {
                is_begun[r] = true;
                memcpy(to, from, stride * sizeof *to);
                sums[r] = next[r];
                add_sink(job, chunk_row(o->kind, group, r), &sums[r], to);
            } else {
                o->kernels->span_merge(&sums[r], to, &next[r], from, stride);
            }
        }
    }
    for (size_t r = 0; r < group->n_rows; r++)
        write_row(o, chunk_row(o->kind, group, r), &sums[r], s->values + worker_off + r * stride);
}

/* Attends item_spans spans of a row group from `first` of qsf_seen_spans() on; merge_rows merges
 * the results. */
static void attend_part(const attention_job *job, const row_group *group, size_t first,
                        size_t worker_idx)
{
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t stride = qsf_stride(o->kind->head_dim);
    const qsf_spans all = qsf_seen_spans(o->kind, group->segment);
    const size_t item_end = first + job->item_spans;
    const size_t end = item_end < all.n ? item_end : all.n;
    if (qsf_span_at(&all, first) * QSF_KV_SPAN_TOKENS >= group->seen[group->n_rows - 1].end)
        return;
    const qsf_acts x = gather_queries(o, group, worker_idx);
    for (size_t i = first; i < end; i++) {
        qsf_span_range ranges[QSF_ATTEND_ROWS];
        qsf_span_sums sums[QSF_ATTEND_ROWS];
        attend_span(job, group, &x, qsf_span_at(&all, i), worker_idx, ranges, sums);
        for (size_t r = 0; r < group->n_rows; r++) {
            if (ranges[r].begin == ranges[r].end)
                continue;
            const size_t part = chunk_row(o->kind, group, r) * s->n_spans + i;
            s->partial_sums[part] = sums[r];
            memcpy(s->partial_values + part * stride,
                   s->span_values + (worker_idx * QSF_ATTEND_ROWS + r) * stride,
                   stride * sizeof *s->partial_values);
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
            size_t first;
            const row_group group = row_group_of(job, g, begin - first_item, &first);
            if (job->item_spans != 0)
                attend_part(job, &group, first, worker_idx);
            else
                attend_row_group(job, &group, worker_idx);
        }
        first_item = end_item;
    }
}

static bool sees_span(const qsf_seen *seen, const qsf_spans *all, size_t i)
{
    return qsf_seen_slots(*seen, qsf_span_at(all, i) * QSF_KV_SPAN_TOKENS).end != 0;
}

/* Merges the spans of rows begin .. end - 1 (rows of the chunk times heads) in ascending order,
 * into the results of the first span. */
static void merge_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const attention_job *const job = arg;
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t stride = qsf_stride(o->kind->head_dim);
    (void)worker_idx;
    for (uint32_t i = 0; i < job->chunk->n_segments; i++) {
        const qsf_segment *const g = &job->chunk->segments[i];
        const size_t end_row = ((size_t)g->first_row + g->n_tokens) * o->kind->n_heads;
        const qsf_spans all = qsf_seen_spans(o->kind, g);
        for (; begin < end && begin < end_row; begin++) {
            const qsf_seen seen = qsf_seen_by(o->kind, g, begin / o->kind->n_heads - g->first_row);
            qsf_span_sums *const sums = s->partial_sums + begin * s->n_spans;
            float *const values = s->partial_values + begin * s->n_spans * stride;
            size_t first = 0;
            while (!sees_span(&seen, &all, first))
                first++;
            add_sink(job, begin, &sums[first], values + first * stride);
            for (size_t j = first + 1; j < all.n; j++)
                if (sees_span(&seen, &all, j))
                    o->kernels->span_merge(&sums[first], values + first * stride, &sums[j],
                                           values + j * stride, stride);
            write_row(o, begin, &sums[first], values + first * stride);
        }
    }
}

/* So that fast threads find more items while slow ones work. */
#define ITEMS_PER_THREAD 4

/* Smaller row groups decode the pages too often. */
#define LEAST_GROUP_ROWS 16

static size_t count_row_groups(const attention_job *job)
{
    size_t n_groups = 0;
    for (uint32_t i = 0; i < job->chunk->n_segments; i++)
        n_groups += row_groups_of(job, &job->chunk->segments[i]) * job->ops->kind->n_kv_heads;
    return n_groups;
}

/* Chooses group_rows and item_spans: groups are large, and not split, if all threads have work. */
static void choose_items(attention_job *job, size_t most_spans)
{
    const qsf_ops *const o = job->ops;
    const size_t n_threads = qsf_pool_thread_count(o->pool);
    const size_t wanted = n_threads == 1 ? 1 : ITEMS_PER_THREAD * n_threads;
    job->group_rows = QSF_ATTEND_ROWS;
    while (count_row_groups(job) < wanted && job->group_rows > LEAST_GROUP_ROWS)
        job->group_rows /= 2;
    const size_t n_groups = count_row_groups(job);
    if (most_spans < 2 || n_groups >= wanted ||
        job->chunk->n_tokens > o->scratch->attend.split_tokens)
        return;
    const size_t n_spans =
        most_spans * n_groups / wanted; /* rounded down: more items rather than fewer */
    job->item_spans = n_spans > 0 ? n_spans : 1;
}

void qsf_attention_run(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer, const float *sinks)
{
    const qsf_layer_kind *const kind = o->kind;
    attention_job job = {.ops = o, .chunk = chunk, .layer = layer, .sinks = sinks};
    size_t most_spans = 0;
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const size_t n = qsf_seen_spans(kind, &chunk->segments[i]).n;
        most_spans = n > most_spans ? n : most_spans;
    }
    choose_items(&job, most_spans);
    size_t n_items = 0;
    size_t n_scores = 0; /* approximate */
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const qsf_segment *const g = &chunk->segments[i];
        const qsf_seen last = qsf_seen_by(kind, g, g->n_tokens - 1);
        n_items += items_of(&job, g);
        n_scores += (last.end - last.first + last.pinned) * g->n_tokens * kind->n_heads;
    }
    qsf_pool_run(o->pool, n_items, qsf_ops_piece(n_scores * 2 * kind->head_dim / n_items),
                 attend_items, &job);
    if (job.item_spans != 0)
        qsf_pool_run(o->pool, (size_t)chunk->n_tokens * kind->n_heads,
                     qsf_ops_piece(2 * most_spans * kind->head_dim), merge_rows, &job);
}
