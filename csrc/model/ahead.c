/* ahead.c - the next layer's router on this layer's state. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ahead.h"

#include <math.h>

#include "base/checked.h"
#include "base/status.h"
#include "model/linear.h"
#include "model/routing.h"

#define LIKELY_EIGHTHS 3 /* eighths of the experts that a token chooses */

/* Scores of the next layer's experts for the only row, before this layer's experts are added. */
static qsf_status score_next(qsf_ops *o, const qsf_layer *next, const float **selection_bias)
{
    const qsf_scratch *const s = o->scratch;
    qsf_norm_weights norm;
    const uint32_t n = next->kind->n_experts;
    qsf_linear router = {
        next->tensors[QSF_LAYER_ROUTER], NULL, s->routed.scores, n, 1, NULL, NULL, {0}};
    const bool is_apart = next->tensors[QSF_LAYER_ROUTER_NORM] != NULL;
    const qsf_tensor *const weight =
        next->tensors[is_apart ? QSF_LAYER_ROUTER_NORM : QSF_LAYER_FFN_NORM];
    const qsf_tensor *const bias = is_apart ? NULL : next->tensors[QSF_LAYER_FFN_NORM_BIAS];
    QSF_TRY(qsf_ops_load_vector(o, weight, s->vectors[2], &norm.weight));
    QSF_TRY(qsf_ops_load_vector(o, bias, s->vectors[3], &norm.bias));
    QSF_TRY(qsf_ops_load_vector(o, next->tensors[QSF_LAYER_ROUTER_BIAS], s->routed.biases[0],
                                &router.bias));
    QSF_TRY(qsf_ops_load_vector(o, next->tensors[QSF_LAYER_SELECTION_BIAS], s->routed.biases[1],
                                selection_bias));
    const qsf_acts x = qsf_ops_prepare(o, s->x, o->config->dim, &norm, s->routed.rows);
    return qsf_linear_run(o, &router, 1, &x);
}

/* Writes the n experts with the largest weights for the only row, in descending order. */
static qsf_status find_likely(qsf_ops *o, const qsf_layer *next, uint32_t n, uint32_t *likely)
{
    const uint32_t n_chosen = next->kind->n_chosen;
    const float *selection_bias;
    uint16_t chosen[QSF_MAX_CHOSEN];
    float weights[QSF_MAX_CHOSEN];
    QSF_TRY(score_next(o, next, &selection_bias));
    qsf_routing_choose(o->kernels, next->kind, o->scratch->routed.scores, selection_bias, chosen,
                       weights);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t best = 0;
        for (uint32_t j = 1; j < n_chosen; j++)
            if (weights[j] > weights[best])
                best = j;
        likely[i] = chosen[best];
        weights[best] = -INFINITY;
    }
    return QSF_OK;
}

/* If the disk is the bottleneck, a wrong guess costs the time of reading its bytes. So only the
 * most probable experts are guessed, which are nearly always right, and only if most experts of
 * this layer had to be read: if most are in memory, half of the guesses for the missing ones are
 * wrong (bench/LOG.md). */
static bool can_guess(const qsf_ops *o, const qsf_layer *next)
{
    return o->n_tokens == 1 && !next->kind->is_parallel &&
           2 * o->experts->n_missing > o->experts->n_wanted &&
           qsf_stream_resident(o->stream, next->unit_idx) != NULL;
}

qsf_status qsf_ahead_guess(qsf_ops *o, uint32_t layer_idx)
{
    if (layer_idx + 1 >= o->config->n_trunk_layers ||
        o->config->layers[layer_idx + 1].tensors[QSF_LAYER_ROUTER] == NULL)
        return QSF_OK;
    const qsf_layer *const next = &o->config->layers[layer_idx + 1];
    uint32_t *const likely = o->scratch->routed.likely;
    uint32_t n = 0;
    if (o->n_tokens * next->kind->n_chosen >=
        2 * next->kind->n_experts) { /* hardly any expert is left out */
        for (; n < next->kind->n_experts; n++)
            likely[n] = n;
    } else if (can_guess(o, next)) {
        n = (uint32_t)qsf_ceil_div(next->kind->n_chosen * LIKELY_EIGHTHS, 8);
        o->apart = qsf_stream_resident(o->stream, next->unit_idx);
        const qsf_status status = find_likely(o, next, n, likely);
        o->apart = NULL;
        QSF_TRY(status);
    }
    for (uint32_t i = 0; i < n; i++)
        likely[i] += next->first_expert;
    qsf_experts_guess(o->experts, likely, n);
    return QSF_OK;
}
