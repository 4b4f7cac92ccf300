/* attention.c - positions, the cache, and the parallel loop over heads. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/attention.h"

#include <math.h>
#include <stddef.h>

/* Turns head `head` of x [n_tokens, stride] by RoPE. */
static void turn(const qsf_ops *o, float *x, size_t stride, uint32_t head)
{
    const qsf_config *const c = o->config;
    const qsf_scratch *const s = o->scratch;
    const size_t n_pairs = c->rope_dims / 2;
    qsf_rope_fn *const rope =
        c->is_rope_interleaved ? o->kernels->rope_interleaved : o->kernels->rope_split;
    for (size_t t = 0; n_pairs > 0 && t < o->n_tokens; t++)
        rope(x + t * stride + (size_t)head * c->head_dim, s->rope_cos + t * n_pairs,
             s->rope_sin + t * n_pairs, n_pairs);
}

void qsf_attention_finish_q(const qsf_ops *o, uint32_t head)
{
    turn(o, o->scratch->q, o->scratch->q_stride, head);
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
    turn(o, o->scratch->k, o->scratch->kv_stride, kv_head);
    store_rows(o, chunk, layer, kv_head, o->scratch->k, qsf_kvcache_store_k);
}

void qsf_attention_finish_v(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                            uint32_t kv_head)
{
    store_rows(o, chunk, layer, kv_head, o->scratch->v, qsf_kvcache_store_v);
}

typedef struct attention_job {
    const qsf_ops *ops;
    const qsf_segment *segment;
    uint32_t layer;
} attention_job;

/* Item i is head i % n_heads of token i / n_heads of the segment. */
static void attend_items(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const attention_job *const job = arg;
    const qsf_config *const c = job->ops->config;
    const qsf_scratch *const s = job->ops->scratch;
    const qsf_kvcache *const kv = job->segment->kv;
    const uint32_t heads_per_kv = c->n_heads / c->n_kv_heads;
    const float scale = 1.0f / sqrtf((float)c->head_dim);
    qsf_attend_fn *const attend =
        kv->is_f32 ? job->ops->kernels->attend_f32 : job->ops->kernels->attend_f16;
    for (size_t i = begin; i < end; i++) {
        const size_t t = i / c->n_heads;
        const uint32_t head = (uint32_t)(i % c->n_heads);
        const size_t past_end = (size_t)job->segment->first_position + t + 1;
        const size_t first =
            c->window_tokens != 0 && past_end > c->window_tokens ? past_end - c->window_tokens : 0;
        const size_t off = (job->segment->first_row + t) * s->q_stride + (size_t)head * c->head_dim;
        attend(s->q + off, qsf_kvcache_k_pages(kv, job->layer, head / heads_per_kv),
               qsf_kvcache_v_pages(kv, job->layer, head / heads_per_kv), c->head_dim, first,
               past_end, scale, s->scores + worker_idx * s->score_stride, s->attended + off);
    }
}

void qsf_attention_run(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer)
{
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const qsf_segment *const g = &chunk->segments[i];
        attention_job job = {o, g, layer};
        const size_t work =
            ((size_t)g->first_position + g->n_tokens) * 2 * (size_t)o->config->head_dim;
        qsf_pool_run(o->pool, (size_t)g->n_tokens * o->config->n_heads, qsf_ops_piece(work),
                     attend_items, &job);
    }
}
