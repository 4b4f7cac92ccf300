/* heads.c - epilogues of the heads of q, k and v: norm, RoPE, Hadamard; those of k and v are
 * stored.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ops.h"

#include <math.h>

/* Turns x [n], of a head in row t, by the position, and by Hadamard if the cache is rotated; its
 * norm between them is `late`, if it has a weight. */
static void rotate_row(const qsf_ops *o, float *x, size_t n, size_t t, bool has_positions,
                       const qsf_norm_weights *late)
{
    const qsf_scratch *const s = o->scratch;
    if (has_positions && o->kind->rope_set != QSF_ROPE_NONE) {
        const qsf_rope *const rope = &o->ropes[o->kind->rope_set];
        const size_t row = s->chunk_tokens * rope->first_pair + t * rope->n_pairs;
        (rope->is_interleaved ? o->kernels->rope_interleaved : o->kernels->rope_split)(
            x, s->rope_cos + row, s->rope_sin + row, rope->n_pairs);
    }
    if (late != NULL && late->weight != NULL)
        qsf_ops_norm_row(o, x, late, n, x);
    if (s->kv_form.is_rotated)
        o->kernels->hadamard(x, n);
}

/* q [n] *= 1 + beta * ln(1 + floor(position / step)), of the relative mixer
 * 1 + beta * ln((position + 1) / step) from that on */
void qsf_heads_heat(const qsf_ops *o, float *q, size_t n, size_t t)
{
    const qsf_layer_kind *const kind = o->kind;
    const uint32_t position = o->scratch->positions[t];
    if (kind->temperature_step == 0 || position < kind->temperature_step)
        return;
    const float steps = kind->mixer == QSF_MIXER_RELATIVE
                            ? (float)(position + 1) / (float)kind->temperature_step
                            : 1.0F + (float)(position / kind->temperature_step);
    o->kernels->scale(q, 1.0F + kind->temperature_beta * logf(steps), n);
}

/* Returns the norm of a head; its weight is NULL if heads have no norms of their own. */
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

void qsf_heads_finish_q(const qsf_ops *o, const float *weight, uint32_t head, size_t begin,
                        size_t end)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_scratch *const s = o->scratch;
    const qsf_norm_weights norm = head_norm(kind, weight, head);
    const bool is_late = kind->has_late_qk_norm != 0;
    for (size_t t = begin; t < end; t++) {
        float *const q = s->q + t * qsf_stride(qsf_q_dim(kind)) + (size_t)head * kind->head_dim;
        if (norm.weight != NULL && !is_late)
            qsf_ops_norm_row(o, q, &norm, kind->head_dim, q);
        qsf_heads_heat(o, q, kind->head_dim, t);
        rotate_row(o, q, kind->head_dim, t, true, is_late ? &norm : NULL);
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

void qsf_heads_store_k(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                       const float *weight, uint32_t kv_head, size_t begin, size_t end)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_scratch *const s = o->scratch;
    const qsf_norm_weights norm = head_norm(kind, weight, kv_head);
    const bool is_late = kind->has_late_qk_norm != 0;
    for (size_t t = begin; t < end; t++) {
        float *const k = s->k + t * qsf_stride(qsf_kv_dim(kind)) + (size_t)kv_head * kind->head_dim;
        if (norm.weight != NULL && !is_late)
            qsf_ops_norm_row(o, k, &norm, kind->head_dim, k);
        rotate_row(o, k, kind->head_dim, t, true, is_late ? &norm : NULL);
        const qsf_segment *const g = segment_of(chunk, t);
        qsf_kvcache_store_k(&g->sequence->kv, o->kernels, layer, kv_head, s->positions[t], k);
    }
}

void qsf_heads_store_v(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer, uint32_t kv_head)
{
    const qsf_layer_kind *const kind = o->kind;
    const qsf_scratch *const s = o->scratch;
    const qsf_norm_weights norm = {.weight = s->ones};
    for (size_t t = 0; t < o->n_tokens; t++) {
        float *const v = s->v + t * qsf_stride(qsf_kv_dim(kind)) + (size_t)kv_head * kind->head_dim;
        if (kind->value_norm != 0)
            qsf_ops_norm_row(o, v, &norm, kind->head_dim, v);
        rotate_row(o, v, kind->head_dim, t, false, NULL);
        const qsf_segment *const g = segment_of(chunk, t);
        qsf_kvcache_store_v(&g->sequence->kv, o->kernels, layer, kv_head, s->positions[t], v);
    }
}

void qsf_heads_turn_latent_q(const qsf_ops *o, size_t t, float *nope, float *rope)
{
    const qsf_layer_kind *const kind = o->kind;
    const size_t n = kind->head_dim - kind->latent_rank;
    qsf_heads_heat(o, nope, kind->nope_dim, t);
    qsf_heads_heat(o, rope, n, t);
    rotate_row(o, rope, n, t, true, NULL);
}

void qsf_heads_store_latent(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer, size_t t,
                            float *k)
{
    const qsf_layer_kind *const kind = o->kind;
    const uint32_t position = o->scratch->positions[t];
    qsf_kvcache *const kv = &segment_of(chunk, t)->sequence->kv;
    rotate_row(o, k, kind->latent_rank, t, false, NULL);
    rotate_row(o, k + kind->latent_rank, kind->head_dim - kind->latent_rank, t, true, NULL);
    qsf_kvcache_store_k(kv, o->kernels, layer, 0, position, k);
}

void qsf_heads_gate(const qsf_ops *o, size_t t, float *x, size_t n)
{
    const uint32_t n_heads = o->kind->n_heads;
    float *const gate = o->scratch->mix_gate + t * qsf_stride(n_heads);
    o->kernels->betas(gate, 1.0F, n_heads);
    for (uint32_t h = 0; h < n_heads; h++)
        o->kernels->scale(x + h * n, gate[h], n);
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
            qsf_heads_finish_q(o, NULL, head, t, t + 1);
        for (uint32_t head = 0; head < kind->n_kv_heads; head++)
            qsf_heads_store_k(o, job->chunk, job->layer, NULL, head, t, t + 1);
    }
}

void qsf_heads_finish_whole(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                            const float *q_weight, const float *k_weight)
{
    whole_job job = {o, chunk, layer, {q_weight, NULL}, {k_weight, NULL}};
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(2 * (size_t)qsf_q_dim(o->kind)), finish_tokens,
                 &job);
}
