/* eviction.c - chooses the unit to evict or to load again. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/eviction.h"

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

/* Distance in layers to the nearest streamed one; the last layer is next to the first. */
static uint32_t distance_to_streamed(const qsf_residency *now, uint32_t unit_idx)
{
    const uint32_t n_layers = now->stream->reader->n_units - 2;
    uint32_t distance = 1;
    for (; distance < n_layers; distance++) {
        const uint32_t after = (unit_idx - 1 + distance) % n_layers + 1;
        const uint32_t before = (unit_idx - 1 + n_layers - distance) % n_layers + 1;
        if (!is_held(now, after) || !is_held(now, before))
            break;
    }
    return distance;
}

uint32_t qsf_eviction_choose(const qsf_residency *now)
{
    const uint32_t n_layers = now->stream->reader->n_units - 2;
    const bool has_own_embedding = !qsf_stream_passes_ring(now->stream->reader, 0);
    if (has_own_embedding && now->stream->ring != NULL && is_worth_dropping(now, 0))
        return 0;
    uint32_t best = UINT32_MAX;
    uint32_t best_distance = 0;
    for (uint32_t i = n_layers; i >= 1; i--) {
        const uint32_t distance = is_worth_dropping(now, i) ? distance_to_streamed(now, i) : 0;
        if (distance > best_distance) {
            best = i;
            best_distance = distance;
        }
    }
    if (best == UINT32_MAX && is_worth_dropping(now, n_layers + 1))
        best = n_layers + 1;
    if (best == UINT32_MAX && !has_own_embedding && is_worth_dropping(now, 0))
        best = 0;
    return best;
}

uint32_t qsf_eviction_choose_return(const qsf_residency *now)
{
    const uint32_t n_layers = now->stream->reader->n_units - 2;
    const bool has_own_embedding = !qsf_stream_passes_ring(now->stream->reader, 0);
    if (now->stream->ring == NULL)
        return UINT32_MAX;
    if (!has_own_embedding && is_missing(now, 0))
        return 0;
    if (is_missing(now, n_layers + 1))
        return n_layers + 1;
    uint32_t n_missing = 0;
    uint32_t n_streamed = 0;
    uint32_t best = UINT32_MAX;
    uint32_t best_distance = UINT32_MAX;
    for (uint32_t i = 1; i <= n_layers; i++) {
        n_streamed += !is_held(now, i);
        if (!is_missing(now, i))
            continue;
        n_missing++;
        const uint32_t distance = distance_to_streamed(now, i);
        if (distance < best_distance) {
            best = i;
            best_distance = distance;
        }
    }
    if (has_own_embedding && is_missing(now, 0) && (n_missing == 0 || n_streamed == 1))
        return 0;
    return best;
}
