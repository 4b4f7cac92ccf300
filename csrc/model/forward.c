/* forward.c - the transformer. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/forward.h"

#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/half.h"
#include "base/status.h"
#include "model/attention.h"
#include "model/linear.h"

/* Writes the position of each row in its sequence. */
static void number_rows(const qsf_chunk *chunk, uint32_t *positions)
{
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const qsf_segment *const g = &chunk->segments[i];
        for (uint32_t t = 0; t < g->n_tokens; t++)
            positions[g->first_row + t] = g->first_position + t;
    }
}

/* x[t] = embedding[token] (+ position[t]); x [n_tokens, dim_stride] */
static qsf_status embed(qsf_forward *f, const qsf_chunk *chunk)
{
    const qsf_config *const c = f->ops.config;
    const qsf_scratch *const s = f->ops.scratch;
    for (uint32_t t = 0; t < chunk->n_tokens; t++) {
        float *const x = s->x + t * s->dim_stride;
        QSF_TRY(qsf_embedding_row(&f->embedding, f->ops.stream, f->ops.kernels, f->ends->embedding,
                                  chunk->tokens[t], x));
        if (f->positions == NULL)
            continue;
        const size_t position = s->positions[t];
        const unsigned char *const row = f->positions + position * c->dim * 2;
        for (size_t i = 0; i < c->dim; i++)
            x[i] += qsf_half_to_float(qsf_load_u16(row + 2 * i));
    }
    return QSF_OK;
}

/* Computes cos and sin of position * frequency for the chunk's positions, once for all layers and
 * heads. A table of all positions would cost memory that weights can use. The product is rounded to
 * f32, as in the reference implementations. */
static void fill_rope(qsf_forward *f, const qsf_chunk *chunk)
{
    const qsf_scratch *const s = f->ops.scratch;
    const size_t n_pairs = f->ops.config->rope_dims / 2;
    for (uint32_t t = 0; t < chunk->n_tokens; t++) {
        for (size_t i = 0; i < n_pairs; i++) {
            const float angle = (float)s->positions[t] * f->rope_frequencies[i];
            s->rope_cos[t * n_pairs + i] = (float)cos((double)angle);
            s->rope_sin[t * n_pairs + i] = (float)sin((double)angle);
        }
    }
}

/* Loads an optional vector into vectors[i]; *out becomes NULL if t is. */
static qsf_status load(qsf_ops *o, const qsf_tensor *t, size_t i, const float **out)
{
    return qsf_ops_load_vector(o, t, o->scratch->vectors[i], out);
}

/* *out = norm(x) with weights of the current unit, as matmul input */
static qsf_status norm(qsf_ops *o, const qsf_tensor *weight, const qsf_tensor *bias, qsf_acts *out)
{
    const float *weight_row;
    const float *bias_row;
    QSF_TRY(load(o, weight, 0, &weight_row));
    QSF_TRY(load(o, bias, 1, &bias_row));
    *out = qsf_ops_prepare_normed(o, weight_row, bias_row);
    return QSF_OK;
}

/* The argument of the epilogues. */
typedef struct epilogue_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer_idx;
} epilogue_job;

static void q_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    const size_t head_dim = job->ops->config->head_dim;
    for (size_t h = begin / head_dim; h < end / head_dim; h++)
        qsf_attention_rotate_q(job->ops, (uint32_t)h);
}

static void k_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    const size_t head_dim = job->ops->config->head_dim;
    for (size_t h = begin / head_dim; h < end / head_dim; h++)
        qsf_attention_store_k(job->ops, job->chunk, job->layer_idx, (uint32_t)h);
}

static void v_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    const size_t head_dim = job->ops->config->head_dim;
    for (size_t h = begin / head_dim; h < end / head_dim; h++)
        qsf_attention_store_v(job->ops, job->chunk, job->layer_idx, (uint32_t)h);
}

static void residual_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    qsf_ops_add_residual(job->ops, begin, end);
}

static void up_epilogue(const void *arg, size_t begin, size_t end)
{
    const epilogue_job *const job = arg;
    qsf_ops_activate(job->ops, begin, end);
}

/* Computes q, k and v of norm(x), rotated; k and v go to the cache. */
static qsf_status project_heads(qsf_ops *o, const qsf_layer *layer, const epilogue_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const size_t head_dim = o->config->head_dim;
    size_t n_used = 0;
    qsf_acts in;
    qsf_linear qkv[] = {
        {layer->q, NULL, s->q, s->q_stride, head_dim, q_epilogue, job, {0}},
        {layer->k, NULL, s->k, s->kv_stride, head_dim, k_epilogue, job, {0}},
        {layer->v, NULL, s->v, s->kv_stride, head_dim, v_epilogue, job, {0}},
    };
    QSF_TRY(norm(o, layer->attn_norm, layer->attn_norm_bias, &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    QSF_TRY(load(o, layer->q_bias, 0, &qkv[0].bias));
    QSF_TRY(load(o, layer->k_bias, 1, &qkv[1].bias));
    QSF_TRY(load(o, layer->v_bias, 2, &qkv[2].bias));
    QSF_TRY(qsf_ops_load_outliers(o, layer->q_outliers, &n_used, &qkv[0].outliers));
    QSF_TRY(qsf_ops_load_outliers(o, layer->k_outliers, &n_used, &qkv[1].outliers));
    QSF_TRY(qsf_ops_load_outliers(o, layer->v_outliers, &n_used, &qkv[2].outliers));
    return qsf_linear_run(o, qkv, sizeof qkv / sizeof qkv[0], &in);
}

/* x += w @ in (+ bias) */
static qsf_status add_product(qsf_ops *o, const qsf_tensor *w, const qsf_tensor *bias,
                              const qsf_tensor *outliers, const qsf_acts *in,
                              const epilogue_job *job)
{
    const qsf_scratch *const s = o->scratch;
    size_t n_used = 0;
    qsf_linear out = {w, NULL, s->y, s->dim_stride, 1, residual_epilogue, job, {0}};
    QSF_TRY(load(o, bias, 0, &out.bias));
    QSF_TRY(qsf_ops_load_outliers(o, outliers, &n_used, &out.outliers));
    return qsf_linear_run(o, &out, 1, in);
}

/* x += attention(norm(x)) */
static qsf_status run_attention(qsf_ops *o, const qsf_layer *layer, const epilogue_job *job)
{
    const qsf_scratch *const s = o->scratch;
    QSF_TRY(project_heads(o, layer, job));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    qsf_attention_run(o, job->chunk, job->layer_idx);
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    const qsf_acts attended = qsf_ops_prepare(o, s->attended, s->q_stride);
    QSF_TRY(add_product(o, layer->attn_out, layer->attn_out_bias, layer->attn_out_outliers,
                        &attended, job));
    qsf_ops_lap(o, QSF_PHASE_ATTN_OUT);
    return QSF_OK;
}

/* x += ffn(norm(x)) */
static qsf_status run_ffn(qsf_ops *o, const qsf_layer *layer, const epilogue_job *job)
{
    const qsf_scratch *const s = o->scratch;
    size_t n_used = 0;
    qsf_acts in;
    qsf_linear gate = {layer->gate, NULL, s->gate, s->ffn_stride, 1, NULL, NULL, {0}};
    qsf_linear up = {layer->up, NULL, s->up, s->ffn_stride, 1, up_epilogue, job, {0}};
    QSF_TRY(norm(o, layer->ffn_norm, layer->ffn_norm_bias, &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    QSF_TRY(load(o, layer->gate_bias, 1, &gate.bias));
    QSF_TRY(load(o, layer->up_bias, 0, &up.bias));
    QSF_TRY(qsf_ops_load_outliers(o, layer->gate_outliers, &n_used, &gate.outliers));
    QSF_TRY(qsf_ops_load_outliers(o, layer->up_outliers, &n_used, &up.outliers));
    if (layer->gate != NULL) {
        QSF_TRY(qsf_linear_run_pair(o, &gate, &up, &in));
    } else {
        up.y = s->gate;
        QSF_TRY(qsf_linear_run(o, &up, 1, &in));
    }
    qsf_ops_lap(o, QSF_PHASE_GATE_UP);
    const qsf_acts activated = qsf_ops_prepare(o, s->gate, s->ffn_stride);
    return add_product(o, layer->down, layer->down_bias, layer->down_outliers, &activated, job);
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

static qsf_status run_layer(qsf_forward *f, const qsf_chunk *chunk, uint32_t layer_idx)
{
    qsf_ops *const o = &f->ops;
    const epilogue_job job = {o, chunk, layer_idx};
    QSF_TRY(begin_unit(o, layer_idx + 1));
    QSF_TRY(run_attention(o, &f->layers[layer_idx], &job));
    QSF_TRY(run_ffn(o, &f->layers[layer_idx], &job));
    return end_unit(o, QSF_PHASE_DOWN);
}

/* logits = head(norm(x)) for the rows that get logits, which move to the front of x */
static qsf_status run_head(qsf_forward *f, const qsf_chunk *chunk)
{
    qsf_ops *const o = &f->ops;
    const qsf_scratch *const s = o->scratch;
    const qsf_config *const c = o->config;
    o->n_tokens = chunk->n_tokens - chunk->first_logits;
    memmove(s->x, s->x + chunk->first_logits * s->dim_stride,
            o->n_tokens * s->dim_stride * sizeof *s->x);

    QSF_TRY(begin_unit(o, c->n_layers + 1));
    qsf_acts in;
    QSF_TRY(norm(o, f->ends->final_norm, f->ends->final_norm_bias, &in));
    if (c->has_tied_head) {
        QSF_TRY(end_unit(o, QSF_PHASE_NORM));
        QSF_TRY(begin_unit(o, 0));
    } else {
        qsf_ops_lap(o, QSF_PHASE_NORM);
    }
    const qsf_linear head = {f->ends->head, NULL, chunk->logits, c->n_vocab, 1, NULL, NULL, {0}};
    QSF_TRY(qsf_linear_run(o, &head, 1, &in));
    return end_unit(o, QSF_PHASE_HEAD);
}

static void begin_pass(qsf_forward *f, const qsf_chunk *chunk)
{
    qsf_stream_begin_pass(f->ops.stream, chunk->first_logits < chunk->n_tokens, chunk->cancelled,
                          chunk->stopwatch);
}

static qsf_status run_units(qsf_forward *f, const qsf_chunk *chunk)
{
    f->ops.n_tokens = chunk->n_tokens;
    number_rows(chunk, f->ops.scratch->positions);
    QSF_TRY(embed(f, chunk));
    fill_rope(f, chunk);
    qsf_stopwatch_lap(chunk->stopwatch, QSF_PHASE_EMBEDDING);
    for (uint32_t i = 0; i < f->ops.config->n_layers; i++) {
        if (atomic_load_explicit(chunk->cancelled, memory_order_relaxed))
            return QSF_FAIL(QSF_ERR_CANCELLED, "cancelled before running layer %u", i);
        if (chunk->before_layer != NULL && chunk->before_layer(chunk->before_layer_arg))
            begin_pass(f, chunk); /* the ring may have been replaced */
        QSF_TRY(run_layer(f, chunk, i));
    }
    return chunk->first_logits < chunk->n_tokens ? run_head(f, chunk) : QSF_OK;
}

qsf_status qsf_forward_run(qsf_forward *f, const qsf_chunk *chunk)
{
    f->ops.stopwatch = chunk->stopwatch;
    if (chunk->stopwatch != NULL)
        chunk->stopwatch->unit_idx = 0; /* the embedding */
    begin_pass(f, chunk);
    const qsf_status status = run_units(f, chunk);
    if (status != QSF_OK)
        qsf_stream_abandon(f->ops.stream);
    qsf_stream_end_pass(f->ops.stream);
    f->ops.stopwatch = NULL;
    return status;
}
