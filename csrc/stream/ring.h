/* ring.h - reads streamed units ahead of the computation, into a ring of memory.
 *
 *     order of the pass   | unit 3 ............ | unit 5 .......... | unit 9 ...
 *     ring                     [taken] [ready][ready][reading] free
 *                              ^ consumer            ^ readers
 *
 * The units come in one fixed order, again and again: reading goes on past the end of a pass
 * to the first units of the next one while the tokens of this one are chosen. Readers fill
 * pieces of the ring, in order; each checks its piece as soon as it has come, and checksums of
 * pieces are joined to that of the unit. A unit begins at a multiple of 4096 in the file and
 * in the ring, so direct reads go where they are used.
 *
 * One consumer thread. What it takes stays where it is until it takes more or ends the unit.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_STREAM_RING_H
#define QSF_STREAM_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/records.h"
#include "io/io.h"
#include "platform/stopwatch.h"

#define QSF_RING_STACK_BYTES (64 * 1024) /* of a reading thread */

typedef struct qsf_ring qsf_ring;

typedef struct qsf_ring_counts {
    uint64_t read_bytes;
    uint64_t busy_ns; /* at least one read was under way */
    uint64_t checksum_ns;
} qsf_ring_counts;

/* The smallest ring_bytes in which spans of range_bytes can be taken; a multiple of 4096. */
size_t qsf_ring_least_bytes(size_t range_bytes);

/* All that init takes from the ledger for such a ring. */
size_t qsf_ring_bytes(size_t ring_bytes, size_t range_bytes, const qsf_reader *r);

/* Starts the readers, whose reads and checks go to `trace` (borrowed, or NULL). ring_bytes: at
 * least the least for range_bytes. On failure nothing is held. */
qsf_status qsf_ring_create(qsf_ring **out, qsf_reader *r, qsf_ledger *ledger, qsf_io *io,
                           const qsf_io_setup *setup, size_t ring_bytes, size_t range_bytes,
                           qsf_trace *trace);
void qsf_ring_destroy(qsf_ring *ring); /* NULL is fine */

/* units [n_units] are what is streamed, in the order of use. The first n_always of them are used
 * by every pass; reading goes on to the others once a pass has begun that wants them. Drops what
 * was read ahead. */
void qsf_ring_set_order(qsf_ring *ring, const uint32_t *units, uint32_t n_units, uint32_t n_always);

/* A pass begins; it uses all units, or only the first n_always. A wait ends with
 * QSF_ERR_CANCELLED soon after *cancelled is set. Waits are set aside on the stopwatch
 * (borrowed until the pass ends, or NULL). */
void qsf_ring_begin_pass(qsf_ring *ring, bool is_whole, const atomic_bool *cancelled,
                         qsf_stopwatch *stopwatch);

/* Usually the next of the order; another one makes reading begin anew there. */
qsf_status qsf_ring_begin_unit(qsf_ring *ring, uint32_t unit_idx);

/* How many stored bytes from `off` on could be taken at once without copying; or range_bytes,
 * where fewer lie before the end of the ring. */
size_t qsf_ring_range_bytes(const qsf_ring *ring, uint64_t off);

/* Waits for the stored bytes [off, off + n_bytes) of the begun unit; what lies before is given
 * up. n_bytes <= qsf_ring_range_bytes(off). Addresses equal offsets modulo 64. *wait_ns grows by
 * what was waited. On failure the unit is abandoned. */
qsf_status qsf_ring_take(qsf_ring *ring, uint64_t off, size_t n_bytes, uint64_t *wait_ns,
                         const unsigned char **out);

/* Waits for the rest of the unit; QSF_ERR_FORMAT when its checksum is not the index's. *read_ns
 * is the time from the start of its first read to the end of its last. */
qsf_status qsf_ring_end_unit(qsf_ring *ring, uint64_t *wait_ns, uint64_t *read_ns);

/* Drops the begun unit, if there is one, and what was read ahead. */
void qsf_ring_abandon(qsf_ring *ring);

qsf_ring_counts qsf_ring_count(qsf_ring *ring);

#endif
