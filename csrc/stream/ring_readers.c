/* ring_readers.c - the threads that fill the pieces of a ring. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "base/checked.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "stream/ring_private.h"
#include "platform/clock.h"

bool qsf_ring_is_next_wanted(qsf_ring *ring)
{
    if (ring->next_pass == ring->pass &&
        ring->next_order >= (ring->is_whole ? ring->n_order : ring->n_always)) {
        ring->next_pass++;
        ring->next_order = 0;
    }
    return ring->next_pass == ring->pass || ring->next_order < ring->n_always;
}

/* Begins the next piece in the lowest free slot; NULL if there is nothing to read or no slot. */
static qsf_piece *begin_piece(qsf_ring *ring, uint64_t *piece_no)
{
    if (ring->is_paused || ring->is_stopping || ring->failure_status != QSF_OK ||
        ring->n_order == 0 || !qsf_ring_is_next_wanted(ring) ||
        ring->head - ring->tail == ring->n_slots)
        return NULL;
    uint32_t slot = 0;
    while (ring->is_taken[slot])
        slot++;
    const uint32_t unit_idx = ring->order[ring->next_order];
    const uint64_t left_bytes = ring->reader->units[unit_idx].stored_bytes - ring->next_off;
    const uint64_t now_ns = qsf_clock_ns();
    *piece_no = ring->head++;
    qsf_piece *const p = &ring->pieces[*piece_no % ring->n_slots];
    *p = (qsf_piece){
        .state = PIECE_READING,
        .unit_idx = unit_idx,
        .off = ring->next_off,
        .data_bytes = left_bytes < ring->slot_bytes ? (size_t)left_bytes : ring->slot_bytes,
        .bytes = ring->bytes + slot * ring->slot_bytes,
        .start_ns = now_ns,
    };
    ring->is_taken[slot] = true;
    ring->next_off += p->data_bytes;
    if (p->data_bytes == left_bytes) {
        ring->next_off = 0;
        ring->next_order++;
    }
    ring->n_reading++;
    if (ring->n_under_way++ == 0)
        ring->busy_since_ns = now_ns;
    return p;
}

/* The read of a piece has ended, well or not. */
static void end_read(qsf_ring *ring, qsf_piece *p)
{
    p->end_ns = qsf_clock_ns();
    ring->counts.read_bytes += p->data_bytes;
    if (--ring->n_under_way == 0)
        ring->counts.busy_ns += p->end_ns - ring->busy_since_ns;
}

/* A reader has finished a piece. Keeps the first error for the consumer. */
static void end_piece(qsf_ring *ring, qsf_piece *p, qsf_status status)
{
    p->state = status == QSF_OK ? PIECE_READY : PIECE_FAILED;
    if (status != QSF_OK && ring->failure_status == QSF_OK) {
        ring->failure_status = status;
        snprintf(ring->failure, sizeof ring->failure, "unit %u: %s", p->unit_idx,
                 qsf_error_detail());
    }
    ring->n_reading--;
    qsf_condition_wake_all(&ring->has_data);
}

/* Starts reads until the queue or the ring is full. Caller holds the lock; it is released during
 * I/O. */
static void start_reads(qsf_ring *ring, qsf_io_queue *queue)
{
    while (queue->n_started < queue->depth) {
        uint64_t piece_no;
        qsf_piece *const p = begin_piece(ring, &piece_no);
        if (p == NULL)
            return;
        const qsf_io_read read = {
            .off = ring->reader->units[p->unit_idx].off + p->off,
            .dst = p->bytes,
            .n_bytes = qsf_round_up(p->data_bytes, QSF_IO_ALIGN),
            .need_bytes = p->data_bytes,
            .tag = piece_no,
        };
        qsf_mutex_unlock(&ring->lock);
        const qsf_status status = qsf_io_start(queue, &read);
        qsf_mutex_lock(&ring->lock);
        if (status != QSF_OK) {
            end_read(ring, p);
            end_piece(ring, p, status);
        }
    }
}

/* Waits for a read, and takes all that have ended by then. Returns in `taken` how many of them
 * are to be verified. Caller holds the lock; it is released meanwhile. */
static uint32_t take_reads(qsf_ring *ring, qsf_io_queue *queue, qsf_piece *taken[QSF_IO_MAX_DEPTH])
{
    uint32_t n_taken = 0;
    do {
        qsf_io_read read;
        qsf_mutex_unlock(&ring->lock);
        const qsf_status status = qsf_io_finish(queue, &read);
        qsf_mutex_lock(&ring->lock);
        qsf_piece *const p = &ring->pieces[read.tag % ring->n_slots];
        end_read(ring, p);
        if (status == QSF_OK)
            taken[n_taken++] = p;
        else
            end_piece(ring, p, status);
    } while (qsf_io_has_ended(queue));
    return n_taken;
}

/* Computes the checksum of a piece. Caller holds the lock; it is released meanwhile. */
static void check_piece(qsf_ring *ring, qsf_piece *p)
{
    qsf_mutex_unlock(&ring->lock);
    const uint64_t start_ns = qsf_clock_ns();
    const uint32_t crc32 = qsf_crc32(0, p->bytes, p->data_bytes);
    const uint64_t end_ns = qsf_clock_ns();
    qsf_mutex_lock(&ring->lock);
    p->crc32 = crc32;
    ring->counts.checksum_ns += end_ns - start_ns;
    end_piece(ring, p, QSF_OK);
}

/* Reads until the ring stops. A disk serves several reads at once: the next ones are started
 * before the checksums of finished ones, so that the disk never waits for checksums. Caller
 * holds the lock. */
static void read_pieces(qsf_ring *ring, qsf_io_queue *queue)
{
    qsf_piece *taken[QSF_IO_MAX_DEPTH];
    uint32_t n_taken = 0;
    for (;;) {
        if (!ring->is_stopping)
            start_reads(ring, queue);
        for (uint32_t i = 0; i < n_taken; i++)
            check_piece(ring, taken[i]);
        if (queue->n_started == 0 && ring->is_stopping)
            return;
        if (queue->n_started > 0)
            n_taken = take_reads(ring, queue, taken);
        else if (n_taken > 0)
            n_taken = 0; /* the ring may have room by now */
        else
            qsf_condition_wait(&ring->has_room, &ring->lock);
    }
}

static void *run_reader(void *arg)
{
    qsf_ring *const ring = arg;
    qsf_io_queue queue;
    qsf_thread_hurry();
    const qsf_status status = qsf_io_queue_open(&queue, ring->io, ring->queue_depth);
    qsf_mutex_lock(&ring->lock);
    if (status != QSF_OK) {
        ring->is_broken = true;
        ring->failure_status = status;
        snprintf(ring->failure, sizeof ring->failure, "%s", qsf_error_detail());
        qsf_condition_wake_all(&ring->has_data);
        qsf_mutex_unlock(&ring->lock);
        return NULL;
    }
    read_pieces(ring, &queue);
    qsf_mutex_unlock(&ring->lock);
    qsf_io_queue_close(&queue);
    return NULL;
}

void qsf_ring_stop_readers(qsf_ring *ring)
{
    qsf_mutex_lock(&ring->lock);
    ring->is_stopping = true;
    qsf_condition_wake_all(&ring->has_room);
    qsf_mutex_unlock(&ring->lock);
    for (uint32_t i = 0; i < ring->n_threads; i++)
        qsf_thread_join(&ring->threads[i]);
    qsf_condition_destroy(&ring->has_data);
    qsf_condition_destroy(&ring->has_room);
    qsf_mutex_destroy(&ring->lock);
}

qsf_status qsf_ring_start_readers(qsf_ring *ring, uint32_t n_threads)
{
    QSF_TRY(qsf_mutex_init(&ring->lock));
    qsf_status status = qsf_condition_init(&ring->has_room);
    if (status != QSF_OK) {
        qsf_mutex_destroy(&ring->lock);
        return status;
    }
    status = qsf_condition_init(&ring->has_data);
    if (status != QSF_OK) {
        qsf_condition_destroy(&ring->has_room);
        qsf_mutex_destroy(&ring->lock);
        return status;
    }
    while (status == QSF_OK && ring->n_threads < n_threads) {
        status = qsf_thread_start(&ring->threads[ring->n_threads], QSF_RING_STACK_BYTES, run_reader,
                                  ring);
        if (status == QSF_OK)
            ring->n_threads++;
    }
    if (status != QSF_OK)
        qsf_ring_stop_readers(ring);
    return status;
}
