/* experts_readers.c - the threads that fill the places of experts, piece by piece. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>

#include "base/checked.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "platform/clock.h"
#include "stream/experts.h"

/* Reads in flight of a thread, if the system supports several. */
#define QUEUE_DEPTH 2

/* A part of an expert that is being read. */
typedef struct piece {
    uint32_t place;
    uint64_t off; /* in the expert */
    size_t n_bytes;
    uint64_t begin_ns;
} piece;

static void fail_place(qsf_experts *e, qsf_expert_slot *s, qsf_status status, const char *why)
{
    s->state = QSF_SLOT_FAILED;
    if (!s->is_wanted || e->failure_status != QSF_OK)
        return; /* a right guess is read again */
    e->failure_status = status;
    snprintf(e->failure, sizeof e->failure, "unit %u (an expert of layer %u): %s",
             qsf_reader_expert_unit(e->reader, s->expert), qsf_experts_unit(e, s->expert)->layer,
             why);
}

/* Takes the next piece of the jobs. Caller holds the lock. */
static piece take_piece(qsf_experts *e)
{
    piece p = {.place = e->jobs[e->next_job % e->n_places], .off = e->next_off};
    qsf_expert_slot *const s = &e->slots[p.place];
    const uint64_t left_bytes = qsf_experts_unit(e, s->expert)->stored_bytes - p.off;
    p.n_bytes = left_bytes < e->piece_bytes ? (size_t)left_bytes : e->piece_bytes;
    e->next_off += p.n_bytes;
    if (p.n_bytes == left_bytes) {
        e->next_off = 0;
        e->next_job++;
    }
    s->n_reading++;
    e->n_reading++;
    return p;
}

/* Records that a piece was read or failed; the last piece decides about its expert. Caller holds
 * the lock. */
static void end_piece(qsf_experts *e, const piece *p, qsf_status status, uint32_t crc32)
{
    qsf_expert_slot *const s = &e->slots[p->place];
    e->n_reading--;
    s->n_reading--;
    e->totals.read_bytes += p->n_bytes;
    if (s->n_reading == 0)
        qsf_condition_wake_all(
            &e->has_data); /* wakes threads that wait for the place or for the end of reading */
    if (s->state == QSF_SLOT_EMPTY)
        return; /* a dropped guess */
    const qsf_unit *const u = qsf_experts_unit(e, s->expert);
    s->done_bytes += p->n_bytes;
    s->crc32 ^= qsf_crc32_combine(crc32, 0, u->stored_bytes - p->off - p->n_bytes);
    if (status != QSF_OK) {
        fail_place(e, s, status, qsf_error_detail());
    } else if (s->state == QSF_SLOT_QUEUED && s->done_bytes == u->stored_bytes) {
        char why[96];
        snprintf(why, sizeof why,
                 "%" PRIu64 " bytes at %" PRIu64 ": checksum is %08x, stored is %08x",
                 u->stored_bytes, u->off, s->crc32, u->crc32);
        if (s->crc32 == u->crc32)
            s->state = QSF_SLOT_READY;
        else
            fail_place(e, s, QSF_ERR_DAMAGED, why);
    }
    if (s->state != QSF_SLOT_QUEUED)
        qsf_condition_wake_all(&e->has_data);
}

/* Starts reads until the queue is full. Caller holds the lock; it is released meanwhile. */
static void start_pieces(qsf_experts *e, qsf_io_queue *queue, piece *under_way)
{
    while (queue->n_started < queue->depth && e->next_job != e->end_job) {
        uint32_t at = 0;
        while (under_way[at].n_bytes != 0)
            at++;
        piece *const p = &under_way[at];
        *p = take_piece(e);
        const qsf_expert_slot *const s = &e->slots[p->place];
        const qsf_io_read want = {
            .off = qsf_experts_unit(e, s->expert)->off + p->off,
            .dst = s->raw + p->off,
            .n_bytes = qsf_round_up(p->n_bytes, QSF_IO_ALIGN),
            .need_bytes = p->n_bytes,
            .tag = at,
        };
        p->begin_ns = qsf_clock_ns();
        qsf_mutex_unlock(&e->lock);
        const qsf_status status = qsf_io_start(queue, &want);
        qsf_mutex_lock(&e->lock);
        if (status != QSF_OK) {
            end_piece(e, p, status, 0);
            p->n_bytes = 0;
        }
    }
}

/* Waits for a read and computes its checksum. Caller holds the lock; it is released meanwhile. */
static void finish_piece(qsf_experts *e, qsf_io_queue *queue, piece *under_way)
{
    qsf_io_read done;
    qsf_mutex_unlock(&e->lock);
    const qsf_status status = qsf_io_finish(queue, &done);
    piece *const p = &under_way[done.tag];
    const uint64_t read_ns = qsf_clock_ns();
    const uint32_t crc32 = status == QSF_OK ? qsf_crc32(0, done.dst, p->n_bytes) : 0;
    const uint64_t end_ns = qsf_clock_ns();
    qsf_mutex_lock(&e->lock);
    e->totals.checksum_ns += end_ns - read_ns;
    end_piece(e, p, status, crc32);
    p->n_bytes = 0;
}

void *qsf_experts_read(void *arg)
{
    qsf_experts *const e = arg;
    piece under_way[QUEUE_DEPTH] = {{0}};
    qsf_io_queue queue;
    const qsf_io_setup setup = {.method = e->io->method, .depth = QUEUE_DEPTH};
    qsf_thread_hurry();
    const qsf_status status = qsf_io_queue_open(&queue, e->io, qsf_io_queue_depth(&setup));
    qsf_mutex_lock(&e->lock);
    while (!e->is_stopping) {
        if (status == QSF_OK)
            start_pieces(e, &queue, under_way);
        if (status == QSF_OK && queue.n_started > 0) {
            finish_piece(e, &queue, under_way);
        } else if (e->next_job == e->end_job) {
            qsf_condition_wait(&e->has_job, &e->lock);
        } else if (status != QSF_OK) { /* the system refused a queue for this thread */
            const piece p = take_piece(e);
            end_piece(e, &p, status, 0);
        }
    }
    while (status == QSF_OK && queue.n_started > 0)
        finish_piece(e, &queue, under_way);
    qsf_mutex_unlock(&e->lock);
    if (status == QSF_OK)
        qsf_io_queue_close(&queue);
    return NULL;
}
