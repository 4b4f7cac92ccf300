/* mix_conv.c - the mixer of a gated short convolution (LFM2): out(c * conv(b * x)).
 *
 * Its state is the last n_taps - 1 rows of b * x, the oldest first; so is a row of the log.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mixers.h"

#include "base/status.h"
#include "model/block.h"
#include "model/mixers/convolution.h"

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
        {t[QSF_LAYER_Q], NULL, s->q, stride, 1, NULL, NULL, {0}},
        {t[QSF_LAYER_K], NULL, s->k, stride, 1, NULL, NULL, {0}},
        {t[QSF_LAYER_V], NULL, s->v, stride, 1, NULL, NULL, {0}},
    };
    QSF_TRY(qsf_block_norm(o, s->x, t[QSF_LAYER_ATTN_NORM], t[QSF_LAYER_ATTN_NORM_BIAS], &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    for (uint32_t i = 0; i < 3; i++)
        QSF_TRY(qsf_block_load(o, t[QSF_LAYER_Q_BIAS + i], i, &parts[i].bias));
    QSF_TRY(qsf_block_load_outliers(o, l, QSF_LAYER_Q, 3, parts));
    QSF_TRY(qsf_linear_run(o, parts, sizeof parts / sizeof parts[0], &in));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    return QSF_OK;
}

qsf_status qsf_mix_conv(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk, uint32_t layer_idx)
{
    const qsf_scratch *const s = o->scratch;
    const uint32_t dim = o->config->dim;
    conv_job job = {{o, layer_idx, s->k, qsf_stride(dim), dim, NULL, NULL}, chunk};
    QSF_TRY(project(o, l, job.conv.stride));
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_CONV], s->conv, &job.conv.w));
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_CONV_BIAS], 3, &job.conv.bias));
    const size_t n_rows = chunk->n_tokens * (size_t)o->kind->n_taps;
    qsf_pool_run(o->pool, dim, qsf_ops_piece(n_rows), convolve, &job);
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    return qsf_block_end_mixer(o, l, s->q, dim);
}
