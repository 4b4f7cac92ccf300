/* mix_conv.c - the projections of a short convolution, the convolution, and the product behind it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mix_conv.h"

#include <string.h>

#include "base/status.h"
#include "model/block.h"
#include "model/linear.h"

/* ---- the state ---- */

static void replay(const qsf_state_layer *l, const float *from, const float *rows, size_t n_rows,
                   float *to)
{
    const size_t n_kept = l->state_floats / l->row_floats; /* rows of a state */
    const size_t row_bytes = l->row_floats * sizeof *to;
    for (size_t i = 0; i < n_kept; i++) {
        const size_t at = i + n_rows; /* in the state and then the log */
        const float *const row = at >= n_kept   ? rows + (at - n_kept) * l->row_floats
                                 : from != NULL ? from + at * l->row_floats
                                                : NULL;
        if (row != NULL)
            memmove(to + i * l->row_floats, row, row_bytes);
        else
            memset(to + i * l->row_floats, 0, row_bytes);
    }
}

void qsf_mix_conv_describe(const qsf_config *c, uint32_t layer, qsf_state_layer *out)
{
    out->row_floats = c->dim;
    out->state_floats = (size_t)(c->layers[layer].kind->n_taps - 1) * c->dim;
    out->replay = replay;
}

/* ---- the convolution ---- */

/* The argument of convolve */
typedef struct conv_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer_idx;
    size_t stride; /* of the rows of b, c and x */
    const float *w;
    const float *bias; /* or NULL */
    const float *zeros;
} conv_job;

/* Returns b * x [dim] at a position that rows of the segment see: of the chunk, or before it. */
static const float *row_at(const conv_job *job, const qsf_segment *g, int64_t position)
{
    if (position >= g->first_position)
        return job->ops->scratch->k +
               (g->first_row + (size_t)(position - g->first_position)) * job->stride;
    const float *const state = qsf_statecache_before(&g->sequence->states, job->layer_idx);
    const int64_t n_back = g->first_position - position; /* 1 .. n_taps - 1 */
    const size_t n_kept = job->ops->kind->n_taps - 1;
    return state == NULL ? job->zeros : state + (n_kept - (size_t)n_back) * job->ops->config->dim;
}

/* Keeps channels begin .. end - 1 of the states behind a segment's own tokens, and of its drafts.
 */
static void keep(const conv_job *job, const qsf_segment *g, size_t begin, size_t end)
{
    const qsf_statecache *const states = &g->sequence->states;
    const size_t n_kept = job->ops->kind->n_taps - 1;
    const size_t n_bytes = (end - begin) * sizeof(float);
    for (uint32_t i = 0; i <= states->n_stops; i++) {
        uint32_t position;
        float *const to = qsf_statecache_after(states, job->layer_idx, i, &position);
        for (size_t r = 0; r < n_kept; r++)
            memcpy(to + r * job->ops->config->dim + begin,
                   row_at(job, g, (int64_t)position - (int64_t)(n_kept - r)) + begin, n_bytes);
    }
    for (uint32_t t = 0; t < g->n_tokens; t++) {
        const uint32_t position = g->first_position + t;
        if (position >= states->next_position)
            memcpy(qsf_statecache_row(states, job->layer_idx, position) + begin,
                   row_at(job, g, position) + begin, n_bytes);
    }
}

/* Convolves channels: for all rows, because a row needs those before it. */
static void convolve(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    (void)worker_idx;
    const conv_job *const job = arg;
    const qsf_scratch *const s = job->ops->scratch;
    const size_t n_taps = job->ops->kind->n_taps;
    const float *rows[QSF_MAX_TAPS];
    for (uint32_t i = 0; i < job->chunk->n_segments; i++) {
        const qsf_segment *const g = &job->chunk->segments[i];
        for (uint32_t t = 0; t < g->n_tokens; t++) {
            const size_t at = (g->first_row + t) * job->stride + begin;
            for (size_t tap = 0; tap < n_taps; tap++)
                rows[tap] =
                    row_at(job, g, (int64_t)g->first_position + t - (int64_t)(n_taps - 1 - tap)) +
                    begin;
            job->ops->kernels->short_conv(rows, job->w + begin, job->ops->config->dim, n_taps,
                                          job->bias != NULL ? job->bias + begin : NULL, s->v + at,
                                          s->k + at, s->q + at, end - begin);
        }
    }
    for (uint32_t i = 0; i < job->chunk->n_segments; i++)
        keep(job, &job->chunk->segments[i], begin, end);
}

/* q, k, v = c, b, x of norm(x) */
static qsf_status project(qsf_ops *o, const qsf_layer *l, size_t stride)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_tensor *const *const t = l->tensors;
    size_t n_used = 0;
    qsf_acts in;
    qsf_linear parts[] = {
        {t[QSF_LAYER_Q], NULL, s->q, stride, 1, NULL, NULL, {0}},
        {t[QSF_LAYER_K], NULL, s->k, stride, 1, NULL, NULL, {0}},
        {t[QSF_LAYER_V], NULL, s->v, stride, 1, NULL, NULL, {0}},
    };
    QSF_TRY(qsf_block_norm(o, s->x, t[QSF_LAYER_ATTN_NORM], t[QSF_LAYER_ATTN_NORM_BIAS], &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    for (uint32_t i = 0; i < 3; i++)
        QSF_TRY(qsf_block_load(o, t[QSF_LAYER_Q_BIAS + i], i, &parts[i].bias));
    for (uint32_t i = 0; i < 3; i++)
        QSF_TRY(qsf_ops_load_sides(o, &l->sides[QSF_LAYER_Q + i], &n_used, &parts[i].sides));
    QSF_TRY(qsf_linear_run(o, parts, sizeof parts / sizeof parts[0], &in));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    return QSF_OK;
}

qsf_status qsf_mix_conv(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk, uint32_t layer_idx)
{
    const qsf_scratch *const s = o->scratch;
    const uint32_t dim = o->config->dim;
    const qsf_block_end end = {l->tensors[QSF_LAYER_ATTN_OUT], l->tensors[QSF_LAYER_ATTN_OUT_BIAS],
                               &l->sides[QSF_LAYER_ATTN_OUT], l->tensors[QSF_LAYER_POST_ATTN_NORM],
                               false};
    conv_job job = {
        o, chunk, layer_idx, qsf_stride(dim), NULL, NULL, s->conv + o->config->conv_cols};
    qsf_acts mixed;
    QSF_TRY(project(o, l, job.stride));
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_CONV], s->conv, &job.w));
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_CONV_BIAS], 3, &job.bias));
    const size_t n_rows = chunk->n_tokens * (size_t)o->kind->n_taps;
    qsf_pool_run(o->pool, dim, qsf_ops_piece(n_rows), convolve, &job);
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    QSF_TRY(qsf_block_sub_norm(o, s->q, dim, NULL, &mixed));
    QSF_TRY(qsf_block_add_product(o, &end, &mixed));
    qsf_ops_lap(o, QSF_PHASE_ATTN_OUT);
    return QSF_OK;
}
