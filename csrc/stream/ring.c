/* ring.c - creates and destroys a ring; its readers, and its consumer. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/ring.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "memory/arena.h"
#include "platform/clock.h"
#include "platform/thread.h"

/* Readers append pieces at `head`, the consumer removes them at `tail`. A piece takes the lowest
 * free slot, so pieces are mostly adjacent, and only the currently needed part of the ring is
 * written: recently used memory is faster. A range of pieces that are not adjacent is copied to
 * the seam.
 *
 * `lock` protects all fields below it. The reader owns the bytes of a piece while its state is
 * READING, the consumer afterwards. */
typedef enum piece_state { PIECE_READING, PIECE_READY, PIECE_FAILED } piece_state;

typedef struct piece {
    piece_state state;
    uint32_t unit_idx;
    uint32_t crc32;       /* of its data_bytes */
    uint64_t off;         /* of its first byte in the stored unit, a multiple of 4096 */
    size_t data_bytes;    /* of the unit; less than a slot has at the end of the unit only */
    unsigned char *bytes; /* in the ring */
    uint64_t start_ns;
    uint64_t end_ns;
} piece;

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
    qsf_pace pace; /* under lock */
    uint32_t n_threads;
    qsf_thread threads[QSF_IO_MAX_DEPTH];

    qsf_mutex lock;
    qsf_condition has_room; /* readers wait */
    qsf_condition has_data; /* the consumer waits */
    bool is_stopping;
    bool is_paused; /* reads do not start, and pieces are invalid */
    piece *pieces;  /* [n_slots], piece i at i % n_slots */
    bool *is_taken; /* [n_slots]: the slot has a piece */
    uint64_t head;  /* pieces [tail, head) are in use */
    uint64_t tail;
    uint32_t n_reading;   /* pieces that a reader reads or verifies */
    uint32_t n_under_way; /* those with a read in flight */
    /* the cursor of reading */
    uint32_t *order; /* [qsf_ring_order_units()] */
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

/* ---- readers ---- */

/* True if the unit at the cursor of reading may be read now. Moves the cursor past the end of a
 * pass. Caller holds the lock. */
static bool is_next_wanted(qsf_ring *ring)
{
    if (ring->next_pass == ring->pass &&
        ring->next_order >= (ring->is_whole ? ring->n_order : ring->n_always)) {
        ring->next_pass++;
        ring->next_order = 0;
    }
    return ring->next_pass == ring->pass || ring->next_order < ring->n_always;
}

/* Begins the next piece in the lowest free slot; NULL if there is nothing to read or no slot. */
static piece *begin_piece(qsf_ring *ring, uint64_t *piece_no)
{
    if (ring->n_under_way >= ring->pace.limit)
        return NULL;
    if (ring->is_paused || ring->is_stopping || ring->failure_status != QSF_OK ||
        ring->n_order == 0 || !is_next_wanted(ring) || ring->head - ring->tail == ring->n_slots) {
        qsf_pace_disturb(&ring->pace);
        return NULL;
    }
    uint32_t slot = 0;
    while (ring->is_taken[slot])
        slot++;
    const uint32_t unit_idx = ring->order[ring->next_order];
    const uint64_t left_bytes = ring->reader->units[unit_idx].stored_bytes - ring->next_off;
    const uint64_t now_ns = qsf_clock_ns();
    *piece_no = ring->head++;
    piece *const p = &ring->pieces[*piece_no % ring->n_slots];
    *p = (piece){
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

/* The read of a piece has ended, well or not: another reader may begin one. */
static void end_read(qsf_ring *ring, piece *p)
{
    p->end_ns = qsf_clock_ns();
    ring->counts.read_bytes += p->data_bytes;
    if (--ring->n_under_way == 0)
        ring->counts.busy_ns += p->end_ns - ring->busy_since_ns;
    if (qsf_pace_count(&ring->pace, p->data_bytes, p->end_ns))
        qsf_condition_wake_all(&ring->has_room);
    else
        qsf_condition_wake_one(&ring->has_room);
}

/* A reader has finished a piece. Keeps the first error for the consumer. */
static void end_piece(qsf_ring *ring, piece *p, qsf_status status)
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
        piece *const p = begin_piece(ring, &piece_no);
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
static uint32_t take_reads(qsf_ring *ring, qsf_io_queue *queue, piece *taken[QSF_IO_MAX_DEPTH])
{
    uint32_t n_taken = 0;
    do {
        qsf_io_read read;
        qsf_mutex_unlock(&ring->lock);
        const qsf_status status = qsf_io_finish(queue, &read);
        qsf_mutex_lock(&ring->lock);
        piece *const p = &ring->pieces[read.tag % ring->n_slots];
        end_read(ring, p);
        if (status == QSF_OK)
            taken[n_taken++] = p;
        else
            end_piece(ring, p, status);
    } while (qsf_io_has_ended(queue));
    return n_taken;
}

/* Computes the checksum of a piece. Caller holds the lock; it is released meanwhile. */
static void check_piece(qsf_ring *ring, piece *p)
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

/* Reads until the ring stops. The disk does not wait for checksums: a queue that the system works
 * on is filled before them, else another reader, if there is one, begins the next read. Caller
 * holds the lock. */
static void read_pieces(qsf_ring *ring, qsf_io_queue *queue)
{
    piece *taken[QSF_IO_MAX_DEPTH];
    uint32_t n_taken = 0;
    for (;;) {
        if (!ring->is_stopping && queue->ring != NULL)
            start_reads(ring, queue);
        for (uint32_t i = 0; i < n_taken; i++)
            check_piece(ring, taken[i]);
        if (!ring->is_stopping && queue->ring == NULL)
            start_reads(ring, queue);
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

static void stop_readers(qsf_ring *ring)
{
    if (ring->n_threads > 0) {
        qsf_mutex_lock(&ring->lock);
        ring->is_stopping = true;
        qsf_condition_wake_all(&ring->has_room);
        qsf_mutex_unlock(&ring->lock);
    }
    for (uint32_t i = 0; i < ring->n_threads; i++)
        qsf_thread_join(&ring->threads[i]);
    qsf_condition_destroy(&ring->has_data);
    qsf_condition_destroy(&ring->has_room);
    qsf_mutex_destroy(&ring->lock);
}

/* Starts n_threads reader threads; on failure some may be running. */
static qsf_status start_readers(qsf_ring *ring, uint32_t n_threads)
{
    QSF_TRY(qsf_mutex_init(&ring->lock));
    QSF_TRY(qsf_condition_init(&ring->has_room));
    QSF_TRY(qsf_condition_init(&ring->has_data));
    for (; ring->n_threads < n_threads; ring->n_threads++)
        QSF_TRY(qsf_thread_start(&ring->threads[ring->n_threads], QSF_RING_STACK_BYTES, run_reader,
                                 ring));
    return QSF_OK;
}

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
    piece *pieces;
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
    l->order = qsf_arena_push(a, qsf_ring_order_units(r), sizeof *l->order);
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
    void *block;
    QSF_TRY(qsf_ledger_take(ledger, QSF_USE_STREAM, block_bytes, "a ring", &block));
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
    qsf_pace_init(&ring->pace, setup->depth, setup->is_fixed);
    const qsf_status status = start_readers(ring, qsf_io_queue_count(setup));
    if (status == QSF_OK)
        *out = ring;
    else
        qsf_ring_destroy(ring);
    return status;
}

void qsf_ring_destroy(qsf_ring *ring)
{
    if (ring == NULL)
        return;
    stop_readers(ring);
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
    assert(n_units <= qsf_ring_order_units(ring->reader) && n_always <= n_units);
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
    (void)is_next_wanted(ring); /* moves the cursor past the end of the last pass */
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
        const piece *const p = &ring->pieces[ring->tail % ring->n_slots];
        return p->unit_idx == unit_idx && p->off == 0;
    }
    return is_next_wanted(ring) && ring->order[ring->next_order] == unit_idx &&
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
        return QSF_FAIL(ARG,
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
        const piece *const p = &ring->pieces[i % ring->n_slots];
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
    most_bytes = QSF_MIN(n_bytes, most_bytes);
    return QSF_MAX(most_bytes, ring->range_bytes);
}

/* Waits until piece piece_no is ready. */
static qsf_status wait_for(qsf_ring *ring, uint64_t piece_no)
{
    for (;;) {
        const piece *const p = &ring->pieces[piece_no % ring->n_slots];
        if (piece_no < ring->head && p->state == PIECE_READY)
            return QSF_OK;
        if (ring->failure_status != QSF_OK)
            return qsf_fail(ring->failure_status, "%s", ring->failure);
        QSF_FAIL_IF(qsf_cancel_is_set(ring->cancel), CANCELLED, "cancelled while reading unit %u",
                    ring->unit_idx);
        qsf_condition_wait_for(&ring->has_data, &ring->lock, CANCEL_POLL_NS);
    }
}

/* Removes the oldest piece, which is ready, and adds it to the checksum and times of its unit. */
static void remove_oldest(qsf_ring *ring)
{
    const piece *const p = &ring->pieces[ring->tail % ring->n_slots];
    ring->unit_crc32 = qsf_crc32_combine(ring->unit_crc32, p->crc32, p->data_bytes);
    if (p->off == 0)
        ring->unit_first_ns = p->start_ns;
    if (p->end_ns > ring->unit_last_ns)
        ring->unit_last_ns = p->end_ns;
    ring->unit_off = p->off + p->data_bytes;
    ring->is_taken[(size_t)(p->bytes - ring->bytes) / ring->slot_bytes] = false;
    ring->tail++;
    qsf_condition_wake_one(&ring->has_room);
}

/* Removes the pieces of the current unit that end at or before `off`; waits until its pieces up
 * to end_off are ready. */
static qsf_status move_to(qsf_ring *ring, uint64_t off, uint64_t end_off)
{
    uint64_t done_off = ring->unit_off; /* end of the visited pieces */
    for (uint64_t i = ring->tail; done_off < end_off; i++) {
        QSF_TRY(wait_for(ring, i));
        const piece *const p = &ring->pieces[i % ring->n_slots];
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
        const piece *const p = &ring->pieces[i % ring->n_slots];
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
    const piece *const p = &ring->pieces[ring->tail % ring->n_slots];
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
        status = QSF_FAIL(
            DAMAGED, "unit %u (%" PRIu64 " bytes at %" PRIu64 "): checksum is %08x, stored is %08x",
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
