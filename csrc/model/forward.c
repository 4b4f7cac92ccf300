/* forward.c - the transformer. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/forward.h"

#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/half.h"
#include "base/status.h"
#include "model/block.h"
#include "model/ffn.h"
#include "model/linear.h"
#include "model/mixers/mixers.h"

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

/* The steps before attention: the norm of the residual, and a copy for a parallel FFN. */
static qsf_status begin_layer(qsf_ops *o, const qsf_layer *l)
{
    const qsf_scratch *const s = o->scratch;
    qsf_norm_weights weights;
    if (l->tensors[QSF_LAYER_INPUT_NORM] != NULL) {
        QSF_TRY(qsf_block_load_norm(o, l->tensors[QSF_LAYER_INPUT_NORM],
                                    l->tensors[QSF_LAYER_INPUT_NORM_BIAS], &weights));
        qsf_ops_norm(o, s->x, &weights, s->x);
    }
    if (qsf_layer_keeps_input(l))
        memcpy(s->input, s->x, o->n_tokens * s->dim_stride * sizeof *s->x);
    return QSF_OK;
}

/* The argument of scale_rows */
typedef struct scale_job {
    const qsf_ops *ops;
    float factor;
} scale_job;

static void scale_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const scale_job *const job = arg;
    const qsf_scratch *const s = job->ops->scratch;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++)
        job->ops->kernels->scale(s->x + t * s->dim_stride, job->factor, job->ops->config->dim);
}

/* x *= the layer's scale, if it has one */
static qsf_status end_layer(qsf_ops *o, const qsf_layer *l)
{
    const float *scale;
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_SCALE], 0, &scale));
    if (scale == NULL)
        return QSF_OK;
    scale_job job = {o, *scale};
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(o->config->dim), scale_rows, &job);
    return QSF_OK;
}

static qsf_status run_layer(qsf_forward *f, const qsf_chunk *chunk, uint32_t layer_idx)
{
    qsf_ops *const o = &f->ops;
    const qsf_layer *const l = &o->config->layers[layer_idx];
    o->kind = l->kind;
    QSF_TRY(begin_unit(o, l->unit_idx));
    QSF_TRY(begin_layer(o, l));
    QSF_TRY(qsf_mixers[l->kind->mixer].run(o, l, chunk, layer_idx));
    QSF_TRY(qsf_ffn_run(o, l, layer_idx));
    QSF_TRY(end_layer(o, l));
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

static uint32_t count_head_rows(const qsf_chunk *chunk)
{
    return chunk->n_logits_rows + chunk->n_hidden_rows;
}

/* Moves the rows that the head is for to the front of x. */
static void gather_rows(qsf_ops *o, const qsf_chunk *chunk)
{
    const qsf_scratch *const s = o->scratch;
    o->n_tokens = count_head_rows(chunk);
    for (uint32_t i = 0; i < o->n_tokens; i++)
        if (chunk->head_rows[i] != i)
            memcpy(s->x + i * s->dim_stride, s->x + chunk->head_rows[i] * s->dim_stride,
                   s->dim_stride * sizeof *s->x);
}

/* logits = head(norm(x)) for the rows that get logits; hidden = norm(x) for the others */
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
    QSF_TRY(qsf_block_norm(o, s->x, f->ends->final_norm, f->ends->final_norm_bias, &in));
    f->hidden = s->normed + chunk->n_logits_rows * s->dim_stride;
    in.n_tokens = chunk->n_logits_rows;
    o->n_tokens = chunk->n_logits_rows;
    QSF_TRY(qsf_ops_load_vector(o, f->ends->head_bias, s->head_bias, &head.bias));
    if (c->has_tied_head) {
        QSF_TRY(end_unit(o, QSF_PHASE_NORM));
        QSF_TRY(begin_unit(o, f->ends->embedding->unit_idx));
    } else {
        qsf_ops_lap(o, QSF_PHASE_NORM);
    }
    if (o->n_tokens > 0)
        QSF_TRY(qsf_linear_run(o, &head, 1, &in));
    return end_unit(o, QSF_PHASE_HEAD);
}

static void begin_pass(qsf_forward *f, const qsf_chunk *chunk)
{
    qsf_stream_begin_pass(f->ops.stream, count_head_rows(chunk) > 0, chunk->cancel,
                          chunk->stopwatch);
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
    return count_head_rows(chunk) > 0 ? run_head(f, chunk) : QSF_OK;
}

qsf_status qsf_forward_run(qsf_forward *f, const qsf_chunk *chunk)
{
    f->ops.stopwatch = chunk->stopwatch;
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
