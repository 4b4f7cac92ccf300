/* ring_private.h - the record that the readers and the consumer of a ring share.
 *
 * Readers append pieces at `head`, the consumer removes them at `tail`. A piece takes the lowest
 * free slot, so pieces are mostly adjacent, and only the currently needed part of the ring is
 * written: recently used memory is faster. A range of pieces that are not adjacent is copied to
 * the seam.
 *
 * `lock` protects all fields below it. The reader owns the bytes of a piece while its state is
 * READING, the consumer afterwards.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "stream/ring.h"
#include "platform/thread.h"

typedef enum qsf_piece_state { PIECE_READING, PIECE_READY, PIECE_FAILED } qsf_piece_state;

typedef struct qsf_piece {
    qsf_piece_state state;
    uint32_t unit_idx;
    uint32_t crc32;       /* of its data_bytes */
    uint64_t off;         /* of its first byte in the stored unit, a multiple of 4096 */
    size_t data_bytes;    /* of the unit; less than a slot has at the end of the unit only */
    unsigned char *bytes; /* in the ring */
    uint64_t start_ns;
    uint64_t end_ns;
} qsf_piece;

struct qsf_ring {
    qsf_reader *reader; /* borrowed */
    qsf_ledger *ledger; /* borrowed */
    qsf_io *io;         /* borrowed */
    void *block;        /* all memory of the ring, this record included */
    size_t block_bytes;
    unsigned char *bytes; /* [n_slots][slot_bytes], aligned to 4096 */
    size_t slot_bytes;
    uint32_t n_slots;
    size_t range_bytes;
    unsigned char *seam; /* [range_bytes + 64] */
    uint32_t queue_depth;
    uint32_t n_threads;
    qsf_thread threads[QSF_IO_MAX_DEPTH];

    qsf_mutex lock;
    qsf_condition has_room; /* readers wait */
    qsf_condition has_data; /* the consumer waits */
    bool is_stopping;
    bool is_paused;    /* reads do not start, and pieces are invalid */
    qsf_piece *pieces; /* [n_slots], piece i at i % n_slots */
    bool *is_taken;    /* [n_slots]: the slot has a piece */
    uint64_t head;     /* pieces [tail, head) are in use */
    uint64_t tail;
    uint32_t n_reading;   /* pieces that a reader reads or verifies */
    uint32_t n_under_way; /* those with a read in flight */
    /* the cursor of reading */
    uint32_t *order; /* [n_stream_units] */
    uint32_t n_order;
    uint32_t n_always;
    uint32_t next_order;
    uint64_t next_off;
    uint64_t next_pass;
    /* the consumer */
    uint64_t pass;
    bool is_whole;
    const qsf_cancel *cancel;
    qsf_stopwatch *stopwatch; /* of the pass, or NULL */
    uint32_t unit_idx;        /* current unit; NONE: none */
    uint64_t unit_off;        /* pieces that end before it are removed */
    uint32_t unit_crc32;      /* of the removed pieces */
    uint64_t unit_first_ns;
    uint64_t unit_last_ns;
    bool is_broken; /* a reader could not open its queue; the failure is permanent */
    /* the first failure of a reader */
    char failure[256];
    qsf_status failure_status;
    uint64_t busy_since_ns;
    qsf_ring_counts counts;
};

/* Starts n_threads reader threads; on failure none is running. */
qsf_status qsf_ring_start_readers(qsf_ring *ring, uint32_t n_threads);
void qsf_ring_stop_readers(qsf_ring *ring);

/* True if the unit at the cursor of reading may be read now. Moves the cursor past the end of a
 * pass. Caller holds the lock. */
bool qsf_ring_is_next_wanted(qsf_ring *ring);
