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

/* The position of each row in its sequence. */
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
    const qsf_tensor *const table = f->ends->embedding;
    for (uint32_t t = 0; t < chunk->n_tokens; t++) {
        const uint32_t token = chunk->tokens[t];
        float *const x = s->x + t * s->dim_stride;
        const unsigned char *band;
        QSF_TRY(qsf_stream_embedding_band(f->ops.stream, token / QSF_TILE_ROWS, &band));
        f->ops.kernels->dequant_row[table->dtype](band, s->dim_stride / QSF_BLOCK,
                                                  token % QSF_TILE_ROWS, x);
        if (f->positions == NULL)
            continue;
        const size_t position = s->positions[t];
        const unsigned char *const row = f->positions + position * c->dim * 2;
        for (size_t i = 0; i < c->dim; i++)
            x[i] += qsf_half_to_float(qsf_load_u16(row + 2 * i));
    }
    return QSF_OK;
}

/* cos and sin of position * frequency for the chunk's positions: once a chunk for all
 * layers and heads, since a table for every position would cost memory that weights
 * can use. The product is rounded to f32 as the reference implementations round it. */
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

/* A linear layer with an optional bias, which lies before its matrix in the unit. */
static qsf_status linear(qsf_ops *o, const qsf_tensor *w, const qsf_acts *x, bool has_bias,
                         const float *bias, float *y, size_t y_stride)
{
    return qsf_ops_linear(o, w, x, has_bias ? bias : NULL, y, y_stride);
}

/* normed = norm(x) with the weights of the begun unit. */
static qsf_status norm(qsf_ops *o, const qsf_tensor *weight, const qsf_tensor *bias)
{
    const qsf_scratch *const s = o->scratch;
    bool has_weight;
    bool has_bias;
    QSF_TRY(qsf_ops_load_vector(o, weight, s->vectors[0], &has_weight));
    QSF_TRY(qsf_ops_load_vector(o, bias, s->vectors[1], &has_bias));
    qsf_ops_norm(o, s->x, s->vectors[0], has_bias ? s->vectors[1] : NULL, s->dim_stride, s->normed);
    return QSF_OK;
}

/* x += attention(norm(x)) */
static qsf_status attention_block(qsf_ops *o, const qsf_layer *layer, uint32_t layer_idx,
                                  const qsf_chunk *chunk)
{
    const qsf_scratch *const s = o->scratch;
    bool has_q_bias;
    bool has_k_bias;
    bool has_v_bias;
    bool has_out_bias;
    QSF_TRY(norm(o, layer->attn_norm, layer->attn_norm_bias));
    QSF_TRY(qsf_ops_load_vector(o, layer->q_bias, s->vectors[0], &has_q_bias));
    QSF_TRY(qsf_ops_load_vector(o, layer->k_bias, s->vectors[1], &has_k_bias));
    QSF_TRY(qsf_ops_load_vector(o, layer->v_bias, s->vectors[2], &has_v_bias));

    const qsf_acts in = qsf_ops_prepare(o, s->normed, s->dim_stride);
    QSF_TRY(linear(o, layer->q, &in, has_q_bias, s->vectors[0], s->q, s->q_stride));
    QSF_TRY(linear(o, layer->k, &in, has_k_bias, s->vectors[1], s->k, s->kv_stride));
    QSF_TRY(linear(o, layer->v, &in, has_v_bias, s->vectors[2], s->v, s->kv_stride));

    for (uint32_t h = 0; h < o->config->n_heads; h++)
        qsf_attention_finish_q(o, h);
    for (uint32_t h = 0; h < o->config->n_kv_heads; h++) {
        qsf_attention_finish_k(o, chunk, layer_idx, h);
        qsf_attention_finish_v(o, chunk, layer_idx, h);
    }
    qsf_attention_run(o, chunk, layer_idx);

    QSF_TRY(qsf_ops_load_vector(o, layer->attn_out_bias, s->vectors[0], &has_out_bias));
    const qsf_acts out = qsf_ops_prepare(o, s->attended, s->q_stride);
    QSF_TRY(linear(o, layer->attn_out, &out, has_out_bias, s->vectors[0], s->y, s->dim_stride));
    qsf_ops_add(o, s->x, s->y, s->dim_stride);
    return QSF_OK;
}

/* x += ffn(norm(x)) */
static qsf_status ffn_block(qsf_ops *o, const qsf_layer *layer)
{
    const qsf_scratch *const s = o->scratch;
    bool has_gate_bias;
    bool has_up_bias;
    bool has_down_bias;
    QSF_TRY(norm(o, layer->ffn_norm, layer->ffn_norm_bias));
    QSF_TRY(qsf_ops_load_vector(o, layer->gate_bias, s->vectors[1], &has_gate_bias));
    QSF_TRY(qsf_ops_load_vector(o, layer->up_bias, s->vectors[0], &has_up_bias));

    const qsf_acts in = qsf_ops_prepare(o, s->normed, s->dim_stride);
    if (layer->gate != NULL)
        QSF_TRY(linear(o, layer->gate, &in, has_gate_bias, s->vectors[1], s->gate, s->ffn_stride));
    float *const up = layer->gate != NULL ? s->up : s->gate;
    QSF_TRY(linear(o, layer->up, &in, has_up_bias, s->vectors[0], up, s->ffn_stride));
    qsf_ops_activate(o);

    QSF_TRY(qsf_ops_load_vector(o, layer->down_bias, s->vectors[0], &has_down_bias));
    const qsf_acts out = qsf_ops_prepare(o, s->gate, s->ffn_stride);
    QSF_TRY(linear(o, layer->down, &out, has_down_bias, s->vectors[0], s->y, s->dim_stride));
    qsf_ops_add(o, s->x, s->y, s->dim_stride);
    return QSF_OK;
}

static qsf_status run_layer(qsf_forward *f, const qsf_chunk *chunk, uint32_t layer_idx)
{
    qsf_ops *const o = &f->ops;
    QSF_TRY(qsf_stream_begin_unit(o->stream, layer_idx + 1));
    QSF_TRY(attention_block(o, &f->layers[layer_idx], layer_idx, chunk));
    QSF_TRY(ffn_block(o, &f->layers[layer_idx]));
    return qsf_stream_end_unit(o->stream);
}

/* logits = head(norm(x)) for the rows that want them, which move to the front of x. */
static qsf_status run_head(qsf_forward *f, const qsf_chunk *chunk)
{
    qsf_ops *const o = &f->ops;
    const qsf_scratch *const s = o->scratch;
    const qsf_config *const c = o->config;
    o->n_tokens = chunk->n_tokens - chunk->first_logits;
    memmove(s->x, s->x + chunk->first_logits * s->dim_stride,
            o->n_tokens * s->dim_stride * sizeof *s->x);

    QSF_TRY(qsf_stream_begin_unit(o->stream, c->n_layers + 1));
    QSF_TRY(norm(o, f->ends->final_norm, f->ends->final_norm_bias));
    if (c->has_tied_head) {
        QSF_TRY(qsf_stream_end_unit(o->stream));
        QSF_TRY(qsf_stream_begin_unit(o->stream, 0));
    }
    const qsf_acts in = qsf_ops_prepare(o, s->normed, s->dim_stride);
    QSF_TRY(qsf_ops_linear(o, f->ends->head, &in, NULL, chunk->logits, c->n_vocab));
    return qsf_stream_end_unit(o->stream);
}

static qsf_status run_units(qsf_forward *f, const qsf_chunk *chunk)
{
    f->ops.n_tokens = chunk->n_tokens;
    number_rows(chunk, f->ops.scratch->positions);
    QSF_TRY(embed(f, chunk));
    fill_rope(f, chunk);
    for (uint32_t i = 0; i < f->ops.config->n_layers; i++) {
        if (atomic_load_explicit(chunk->cancelled, memory_order_relaxed))
            return QSF_FAIL(QSF_ERR_CANCELLED, "cancelled before layer %u", i);
        QSF_TRY(run_layer(f, chunk, i));
    }
    return chunk->first_logits < chunk->n_tokens ? run_head(f, chunk) : QSF_OK;
}

qsf_status qsf_forward_run(qsf_forward *f, const qsf_chunk *chunk)
{
    const qsf_status status = run_units(f, chunk);
    if (status != QSF_OK)
        qsf_stream_abandon(f->ops.stream);
    return status;
}
