/* io_slots.h - shared by the queues of all systems: a slot for each read in flight, and the rest
 * of reads that the system performed only in part. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "platform/io_way.h"

#define QSF_IO_AGAIN (-1) /* not an error of the system: the read must be submitted again */

/* The calls of a system. */
typedef struct qsf_io_slot_fns {
    /* Starts bytes [from, n_bytes) of the read in `slot`. Returns 0 or an error of the system. */
    int (*submit)(qsf_io_queue *queue, uint32_t slot, size_t from);
    /* Waits for the end of a read. *n_bytes: its bytes, 0 at the end of the file; *error: 0, its
     * error or QSF_IO_AGAIN. Returns 0, or an error of the wait. */
    int (*take)(qsf_io_queue *queue, uint32_t *slot, size_t *n_bytes, int *error);
} qsf_io_slot_fns;

/* The first member of queue->ring */
typedef struct qsf_io_slots {
    const qsf_io_slot_fns *fns;
    uint32_t busy;                       /* bit i: slot i of queue->started */
    size_t done_bytes[QSF_IO_MAX_DEPTH]; /* of the read in the slot */
} qsf_io_slots;

static inline bool qsf_io_slot_is_busy(const qsf_io_slots *s, uint32_t slot)
{
    return (s->busy >> slot & 1) != 0;
}

/* `start` and `finish` of qsf_io_queue_fns. */
qsf_status qsf_io_slots_start(qsf_io_queue *queue, const qsf_io_read *read);
qsf_status qsf_io_slots_finish(qsf_io_queue *queue, qsf_io_read *read);

/* Waits for all reads in flight, as far as a wait is possible. */
void qsf_io_slots_drain(qsf_io_queue *queue);

/* Opens a queue, reads one block through it and closes it. QSF_ERR_UNSUPPORTED: the read failed. */
qsf_status qsf_io_try_queue(qsf_io *io, const qsf_io_queue_fns *fns);
