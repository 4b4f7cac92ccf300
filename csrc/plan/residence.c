/* residence.c - spreads streamed units evenly among resident ones. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan.h"

#include "base/checked.h"
#include "stream/stream.h"

/* Returns a * b / c for a <= c; may be too small by a few parts in 2^32 of c. */
static uint64_t share_of(uint64_t a, uint64_t b, uint64_t c)
{
    unsigned shift = 0;
    while ((b | c) >> shift > UINT32_MAX)
        shift++;
    const uint64_t part = c >> shift;
    return part == 0 ? 0 : ((a >> shift) * (b >> shift) / part) << shift;
}

/* Marks the unit as resident if it fits; returns its bytes, else 0. */
static uint64_t keep(const qsf_reader *r, uint32_t unit_idx, uint64_t room_bytes, bool *is_resident)
{
    const uint64_t n_bytes = r->units[unit_idx].raw_bytes;
    if (is_resident[unit_idx] || n_bytes > room_bytes)
        return 0;
    is_resident[unit_idx] = true;
    return n_bytes;
}

static bool is_looped(const qsf_reader *r, uint32_t i)
{
    return qsf_reader_visits(r, qsf_reader_layer(r, i)) > 1;
}

/* Marks looped layers: without memory of its own, each is read several times a pass. */
static uint64_t keep_looped(const qsf_reader *r, uint64_t room_bytes, bool *is_resident)
{
    uint64_t kept_bytes = 0;
    for (uint32_t i = 0; i < r->n_pass_layers; i++)
        if (is_looped(r, i))
            kept_bytes += keep(r, r->layer_units[i], room_bytes - kept_bytes, is_resident);
    return kept_bytes;
}

/* Marks the units at the end of a pass: the final norm with the head, and a tied embedding; and the
 * MTP head, for whose guesses these units are used again. */
static uint64_t keep_head(const qsf_reader *r, uint64_t room_bytes, bool *is_resident)
{
    if (r->is_without_head)
        return 0;
    uint64_t kept_bytes = keep(r, r->final_unit, room_bytes, is_resident);
    if (qsf_stream_passes_ring(r, r->embedding_unit))
        kept_bytes += keep(r, r->embedding_unit, room_bytes - kept_bytes, is_resident);
    if (r->has_mtp)
        kept_bytes +=
            keep(r, r->layer_units[r->n_pass_layers - 1], room_bytes - kept_bytes, is_resident);
    return kept_bytes;
}

/* Marks layers so that each part of the pass has the same resident share as the whole: all runs are
 * then equal to within one layer. The head is resident already, ends the pass and counts in both.
 * is_trial: marks nothing, only returns the bytes. */
static uint64_t spread(const qsf_reader *r, uint64_t head_bytes, uint64_t room_bytes, bool is_trial,
                       bool *is_resident)
{
    uint64_t total_bytes = head_bytes;
    for (uint32_t i = 0; i < r->n_pass_layers; i++)
        if (!is_resident[r->layer_units[i]])
            total_bytes = qsf_add_capped(total_bytes, qsf_reader_layer(r, i)->raw_bytes);
    uint64_t wanted_bytes = qsf_add_capped(head_bytes, room_bytes);
    wanted_bytes = QSF_MIN(wanted_bytes, total_bytes);
    uint64_t passed_bytes = 0;
    uint64_t kept_bytes = 0;
    for (uint32_t i = 0; i < r->n_pass_layers; i++) {
        const uint64_t n_bytes = qsf_reader_layer(r, i)->raw_bytes;
        if (is_resident[r->layer_units[i]])
            continue;
        passed_bytes = qsf_add_capped(passed_bytes, n_bytes);
        const uint64_t inexact_bytes = (n_bytes >> 16) + 1;
        const uint64_t share_bytes =
            qsf_add_capped(share_of(passed_bytes, wanted_bytes, total_bytes), inexact_bytes);
        if (n_bytes > room_bytes - kept_bytes || qsf_add_capped(kept_bytes, n_bytes) > share_bytes)
            continue;
        kept_bytes += n_bytes;
        is_resident[r->layer_units[i]] = !is_trial;
    }
    return kept_bytes;
}

uint64_t qsf_residence_add(const qsf_reader *r, uint64_t room_bytes, bool *is_resident)
{
    const uint64_t looped_bytes = keep_looped(r, room_bytes, is_resident);
    room_bytes -= looped_bytes;
    const uint64_t head_bytes = keep_head(r, room_bytes, is_resident);
    /* Rounds the room down to whole layers: 9 of 9.7 layers are spread most evenly as 9. */
    const uint64_t layers_bytes = spread(r, head_bytes, room_bytes - head_bytes, true, is_resident);
    uint64_t kept_bytes = head_bytes + spread(r, head_bytes, layers_bytes, false, is_resident);
    for (uint32_t i = 0; i < r->n_pass_layers; i++)
        kept_bytes += keep(r, r->layer_units[i], room_bytes - kept_bytes, is_resident);
    return looped_bytes + kept_bytes;
}

uint64_t qsf_residence_longest_run_bytes(const qsf_reader *r, const bool *is_resident)
{
    uint64_t longest_bytes = 0;
    uint64_t run_bytes = 0;
    bool is_streaming = false;
    /* Two passes, because a run may reach around the end of the pass. */
    for (uint64_t step = 0; step < 2 * (uint64_t)r->n_pass_units; step++) {
        /* A tied embedding is streamed as the head: last. */
        const uint32_t unit_idx = r->pass_units[(step + 1) % r->n_pass_units];
        if (!qsf_stream_passes_ring(r, unit_idx))
            continue;
        if (is_resident[unit_idx]) {
            run_bytes = qsf_add_capped(run_bytes, r->units[unit_idx].raw_bytes);
            longest_bytes = QSF_MAX(run_bytes, longest_bytes);
        } else {
            run_bytes = 0;
            is_streaming = true;
        }
    }
    return is_streaming ? longest_bytes : 0;
}

/* ---- eviction ---- */

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

/* Returns the layer to drop, looped or not: the farthest from streamed ones; QSF_UNIT_NONE if none
 * is worth it. */
static uint32_t farthest_layer(const qsf_residency *now, bool of_looped)
{
    const qsf_reader *const r = now->stream->reader;
    uint32_t best = QSF_UNIT_NONE;
    uint32_t best_distance = 0;
    for (uint32_t i = r->n_pass_layers; i-- > 0;) {
        if (is_looped(r, i) != of_looped || !is_worth_dropping(now, r->layer_units[i]))
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
    for (int of_looped = 0; of_looped < 2; of_looped++) {
        const uint32_t layer = farthest_layer(now, of_looped != 0);
        if (layer != QSF_UNIT_NONE)
            return layer;
    }
    if (!r->is_without_head && is_worth_dropping(now, r->final_unit))
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
    if (!r->is_without_head && is_missing(now, r->final_unit))
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
        const uint32_t distance = is_looped(r, i) ? 0 : distance_to_streamed(now, i);
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
