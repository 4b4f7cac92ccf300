/* mix_latent.c - latent attention, absorbed: heads attend to the latents of keys and values.
 *
 *     c = norm(first rows of K h), k_r = rope(the others): one key [c, k_r] and value c of all
 * heads q = Q h, or Q_UP norm(Q h); of each head [q_n, q_r]: its query is [K_UP q_n, rope(q_r)]
 *     out(V_UP attended), K_UP and V_UP by heads, whose outputs may have a gate each
 *
 * Prompts and single tokens are computed alike, so bits do not depend on how a prompt is cut.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mixers.h"

#include <string.h>

#include "base/status.h"
#include "model/ops.h"
#include "model/linear.h"

#define LATENT_EPSILON 1e-6F /* of the norms of latents, independent of the model's epsilon */

/* Apply the epilogue to the latents of rows begin .. end - 1: norms and RoPE; then store key and
 * value. */
static void finish_latents(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const qsf_mix_job *const job = arg;
    const qsf_ops *const o = job->ops;
    const qsf_layer_kind *const kind = o->kind;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        float *const k = o->scratch->k + t * qsf_stride(qsf_kv_dim(kind));
        float *const q = o->scratch->v + t * qsf_stride(kind->query_rank);
        const uint32_t n = kind->latent_norm_dim != 0 ? kind->latent_norm_dim : kind->latent_rank;
        o->kernels->rmsnorm(k, job->k_norm, LATENT_EPSILON, n, k);
        memset(k + n, 0, (kind->latent_rank - n) * sizeof *k);
        if (job->q_norm != NULL)
            o->kernels->rmsnorm(q, job->q_norm, LATENT_EPSILON, kind->query_rank, q);
        qsf_heads_store_latent(o, job->chunk, job->layer_idx, t, k);
    }
}

/* Splits queries of whole heads: into the part for K_UP, and the part for RoPE, which goes to
 * its place after K_UP's outputs. */
static void q_epilogue(const void *arg, size_t begin, size_t end)
{
    const qsf_mix_job *const job = arg;
    const qsf_ops *const o = job->ops;
    const qsf_layer_kind *const kind = o->kind;
    const size_t dim = qsf_latent_query_dim(kind);
    const size_t stride = qsf_stride(kind->n_heads * (uint32_t)dim);
    for (size_t h = begin / dim; h < end / dim; h++)
        for (size_t t = 0; t < o->n_tokens; t++) {
            const float *const from = o->scratch->attended + t * stride + h * dim;
            float *const nope =
                o->scratch->by_head + (h * o->n_tokens + t) * qsf_stride(kind->nope_dim);
            float *const to = o->scratch->q + t * qsf_stride(qsf_q_dim(kind)) + h * kind->head_dim +
                              kind->latent_rank;
            memcpy(nope, from, kind->nope_dim * sizeof *nope);
            memcpy(to, from + kind->nope_dim, (dim - kind->nope_dim) * sizeof *to);
            qsf_heads_turn_latent_q(o, t, nope, to);
        }
}

/* Copies K_UP's outputs of whole heads to their queries. */
static void k_up_epilogue(const void *arg, size_t begin, size_t end)
{
    const qsf_ops *const o = arg;
    const qsf_layer_kind *const kind = o->kind;
    const size_t rank = kind->latent_rank;
    for (size_t t = 0; t < o->n_tokens; t++)
        for (size_t h = begin / rank; h < end / rank; h++) {
            float *const q = o->scratch->q + t * qsf_stride(qsf_q_dim(kind)) + h * kind->head_dim;
            memcpy(q, o->scratch->attended + (t * kind->n_heads + h) * rank, rank * sizeof *q);
            if (o->scratch->kv_form.is_rotated)
                o->kernels->hadamard(q, rank);
        }
}

/* y [n_tokens, y_stride] = w @ x by heads; x [heads, n_tokens, dim padded to 64] */
static qsf_status run_heads(qsf_ops *o, const qsf_linear *linear, float *x, uint32_t dim,
                            size_t head_rows)
{
    const uint32_t n_tokens = o->n_tokens;
    o->n_tokens = n_tokens * o->kind->n_heads;
    const qsf_acts in = qsf_ops_prepare(o, x, dim, NULL, NULL);
    o->n_tokens = n_tokens;
    return qsf_linear_run_heads(o, linear, head_rows, &in);
}

/* Computes the latents, which go to the cache, and the queries of norm(x). */
static qsf_status project(qsf_ops *o, const qsf_layer *l, qsf_mix_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_tensor *const *const t = l->tensors;
    const qsf_layer_kind *const kind = o->kind;
    const size_t dim = qsf_latent_query_dim(kind);
    const bool has_rank = kind->query_rank != 0;
    const size_t q_stride = qsf_stride(kind->n_heads * (uint32_t)dim);
    const size_t latents_stride = (size_t)kind->n_heads * kind->latent_rank;
    qsf_acts in;
    qsf_linear q_up = {
        .w = t[QSF_LAYER_Q_UP],
        .y = s->attended,
        .y_stride = q_stride,
        .group_rows = dim,
        .epilogue = q_epilogue,
        .epilogue_arg = job,
    };
    const qsf_linear k_up = {
        .w = t[QSF_LAYER_K_UP],
        .y = s->attended,
        .y_stride = latents_stride,
        .group_rows = kind->latent_rank,
        .epilogue = k_up_epilogue,
        .epilogue_arg = o,
    };
    qsf_linear qk[] = {
        qsf_linear_of(t[QSF_LAYER_Q], s->v, qsf_stride(kind->query_rank)),
        qsf_linear_of(t[QSF_LAYER_K], s->k, qsf_stride(qsf_kv_dim(kind))),
        qsf_linear_of(t[QSF_LAYER_MIX_GATE], s->mix_gate, qsf_stride(kind->n_heads)),
    };
    const size_t n_linears = kind->output_gate != 0 && !o->stores_only ? 3 : 2;
    if (!has_rank) {
        qk[0] = q_up;
        qk[0].w = t[QSF_LAYER_Q];
    }
    QSF_TRY(qsf_block_norm(o, s->x, t[QSF_LAYER_ATTN_NORM], t[QSF_LAYER_ATTN_NORM_BIAS], &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    QSF_TRY(qsf_block_load(o, t[QSF_LAYER_Q_BIAS], 0, &qk[0].bias));
    QSF_TRY(qsf_block_load(o, t[QSF_LAYER_K_BIAS], 1, &qk[1].bias));
    QSF_TRY(qsf_attention_load(o, l, job));
    QSF_TRY(qsf_block_load_side(o, l, QSF_LAYER_Q, 2, qk));
    QSF_TRY(qsf_linear_run(o, qk, n_linears, &in));
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(8 * (size_t)kind->head_dim), finish_latents,
                 job);
    if (o->stores_only)
        return QSF_OK;
    if (has_rank) {
        in = qsf_ops_prepare(o, s->v, kind->query_rank, NULL, NULL);
        QSF_TRY(qsf_linear_run(o, &q_up, 1, &in));
    }
    return run_heads(o, &k_up, s->by_head, kind->nope_dim, kind->latent_rank);
}

static void gate_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const qsf_ops *const o = arg;
    const uint32_t n = o->kind->latent_value_dim;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++)
        qsf_heads_gate(o, t, o->scratch->q + t * qsf_stride(o->kind->n_heads * n), n);
}

qsf_status qsf_mix_latent(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                          uint32_t layer_idx)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_layer_kind *const kind = o->kind;
    qsf_mix_job job = {.ops = o, .chunk = chunk, .layer_idx = layer_idx};
    const uint32_t n_values = kind->n_heads * kind->latent_value_dim;
    const qsf_linear v_up = qsf_linear_of(l->tensors[QSF_LAYER_V_UP], s->q, qsf_stride(n_values));
    QSF_TRY(project(o, l, &job));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    if (o->stores_only)
        return QSF_OK;
    QSF_TRY(qsf_attention_run(o, chunk, layer_idx, &job.terms));
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    QSF_TRY(run_heads(o, &v_up, s->attended, kind->latent_rank, kind->latent_value_dim));
    if (kind->output_gate != 0)
        qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(8 * (size_t)n_values), gate_rows, o);
    return qsf_block_end_mixer(o, l, s->q, n_values);
}
