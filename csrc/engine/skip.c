/* skip.c - chooses the layers of skip.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/skip.h"

#include <math.h>
#include <string.h>

#include "base/status.h"
#include "format/reader.h"

#define N_KEPT_AT_AN_END 2

_Static_assert(QSF_SKIP_WORDS * 64 >= QSF_MAX_LAYERS, "a bit for every layer");

/* 1 - 0.9 is a little less than 0.1; half a layer of five must still be rounded up. */
#define ROUNDING_SLACK 1e-9

static uint32_t count_asked(uint32_t n_layers, double quality)
{
    return (uint32_t)floor((1.0 - quality) * n_layers + 0.5 + ROUNDING_SLACK);
}

static float importance_of(const qsf_reader *r, uint32_t layer)
{
    return qsf_reader_layer(r, layer)->importance;
}

static bool has_importances(const qsf_reader *r)
{
    for (uint32_t i = 1; i < qsf_reader_trunk_layers(r); i++)
        if (importance_of(r, i) != importance_of(r, 0))
            return true;
    return false;
}

/* Returns the distance in half layers. */
static uint32_t distance_to_middle(const qsf_reader *r, uint32_t layer)
{
    const uint32_t last = qsf_reader_trunk_layers(r) - 1;
    return 2 * layer > last ? 2 * layer - last : last - 2 * layer;
}

static bool goes_before(const qsf_reader *r, uint32_t a, uint32_t b)
{
    if (importance_of(r, a) != importance_of(r, b))
        return importance_of(r, a) < importance_of(r, b);
    if (distance_to_middle(r, a) != distance_to_middle(r, b))
        return distance_to_middle(r, a) < distance_to_middle(r, b);
    return a < b;
}

/* Layers at the ends always run, and those whose keys and values others read. */
static bool can_skip(const qsf_reader *r, uint32_t layer)
{
    for (uint32_t i = layer + 1; i < qsf_reader_trunk_layers(r); i++)
        if (qsf_reader_layer_kind(r, i)->kv_source == layer + 1)
            return false;
    return layer >= N_KEPT_AT_AN_END && layer + N_KEPT_AT_AN_END < qsf_reader_trunk_layers(r);
}

/* Marks one more layer. */
static void skip_next(const qsf_reader *r, bool *is_skipped)
{
    uint32_t next = UINT32_MAX;
    for (uint32_t i = 0; i < qsf_reader_trunk_layers(r); i++)
        if (can_skip(r, i) && !is_skipped[i] && (next == UINT32_MAX || goes_before(r, i, next)))
            next = i;
    is_skipped[next] = true;
}

qsf_status qsf_skip_layers(const qsf_reader *r, double quality, bool *is_skipped)
{
    const uint32_t n_layers = qsf_reader_trunk_layers(r);
    if (quality >= 1.0)
        return QSF_OK;
    if (n_layers <= 2 * N_KEPT_AT_AN_END)
        return QSF_FAIL(QSF_ERR_ARG,
                        "quality %g: no layer can be skipped: the first two and the last two "
                        "always run, and this model has %u layers",
                        quality, n_layers);
    if (!has_importances(r))
        return QSF_FAIL(QSF_ERR_ARG,
                        "quality %g: the file has no importances for its %u layers (all are %g); "
                        "qsf-convert --calibration makes a file that has them",
                        quality, n_layers, (double)importance_of(r, 0));
    uint32_t n_skippable = 0;
    for (uint32_t i = 0; i < n_layers; i++)
        n_skippable += can_skip(r, i);
    uint32_t n_skips = count_asked(n_layers, quality);
    if (n_skips > n_skippable)
        n_skips = n_skippable;
    for (uint32_t i = 0; i < n_skips; i++)
        skip_next(r, is_skipped);
    return QSF_OK;
}

void qsf_skip_describe(const qsf_reader *r, double quality, qsf_plan *plan)
{
    plan->n_layers = qsf_reader_trunk_layers(r);
    plan->n_layers_skipped = plan->n_layers - (r->n_pass_layers - (r->has_mtp ? 1 : 0));
    plan->n_skips_asked = count_asked(plan->n_layers, quality);
    memset(plan->skipped_layers, 0, sizeof plan->skipped_layers);
    uint32_t layer = 0;
    for (uint32_t i = 0; i < r->n_pass_layers; i++, layer++) /* gaps between the remaining layers */
        for (; layer < qsf_reader_layer(r, i)->layer; layer++)
            plan->skipped_layers[layer / 64] |= UINT64_C(1) << layer % 64;
}
