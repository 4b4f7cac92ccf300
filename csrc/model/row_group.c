/* row_group.c - scores, exponentials and values of the rows of a group. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/row_group.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/values.h"

size_t qsf_row_group_chunk_row(const qsf_layer_kind *k, const qsf_row_group *group, size_t r)
{
    const uint32_t n_heads = qsf_heads_per_kv(k);
    const size_t row = group->first_row + r;
    return (group->segment->first_row + row / n_heads) * k->n_heads +
           (size_t)group->kv_head * n_heads + row % n_heads;
}

size_t qsf_row_group_head_off(const qsf_ops *o, size_t row)
{
    const qsf_layer_kind *const k = o->kind;
    return row / k->n_heads * qsf_stride(qsf_q_dim(k)) + row % k->n_heads * k->head_dim;
}

qsf_acts qsf_row_group_gather(const qsf_ops *o, const qsf_row_group *group, size_t worker_idx)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_attend_scratch *const s = &o->scratch->attend;
    const size_t stride = qsf_stride(kind->head_dim);
    const size_t n_blocks = stride / QSF_BLOCK;
    const size_t value_off = worker_idx * QSF_ATTEND_ROWS * stride;
    const size_t block_off = value_off / QSF_BLOCK;
    for (size_t r = 0; r < group->n_rows; r++) {
        float *const q = s->q + value_off + r * stride;
        memcpy(q,
               o->scratch->q + qsf_row_group_head_off(o, qsf_row_group_chunk_row(kind, group, r)),
               kind->head_dim * sizeof *q);
        memset(q + kind->head_dim, 0, (stride - kind->head_dim) * sizeof *q);
    }
    const qsf_act_row rows = {
        .q = s->act_q + value_off,
        .q_low = s->act_q_low + value_off,
        .scale = s->act_scale + block_off,
        .sum = s->act_sum + block_off,
        .parts = s->act_parts + block_off,
        .scaled_sum = s->act_scaled_sum + block_off,
        .fine_sum = s->act_fine_sum + block_off,
    };
    if (qsf_dtype_is_quantised(o->scratch->kv_form.k_type)) /* rows and blocks are contiguous */
        o->kernels->quantise(s->q + value_off, group->n_rows * n_blocks, false, &rows);
    return (qsf_acts){
        .n_tokens = group->n_rows,
        .n_blocks = n_blocks,
        .f32 = s->q + value_off,
        .q = rows.q,
        .q_low = rows.q_low,
        .scale = rows.scale,
        .sum = rows.sum,
        .parts = rows.parts,
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

/* Prefetches pages, because each is too short for the processor's own prefetcher. */
static void prefetch_pages(const void *const *pages, size_t first, size_t end, size_t page_bytes)
{
    for (size_t i = first; i < end; i++)
        for (size_t off = 0; off < page_bytes; off += CACHE_LINE_BYTES)
            __builtin_prefetch((const unsigned char *)pages[i] + off);
}

/* Applies ALiBi and the cap to the scores [256] of row r, and removes positions between its
 * pinned ones and its window. `begin` is the first position of the span. */
static void change_scores(const qsf_ops *o, const qsf_row_group *group, size_t r, size_t begin,
                          qsf_span_range range, float *scores)
{
    const qsf_layer_kind *const kind = o->kind;
    float *const first = scores + range.begin;
    const size_t n = range.end - range.begin;
    float scale = kind->score_scale;
    if (kind->alibi_slopes.n != 0) {
        const size_t head = qsf_row_group_chunk_row(kind, group, r) % kind->n_heads;
        const size_t distance = group->seen[r].end - 1 - (begin + range.begin);
        o->kernels->alibi(first, scale, kind->alibi_slopes.values[head], (uint32_t)distance, n);
        scale = 1.0F;
    }
    if (kind->score_cap != 0.0F)
        o->kernels->cap(first, scale / kind->score_cap, kind->score_cap, n);
    const qsf_seen *const seen = &group->seen[r];
    size_t p = begin + range.begin > seen->pinned ? begin + range.begin : seen->pinned;
    for (; p < seen->first && p < begin + range.end; p++)
        scores[p - begin] = -INFINITY;
}

/* Turns the scores [n_rows, 256] into exponentials. */
static void weigh_scores(const qsf_ops *o, const qsf_row_group *group, size_t begin,
                         const qsf_span_range *ranges, float *scores, qsf_span_sums *sums)
{
    const qsf_layer_kind *const kind = o->kind;
    const bool is_scaled = kind->alibi_slopes.n != 0 || kind->score_cap != 0.0F;
    for (size_t r = 0; r < group->n_rows; r++)
        if (ranges[r].begin < ranges[r].end)
            change_scores(o, group, r, begin, ranges[r], scores + r * QSF_KV_SPAN_TOKENS);
    o->kernels->span_softmax(scores, ranges, group->n_rows, is_scaled ? 1.0F : kind->score_scale,
                             sums);
}

/* Finds pages first .. end - 1 of a span that are in the transit buffer; returns the first one that
 * is not. */
static size_t find_cold_pages(const qsf_attention_job *job, const qsf_row_group *group, size_t page,
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
static void find_pages(const qsf_attention_job *job, const qsf_row_group *group, size_t page,
                       size_t first, size_t end, const void **k_pages, const void **v_pages)
{
    const qsf_kvcache *const kv = &group->segment->sequence->kv;
    const qsf_seen *const seen = &group->all;
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

/* A span with exponentials instead of scores */
typedef struct weighed_span {
    const qsf_attention_job *job;
    const qsf_row_group *group;
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

void qsf_row_group_attend_span(const qsf_attention_job *job, const qsf_row_group *group,
                               const qsf_acts *x, size_t span, size_t worker_idx,
                               qsf_span_range *ranges, qsf_span_sums *sums)
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
    weigh_scores(o, group, begin, ranges, scores, sums);
    const size_t stride = qsf_stride(qsf_value_dim(o->kind));
    float *const values = s->span_values + worker_idx * QSF_ATTEND_ROWS * stride;
    const weighed_span weighed = {job, group, scores, ranges, all};
    for (size_t b = 0; b < stride / QSF_BLOCK; b++)
        span_values(&weighed, layer, b, layer->v_page_bytes == 0 ? k_pages : v_pages,
                    values + b * QSF_BLOCK, stride);
}
