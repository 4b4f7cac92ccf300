/* own.c - reads and adds the embeddings of each layer. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/own.h"

#include <math.h>
#include <string.h>

#include "base/status.h"
#include "model/block.h"
#include "model/embedding.h"

#define HALF_ROOT 0.70710678118654752F /* 1 / sqrt(2) */

qsf_status qsf_own_read(qsf_ops *o, const qsf_tensor *table, const uint32_t *tokens)
{
    const qsf_scratch *const s = o->scratch;
    memcpy(s->embedded, s->x, o->n_tokens * s->dim_stride * sizeof *s->x);
    for (uint32_t t = 0; t < o->n_tokens; t++)
        QSF_TRY(qsf_embedding_decode(o->stream, o->kernels, table, tokens[t],
                                     s->own + t * s->own_stride));
    return QSF_OK;
}

/* The argument of the loops */
typedef struct own_job {
    const qsf_ops *ops;
    const qsf_layer *layer;
    qsf_norm_weights norm; /* of the projected embedding */
} own_job;

/* up = p, from up = in @ embedding */
static void finish_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const own_job *const job = arg;
    const qsf_config *const c = job->ops->config;
    const qsf_scratch *const s = job->ops->scratch;
    const qsf_kernels *const k = job->ops->kernels;
    const float factor = 1.0F / sqrtf((float)c->dim);
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        float *const p = s->up + t * qsf_stride(c->own_width);
        k->scale(p, factor, c->own_width);
        qsf_ops_norm_row(job->ops, p, &job->norm, c->own_width, p);
        k->add_scaled(p, s->own + t * s->own_stride + job->layer->own_col,
                      sqrtf((float)c->own_width), c->own_width);
        k->scale(p, HALF_ROOT, c->own_width);
    }
}

static void gate_epilogue(const void *arg, size_t begin, size_t end)
{
    const qsf_ops *const o = arg;
    qsf_ops_activate_gated(o, qsf_stride(o->config->own_width), begin, end);
}

qsf_status qsf_own_run(qsf_ops *o, const qsf_layer *l)
{
    const qsf_scratch *const s = o->scratch;
    const uint32_t width = o->config->own_width;
    const qsf_norm_weights none = {0};
    const qsf_block_end end = {l->tensors[QSF_LAYER_OWN_OUT], NULL, NULL,
                               l->tensors[QSF_LAYER_OWN_NORM], false};
    const qsf_linear in = {
        l->tensors[QSF_LAYER_OWN_IN], NULL, s->up, qsf_stride(width), 1, NULL, NULL, {0}};
    const qsf_linear gate = {
        l->tensors[QSF_LAYER_OWN_GATE], NULL, s->gate, qsf_stride(width), 1, gate_epilogue, o, {0}};
    own_job job = {o, l, none};
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_OWN_IN_NORM], 2, &job.norm.weight));
    qsf_acts x = qsf_ops_prepare(o, s->embedded, o->config->dim, &none, s->embedded);
    QSF_TRY(qsf_linear_run(o, &in, 1, &x));
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(8 * (size_t)width), finish_rows, &job);
    x = qsf_ops_prepare(o, s->x, o->config->dim, &none, s->x);
    QSF_TRY(qsf_linear_run(o, &gate, 1, &x));
    QSF_TRY(qsf_block_sub_norm(o, s->gate, width, NULL, &x));
    return qsf_block_add_product(o, &end, &x);
}
