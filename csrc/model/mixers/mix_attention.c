/* mix_attention.c - projections, attention to the KV cache, and the product after it. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mixers.h"

#include <string.h>

#include "base/status.h"
#include "model/ops.h"
#include "model/linear.h"

/* Clamps columns [begin, end) of all rows of q, k or v. */
static void limit(const qsf_ops *o, float *x, uint32_t dim, size_t begin, size_t end)
{
    if (o->kind->qkv_limit != 0.0F)
        for (size_t t = 0; t < o->n_tokens; t++)
            o->kernels->clamp(x + t * qsf_stride(dim) + begin, o->kind->qkv_limit, end - begin);
}

static void q_epilogue(const void *arg, size_t begin, size_t end)
{
    const qsf_mix_job *const job = arg;
    const size_t head_dim = job->ops->kind->head_dim;
    limit(job->ops, job->ops->scratch->q, qsf_q_dim(job->ops->kind), begin, end);
    for (size_t h = begin / head_dim; h < end / head_dim; h++)
        qsf_heads_finish_q(job->ops, job->q_norm, (uint32_t)h, 0, job->ops->n_tokens);
}

/* v = k in columns [begin, end) of all rows */
static void copy_keys(const qsf_ops *o, size_t begin, size_t end)
{
    const qsf_scratch *const s = o->scratch;
    const size_t stride = qsf_stride(qsf_kv_dim(o->kind));
    for (size_t t = 0; t < o->n_tokens; t++)
        memcpy(s->v + t * stride + begin, s->k + t * stride + begin, (end - begin) * sizeof *s->v);
}

static void v_epilogue(const void *arg, size_t begin, size_t end)
{
    const qsf_mix_job *const job = arg;
    const size_t head_dim = job->ops->kind->head_dim;
    limit(job->ops, job->ops->scratch->v, qsf_kv_dim(job->ops->kind), begin, end);
    for (size_t h = begin / head_dim; h < end / head_dim; h++)
        qsf_heads_store_v(job->ops, job->chunk, job->layer_idx, (uint32_t)h);
}

static void k_epilogue(const void *arg, size_t begin, size_t end)
{
    const qsf_mix_job *const job = arg;
    const size_t head_dim = job->ops->kind->head_dim;
    limit(job->ops, job->ops->scratch->k, qsf_kv_dim(job->ops->kind), begin, end);
    if (job->ops->kind->values_are_keys != 0) {
        copy_keys(job->ops, begin, end);
        v_epilogue(arg, begin, end);
    }
    for (size_t h = begin / head_dim; h < end / head_dim; h++)
        qsf_heads_store_k(job->ops, job->chunk, job->layer_idx, job->k_norm, (uint32_t)h, 0,
                          job->ops->n_tokens);
}

static size_t gate_stride(const qsf_layer_kind *k)
{
    return qsf_stride(k->output_gate == QSF_OUTPUT_GATE_OF_HEADS ? k->n_heads : qsf_q_dim(k));
}

/* Computes q, k and v of norm(x) with their epilogues; k and v go to the cache. */
static qsf_status project_heads(qsf_ops *o, const qsf_layer *layer, qsf_mix_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_tensor *const *const t = layer->tensors;
    const qsf_layer_kind *const kind = o->kind;
    const bool is_whole = kind->qk_norm == QSF_QK_NORM_WHOLE_WIDTH;
    const size_t q_stride = qsf_stride(qsf_q_dim(kind));
    const size_t kv_stride = qsf_stride(qsf_kv_dim(kind));
    const size_t head_dim = kind->head_dim;
    qsf_acts in;
    qsf_linear qkv[] = {
        qsf_linear_of(t[QSF_LAYER_Q], s->q, q_stride),
        qsf_linear_of(t[QSF_LAYER_K], s->k, kv_stride),
        qsf_linear_of(t[QSF_LAYER_V], s->v, kv_stride),
        qsf_linear_of(t[QSF_LAYER_MIX_GATE], s->mix_gate, gate_stride(kind)),
    };
    size_t n_linears = kind->kv_source != 0 ? 1 : kind->values_are_keys != 0 ? 2 : 3;
    QSF_TRY(qsf_block_norm(o, s->x, t[QSF_LAYER_ATTN_NORM], t[QSF_LAYER_ATTN_NORM_BIAS], &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    qkv[0].epilogue = is_whole ? NULL : q_epilogue;
    qkv[1].epilogue = is_whole ? NULL : k_epilogue;
    qkv[2].epilogue = v_epilogue;
    for (uint32_t i = 0; i < 3; i++) {
        qkv[i].group_rows = head_dim;
        qkv[i].epilogue_arg = job;
        QSF_TRY(qsf_block_load(o, t[QSF_LAYER_Q_BIAS + i], i, &qkv[i].bias));
    }
    QSF_TRY(qsf_attention_load(o, layer, job));
    QSF_TRY(qsf_block_load_side(o, layer, QSF_LAYER_Q, 3, qkv));
    for (size_t i = 0; i < kind->value_norm * head_dim; i++)
        s->ones[i] = 1.0F;
    if (kind->output_gate != 0 && !o->stores_only)
        qkv[n_linears++] = qkv[3];
    QSF_TRY(qsf_linear_run(o, qkv, n_linears, &in));
    if (is_whole)
        qsf_heads_finish_whole(o, job->chunk, job->layer_idx, job->q_norm, job->k_norm);
    return QSF_OK;
}

/* attended *= sigmoid(gate), by heads; or gate = attended * sigmoid(gate), by elements */
static void gate_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const qsf_ops *const o = arg;
    const qsf_layer_kind *const kind = o->kind;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        float *const gate = o->scratch->mix_gate + t * gate_stride(kind);
        float *const attended = o->scratch->attended + t * qsf_stride(qsf_q_dim(kind));
        if (kind->output_gate == QSF_OUTPUT_GATE_OF_ELEMENTS) {
            o->kernels->sigmoid_mul(gate, attended, qsf_q_dim(kind));
            continue;
        }
        qsf_heads_gate(o, t, attended, kind->head_dim);
    }
}

float *qsf_attention_gate(qsf_ops *o)
{
    if (o->kind->output_gate != 0)
        qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(8 * (size_t)qsf_q_dim(o->kind)), gate_rows,
                     o);
    return o->kind->output_gate == QSF_OUTPUT_GATE_OF_ELEMENTS ? o->scratch->mix_gate
                                                               : o->scratch->attended;
}

qsf_status qsf_mix_attention(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                             uint32_t layer_idx)
{
    if (o->kind->latent_rank != 0)
        return qsf_mix_latent(o, l, chunk, layer_idx);
    qsf_mix_job job = {.ops = o, .chunk = chunk, .layer_idx = l->kv_layer};
    QSF_TRY(project_heads(o, l, &job));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    if (o->stores_only)
        return QSF_OK;
    QSF_TRY(qsf_attention_run(o, chunk, l->kv_layer, &job.terms));
    float *const out = qsf_attention_gate(o);
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    return qsf_block_end_mixer(o, l, out, qsf_q_dim(o->kind));
}
