/* ring.h - reads streamed units ahead of the computation into a ring buffer.
 *
 *     order of the pass   | unit 3 ............ | unit 5 .......... | unit 9 ...
 *     ring                     [taken] [ready][ready][reading] free
 *                              ^ consumer            ^ readers
 *
 * Every pass uses the units in the same order. At the end of a pass, readers continue with the
 * first units of the next pass. They fill pieces of the ring in order and compute the checksum of
 * each piece; these combine to the checksum of the unit. A unit begins at a multiple of 4096 in
 * the file and in the ring, so direct reads need no copy.
 *
 * One consumer thread. Bytes that it takes stay valid until it takes more or ends the unit.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/cancel.h"
#include "format/records.h"
#include "io/io.h"
#include "io/pace.h"
#include "platform/clock.h"

#define QSF_RING_STACK_BYTES (64 * 1024) /* of a reading thread */

typedef struct qsf_ring qsf_ring;

typedef struct qsf_ring_counts {
    uint64_t read_bytes;
    uint64_t busy_ns; /* time with at least one read in flight */
    uint64_t checksum_ns;
} qsf_ring_counts;

/* The smallest ring_bytes for ranges of range_bytes; a multiple of 4096. */
size_t qsf_ring_least_bytes(size_t range_bytes);

/* Bytes that qsf_ring_create acquires from the ledger. */
size_t qsf_ring_bytes(size_t ring_bytes, size_t range_bytes, const qsf_reader *r);

/* Starts the readers. ring_bytes is a multiple of 4096, at least qsf_ring_least_bytes(range_bytes).
 * On failure nothing is held. */
qsf_status qsf_ring_create(qsf_ring **out, qsf_reader *r, qsf_ledger *ledger, qsf_io *io,
                           const qsf_io_setup *setup, size_t ring_bytes, size_t range_bytes);
void qsf_ring_destroy(qsf_ring *ring); /* accepts NULL */

/* Most units of an order: looped ones are in it once for each of their visits. Layers that are left
 * out count, because they may come back. */
static inline uint32_t qsf_ring_order_units(const qsf_reader *r)
{
    return r->n_stream_units + (r->arch.loop_end - r->arch.loop_begin) * (r->arch.loop_passes - 1);
}

/* Sets the streamed units [n_units] in the order of use and drops all bytes read ahead. Every pass
 * uses the first n_always units; the others are read only after a pass that uses them has begun. */
void qsf_ring_set_order(qsf_ring *ring, const uint32_t *units, uint32_t n_units, uint32_t n_always);

/* Begins a pass over all units (is_whole) or the first n_always. A wait ends with
 * QSF_ERR_CANCELLED about 20 ms after *cancel is set. The stopwatch (borrowed until the pass
 * ends, or NULL) counts waits as QSF_PHASE_WAIT. */
void qsf_ring_begin_pass(qsf_ring *ring, bool is_whole, const qsf_cancel *cancel,
                         qsf_stopwatch *stopwatch);

/* Begins a unit. If it is not the next one in the order, reading restarts at it. */
qsf_status qsf_ring_begin_unit(qsf_ring *ring, uint32_t unit_idx);

/* Most stored bytes that one qsf_ring_take() may request at `off`: adjacent ones that are ready
 * or will be next, at least range_bytes. Grows while the readers work. */
size_t qsf_ring_range_bytes(qsf_ring *ring, uint64_t off);

/* Waits for the stored bytes [off, off + n_bytes) of the current unit and releases all bytes before
 * `off`. n_bytes <= qsf_ring_range_bytes(off). *out equals off modulo 64. Adds the time of the wait
 * to *wait_ns. On failure the unit is abandoned. */
qsf_status qsf_ring_take(qsf_ring *ring, uint64_t off, size_t n_bytes, uint64_t *wait_ns,
                         const unsigned char **out);

/* Waits for the rest of the unit and verifies its checksum; QSF_ERR_DAMAGED if it differs from the
 * index. *read_ns: time from the start of the unit's first read to the end of its last. */
qsf_status qsf_ring_end_unit(qsf_ring *ring, uint64_t *wait_ns, uint64_t *read_ns);

/* Drops the current unit, if any, and all bytes read ahead. */
void qsf_ring_abandon(qsf_ring *ring);

qsf_ring_counts qsf_ring_count(qsf_ring *ring);
