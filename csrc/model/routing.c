/* routing.c - scores, groups, the largest scores, weights. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/routing.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/fused.h"

#define LANES 16
#define STRIPS (QSF_MAX_LAYER_EXPERTS / QSF_STRIP)

/* x [n] = softmax(x) */
static void softmax(const qsf_kernels *k, float *x, uint32_t n)
{
    float sums[STRIPS];
    float e[QSF_MAX_LAYER_EXPERTS];
    float max = x[0];
    float total = 0.0F;
    for (uint32_t i = 1; i < n; i++)
        max = x[i] > max ? x[i] : max;
    k->weigh(x, n, max, 1.0F, 0.0F, e, sums);
    for (uint32_t i = 0; i * QSF_STRIP < n; i++)
        total += sums[i];
    for (uint32_t i = 0; i < n; i++)
        x[i] = e[i] / total;
}

/* x [n] = sigmoid(x), by exp(-|x|), which cannot overflow */
static void sigmoid(const qsf_kernels *k, float *x, uint32_t n)
{
    float sums[STRIPS];
    float below[QSF_MAX_LAYER_EXPERTS] = {0.0F};
    float e[QSF_MAX_LAYER_EXPERTS];
    for (uint32_t i = 0; i < n; i++)
        below[i] = -fabsf(x[i]);
    k->weigh(below, n, 0.0F, 1.0F, 0.0F, e, sums);
    for (uint32_t i = 0; i < n; i++)
        x[i] = (x[i] >= 0.0F ? 1.0F : e[i]) / (1.0F + e[i]);
}

/* Returns the largest of x [n] that is not taken yet; of equals, and if none is larger than NaN,
 * the first. */
static uint32_t find_largest(const float *x, const bool *is_taken, uint32_t n)
{
    uint32_t best = n;
    for (uint32_t i = 0; i < n; i++)
        if (!is_taken[i] && (best == n || x[i] > x[best]))
            best = i;
    return best;
}

static float score_group(const qsf_layer_kind *kind, const float *x, uint32_t n)
{
    bool is_taken[QSF_MAX_LAYER_EXPERTS] = {false};
    const uint32_t first = find_largest(x, is_taken, n);
    if (kind->group_score == QSF_GROUP_LARGEST)
        return x[first];
    is_taken[first] = true;
    return x[first] + x[find_largest(x, is_taken, n)];
}

/* Removes the experts of the groups that are not chosen. */
static void drop_groups(const qsf_layer_kind *kind, const float *selection, bool *is_taken)
{
    float scores[QSF_MAX_LAYER_EXPERTS];
    bool is_kept[QSF_MAX_LAYER_EXPERTS] = {false};
    const uint32_t n = kind->n_experts / kind->n_groups;
    for (uint32_t i = 0; i < kind->n_groups; i++)
        scores[i] = score_group(kind, selection + (size_t)i * n, n);
    for (uint32_t i = 0; i < kind->n_groups_kept; i++)
        is_kept[find_largest(scores, is_kept, kind->n_groups)] = true;
    for (uint32_t i = 0; i < kind->n_experts; i++)
        is_taken[i] = !is_kept[i / n];
}

/* Turns the scores of the chosen [n] into weights. */
static void make_weights(const qsf_kernels *k, const qsf_layer_kind *kind, float *weights)
{
    const uint32_t n = kind->n_chosen;
    float sum = 0.0F;
    if (kind->expert_weights == QSF_EXPERT_WEIGHTS_SOFTMAX)
        softmax(k, weights, n);
    for (uint32_t i = 0; i < n; i++)
        sum += weights[i];
    sum += kind->weights_epsilon;
    for (uint32_t i = 0; i < n; i++) {
        if (kind->expert_weights == QSF_EXPERT_WEIGHTS_BY_SUM)
            weights[i] /= sum;
        weights[i] *= kind->weights_factor;
    }
}

void qsf_routing_choose(const qsf_kernels *k, const qsf_layer_kind *kind, float *logits,
                        const float *selection_bias, uint16_t *chosen, float *weights)
{
    float biased[QSF_MAX_LAYER_EXPERTS];
    bool is_taken[QSF_MAX_LAYER_EXPERTS] = {false};
    bool is_chosen[QSF_MAX_LAYER_EXPERTS] = {false};
    const uint32_t n = kind->n_experts;
    if (kind->expert_score == QSF_EXPERT_SOFTMAX)
        softmax(k, logits, n);
    else if (kind->expert_score == QSF_EXPERT_SIGMOID)
        sigmoid(k, logits, n);
    for (uint32_t i = 0; selection_bias != NULL && i < n; i++)
        biased[i] = logits[i] + selection_bias[i];
    const float *const selection = selection_bias != NULL ? biased : logits;
    if (kind->n_groups > 1)
        drop_groups(kind, selection, is_taken);
    for (uint32_t i = 0; i < kind->n_chosen; i++) {
        const uint32_t best = find_largest(selection, is_taken, n);
        is_taken[best] = true;
        is_chosen[best] = true;
    }
    uint32_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!is_chosen[i])
            continue;
        chosen[at] = (uint16_t)i;
        weights[at++] = logits[i];
    }
    make_weights(k, kind, weights);
}

float qsf_routing_gate(const qsf_kernels *k, const float *w, const float *x, uint32_t n)
{
    float lanes[LANES] = {0.0F};
    for (uint32_t i = 0; i < n; i++)
        lanes[i % LANES] = qsf_fmaf(w[i], x[i], lanes[i % LANES]);
    for (uint32_t step = LANES / 2; step > 0; step /= 2)
        for (uint32_t i = 0; i < step; i++)
            lanes[i] += lanes[i + step];
    sigmoid(k, lanes, 1);
    return lanes[0];
}
