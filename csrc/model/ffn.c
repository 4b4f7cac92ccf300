/* ffn.c - the dense part, and its order relative to the routed part (routed.c). */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ops.h"

#include "base/status.h"
#include "model/linear.h"

static void up_epilogue(const void *arg, size_t begin, size_t end)
{
    const qsf_ops *const o = arg;
    qsf_ops_activate(o, 0, o->n_tokens, begin, end);
}

/* *out = the FFN's input, as matmul input */
static qsf_status prepare_ffn(qsf_ops *o, const qsf_layer *l, qsf_acts *out)
{
    const qsf_scratch *const s = o->scratch;
    qsf_norm_weights weights;
    if (o->kind->is_post_norm != 0) {
        QSF_TRY(qsf_block_load_norm(o, l->tensors[QSF_LAYER_FFN_NORM],
                                    l->tensors[QSF_LAYER_FFN_NORM_BIAS], &weights));
        qsf_ops_norm(o, s->x, &weights, s->x);
        *out = qsf_ops_prepare(o, s->x, o->config->dim, NULL, NULL);
        return QSF_OK;
    }
    float *const x = o->kind->mixer == QSF_MIXER_RELATIVE || qsf_layer_keeps_input(l) ? s->input
                     : o->kind->is_parallel                                           ? NULL
                                                                                      : s->x;
    if (x != NULL)
        return qsf_block_norm(o, x, l->tensors[QSF_LAYER_FFN_NORM],
                              l->tensors[QSF_LAYER_FFN_NORM_BIAS], out);
    *out = qsf_ops_prepare(o, s->normed, o->config->dim, NULL, NULL); /* as attention does */
    return QSF_OK;
}

/* x += ffn(in), or y = ffn(in) if experts are added to it */
static qsf_status run_dense(qsf_ops *o, const qsf_layer *l, const qsf_acts *in)
{
    const qsf_scratch *const s = o->scratch;
    const size_t stride = qsf_stride(o->kind->ffn_dim);
    const qsf_block_end end = {
        .w = l->tensors[QSF_LAYER_FFN_DOWN],
        .bias = l->tensors[QSF_LAYER_FFN_DOWN_BIAS],
        .outliers = l->outliers[QSF_LAYER_FFN_DOWN],
        .low_rank = l->low_rank[QSF_LAYER_FFN_DOWN],
        .post_norm = l->tensors[QSF_LAYER_POST_FFN_NORM],
        .is_kept = o->kind->n_experts != 0,
    };
    qsf_acts activated;
    qsf_linear parts[] = {
        qsf_linear_of(l->tensors[QSF_LAYER_FFN_GATE], s->gate, stride),
        qsf_linear_of(l->tensors[QSF_LAYER_FFN_UP], s->up, stride),
    };
    parts[1].epilogue = up_epilogue;
    parts[1].epilogue_arg = o;
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_FFN_GATE_BIAS], 1, &parts[0].bias));
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_FFN_UP_BIAS], 0, &parts[1].bias));
    QSF_TRY(qsf_block_load_side(o, l, QSF_LAYER_FFN_GATE, 2, parts));
    if (l->tensors[QSF_LAYER_FFN_GATE] != NULL) {
        QSF_TRY(qsf_linear_run_pair(o, &parts[0], &parts[1], in));
    } else {
        parts[1].y = s->gate;
        QSF_TRY(qsf_linear_run(o, &parts[1], 1, in));
    }
    qsf_ops_lap(o, QSF_PHASE_GATE_UP);
    QSF_TRY(qsf_block_sub_norm(o, s->gate, o->kind->ffn_dim, l->tensors[QSF_LAYER_FFN_SUB_NORM],
                               &activated));
    return qsf_block_add_product(o, &end, &activated);
}

/* Chooses experts from the residual with the router's norm; then *in = the dense part's input.
 * The dense part's norm is loaded before the router, which follows it in the file. */
static qsf_status choose_apart(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx, qsf_acts *in)
{
    const qsf_scratch *const s = o->scratch;
    qsf_norm_weights of_router = {0};
    qsf_norm_weights of_ffn;
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_ROUTER_NORM], 2, &of_router.weight));
    QSF_TRY(qsf_block_load_norm(o, l->tensors[QSF_LAYER_FFN_NORM],
                                l->tensors[QSF_LAYER_FFN_NORM_BIAS], &of_ffn));
    *in = qsf_ops_prepare(o, s->x, o->config->dim, &of_router, s->normed);
    qsf_ops_lap(o, QSF_PHASE_NORM);
    QSF_TRY(qsf_routed_choose(o, l, layer_idx, in));
    *in = qsf_ops_prepare(o, s->x, o->config->dim, &of_ffn, s->normed);
    return QSF_OK;
}

qsf_status qsf_ffn_run(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx)
{
    const bool is_routed = o->kind->n_experts != 0;
    if (!is_routed && o->kind->ffn == QSF_FFN_NONE)
        return QSF_OK;
    qsf_norm_weights weights;
    qsf_acts in;
    if (l->tensors[QSF_LAYER_ROUTER_NORM] != NULL) {
        QSF_TRY(choose_apart(o, l, layer_idx, &in));
    } else {
        QSF_TRY(prepare_ffn(o, l, &in));
        qsf_ops_lap(o, QSF_PHASE_NORM);
        if (is_routed)
            QSF_TRY(qsf_routed_choose(o, l, layer_idx, &in));
    }
    if (is_routed)
        QSF_TRY(qsf_routed_gates(o, l, &in));
    if (l->tensors[QSF_LAYER_FFN_UP] != NULL)
        QSF_TRY(run_dense(o, l, &in));
    if (!is_routed)
        return QSF_OK;
    QSF_TRY(qsf_routed_add(o, l, in.f32));
    if (o->kind->mixer == QSF_MIXER_RELATIVE) /* qsf_relative_end adds y */
        return QSF_OK;
    QSF_TRY(qsf_block_load_norm(o, l->tensors[QSF_LAYER_POST_FFN_NORM], NULL, &weights));
    if (weights.weight != NULL)
        qsf_ops_add_normed(o, &weights);
    else
        qsf_ops_add_residual(o, 0, o->config->dim);
    return QSF_OK;
}
