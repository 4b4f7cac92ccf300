/* forward.c - the transformer. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/forward.h"

#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/half.h"
#include "base/status.h"
#include "model/attention.h"
#include "model/heads.h"
#include "model/linear.h"
#include "model/routed.h"

/* Writes the position of each row in its sequence. */
static void number_rows(const qsf_chunk *chunk, uint32_t *positions)
{
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const qsf_segment *const g = &chunk->segments[i];
        for (uint32_t t = 0; t < g->n_tokens; t++)
            positions[g->first_row + t] = g->first_position + t;
    }
}

/* x[t] = embedding[token] * factor (+ position[t]); x [n_tokens, dim_stride] */
static qsf_status embed(qsf_forward *f, const qsf_chunk *chunk)
{
    const qsf_config *const c = f->ops.config;
    const qsf_scratch *const s = f->ops.scratch;
    for (uint32_t t = 0; t < chunk->n_tokens; t++) {
        float *const x = s->x + t * s->dim_stride;
        QSF_TRY(qsf_embedding_row(&f->embedding, f->ops.stream, f->ops.kernels, f->ends->embedding,
                                  chunk->tokens[t], x));
        if (c->embedding_factor != 1.0F)
            f->ops.kernels->scale(x, c->embedding_factor, c->dim);
        if (f->positions == NULL)
            continue;
        const size_t position = s->positions[t];
        const unsigned char *const row = f->positions + position * c->dim * 2;
        for (size_t i = 0; i < c->dim; i++)
            x[i] += qsf_half_to_float(qsf_load_u16(row + 2 * i));
    }
    return QSF_OK;
}

/* Loads an optional vector into vectors[i]; *out becomes NULL if t is. */
static qsf_status load(qsf_ops *o, const qsf_tensor *t, size_t i, const float **out)
{
    return qsf_ops_load_vector(o, t, o->scratch->vectors[i], out);
}

/* Loads the weights of a norm of the current unit; *out has no weight if there is no such norm. */
static qsf_status load_norm(qsf_ops *o, const qsf_tensor *weight, const qsf_tensor *bias,
                            qsf_norm_weights *out)
{
    QSF_TRY(load(o, weight, 0, &out->weight));
    return load(o, bias, 1, &out->bias);
}

/* *out = norm(x), or x without a norm, as matmul input */
static qsf_status norm(qsf_ops *o, float *x, const qsf_tensor *weight, const qsf_tensor *bias,
                       qsf_acts *out)
{
    qsf_norm_weights weights;
    QSF_TRY(load_norm(o, weight, bias, &weights));
    *out = qsf_ops_prepare(o, x, o->config->dim, &weights, o->scratch->normed);
    return QSF_OK;
}

/* *out = x [n_tokens, dim], normalised in place by a sub-norm if there is one, as matmul input */
static qsf_status sub_norm(qsf_ops *o, float *x, uint32_t dim, const qsf_tensor *weight,
                           qsf_acts *out)
{
    qsf_norm_weights weights;
    QSF_TRY(load_norm(o, weight, NULL, &weights));
    *out = qsf_ops_prepare(o, x, dim, &weights, x);
    return QSF_OK;
}

/* The argument of the epilogues. */
typedef struct epilogue_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer_idx;
    const float *q_norm; /* weights, or NULL */
    const float *k_norm;
    const float *sinks;
} epilogue_job;

static void q_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    const size_t head_dim = job->ops->kind->head_dim;
    for (size_t h = begin / head_dim; h < end / head_dim; h++)
        qsf_heads_finish_q(job->ops, job->q_norm, (uint32_t)h, 0, job->ops->n_tokens);
}

static void k_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    const size_t head_dim = job->ops->kind->head_dim;
    for (size_t h = begin / head_dim; h < end / head_dim; h++)
        qsf_heads_store_k(job->ops, job->chunk, job->layer_idx, job->k_norm, (uint32_t)h, 0,
                          job->ops->n_tokens);
}

static void v_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    const size_t head_dim = job->ops->kind->head_dim;
    for (size_t h = begin / head_dim; h < end / head_dim; h++)
        qsf_heads_store_v(job->ops, job->chunk, job->layer_idx, (uint32_t)h);
}

static void residual_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    qsf_ops_add_residual(job->ops, begin, end);
}

static void up_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    qsf_ops_activate(job->ops, 0, job->ops->n_tokens, begin, end);
}

/* Computes q, k and v of norm(x), finished; k and v go to the cache. */
static qsf_status project_heads(qsf_ops *o, const qsf_layer *layer, epilogue_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_tensor *const *const t = layer->tensors;
    const qsf_layer_kind *const kind = o->kind;
    const bool is_whole = kind->qk_norm == QSF_QK_NORM_WHOLE_WIDTH;
    const size_t q_stride = qsf_stride(qsf_q_dim(kind));
    const size_t kv_stride = qsf_stride(qsf_kv_dim(kind));
    const size_t head_dim = kind->head_dim;
    size_t n_used = 0;
    qsf_acts in;
    qsf_linear qkv[] = {
        {t[QSF_LAYER_Q], NULL, s->q, q_stride, head_dim, is_whole ? NULL : q_epilogue, job, {0}},
        {t[QSF_LAYER_K], NULL, s->k, kv_stride, head_dim, is_whole ? NULL : k_epilogue, job, {0}},
        {t[QSF_LAYER_V], NULL, s->v, kv_stride, head_dim, v_epilogue, job, {0}},
    };
    QSF_TRY(norm(o, s->x, t[QSF_LAYER_ATTN_NORM], t[QSF_LAYER_ATTN_NORM_BIAS], &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    QSF_TRY(load(o, t[QSF_LAYER_Q_BIAS], 0, &qkv[0].bias));
    QSF_TRY(load(o, t[QSF_LAYER_K_BIAS], 1, &qkv[1].bias));
    QSF_TRY(load(o, t[QSF_LAYER_V_BIAS], 2, &qkv[2].bias));
    QSF_TRY(qsf_ops_load_vector(o, t[QSF_LAYER_Q_NORM], s->qk_norms[0], &job->q_norm));
    QSF_TRY(qsf_ops_load_vector(o, t[QSF_LAYER_K_NORM], s->qk_norms[1], &job->k_norm));
    QSF_TRY(load(o, t[QSF_LAYER_SINKS], 3, &job->sinks));
    QSF_TRY(qsf_ops_load_sides(o, &layer->sides[QSF_LAYER_Q], &n_used, &qkv[0].sides));
    QSF_TRY(qsf_ops_load_sides(o, &layer->sides[QSF_LAYER_K], &n_used, &qkv[1].sides));
    QSF_TRY(qsf_ops_load_sides(o, &layer->sides[QSF_LAYER_V], &n_used, &qkv[2].sides));
    QSF_TRY(qsf_linear_run(o, qkv, sizeof qkv / sizeof qkv[0], &in));
    if (is_whole)
        qsf_heads_finish_whole(o, job->chunk, job->layer_idx, job->q_norm, job->k_norm);
    return QSF_OK;
}

/* A product that goes back to the residual */
typedef struct branch_end {
    const qsf_tensor *w;
    const qsf_tensor *bias;
    const qsf_sides *sides;
    const qsf_tensor *post_norm;
    bool is_kept; /* stays in y, because more is added to it */
} branch_end;

/* x += factor * (w @ in (+ bias)), normalised before it is added if there is a post norm */
static qsf_status add_product(qsf_ops *o, const branch_end *end, const qsf_acts *in,
                              const epilogue_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const bool is_normed = end->post_norm != NULL;
    size_t n_used = 0;
    qsf_norm_weights weights;
    qsf_linear out = {end->w, NULL, s->y, s->dim_stride, 1, residual_epilogue, job, {0}};
    if (is_normed || end->is_kept)
        out.epilogue = NULL;
    QSF_TRY(load(o, end->bias, 0, &out.bias));
    QSF_TRY(qsf_ops_load_sides(o, end->sides, &n_used, &out.sides));
    QSF_TRY(qsf_linear_run(o, &out, 1, in));
    if (!is_normed || end->is_kept)
        return QSF_OK;
    QSF_TRY(load_norm(o, end->post_norm, NULL, &weights));
    qsf_ops_add_normed(o, &weights);
    return QSF_OK;
}

/* x += attention(norm(x)) */
static qsf_status run_attention(qsf_ops *o, const qsf_layer *l, epilogue_job *job)
{
    const branch_end end = {l->tensors[QSF_LAYER_ATTN_OUT], l->tensors[QSF_LAYER_ATTN_OUT_BIAS],
                            &l->sides[QSF_LAYER_ATTN_OUT], l->tensors[QSF_LAYER_POST_ATTN_NORM],
                            false};
    qsf_acts attended;
    QSF_TRY(project_heads(o, l, job));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    QSF_TRY(qsf_attention_run(o, job->chunk, job->layer_idx, job->sinks));
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    QSF_TRY(sub_norm(o, o->scratch->attended, qsf_q_dim(o->kind),
                     l->tensors[QSF_LAYER_ATTN_SUB_NORM], &attended));
    QSF_TRY(add_product(o, &end, &attended, job));
    qsf_ops_lap(o, QSF_PHASE_ATTN_OUT);
    return QSF_OK;
}

/* *out = what the FFN reads, as matmul input */
static qsf_status prepare_ffn(qsf_ops *o, const qsf_layer *l, qsf_acts *out)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_norm_weights none = {0};
    if (!o->kind->is_parallel)
        return norm(o, s->x, l->tensors[QSF_LAYER_FFN_NORM], l->tensors[QSF_LAYER_FFN_NORM_BIAS],
                    out);
    if (qsf_layer_keeps_input(l))
        return norm(o, s->input, l->tensors[QSF_LAYER_FFN_NORM],
                    l->tensors[QSF_LAYER_FFN_NORM_BIAS], out);
    *out = qsf_ops_prepare(o, s->normed, o->config->dim, &none, s->normed); /* as attention did */
    return QSF_OK;
}

/* x += ffn(in), or y = ffn(in) if experts are added to it */
static qsf_status run_dense(qsf_ops *o, const qsf_layer *l, const qsf_acts *in,
                            const epilogue_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const size_t stride = qsf_stride(o->kind->ffn_dim);
    const branch_end end = {l->tensors[QSF_LAYER_DOWN], l->tensors[QSF_LAYER_DOWN_BIAS],
                            &l->sides[QSF_LAYER_DOWN], l->tensors[QSF_LAYER_POST_FFN_NORM],
                            o->kind->n_experts != 0};
    size_t n_used = 0;
    qsf_acts activated;
    qsf_linear gate = {l->tensors[QSF_LAYER_GATE], NULL, s->gate, stride, 1, NULL, NULL, {0}};
    qsf_linear up = {l->tensors[QSF_LAYER_UP], NULL, s->up, stride, 1, up_epilogue, job, {0}};
    QSF_TRY(load(o, l->tensors[QSF_LAYER_GATE_BIAS], 1, &gate.bias));
    QSF_TRY(load(o, l->tensors[QSF_LAYER_UP_BIAS], 0, &up.bias));
    QSF_TRY(qsf_ops_load_sides(o, &l->sides[QSF_LAYER_GATE], &n_used, &gate.sides));
    QSF_TRY(qsf_ops_load_sides(o, &l->sides[QSF_LAYER_UP], &n_used, &up.sides));
    if (l->tensors[QSF_LAYER_GATE] != NULL) {
        QSF_TRY(qsf_linear_run_pair(o, &gate, &up, in));
    } else {
        up.y = s->gate;
        QSF_TRY(qsf_linear_run(o, &up, 1, in));
    }
    qsf_ops_lap(o, QSF_PHASE_GATE_UP);
    QSF_TRY(sub_norm(o, s->gate, o->kind->ffn_dim, l->tensors[QSF_LAYER_FFN_SUB_NORM], &activated));
    return add_product(o, &end, &activated, job);
}

/* x += dense(norm(x)) + experts(norm(x)), either of which may be missing */
static qsf_status run_ffn(qsf_ops *o, const qsf_layer *l, const epilogue_job *job)
{
    const bool is_routed = o->kind->n_experts != 0;
    qsf_norm_weights weights;
    qsf_acts in;
    QSF_TRY(prepare_ffn(o, l, &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    if (is_routed)
        QSF_TRY(qsf_routed_choose(o, l, job->layer_idx, &in));
    if (l->tensors[QSF_LAYER_UP] != NULL)
        QSF_TRY(run_dense(o, l, &in, job));
    if (!is_routed)
        return QSF_OK;
    QSF_TRY(load_norm(o, l->tensors[QSF_LAYER_POST_FFN_NORM], NULL, &weights));
    QSF_TRY(qsf_routed_add(o, l, in.f32));
    if (weights.weight != NULL)
        qsf_ops_add_normed(o, &weights);
    else
        qsf_ops_add_residual(o, 0, o->config->dim);
    return QSF_OK;
}

/* Beginning a resident unit is too cheap to time. */
static qsf_status begin_unit(qsf_ops *o, uint32_t unit_idx)
{
    QSF_TRY(qsf_stream_begin_unit(o->stream, unit_idx));
    if (!qsf_stream_is_resident(o->stream, unit_idx))
        qsf_stopwatch_lap(o->stopwatch, QSF_PHASE_OTHER);
    return QSF_OK;
}

/* Ends the unit, and `phase` with it. */
static qsf_status end_unit(qsf_ops *o, qsf_phase phase)
{
    QSF_TRY(qsf_stream_end_unit(o->stream));
    qsf_stopwatch_lap_at(o->stopwatch, phase, o->stream->end_ns);
    return QSF_OK;
}

/* What comes before attention: the norm of the residual itself, and a copy for the FFN. */
static qsf_status begin_layer(qsf_ops *o, const qsf_layer *l)
{
    const qsf_scratch *const s = o->scratch;
    qsf_norm_weights weights;
    if (l->tensors[QSF_LAYER_INPUT_NORM] != NULL) {
        QSF_TRY(load_norm(o, l->tensors[QSF_LAYER_INPUT_NORM],
                          l->tensors[QSF_LAYER_INPUT_NORM_BIAS], &weights));
        qsf_ops_norm(o, s->x, &weights, s->x);
    }
    if (qsf_layer_keeps_input(l))
        memcpy(s->input, s->x, o->n_tokens * s->dim_stride * sizeof *s->x);
    return QSF_OK;
}

static qsf_status run_layer(qsf_forward *f, const qsf_chunk *chunk, uint32_t layer_idx)
{
    qsf_ops *const o = &f->ops;
    const qsf_layer *const l = &o->config->layers[layer_idx];
    epilogue_job job = {o, chunk, layer_idx, NULL, NULL, NULL};
    o->kind = l->kind;
    QSF_TRY(begin_unit(o, l->unit_idx));
    QSF_TRY(begin_layer(o, l));
    QSF_TRY(run_attention(o, l, &job));
    if (l->kind->ffn != QSF_FFN_NONE || l->kind->n_experts != 0)
        QSF_TRY(run_ffn(o, l, &job));
    return end_unit(o, QSF_PHASE_DOWN);
}

/* The argument of head_epilogue */
typedef struct head_job {
    const qsf_ops *ops;
    float *logits; /* [n_tokens, n_vocab] */
} head_job;

static void head_epilogue(const void *arg, size_t begin, size_t end)
{
    const head_job *const job = arg;
    const qsf_config *const c = job->ops->config;
    for (size_t t = 0; t < job->ops->n_tokens; t++)
        job->ops->kernels->cap(job->logits + t * c->n_vocab + begin, 1.0F / c->logit_cap,
                               c->logit_cap, end - begin);
}

/* Moves the rows that get logits to the front of x. */
static void gather_rows(qsf_ops *o, const qsf_chunk *chunk)
{
    const qsf_scratch *const s = o->scratch;
    for (uint32_t i = 0; i < chunk->n_logits_rows; i++)
        if (chunk->logits_rows[i] != i)
            memcpy(s->x + i * s->dim_stride, s->x + chunk->logits_rows[i] * s->dim_stride,
                   s->dim_stride * sizeof *s->x);
    o->n_tokens = chunk->n_logits_rows;
}

/* logits = head(norm(x)) for the rows that get logits */
static qsf_status run_head(qsf_forward *f, const qsf_chunk *chunk)
{
    qsf_ops *const o = &f->ops;
    const qsf_scratch *const s = o->scratch;
    const qsf_config *const c = o->config;
    gather_rows(o, chunk);
    const head_job job = {o, chunk->logits};
    qsf_linear head = {f->ends->head, NULL, chunk->logits, c->n_vocab, 1, NULL, &job, {0}};
    if (c->logit_cap != 0.0F)
        head.epilogue = head_epilogue;
    QSF_TRY(begin_unit(o, f->ends->final_norm->unit_idx));
    qsf_acts in;
    QSF_TRY(norm(o, s->x, f->ends->final_norm, f->ends->final_norm_bias, &in));
    if (c->has_tied_head) {
        QSF_TRY(end_unit(o, QSF_PHASE_NORM));
        QSF_TRY(begin_unit(o, f->ends->embedding->unit_idx));
    } else {
        qsf_ops_lap(o, QSF_PHASE_NORM);
        QSF_TRY(qsf_ops_load_vector(o, f->ends->head_bias, s->head_bias, &head.bias));
    }
    QSF_TRY(qsf_linear_run(o, &head, 1, &in));
    return end_unit(o, QSF_PHASE_HEAD);
}

static void begin_pass(qsf_forward *f, const qsf_chunk *chunk)
{
    qsf_stream_begin_pass(f->ops.stream, chunk->n_logits_rows > 0, chunk->cancel, chunk->stopwatch);
}

static qsf_status run_units(qsf_forward *f, const qsf_chunk *chunk)
{
    const qsf_scratch *const s = f->ops.scratch;
    f->ops.n_tokens = chunk->n_tokens;
    number_rows(chunk, s->positions);
    QSF_TRY(embed(f, chunk));
    qsf_ropes_fill(f->ops.ropes, f->ops.config->n_ropes, s->positions, chunk->n_tokens,
                   s->chunk_tokens, s->rope_cos, s->rope_sin);
    qsf_stopwatch_lap(chunk->stopwatch, QSF_PHASE_EMBEDDING);
    for (uint32_t i = 0; i < f->ops.config->n_layers; i++) {
        if (qsf_cancel_is_set(chunk->cancel))
            return QSF_FAIL(QSF_ERR_CANCELLED, "cancelled before running layer %u", i);
        if (chunk->before_layer != NULL && chunk->before_layer(chunk->before_layer_arg))
            begin_pass(f, chunk); /* the ring may have been replaced */
        QSF_TRY(run_layer(f, chunk, i));
    }
    return chunk->n_logits_rows > 0 ? run_head(f, chunk) : QSF_OK;
}

qsf_status qsf_forward_run(qsf_forward *f, const qsf_chunk *chunk)
{
    f->ops.stopwatch = chunk->stopwatch;
    if (chunk->stopwatch != NULL)
        chunk->stopwatch->unit_idx = f->ends->embedding->unit_idx;
    begin_pass(f, chunk);
    qsf_experts_begin_pass(f->ops.experts, chunk->n_tokens, chunk->cancel, chunk->stopwatch);
    const qsf_status status = run_units(f, chunk);
    if (status != QSF_OK)
        qsf_stream_abandon(f->ops.stream);
    qsf_experts_end_pass(f->ops.experts);
    qsf_stream_end_pass(f->ops.stream);
    f->ops.stopwatch = NULL;
    return status;
}
