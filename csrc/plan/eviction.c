/* eviction.c - chooses the unit to evict or to load again. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/eviction.h"

static bool is_held(const qsf_residency *now, uint32_t unit_idx)
{
    return qsf_stream_is_resident(now->stream, unit_idx);
}

/* True if the unit was evicted. */
static bool is_missing(const qsf_residency *now, uint32_t unit_idx)
{
    return now->is_planned[unit_idx] && !is_held(now, unit_idx);
}

/* True if the unit is resident and larger than the buffers for streaming it. */
static bool is_worth_dropping(const qsf_residency *now, uint32_t unit_idx)
{
    const uint64_t buffer_bytes =
        now->stream->ring == NULL ? qsf_stream_unit_buffer_bytes(now->stream->reader, unit_idx) +
                                        (uint64_t)now->stream->setup.depth * QSF_RING_STACK_BYTES
                                  : 0;
    return is_held(now, unit_idx) && now->stream->reader->units[unit_idx].raw_bytes > buffer_bytes;
}

/* Distance from the i-th layer of the pass to the nearest streamed one; the last layer is next to
 * the first. */
static uint32_t distance_to_streamed(const qsf_residency *now, uint32_t i)
{
    const qsf_reader *const r = now->stream->reader;
    const uint32_t n_layers = r->n_pass_layers;
    uint32_t distance = 1;
    for (; distance < n_layers; distance++) {
        const uint32_t after = (i + distance) % n_layers;
        const uint32_t before = (i + n_layers - distance) % n_layers;
        if (!is_held(now, r->layer_units[after]) || !is_held(now, r->layer_units[before]))
            break;
    }
    return distance;
}

/* Returns the layer to drop: the farthest from streamed ones; QSF_UNIT_NONE if none is worth it. */
static uint32_t farthest_layer(const qsf_residency *now)
{
    const qsf_reader *const r = now->stream->reader;
    uint32_t best = QSF_UNIT_NONE;
    uint32_t best_distance = 0;
    for (uint32_t i = r->n_pass_layers; i-- > 0;) {
        if (!is_worth_dropping(now, r->layer_units[i]))
            continue;
        const uint32_t distance = distance_to_streamed(now, i);
        if (distance > best_distance) {
            best = r->layer_units[i];
            best_distance = distance;
        }
    }
    return best;
}

uint32_t qsf_eviction_choose(const qsf_residency *now)
{
    const qsf_reader *const r = now->stream->reader;
    const bool has_own_embedding = !qsf_stream_passes_ring(r, r->embedding_unit);
    if (has_own_embedding && now->stream->ring != NULL && is_worth_dropping(now, r->embedding_unit))
        return r->embedding_unit;
    const uint32_t layer = farthest_layer(now);
    if (layer != QSF_UNIT_NONE)
        return layer;
    if (is_worth_dropping(now, r->final_unit))
        return r->final_unit;
    return !has_own_embedding && is_worth_dropping(now, r->embedding_unit) ? r->embedding_unit
                                                                           : QSF_UNIT_NONE;
}

uint32_t qsf_eviction_choose_return(const qsf_residency *now)
{
    const qsf_reader *const r = now->stream->reader;
    const bool has_own_embedding = !qsf_stream_passes_ring(r, r->embedding_unit);
    if (now->stream->ring == NULL)
        return QSF_UNIT_NONE;
    if (!has_own_embedding && is_missing(now, r->embedding_unit))
        return r->embedding_unit;
    if (is_missing(now, r->final_unit))
        return r->final_unit;
    uint32_t n_missing = 0;
    uint32_t n_streamed = 0;
    uint32_t best = QSF_UNIT_NONE;
    uint32_t best_distance = UINT32_MAX;
    for (uint32_t i = 0; i < r->n_pass_layers; i++) {
        const uint32_t unit_idx = r->layer_units[i];
        n_streamed += !is_held(now, unit_idx);
        if (!is_missing(now, unit_idx))
            continue;
        n_missing++;
        const uint32_t distance = distance_to_streamed(now, i);
        if (distance < best_distance) {
            best = unit_idx;
            best_distance = distance;
        }
    }
    if (has_own_embedding && is_missing(now, r->embedding_unit) &&
        (n_missing == 0 || n_streamed == 1))
        return r->embedding_unit;
    return best;
}
