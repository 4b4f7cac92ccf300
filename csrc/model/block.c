/* block.c - norms before mixers and FFNs, and products after them. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/block.h"

#include "base/status.h"

qsf_status qsf_block_load(qsf_ops *o, const qsf_tensor *t, size_t i, const float **out)
{
    return qsf_ops_load_vector(o, t, o->scratch->vectors[i], out);
}

qsf_status qsf_block_load_norm(qsf_ops *o, const qsf_tensor *weight, const qsf_tensor *bias,
                               qsf_norm_weights *out)
{
    QSF_TRY(qsf_block_load(o, weight, 0, &out->weight));
    return qsf_block_load(o, bias, 1, &out->bias);
}

qsf_status qsf_block_norm(qsf_ops *o, float *x, const qsf_tensor *weight, const qsf_tensor *bias,
                          qsf_acts *out)
{
    qsf_norm_weights weights;
    QSF_TRY(qsf_block_load_norm(o, weight, bias, &weights));
    *out = qsf_ops_prepare(o, x, o->config->dim, &weights, o->scratch->normed);
    return QSF_OK;
}

qsf_status qsf_block_sub_norm(qsf_ops *o, float *x, uint32_t dim, const qsf_tensor *weight,
                              qsf_acts *out)
{
    qsf_norm_weights weights;
    QSF_TRY(qsf_block_load_norm(o, weight, NULL, &weights));
    *out = qsf_ops_prepare(o, x, dim, &weights, x);
    return QSF_OK;
}

qsf_status qsf_block_load_outliers(qsf_ops *o, const qsf_layer *l, qsf_layer_tensor first, size_t n,
                                   qsf_linear *parts)
{
    size_t n_used = 0;
    for (size_t i = 0; i < n; i++)
        QSF_TRY(qsf_ops_load_outliers(o, l->outliers[first + i], &n_used, &parts[i].outliers));
    return QSF_OK;
}

static void residual_epilogue(const void *arg, size_t begin, size_t end)
{
    qsf_ops_add_residual(arg, begin, end);
}

qsf_status qsf_block_add_product(qsf_ops *o, const qsf_block_end *end, const qsf_acts *in)
{
    const qsf_scratch *const s = o->scratch;
    const bool is_normed = end->post_norm != NULL;
    size_t n_used = 0;
    qsf_norm_weights weights;
    qsf_linear out = {end->w, NULL, s->y, s->dim_stride, 1, residual_epilogue, o, {0}};
    if (is_normed || end->is_kept)
        out.epilogue = NULL;
    QSF_TRY(qsf_block_load(o, end->bias, 0, &out.bias));
    QSF_TRY(qsf_ops_load_outliers(o, end->outliers, &n_used, &out.outliers));
    QSF_TRY(qsf_linear_run(o, &out, 1, in));
    if (!is_normed || end->is_kept)
        return QSF_OK;
    QSF_TRY(qsf_block_load_norm(o, end->post_norm, NULL, &weights));
    qsf_ops_add_normed(o, &weights);
    return QSF_OK;
}

qsf_status qsf_block_end_mixer(qsf_ops *o, const qsf_layer *l, float *x, uint32_t dim)
{
    const qsf_block_end end = {l->tensors[QSF_LAYER_ATTN_OUT], l->tensors[QSF_LAYER_ATTN_OUT_BIAS],
                               l->outliers[QSF_LAYER_ATTN_OUT],
                               l->tensors[QSF_LAYER_POST_ATTN_NORM], false};
    qsf_acts in;
    QSF_TRY(qsf_block_sub_norm(o, x, dim, l->tensors[QSF_LAYER_ATTN_SUB_NORM], &in));
    QSF_TRY(qsf_block_add_product(o, &end, &in));
    qsf_ops_lap(o, QSF_PHASE_ATTN_OUT);
    return QSF_OK;
}
