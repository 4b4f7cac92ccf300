/* attention.c - attention over the pages, by row groups and spans, on the pool.
 *
 * One item of the parallel loop attends a whole row group, span after span. If there are too few
 * row groups for the threads, groups become smaller; if that is not enough, an item is a few spans
 * of a group, and a second loop merges them. Cold pages of a segment pass through a buffer: its
 * spans are attended part by part, and the sums of rows are carried to the next part. All ways
 * give the same bits (kernels.h).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ops.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "kernels/kernels.h"

/* ---- query rows that share a pass over the pages, one span at a time ---- */

/* The keys and values of a layer */
typedef struct attention_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer;
    const qsf_score_terms *terms;
    size_t group_rows; /* most rows of a row group */
    size_t item_spans; /* spans of a row group in an item; 0: all of them */
    /* If spans are attended part by part: the current part, and its cold pages in the transit
     * buffer */
    size_t first_span;
    size_t end_span;
    size_t first_cold;
    size_t end_cold;
} attention_job;

/* Up to QSF_ATTEND_ROWS query rows of one KV head, and of one segment: row i is query head i %
 * heads_per_kv of token i / heads_per_kv. */
typedef struct row_group {
    const qsf_segment *segment;
    uint32_t kv_head;
    size_t first_row; /* row i of the group is number first_row + i */
    size_t n_rows;
    qsf_seen seen[QSF_ATTEND_ROWS];
    qsf_seen all; /* from the first position that any row sees to the last one */
} row_group;

static uint32_t heads_per_kv(const qsf_layer_kind *k)
{
    return k->n_heads / k->n_kv_heads;
}

/* Returns the index of row r in the chunk: row of the chunk times heads, plus head. */
static size_t chunk_row_of(const qsf_layer_kind *k, const row_group *group, size_t r)
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
static qsf_acts gather_rows(const qsf_ops *o, const row_group *group, size_t worker_idx)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t stride = qsf_stride(kind->head_dim);
    const size_t n_blocks = stride / QSF_BLOCK;
    const size_t value_off = worker_idx * QSF_ATTEND_ROWS * stride;
    for (size_t r = 0; r < group->n_rows; r++) {
        float *const q = s->q + value_off + r * stride;
        memcpy(q, o->scratch->q + head_off(o, chunk_row_of(kind, group, r)),
               kind->head_dim * sizeof *q);
        memset(q + kind->head_dim, 0, (stride - kind->head_dim) * sizeof *q);
    }
    const qsf_act_row rows = qsf_act_row_at(&s->acts, value_off);
    if (qsf_dtype_is_quantised(o->scratch->kv_form.k_type)) /* rows and blocks are contiguous */
        o->kernels->quantise(s->q + value_off, group->n_rows * n_blocks, false, &rows);
    return qsf_acts_of(&rows, group->n_rows, n_blocks, s->q + value_off);
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

/* Prefetches pages, because each is too short for the processor's own prefetcher. */
static void prefetch_pages(const void *const *pages, size_t first, size_t end, size_t page_bytes)
{
    for (size_t i = first; i < end; i++)
        for (size_t off = 0; off < page_bytes; off += CACHE_LINE_BYTES)
            __builtin_prefetch((const unsigned char *)pages[i] + off);
}

/* scores = scores * scale + the biases of row r for the n slots before `distance` + 1 */
static void add_biases(const attention_job *job, const row_group *group, size_t r, size_t distance,
                       size_t n, float *scores)
{
    const qsf_score_terms *const terms = job->terms;
    const qsf_layer_kind *const kind = job->ops->kind;
    const size_t row = chunk_row_of(kind, group, r);
    const size_t extent = kind->relative_extent;
    const size_t first = distance >= extent ? distance + 1 - extent : 0;
    const float *const relative = terms->relative + row / kind->n_heads * terms->relative_stride +
                                  row % kind->n_heads * kind->relative_dim;
    const float *const profiles = terms->profiles + (extent - 1 - (distance - first));
    job->ops->kernels->scale(scores, kind->score_scale, n);
    for (size_t i = 0; first < n && i < kind->relative_dim; i++)
        job->ops->kernels->add_scaled(scores + first, profiles + i * extent, relative[i],
                                      n - first);
}

/* Applies biases, ALiBi and the cap to the scores [256] of row r, and removes positions between its
 * pinned ones and its window. `begin` is the first position of the span. */
static void change_scores(const attention_job *job, const row_group *group, size_t r, size_t begin,
                          qsf_span_range range, float *scores)
{
    const qsf_ops *const o = job->ops;
    const qsf_layer_kind *const kind = o->kind;
    float *const first = scores + range.begin;
    const size_t n = range.end - range.begin;
    float scale = kind->score_scale;
    const size_t distance = group->seen[r].end - 1 - (begin + range.begin);
    if (job->terms->relative != NULL) {
        add_biases(job, group, r, distance, n, first);
        scale = 1.0F;
    }
    if (kind->alibi_slopes.n != 0) {
        const size_t head = chunk_row_of(kind, group, r) % kind->n_heads;
        o->kernels->alibi(first, scale, kind->alibi_slopes.values[head], (uint32_t)distance, n);
        scale = 1.0F;
    }
    if (kind->score_cap != 0.0F)
        o->kernels->cap(first, scale / kind->score_cap, kind->score_cap, n);
    const qsf_seen *const seen = &group->seen[r];
    size_t p = QSF_MAX(begin + range.begin, seen->pinned);
    for (; p < seen->first && p < begin + range.end; p++)
        scores[p - begin] = -INFINITY;
}

/* Turns the scores [n_rows, 256] into exponentials. */
static void weigh_scores(const attention_job *job, const row_group *group, size_t begin,
                         const qsf_span_range *ranges, float *scores, qsf_span_sums *sums)
{
    const qsf_layer_kind *const kind = job->ops->kind;
    const bool is_scaled =
        kind->alibi_slopes.n != 0 || kind->score_cap != 0.0F || job->terms->relative != NULL;
    for (size_t r = 0; r < group->n_rows; r++)
        if (ranges[r].begin < ranges[r].end)
            change_scores(job, group, r, begin, ranges[r], scores + r * QSF_KV_SPAN_TOKENS);
    job->ops->kernels->span_softmax(scores, ranges, group->n_rows,
                                    is_scaled ? 1.0F : kind->score_scale, sums);
}

/* Finds pages first .. end - 1 of a span that are in the transit buffer; returns the first one that
 * is not. */
static size_t find_cold_pages(const attention_job *job, const row_group *group, size_t page,
                              size_t first, size_t end, const void **k_pages, const void **v_pages)
{
    const qsf_kv_layer *const l = &group->segment->sequence->kv.pool->layers[job->layer];
    const unsigned char *const records =
        job->ops->scratch->attend.transit + group->kv_head * (l->k_page_bytes + l->v_page_bytes);
    for (; first < end && page + first < job->end_cold; first++) {
        k_pages[first] = records + (page + first - job->first_cold) * qsf_kv_record_bytes(l);
        v_pages[first] = (const unsigned char *)k_pages[first] + l->k_page_bytes;
    }
    return first;
}

/* Finds pages first .. end - 1 of a span in memory. Pages between pinned positions and the
 * window may be lost: page `first` replaces them, and their values get no weight. */
static void find_pages(const attention_job *job, const row_group *group, size_t page, size_t first,
                       size_t end, const void **k_pages, const void **v_pages)
{
    const qsf_kvcache *const kv = &group->segment->sequence->kv;
    const qsf_seen *const seen = &group->all;
    const size_t pinned_end = qsf_ceil_div(seen->pinned, QSF_KV_PAGE_TOKENS);
    const size_t window = seen->first / QSF_KV_PAGE_TOKENS;
    size_t gone = pinned_end > page + first ? pinned_end - page : first;
    gone = QSF_MIN(gone, end);
    size_t back = window > page + gone ? window - page : gone;
    back = QSF_MIN(back, end);
    qsf_kvcache_find_pages(kv, job->layer, group->kv_head, page, first, gone, k_pages, v_pages);
    for (size_t i = gone; i < back; i++) {
        k_pages[i] = k_pages[first];
        v_pages[i] = v_pages[first];
    }
    qsf_kvcache_find_pages(kv, job->layer, group->kv_head, page, back, end, k_pages, v_pages);
}

/* A span with exponentials instead of scores */
typedef struct weighed_span {
    const attention_job *job;
    const row_group *group;
    const float *e;               /* [n_rows, 256] */
    const qsf_span_range *ranges; /* [n_rows] */
    qsf_span_range all;           /* their union */
} weighed_span;

/* Computes a block of the values of all rows. pages: of V, or of K if the values are there. */
static void span_values(const weighed_span *s, const qsf_kv_layer *layer, size_t block,
                        const void *const *pages, float *values, size_t stride)
{
    const qsf_kernels *const k = s->job->ops->kernels;
    const qsf_kv_form *const form = &s->job->ops->scratch->kv_form;
    const bool is_in_keys = layer->v_page_bytes == 0;
    const qsf_dtype type = is_in_keys ? form->k_type : form->v_type;
    const size_t block_bytes =
        is_in_keys ? qsf_dtype_tile_bytes(type) : qsf_kv_value_block_bytes(type);
    qsf_value_blocks blocks = {.tile_step = is_in_keys ? layer->k_page_bytes / 2 : 0};
    qsf_value_tiles tiles;
    for (size_t i = 0; i < QSF_KV_SPAN_PAGES; i++)
        if (pages[i] != NULL)
            blocks.pages[i] = (const unsigned char *)pages[i] + block * block_bytes;
    qsf_span_values_prepare(k, type, &blocks, s->all, &tiles);
    qsf_span_values(k, type, &blocks, &tiles, s->all, s->e, s->ranges, s->group->n_rows, values,
                    stride);
}

/* Computes the sums, and in the worker's span_values the values, of all rows over one span. ranges
 * [n_rows] receives the slots that each row sees. */
static void attend_one_span(const attention_job *job, const row_group *group, const qsf_acts *x,
                            size_t span, size_t worker_idx, qsf_span_range *ranges,
                            qsf_span_sums *sums)
{
    const qsf_ops *const o = job->ops;
    const qsf_kernels *const k = o->kernels;
    const qsf_kvcache *const kv = &group->segment->sequence->kv;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t begin = span * QSF_KV_SPAN_TOKENS;
    float *const scores = s->scores + worker_idx * QSF_ATTEND_ROWS * QSF_KV_SPAN_TOKENS;
    for (size_t r = 0; r < group->n_rows; r++)
        ranges[r] = qsf_seen_slots(group->seen[r], begin);
    const qsf_span_range all = qsf_union_of_ranges(ranges, group->n_rows);
    if (all.begin >= all.end)
        return;
    const size_t page = span * QSF_KV_SPAN_PAGES;
    const qsf_kv_layer *const layer = &kv->pool->layers[job->layer];
    const size_t first_page = all.begin / QSF_KV_PAGE_TOKENS;
    const size_t end_page = qsf_ceil_div(all.end, QSF_KV_PAGE_TOKENS);
    const void *k_pages[QSF_KV_SPAN_PAGES] = {NULL};
    const void *v_pages[QSF_KV_SPAN_PAGES] = {NULL};
    const size_t first_hot =
        find_cold_pages(job, group, page, first_page, end_page, k_pages, v_pages);
    if (first_hot < end_page)
        find_pages(job, group, page, first_hot, end_page, k_pages, v_pages);
    prefetch_pages(k_pages, first_page, end_page, layer->k_page_bytes);
    prefetch_pages(v_pages, first_page, end_page, layer->v_page_bytes);
    score_pages(k->matmul[kv->pool->form.k_type], layer->k_page_bytes, k_pages, first_page,
                end_page, x, scores);
    weigh_scores(job, group, begin, ranges, scores, sums);
    const size_t stride = qsf_stride(qsf_value_dim(o->kind));
    float *const values = s->span_values + worker_idx * QSF_ATTEND_ROWS * stride;
    const weighed_span weighed = {job, group, scores, ranges, all};
    for (size_t b = 0; b < stride / QSF_BLOCK; b++)
        span_values(&weighed, layer, b, layer->v_page_bytes == 0 ? k_pages : v_pages,
                    values + b * QSF_BLOCK, stride);
}

/* ---- the items of the parallel loop ---- */

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
    const uint32_t *const positions = job->ops->scratch->positions + g->first_row;
    row_group group = {
        .segment = g,
        .kv_head = (uint32_t)(item / n_parts / n_groups),
        .first_row = first_row,
        .n_rows = QSF_MIN(left, job->group_rows),
        .all.first = SIZE_MAX,
    };
    for (size_t r = 0; r < group.n_rows; r++) {
        const qsf_seen seen = qsf_seen_at(kind, g, positions[(first_row + r) / heads_per_kv(kind)]);
        group.seen[r] = seen;
        if (seen.first < group.all.first)
            group.all = (qsf_seen){seen.pinned, seen.first, group.all.end};
        group.all.end = QSF_MAX(seen.end, group.all.end);
    }
    return group;
}

/* Returns the offset of a row of the chunk (times heads) in the attended values. Rows of latents
 * are grouped by head, because V_UP multiplies each head's rows together. */
static size_t attended_off(const qsf_ops *o, size_t row)
{
    const qsf_layer_kind *const k = o->kind;
    if (k->latent_rank == 0)
        return head_off(o, row);
    return (row % k->n_heads * o->n_tokens + row / k->n_heads) * k->latent_rank;
}

/* attended = values / total, rotated back */
static void write_row(const qsf_ops *o, size_t row, const qsf_span_sums *sums, const float *values)
{
    const uint32_t dim = qsf_value_dim(o->kind);
    float *const out = o->scratch->attended + attended_off(o, row);
    o->kernels->span_normalise(sums, values, dim, out);
    if (o->scratch->kv_form.is_rotated)
        o->kernels->hadamard(out, dim);
}

/* Adds the sink of a row of the chunk (times heads) to its first span. */
static void add_sink(const attention_job *job, size_t row, qsf_span_sums *sums, float *values)
{
    const qsf_layer_kind *const kind = job->ops->kind;
    const qsf_score_terms *const terms = job->terms;
    if (terms->sinks != NULL)
        job->ops->kernels->span_sink(
            sums, values,
            terms->sinks[row / kind->n_heads * terms->sink_stride + row % kind->n_heads],
            qsf_stride(qsf_value_dim(kind)));
}

/* Saves or restores the sums and values of a row between two parts. */
static void carry(const attention_job *job, size_t row, bool is_end, qsf_span_sums *sums,
                  float *values)
{
    const qsf_ops *const o = job->ops;
    const uint32_t dim = qsf_value_dim(o->kind);
    float *const there = o->scratch->attended + attended_off(o, row);
    qsf_span_sums *const carried = &o->scratch->attend.carried[row];
    if (is_end) {
        *carried = *sums;
        memcpy(there, values, dim * sizeof *values);
    } else {
        *sums = *carried;
        memcpy(values, there, dim * sizeof *values);
        memset(values + dim, 0, (qsf_stride(dim) - dim) * sizeof *values);
    }
}

/* Attends a whole row group, or the job's part of it, its spans in ascending order. */
static void attend_row_group(const attention_job *job, const row_group *group, size_t worker_idx)
{
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t stride = qsf_stride(qsf_value_dim(o->kind));
    const size_t worker_off = worker_idx * QSF_ATTEND_ROWS * stride;
    const qsf_acts x = gather_rows(o, group, worker_idx);
    const qsf_spans all = qsf_seen_spans(o->kind, group->segment);
    const bool is_part = job->end_span != 0;
    const bool is_last = !is_part || job->end_span >= qsf_span_at(&all, all.n);
    bool is_begun[QSF_ATTEND_ROWS] = {false};
    qsf_span_sums sums[QSF_ATTEND_ROWS];
    for (size_t r = 0; is_part && r < group->n_rows; r++) {
        is_begun[r] = group->seen[r].first / QSF_KV_SPAN_TOKENS < job->first_span;
        if (is_begun[r])
            carry(job, chunk_row_of(o->kind, group, r), false, &sums[r],
                  s->values + worker_off + r * stride);
    }
    for (size_t i = 0; i < all.n; i++) {
        const size_t span = qsf_span_at(&all, i);
        if (is_part && (span < job->first_span || span >= job->end_span))
            continue;
        qsf_span_range ranges[QSF_ATTEND_ROWS];
        qsf_span_sums next[QSF_ATTEND_ROWS];
        attend_one_span(job, group, &x, span, worker_idx, ranges, next);
        for (size_t r = 0; r < group->n_rows; r++) {
            const float *const from = s->span_values + worker_off + r * stride;
            float *const to = s->values + worker_off + r * stride;
            if (ranges[r].begin == ranges[r].end)
                continue;
            if (!is_begun[r]) {
                is_begun[r] = true;
                memcpy(to, from, stride * sizeof *to);
                sums[r] = next[r];
                add_sink(job, chunk_row_of(o->kind, group, r), &sums[r], to);
            } else {
                o->kernels->span_merge(&sums[r], to, &next[r], from, stride);
            }
        }
    }
    for (size_t r = 0; r < group->n_rows; r++) {
        const size_t row = chunk_row_of(o->kind, group, r);
        float *const values = s->values + worker_off + r * stride;
        if (is_last)
            write_row(o, row, &sums[r], values);
        else if (is_begun[r])
            carry(job, row, true, &sums[r], values);
    }
}

/* Attends item_spans spans of a row group from `first` of qsf_seen_spans() on; merge_rows merges
 * the results. */
static void attend_part(const attention_job *job, const row_group *group, size_t first,
                        size_t worker_idx)
{
    const qsf_ops *const o = job->ops;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t stride = qsf_stride(qsf_value_dim(o->kind));
    const qsf_spans all = qsf_seen_spans(o->kind, group->segment);
    const size_t item_end = first + job->item_spans;
    const size_t end = QSF_MIN(item_end, all.n);
    if (qsf_span_at(&all, first) * QSF_KV_SPAN_TOKENS >= group->all.end)
        return;
    const qsf_acts x = gather_rows(o, group, worker_idx);
    for (size_t i = first; i < end; i++) {
        qsf_span_range ranges[QSF_ATTEND_ROWS];
        qsf_span_sums sums[QSF_ATTEND_ROWS];
        attend_one_span(job, group, &x, qsf_span_at(&all, i), worker_idx, ranges, sums);
        for (size_t r = 0; r < group->n_rows; r++) {
            if (ranges[r].begin == ranges[r].end)
                continue;
            const size_t part = chunk_row_of(o->kind, group, r) * s->n_spans + i;
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
    const size_t stride = qsf_stride(qsf_value_dim(o->kind));
    (void)worker_idx;
    for (uint32_t i = 0; i < job->chunk->n_segments; i++) {
        const qsf_segment *const g = &job->chunk->segments[i];
        const size_t end_row = (g->first_row + (size_t)g->n_tokens) * o->kind->n_heads;
        const qsf_spans all = qsf_seen_spans(o->kind, g);
        for (; begin < end && begin < end_row; begin++) {
            const qsf_seen seen =
                qsf_seen_at(o->kind, g, o->scratch->positions[begin / o->kind->n_heads]);
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

/* Items per thread: more than 1, so that fast threads can take more. */
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

/* Runs the items of the chunk, in pieces. */
static void run_items(attention_job *job)
{
    const qsf_layer_kind *const kind = job->ops->kind;
    size_t n_items = 0;
    size_t n_scores = 0; /* approximate */
    for (uint32_t i = 0; i < job->chunk->n_segments; i++) {
        const qsf_segment *const g = &job->chunk->segments[i];
        const qsf_seen last = qsf_seen_at(kind, g, g->first_position + g->n_tokens - 1);
        n_items += items_of(job, g);
        n_scores += (last.end - last.first + last.pinned) * g->n_tokens * kind->n_heads;
    }
    qsf_pool_run(job->ops->pool, n_items, qsf_ops_piece(n_scores * 2 * kind->head_dim / n_items),
                 attend_items, job);
}

/* Attends the segments of the chunk, all of one sequence, in parts: each part has as many cold
 * pages as the transit buffer holds; the last part includes the pages in memory. */
static qsf_status attend_by_parts(const qsf_ops *o, attention_job *job)
{
    const qsf_segment *const segments = job->chunk->segments;
    qsf_kvcache *const kv = &segments[0].sequence->kv;
    const qsf_kv_layer *const l = &kv->pool->layers[job->layer];
    const size_t n_cold = qsf_kvcache_cold_pages(kv, job->layer);
    const size_t first_page =
        qsf_seen_at(o->kind, segments, segments[0].first_position).first / QSF_KV_PAGE_TOKENS;
    const size_t part_spans =
        qsf_kv_transit_bytes(kv->pool) / qsf_kv_record_bytes(l) / QSF_KV_SPAN_PAGES;
    const qsf_spans all = qsf_seen_spans(o->kind, &segments[0]);
    const size_t end_span = all.first + all.n;
    job->end_span = first_page / QSF_KV_SPAN_PAGES;
    while (job->end_span < end_span) {
        const size_t end_page = (job->end_span + part_spans) * QSF_KV_SPAN_PAGES;
        const size_t page = job->end_span * QSF_KV_SPAN_PAGES;
        job->first_span = job->end_span;
        job->end_span = end_page < n_cold ? job->first_span + part_spans : end_span;
        job->first_cold = QSF_MAX(page, first_page);
        job->end_cold = QSF_MIN(end_page, n_cold);
        qsf_ops_lap(o, QSF_PHASE_ATTENTION);
        if (job->first_cold < job->end_cold)
            QSF_TRY(qsf_kv_cold_read_records(&kv->cold, l, (uint32_t)job->first_cold,
                                             (uint32_t)job->end_cold, o->scratch->attend.transit));
        qsf_stopwatch_lap(o->stopwatch, QSF_PHASE_WAIT);
        run_items(job);
    }
    return QSF_OK;
}

/* Attends a chunk some of whose sequences have cold pages: one sequence after the other. */
static qsf_status attend_cold(const qsf_ops *o, const attention_job *all)
{
    const qsf_chunk *const whole = all->chunk;
    qsf_chunk chunk = *whole;
    attention_job job = *all;
    job.chunk = &chunk;
    for (uint32_t i = 0; i < whole->n_segments; i++) {
        chunk.segments = whole->segments + i;
        chunk.n_segments = 1;
        QSF_TRY(attend_by_parts(o, &job));
    }
    return QSF_OK;
}

qsf_status qsf_attention_run(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                             const qsf_score_terms *terms)
{
    const qsf_layer_kind *const kind = o->kind;
    attention_job job = {.ops = o, .chunk = chunk, .layer = layer, .terms = terms};
    size_t most_spans = 0;
    size_t n_cold = 0;
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const size_t n = qsf_seen_spans(kind, &chunk->segments[i]).n;
        most_spans = QSF_MAX(n, most_spans);
        n_cold += qsf_kvcache_cold_pages(&chunk->segments[i].sequence->kv, layer);
    }
    choose_items(&job, most_spans);
    if (n_cold > 0) {
        job.item_spans = 0;
        return attend_cold(o, &job);
    }
    run_items(&job);
    if (job.item_spans != 0)
        qsf_pool_run(o->pool, (size_t)chunk->n_tokens * kind->n_heads,
                     qsf_ops_piece(2 * most_spans * kind->head_dim), merge_rows, &job);
    return QSF_OK;
}

qsf_status qsf_attention_load(qsf_ops *o, const qsf_layer *l, qsf_mix_job *job)
{
    float *const *const spaces = o->scratch->qk_norms;
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_Q_NORM], spaces[0], &job->q_norm));
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_K_NORM], spaces[1], &job->k_norm));
    return qsf_ops_load_vector(o, l->tensors[QSF_LAYER_SINKS], o->scratch->vectors[3],
                               &job->terms.sinks);
}

/* ---- which positions a token sees ---- */

qsf_seen qsf_seen_at(const qsf_layer_kind *k, const qsf_segment *g, size_t position)
{
    const size_t window = k->window_tokens;
    const size_t first = window != 0 && position >= window ? position + 1 - window : 0;
    size_t end = position + (k->kv_source == QSF_KV_LENT ? 0 : 1);
    if (k->is_encoder != 0) {
        end = (size_t)g->first_position + g->n_tokens;
        end = window != 0 && position + window < end ? position + window : end;
    }
    return first <= k->pinned_tokens ? (qsf_seen){0, 0, end}
                                     : (qsf_seen){k->pinned_tokens, first, end};
}

qsf_span_range qsf_seen_slots(qsf_seen seen, size_t begin)
{
    const size_t span_end = begin + QSF_KV_SPAN_TOKENS;
    const size_t first = QSF_MAX(seen.first, begin);
    const size_t window_end = QSF_MIN(seen.end, span_end);
    const size_t pinned_end = QSF_MIN(seen.pinned, span_end);
    const size_t end = first < window_end ? window_end : pinned_end;
    if (end <= begin)
        return (qsf_span_range){0, 0};
    return (qsf_span_range){
        .begin = seen.pinned > begin ? 0 : (uint32_t)(first - begin),
        .end = (uint32_t)(end - begin),
    };
}

static size_t end_span(qsf_seen seen)
{
    return qsf_ceil_div(seen.end, QSF_KV_SPAN_TOKENS);
}

qsf_spans qsf_seen_spans(const qsf_layer_kind *k, const qsf_segment *g)
{
    const qsf_seen seen = qsf_seen_at(k, g, g->first_position);
    const size_t last = (size_t)g->first_position + g->n_tokens - 1;
    const size_t first = seen.first / QSF_KV_SPAN_TOKENS;
    const size_t n_pinned = qsf_ceil_div(seen.pinned, QSF_KV_SPAN_TOKENS);
    qsf_spans all = {QSF_MIN(n_pinned, first), first, 0};
    all.n = all.n_pinned + end_span(qsf_seen_at(k, g, last)) - first;
    return all;
}

size_t qsf_seen_most_spans(const qsf_layer_kind *k, size_t chunk_tokens, size_t ctx_tokens)
{
    const size_t n_all = qsf_ceil_div(ctx_tokens, QSF_KV_SPAN_TOKENS);
    const size_t n_seen = qsf_ceil_div(k->pinned_tokens, QSF_KV_SPAN_TOKENS) +
                          qsf_ceil_div(k->window_tokens + chunk_tokens, QSF_KV_SPAN_TOKENS) + 1;
    return k->window_tokens != 0 && k->is_encoder == 0 && n_seen < n_all ? n_seen : n_all;
}
