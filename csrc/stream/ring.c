/* ring.c - creates and destroys a ring; the consumer's side of it. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/ring.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "stream/ring_private.h"
#include "memory/arena.h"
#include "platform/clock.h"

#define NONE UINT32_MAX
/* Large enough to hide the overhead of a read, small enough for several reads in flight. 512 KiB
 * and 1 MiB were equally fast (bench/LOG.md). */
#define MAX_SLOT_BYTES ((size_t)1024 * 1024)
#define MIN_SLOT_BYTES ((size_t)QSF_IO_ALIGN)
/* Most bytes used at once, so that slots become free for the disk soon. */
#define MAX_RANGE_BYTES ((size_t)2 * 1024 * 1024)
#define CANCEL_POLL_NS 20000000

/* ---- memory ---- */

size_t qsf_ring_least_bytes(size_t range_bytes)
{
    return qsf_round_up(range_bytes, QSF_IO_ALIGN) + 4 * MIN_SLOT_BYTES;
}

/* Leaves room for `depth` reads in flight beside the range in use. */
static size_t choose_slot_bytes(size_t ring_bytes, size_t range_bytes, uint32_t depth)
{
    const size_t room_bytes = ring_bytes - qsf_round_up(range_bytes, QSF_IO_ALIGN);
    const size_t n_bytes = room_bytes / (depth + 2) / QSF_IO_ALIGN * QSF_IO_ALIGN;
    return n_bytes < MIN_SLOT_BYTES   ? MIN_SLOT_BYTES
           : n_bytes > MAX_SLOT_BYTES ? MAX_SLOT_BYTES
                                      : n_bytes;
}

typedef struct layout {
    qsf_ring *ring;
    qsf_piece *pieces;
    uint32_t *order;
    bool *is_taken;
    unsigned char *seam;
    unsigned char *bytes;
} layout;

/* With records for the most slots of any depth. */
static void lay_out(layout *l, qsf_arena *a, size_t ring_bytes, size_t range_bytes,
                    const qsf_reader *r)
{
    const size_t most_slots =
        ring_bytes / choose_slot_bytes(ring_bytes, range_bytes, QSF_IO_MAX_DEPTH);
    l->ring = qsf_arena_push(a, 1, sizeof *l->ring);
    l->pieces = qsf_arena_push(a, most_slots, sizeof *l->pieces);
    l->order = qsf_arena_push(a, r->n_stream_units, sizeof *l->order);
    l->is_taken = qsf_arena_push(a, most_slots, sizeof *l->is_taken);
    l->seam = qsf_arena_push(a, range_bytes + QSF_DATA_ALIGN, 1);
    l->bytes = qsf_arena_push(a, ring_bytes + QSF_IO_ALIGN, 1);
}

size_t qsf_ring_bytes(size_t ring_bytes, size_t range_bytes, const qsf_reader *r)
{
    qsf_arena measuring;
    layout l;
    qsf_arena_init_measuring(&measuring);
    lay_out(&l, &measuring, ring_bytes, range_bytes, r);
    return measuring.failed ? SIZE_MAX : measuring.used_bytes;
}

/* ---- life ---- */

qsf_status qsf_ring_create(qsf_ring **out, qsf_reader *r, qsf_ledger *ledger, qsf_io *io,
                           const qsf_io_setup *setup, size_t ring_bytes, size_t range_bytes)
{
    assert(ring_bytes % QSF_IO_ALIGN == 0 && ring_bytes >= qsf_ring_least_bytes(range_bytes));
    *out = NULL;
    const size_t block_bytes = qsf_ring_bytes(ring_bytes, range_bytes, r);
    void *const block = qsf_ledger_acquire(ledger, QSF_USE_STREAM, block_bytes);
    if (block == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM,
                        "no memory for a ring of %zu MB: %" PRIu64 " of %" PRIu64 " MB are in use",
                        block_bytes >> 20, ledger->held_bytes >> 20, ledger->ceiling_bytes >> 20);
    qsf_arena arena;
    layout l;
    qsf_arena_init(&arena, block, block_bytes);
    lay_out(&l, &arena, ring_bytes, range_bytes, r);
    const size_t slot_bytes = choose_slot_bytes(ring_bytes, range_bytes, setup->depth);
    qsf_ring *const ring = l.ring;
    *ring = (qsf_ring){
        .reader = r,
        .ledger = ledger,
        .io = io,
        .block = block,
        .block_bytes = block_bytes,
        .bytes = l.bytes + -(uintptr_t)l.bytes % QSF_IO_ALIGN,
        .slot_bytes = slot_bytes,
        .n_slots = (uint32_t)(ring_bytes / slot_bytes),
        .range_bytes = range_bytes,
        .seam = l.seam,
        .queue_depth = qsf_io_queue_depth(setup),
        .is_paused = true,
        .pieces = l.pieces,
        .is_taken = l.is_taken,
        .order = l.order,
        .unit_idx = NONE,
    };
    const qsf_status status = qsf_ring_start_readers(ring, qsf_io_queue_count(setup));
    if (status != QSF_OK) {
        qsf_ledger_release(ledger, QSF_USE_STREAM, block, block_bytes);
        return status;
    }
    *out = ring;
    return QSF_OK;
}

void qsf_ring_destroy(qsf_ring *ring)
{
    if (ring == NULL)
        return;
    qsf_ring_stop_readers(ring);
    qsf_ledger_release(ring->ledger, QSF_USE_STREAM, ring->block, ring->block_bytes);
}

/* ---- the consumer ---- */

/* Waits until no reader uses a piece, drops all pieces, and restarts reading at entry next_order
 * of the order. */
static void restart(qsf_ring *ring, uint32_t next_order, uint64_t next_pass)
{
    ring->is_paused = true;
    while (ring->n_reading > 0)
        qsf_condition_wait(&ring->has_data, &ring->lock);
    ring->tail = ring->head;
    memset(ring->is_taken, 0, ring->n_slots * sizeof *ring->is_taken);
    ring->next_order = next_order;
    ring->next_off = 0;
    ring->next_pass = next_pass;
    if (!ring->is_broken)
        ring->failure_status = QSF_OK;
    ring->is_paused = false;
    qsf_condition_wake_all(&ring->has_room);
}

void qsf_ring_set_order(qsf_ring *ring, const uint32_t *units, uint32_t n_units, uint32_t n_always)
{
    assert(n_units <= ring->reader->n_stream_units && n_always <= n_units);
    qsf_mutex_lock(&ring->lock);
    ring->is_paused = true; /* readers use the order */
    ring->unit_idx = NONE;
    memcpy(ring->order, units, n_units * sizeof *units);
    ring->n_order = n_units;
    ring->n_always = n_always;
    restart(ring, 0, ring->pass + 1);
    qsf_mutex_unlock(&ring->lock);
}

void qsf_ring_begin_pass(qsf_ring *ring, bool is_whole, const qsf_cancel *cancel,
                         qsf_stopwatch *stopwatch)
{
    qsf_mutex_lock(&ring->lock);
    (void)qsf_ring_is_next_wanted(ring); /* moves the cursor past the end of the last pass */
    ring->pass++;
    ring->is_whole = is_whole;
    ring->cancel = cancel;
    ring->stopwatch = stopwatch;
    qsf_condition_wake_all(&ring->has_room);
    qsf_mutex_unlock(&ring->lock);
}

/* True if the oldest piece begins this unit; without pieces, if the next one will. */
static bool is_at(qsf_ring *ring, uint32_t unit_idx)
{
    if (ring->is_paused)
        return false;
    if (ring->tail < ring->head) {
        const qsf_piece *const p = &ring->pieces[ring->tail % ring->n_slots];
        return p->unit_idx == unit_idx && p->off == 0;
    }
    return qsf_ring_is_next_wanted(ring) && ring->order[ring->next_order] == unit_idx &&
           ring->next_off == 0 && ring->failure_status == QSF_OK;
}

qsf_status qsf_ring_begin_unit(qsf_ring *ring, uint32_t unit_idx)
{
    uint32_t place = 0;
    qsf_mutex_lock(&ring->lock);
    while (place < ring->n_order && ring->order[place] != unit_idx)
        place++;
    if (ring->unit_idx != NONE || place == ring->n_order) {
        qsf_mutex_unlock(&ring->lock);
        return QSF_FAIL(QSF_ERR_ARG,
                        "internal error: unit %u is not streamed, or another unit has not ended",
                        unit_idx);
    }
    if (place >= ring->n_always)
        ring->is_whole = true;
    if (!is_at(ring, unit_idx))
        restart(ring, place, ring->pass);
    ring->unit_idx = unit_idx;
    ring->unit_off = 0;
    ring->unit_crc32 = 0;
    ring->unit_first_ns = 0;
    ring->unit_last_ns = 0;
    qsf_mutex_unlock(&ring->lock);
    return QSF_OK;
}

/* Counts bytes of the current unit from `off` on that are adjacent: in the piece of `off` and
 * the ready pieces after it. Stops soon after most_bytes. Caller holds the lock. */
static size_t adjacent_bytes(const qsf_ring *ring, uint64_t off, size_t most_bytes)
{
    size_t n_bytes = 0;
    uint64_t next_off = ring->unit_off;
    const unsigned char *end = NULL; /* NULL: `off` is not reached */
    for (uint64_t i = ring->tail; i < ring->head && n_bytes < most_bytes; i++) {
        const qsf_piece *const p = &ring->pieces[i % ring->n_slots];
        if (p->off != next_off || (end != NULL && (p->bytes != end || p->state != PIECE_READY)))
            break;
        next_off += p->data_bytes;
        if (next_off <= off)
            continue;
        n_bytes += p->off < off ? (size_t)(next_off - off) : p->data_bytes;
        end = p->bytes + p->data_bytes;
    }
    return n_bytes;
}

size_t qsf_ring_range_bytes(qsf_ring *ring, uint64_t off)
{
    qsf_mutex_lock(&ring->lock);
    size_t most_bytes = ring->n_slots / 4 * ring->slot_bytes; /* the rest is for reads in flight */
    if (most_bytes > MAX_RANGE_BYTES)
        most_bytes = MAX_RANGE_BYTES;
    const size_t n_bytes = adjacent_bytes(ring, off, most_bytes);
    qsf_mutex_unlock(&ring->lock);
    most_bytes = n_bytes < most_bytes ? n_bytes : most_bytes;
    return most_bytes > ring->range_bytes ? most_bytes : ring->range_bytes;
}

/* Waits until piece piece_no is ready. */
static qsf_status wait_for(qsf_ring *ring, uint64_t piece_no)
{
    for (;;) {
        const qsf_piece *const p = &ring->pieces[piece_no % ring->n_slots];
        if (piece_no < ring->head && p->state == PIECE_READY)
            return QSF_OK;
        if (ring->failure_status != QSF_OK)
            return QSF_FAIL(ring->failure_status, "%s", ring->failure);
        if (qsf_cancel_is_set(ring->cancel))
            return QSF_FAIL(QSF_ERR_CANCELLED, "cancelled while reading unit %u", ring->unit_idx);
        qsf_condition_wait_for(&ring->has_data, &ring->lock, CANCEL_POLL_NS);
    }
}

/* Removes the oldest piece, which is ready, and adds it to the checksum and times of its unit. */
static void remove_oldest(qsf_ring *ring)
{
    const qsf_piece *const p = &ring->pieces[ring->tail % ring->n_slots];
    ring->unit_crc32 = qsf_crc32_combine(ring->unit_crc32, p->crc32, p->data_bytes);
    if (p->off == 0)
        ring->unit_first_ns = p->start_ns;
    if (p->end_ns > ring->unit_last_ns)
        ring->unit_last_ns = p->end_ns;
    ring->unit_off = p->off + p->data_bytes;
    ring->is_taken[(size_t)(p->bytes - ring->bytes) / ring->slot_bytes] = false;
    ring->tail++;
    qsf_condition_wake_all(&ring->has_room);
}

/* Removes the pieces of the current unit that end at or before `off`; waits until its pieces up
 * to end_off are ready. */
static qsf_status move_to(qsf_ring *ring, uint64_t off, uint64_t end_off)
{
    uint64_t done_off = ring->unit_off; /* end of the visited pieces */
    for (uint64_t i = ring->tail; done_off < end_off; i++) {
        QSF_TRY(wait_for(ring, i));
        const qsf_piece *const p = &ring->pieces[i % ring->n_slots];
        assert(p->unit_idx == ring->unit_idx);
        done_off = p->off + p->data_bytes;
        if (done_off <= off)
            remove_oldest(ring);
    }
    return QSF_OK;
}

/* Caller holds the lock. A failure ends the unit. */
static qsf_status move_timed(qsf_ring *ring, uint64_t off, uint64_t end_off, uint64_t *wait_ns)
{
    const uint64_t start_ns = qsf_clock_ns();
    const qsf_status status = move_to(ring, off, end_off);
    const uint64_t end_ns = qsf_clock_ns();
    *wait_ns += end_ns - start_ns;
    qsf_stopwatch_set_aside(ring->stopwatch, QSF_PHASE_WAIT, start_ns, end_ns);
    if (status != QSF_OK) {
        ring->unit_idx = NONE;
        ring->is_paused = true;
    }
    return status;
}

/* Copies bytes [off, off + n_bytes) of the current unit, whose pieces are ready, to the seam. */
static const unsigned char *copy_to_seam(const qsf_ring *ring, uint64_t off, size_t n_bytes)
{
    unsigned char *const seam = ring->seam + off % QSF_DATA_ALIGN;
    size_t done_bytes = 0;
    assert(n_bytes <= ring->range_bytes);
    for (uint64_t i = ring->tail; done_bytes < n_bytes; i++) {
        const qsf_piece *const p = &ring->pieces[i % ring->n_slots];
        const size_t skipped_bytes = (size_t)(off + done_bytes - p->off);
        size_t part_bytes = p->data_bytes - skipped_bytes;
        if (part_bytes > n_bytes - done_bytes)
            part_bytes = n_bytes - done_bytes;
        memcpy(seam + done_bytes, p->bytes + skipped_bytes, part_bytes);
        done_bytes += part_bytes;
    }
    return seam;
}

qsf_status qsf_ring_take(qsf_ring *ring, uint64_t off, size_t n_bytes, uint64_t *wait_ns,
                         const unsigned char **out)
{
    assert(ring->unit_idx != NONE);
    qsf_mutex_lock(&ring->lock);
    const qsf_status status = move_timed(ring, off, off + n_bytes, wait_ns);
    const bool is_adjacent =
        status == QSF_OK && n_bytes > 0 && adjacent_bytes(ring, off, n_bytes) >= n_bytes;
    qsf_mutex_unlock(&ring->lock);
    QSF_TRY(status);
    const qsf_piece *const p = &ring->pieces[ring->tail % ring->n_slots];
    *out = is_adjacent ? p->bytes + (off - p->off) : copy_to_seam(ring, off, n_bytes);
    return QSF_OK;
}

qsf_status qsf_ring_end_unit(qsf_ring *ring, uint64_t *wait_ns, uint64_t *read_ns)
{
    const uint32_t unit_idx = ring->unit_idx;
    const qsf_unit *const u = &ring->reader->units[unit_idx];
    qsf_mutex_lock(&ring->lock);
    qsf_status status = move_timed(ring, u->stored_bytes, u->stored_bytes, wait_ns);
    ring->unit_idx = NONE;
    const uint32_t crc32 = ring->unit_crc32;
    if (status == QSF_OK && crc32 != u->crc32) {
        ring->is_paused = true;
        status =
            QSF_FAIL(QSF_ERR_DAMAGED,
                     "unit %u (%" PRIu64 " bytes at %" PRIu64 "): checksum is %08x, stored is %08x",
                     unit_idx, u->stored_bytes, u->off, crc32, u->crc32);
    }
    *read_ns = ring->unit_last_ns - ring->unit_first_ns;
    qsf_mutex_unlock(&ring->lock);
    return status;
}

void qsf_ring_abandon(qsf_ring *ring)
{
    qsf_mutex_lock(&ring->lock);
    ring->unit_idx = NONE;
    ring->is_paused = true; /* until a unit begins: the next pass may begin with any unit */
    qsf_mutex_unlock(&ring->lock);
}

qsf_ring_counts qsf_ring_count(qsf_ring *ring)
{
    qsf_mutex_lock(&ring->lock);
    qsf_ring_counts counts = ring->counts;
    if (ring->n_under_way > 0)
        counts.busy_ns += qsf_clock_ns() - ring->busy_since_ns;
    qsf_mutex_unlock(&ring->lock);
    return counts;
}
