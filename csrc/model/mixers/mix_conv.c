/* mix_conv.c - the mixer of a gated short convolution (LFM2): out(c * conv(b * x)).
 *
 * Its state is the last n_taps - 1 rows of b * x, the oldest first; so is a row of the log.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mixers.h"

#include <string.h>

#include "base/status.h"
#include "model/linear.h"

/* ---- the convolution ---- */

void qsf_convolution_replay(const qsf_state_layer *l, size_t n_kept, size_t n_channels,
                            const float *from, const float *rows, size_t n_rows, float *to)
{
    for (size_t i = 0; i < n_kept; i++) {
        const size_t at = i + n_rows; /* in the state and then the log */
        const float *const row = at >= n_kept   ? rows + (at - n_kept) * l->row_floats
                                 : from != NULL ? from + at * n_channels
                                                : NULL;
        if (row != NULL)
            memmove(to + i * n_channels, row, n_channels * sizeof *to);
        else
            memset(to + i * n_channels, 0, n_channels * sizeof *to);
    }
}

const float *qsf_convolution_at(const qsf_convolution *c, const qsf_segment *g, int64_t position)
{
    if (position >= g->first_position)
        return c->rows + (g->first_row + (size_t)(position - g->first_position)) * c->stride;
    const float *const state = qsf_statecache_before(&g->sequence->states, c->layer_idx);
    const int64_t n_back = g->first_position - position; /* 1 .. n_taps - 1 */
    const size_t n_kept = c->ops->kind->n_taps - 1;
    return state == NULL ? c->ops->scratch->conv + c->ops->config->conv_cols /* zeros */
                         : state + n_kept * c->first + (n_kept - (size_t)n_back) * c->n_channels;
}

void qsf_convolution_row(const qsf_convolution *c, const qsf_segment *g, uint32_t t, size_t begin,
                         size_t end, float *out)
{
    const size_t n_taps = c->ops->kind->n_taps;
    const float *rows[QSF_MAX_TAPS];
    for (size_t tap = 0; tap < n_taps; tap++)
        rows[tap] =
            qsf_convolution_at(c, g, (int64_t)g->first_position + t - (int64_t)(n_taps - 1 - tap)) +
            begin;
    c->ops->kernels->conv(rows, c->w + begin, c->n_channels, n_taps,
                          c->bias != NULL ? c->bias + begin : NULL, out, end - begin);
}

void qsf_convolution_keep(const qsf_convolution *c, const qsf_segment *g, size_t begin, size_t end)
{
    const qsf_statecache *const states = &g->sequence->states;
    const size_t n_kept = c->ops->kind->n_taps - 1;
    const size_t n_bytes = (end - begin) * sizeof(float);
    for (uint32_t i = 0; i <= states->n_stops; i++) {
        uint32_t position;
        float *const to = qsf_statecache_after(states, c->layer_idx, i, &position);
        for (size_t r = 0; r < n_kept; r++)
            memcpy(to + n_kept * c->first + r * c->n_channels + begin,
                   qsf_convolution_at(c, g, (int64_t)position - (int64_t)(n_kept - r)) + begin,
                   n_bytes);
    }
    for (uint32_t t = 0; t < g->n_tokens; t++) {
        const uint32_t position = g->first_position + t;
        if (position >= states->next_position)
            memcpy(qsf_statecache_row(states, c->layer_idx, position) + c->first + begin,
                   qsf_convolution_at(c, g, position) + begin, n_bytes);
    }
}

static void replay(const qsf_state_layer *l, const qsf_state_tools *tools, const float *from,
                   const float *rows, size_t n_rows, float *to)
{
    (void)tools;
    qsf_convolution_replay(l, l->state_floats / l->row_floats, l->row_floats, from, rows, n_rows,
                           to);
}

void qsf_mix_conv_describe(const qsf_config *c, uint32_t layer, qsf_state_layer *out)
{
    out->row_floats = c->dim;
    out->state_floats = qsf_convolution_floats(c->layers[layer].kind, c->dim);
    out->replay = replay;
}

/* The argument of convolve */
typedef struct conv_job {
    qsf_convolution conv; /* of b * x */
    const qsf_chunk *chunk;
} conv_job;

/* c * conv(b * x) by channels, for all rows, because a row needs earlier ones. */
static void convolve(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    (void)worker_idx;
    const conv_job *const job = arg;
    const qsf_kernels *const k = job->conv.ops->kernels;
    const qsf_scratch *const s = job->conv.ops->scratch;
    for (uint32_t i = 0; i < job->chunk->n_segments; i++) {
        const qsf_segment *const g = &job->chunk->segments[i];
        for (uint32_t t = 0; t < g->n_tokens; t++) {
            const size_t at = (g->first_row + t) * job->conv.stride + begin;
            k->mul(s->k + at, s->v + at, end - begin);
            qsf_convolution_row(&job->conv, g, t, begin, end, s->v + at);
            k->mul(s->q + at, s->v + at, end - begin);
        }
        qsf_convolution_keep(&job->conv, g, begin, end);
    }
}

/* q, k, v = c, b, x of norm(x) */
static qsf_status project(qsf_ops *o, const qsf_layer *l, size_t stride)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_tensor *const *const t = l->tensors;
    qsf_acts in;
    qsf_linear parts[] = {
        qsf_linear_of(t[QSF_LAYER_Q], s->q, stride),
        qsf_linear_of(t[QSF_LAYER_K], s->k, stride),
        qsf_linear_of(t[QSF_LAYER_V], s->v, stride),
    };
    QSF_TRY(qsf_block_norm(o, s->x, t[QSF_LAYER_ATTN_NORM], t[QSF_LAYER_ATTN_NORM_BIAS], &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    for (uint32_t i = 0; i < 3; i++)
        QSF_TRY(qsf_block_load(o, t[QSF_LAYER_Q_BIAS + i], i, &parts[i].bias));
    QSF_TRY(qsf_block_load_side(o, l, QSF_LAYER_Q, 3, parts));
    QSF_TRY(qsf_linear_run(o, parts, sizeof parts / sizeof parts[0], &in));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    return QSF_OK;
}

qsf_status qsf_mix_conv(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk, uint32_t layer_idx)
{
    const qsf_scratch *const s = o->scratch;
    const uint32_t dim = o->config->dim;
    conv_job job = {{.ops = o,
                     .layer_idx = layer_idx,
                     .rows = s->k,
                     .stride = qsf_stride(dim),
                     .n_channels = dim},
                    chunk};
    QSF_TRY(project(o, l, job.conv.stride));
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_CONV], s->conv, &job.conv.w));
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_CONV_BIAS], 3, &job.conv.bias));
    const size_t n_rows = chunk->n_tokens * (size_t)o->kind->n_taps;
    qsf_pool_run(o->pool, dim, qsf_ops_piece(n_rows), convolve, &job);
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    return qsf_block_end_mixer(o, l, s->q, dim);
}
