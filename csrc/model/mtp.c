/* mtp.c - joins embeddings and hidden states, and stores what later guesses need. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/forward.h"

#include <string.h>

#include "base/status.h"
#include "model/linear.h"
#include "model/mixers/mixers.h"

static const qsf_layer *layer_of(const qsf_mtp *m)
{
    return &m->ops->config->layers[m->ops->config->n_trunk_layers];
}

const float *qsf_mtp_hidden(const qsf_sequence *q, uint32_t position, size_t dim_stride)
{
    if (position >= q->hidden_end || q->hidden_end - position > q->n_hidden)
        return NULL;
    return q->hidden + position % q->most_hidden * dim_stride;
}

/* The norms of the input */
typedef struct input_norms {
    qsf_norm_weights trunk;
    qsf_norm_weights token;
    qsf_norm_weights hidden;
} input_norms;

static qsf_status load_norms(const qsf_mtp *m, input_norms *out)
{
    const qsf_tensor *const *const t = layer_of(m)->tensors;
    *out = (input_norms){0};
    QSF_TRY(qsf_block_load(m->ops, t[QSF_LAYER_MTP_TRUNK_NORM], 0, &out->trunk.weight));
    QSF_TRY(qsf_block_load(m->ops, t[QSF_LAYER_MTP_TOKEN_NORM], 1, &out->token.weight));
    return qsf_block_load(m->ops, t[QSF_LAYER_MTP_HIDDEN_NORM], 2, &out->hidden.weight);
}

/* gate[row] = [norm(embedding of the token) | norm(hidden)], zeros if hidden is NULL */
static qsf_status fill_row(const qsf_mtp *m, const input_norms *norms, size_t row, uint32_t token,
                           const float *hidden)
{
    qsf_ops *const o = m->ops;
    const size_t dim = o->config->dim;
    float *const to = o->scratch->gate + row * qsf_stride(2 * o->config->dim);
    QSF_TRY(qsf_embedding_row(m->embedding, o->stream, o->kernels, m->table, token, to));
    if (o->config->embedding_factor != 1.0F)
        o->kernels->scale(to, o->config->embedding_factor, dim);
    qsf_ops_norm_row(o, to, &norms->token, dim, to);
    if (hidden != NULL)
        qsf_ops_norm_row(o, hidden, &norms->hidden, dim, to + dim);
    else
        memset(to + dim, 0, dim * sizeof *to);
    return QSF_OK;
}

/* out [n_tokens, dim_stride] = join @ gate */
static qsf_status join(const qsf_mtp *m, float *out)
{
    qsf_ops *const o = m->ops;
    const qsf_norm_weights none = {0};
    const qsf_linear product =
        qsf_linear_of(layer_of(m)->tensors[QSF_LAYER_MTP_JOIN], out, o->scratch->dim_stride);
    const qsf_acts in =
        qsf_ops_prepare(o, o->scratch->gate, 2 * o->config->dim, &none, o->scratch->gate);
    return qsf_linear_run(o, &product, 1, &in);
}

/* Keeps the final hidden states of the last tokens of a segment, rows [n_tokens, dim_stride]. */
static void keep_hidden(const qsf_segment *g, const float *rows, size_t stride)
{
    qsf_sequence *const q = g->sequence;
    const uint32_t end = g->first_position + g->n_tokens;
    q->n_hidden = g->n_tokens < q->most_hidden ? g->n_tokens : q->most_hidden;
    q->hidden_end = end;
    for (uint32_t i = 1; i <= q->n_hidden; i++)
        memcpy(q->hidden + (end - i) % q->most_hidden * stride, rows + (g->n_tokens - i) * stride,
               stride * sizeof *rows);
}

/* Makes the inputs of a segment's rows; hidden states of the trunk are in `normed`. */
static qsf_status fill_segment(const qsf_mtp *m, const qsf_chunk *chunk, const qsf_segment *g,
                               const input_norms *norms)
{
    const size_t stride = m->ops->scratch->dim_stride;
    const float *const rows = m->ops->scratch->normed + g->first_row * stride;
    const uint32_t *const tokens = chunk->tokens + g->first_row;
    qsf_sequence *const q = g->sequence;
    const float *hidden =
        g->first_position == 0 ? NULL : qsf_mtp_hidden(q, g->first_position - 1, stride);
    if (g->first_position == 0 || g->first_position < q->mtp_begin)
        q->mtp_begin = g->first_position + 1;
    for (uint32_t t = 0; t < g->n_tokens; t++, hidden = rows + (t - 1) * stride)
        QSF_TRY(fill_row(m, norms, g->first_row + t, tokens[t], hidden));
    keep_hidden(g, rows, stride);
    return QSF_OK;
}

qsf_status qsf_mtp_store(const qsf_mtp *m, const qsf_chunk *chunk)
{
    qsf_ops *const o = m->ops;
    qsf_scratch *const scratch = o->scratch;
    qsf_scratch apart = *scratch; /* the residual of the trunk stays */
    input_norms norms;
    QSF_TRY(load_norms(m, &norms));
    qsf_ops_norm(o, scratch->x, &norms.trunk, scratch->normed);
    for (uint32_t i = 0; i < chunk->n_segments; i++)
        QSF_TRY(fill_segment(m, chunk, &chunk->segments[i], &norms));
    QSF_TRY(join(m, scratch->y));
    apart.x = scratch->y;
    o->scratch = &apart;
    o->stores_only = true;
    const qsf_status status =
        qsf_mixers[o->kind->mixer].run(o, layer_of(m), chunk, o->config->n_trunk_layers);
    o->stores_only = false;
    o->scratch = scratch;
    return status;
}

qsf_status qsf_mtp_begin(const qsf_mtp *m, uint32_t token, const float *hidden)
{
    input_norms norms;
    QSF_TRY(load_norms(m, &norms));
    QSF_TRY(fill_row(m, &norms, 0, token, hidden));
    return join(m, m->ops->scratch->x);
}
