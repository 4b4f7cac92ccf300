/* residence.c - spreads streamed units evenly among resident ones. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/residence.h"

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

/* Marks the units at the end of a pass: the final norm with the head, and a tied embedding; and the
 * MTP head, for whose guesses these units are used again. */
static uint64_t keep_head(const qsf_reader *r, uint64_t room_bytes, bool *is_resident)
{
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
    wanted_bytes = wanted_bytes < total_bytes ? wanted_bytes : total_bytes;
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
    const uint64_t head_bytes = keep_head(r, room_bytes, is_resident);
    /* Rounds the room down to whole layers: 9 of 9.7 layers are spread most evenly as 9. */
    const uint64_t layers_bytes = spread(r, head_bytes, room_bytes - head_bytes, true, is_resident);
    uint64_t kept_bytes = head_bytes + spread(r, head_bytes, layers_bytes, false, is_resident);
    for (uint32_t i = 0; i < r->n_pass_layers; i++)
        kept_bytes += keep(r, r->layer_units[i], room_bytes - kept_bytes, is_resident);
    return kept_bytes;
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
            longest_bytes = run_bytes > longest_bytes ? run_bytes : longest_bytes;
        } else {
            run_bytes = 0;
            is_streaming = true;
        }
    }
    return is_streaming ? longest_bytes : 0;
}
