/* io_choose.c - chooses how to read a file: by option, cache state or a probe. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/checked.h"
#include "io/io.h"

#include <stdatomic.h>

#include "base/status.h"
#include "platform/clock.h"
#include "platform/file.h"
#include "platform/thread.h"

#define LEAST_PROBED_BYTES (UINT64_C(64) << 20)
#define USUAL_DEPTH 4
#define USUAL_URING_DEPTH 8
#define N_ROUNDS 2
#define RUN_NS UINT64_C(20000000)   /* time of one candidate in one round */
#define MOST_NS UINT64_C(250000000) /* no run begins after this time */
#define NEARLY_BEST 0.95
/* A ring has one thread, which gets less of busy cores than several reading threads: it must be
 * clearly faster while the probe runs (figures: docs/use.md). */
#define URING_WEIGHT 0.8
#define STACK_BYTES ((size_t)64 * 1024)

/* At least two threads for direct: one verifies its data while the other reads. */
static const qsf_io_setup candidates[] = {
    {QSF_IO_URING, 4}, {QSF_IO_URING, 8}, {QSF_IO_DIRECT, 2}, {QSF_IO_DIRECT, 4}};
#define N_CANDIDATES (sizeof candidates / sizeof candidates[0])

/* The depth from the options, else the usual one; at most max_threads if each read takes a
 * thread. */
static uint32_t depth_for(const qsf_io_wish *wish, uint32_t method, uint32_t usual)
{
    const uint32_t depth = wish->depth != 0 ? wish->depth : usual;
    return method == QSF_IO_URING ? depth : QSF_MIN(depth, wish->max_threads);
}

/* One run of the probe. Each idle queue takes the next read of one part of the file. */
typedef struct run {
    qsf_io *io;
    unsigned char *buffer;
    uint32_t queue_depth;
    uint64_t begin_off;
    uint64_t end_off;
    uint64_t stop_ns;
    _Atomic uint64_t next_off;
    _Atomic uint32_t next_buffer;
    _Atomic uint64_t done_bytes;
    atomic_bool has_failed;
} run;

/* Returns false if the part is read, the time is over or the read cannot start. */
static bool start_next(run *r, qsf_io_queue *queue, unsigned char *dst)
{
    if (qsf_clock_ns() >= r->stop_ns)
        return false;
    const uint64_t off = atomic_fetch_add(&r->next_off, QSF_IO_PROBE_READ_BYTES);
    if (off + QSF_IO_PROBE_READ_BYTES > r->end_off)
        return false;
    const qsf_io_read read = {.off = off,
                              .dst = dst,
                              .n_bytes = QSF_IO_PROBE_READ_BYTES,
                              .need_bytes = QSF_IO_PROBE_READ_BYTES};
    if (qsf_io_start(queue, &read) == QSF_OK)
        return true;
    atomic_store(&r->has_failed, true);
    return false;
}

static void *read_queue(void *arg)
{
    run *const r = arg;
    qsf_io_queue queue;
    if (qsf_io_queue_open(&queue, r->io, r->queue_depth) != QSF_OK) {
        atomic_store(&r->has_failed, true);
        return NULL;
    }
    for (uint32_t i = 0; i < r->queue_depth; i++) {
        const uint32_t buffer_idx = atomic_fetch_add(&r->next_buffer, 1);
        if (!start_next(r, &queue, r->buffer + buffer_idx * QSF_IO_PROBE_READ_BYTES))
            break;
    }
    while (queue.n_started > 0) {
        qsf_io_read had;
        if (qsf_io_finish(&queue, &had) != QSF_OK) {
            atomic_store(&r->has_failed, true);
            break;
        }
        atomic_fetch_add(&r->done_bytes, had.n_bytes);
        start_next(r, &queue, had.dst);
    }
    qsf_io_queue_close(&queue);
    return NULL;
}

/* Bytes per second; 0 after an error. */
static double measure(qsf_io *io, const qsf_io_setup *setup, unsigned char *buffer,
                      uint64_t begin_off, uint64_t end_off)
{
    qsf_thread threads[QSF_IO_MAX_DEPTH];
    const uint32_t n_queues = qsf_io_queue_count(setup);
    const uint64_t start_ns = qsf_clock_ns();
    run r = {.io = io,
             .buffer = buffer,
             .queue_depth = qsf_io_queue_depth(setup),
             .end_off = end_off,
             .stop_ns = start_ns + RUN_NS,
             .next_off = begin_off};
    uint32_t n_threads = 0;
    while (n_threads + 1 < n_queues &&
           qsf_thread_start(&threads[n_threads], STACK_BYTES, read_queue, &r) == QSF_OK)
        n_threads++;
    read_queue(&r); /* this thread is the last reader */
    for (uint32_t i = 0; i < n_threads; i++)
        qsf_thread_join(&threads[i]);
    const uint64_t took_ns = qsf_clock_ns() - start_ns;
    if (n_threads + 1 < n_queues || atomic_load(&r.has_failed) || took_ns == 0)
        return 0.0;
    return (double)atomic_load(&r.done_bytes) * 1e9 / (double)took_ns;
}

/* The setups that the options, the system and the buffer allow. */
static size_t list_candidates(const qsf_io_wish *wish, size_t buffer_bytes, bool has_uring,
                              qsf_io_setup *out)
{
    size_t n = 0;
    for (size_t i = 0; i < N_CANDIDATES; i++) {
        qsf_io_setup setup = candidates[i];
        if (wish->depth != 0)
            setup.depth = depth_for(wish, setup.method, 0);
        if (qsf_io_queue_count(&setup) > wish->max_threads ||
            setup.depth > buffer_bytes / QSF_IO_PROBE_READ_BYTES ||
            (setup.method == QSF_IO_URING && !has_uring))
            continue;
        bool is_listed = false;
        for (size_t j = 0; j < n; j++)
            is_listed |= out[j].method == setup.method && out[j].depth == setup.depth;
        if (!is_listed)
            out[n++] = setup;
    }
    return n;
}

/* True if a uses fewer threads, or the same number and less depth. */
static bool is_lighter(const qsf_io_setup *a, const qsf_io_setup *b)
{
    const uint32_t a_queues = qsf_io_queue_count(a);
    const uint32_t b_queues = qsf_io_queue_count(b);
    return a_queues != b_queues ? a_queues < b_queues : a->depth < b->depth;
}

/* Each run reads its own part of the file, so that caches of the disk do not help a later run. The
 * second round runs backwards, so that a drift of the disk's speed affects all setups. */
static const qsf_io_setup *probe(qsf_io *direct, qsf_io *uring, const qsf_io_setup *setups,
                                 size_t n_setups, unsigned char *buffer)
{
    const uint64_t part_bytes = direct->file->n_bytes / (N_ROUNDS * n_setups) /
                                QSF_IO_PROBE_READ_BYTES * QSF_IO_PROBE_READ_BYTES;
    const uint64_t begin_ns = qsf_clock_ns();
    double speeds[N_CANDIDATES] = {0.0};
    double best = 0.0;
    for (size_t i = 0; i < N_ROUNDS * n_setups; i++) {
        const size_t which = i < n_setups ? i : N_ROUNDS * n_setups - 1 - i;
        const qsf_io_setup *const setup = &setups[which];
        /* Consecutive runs read parts that are far apart. */
        const uint64_t part_idx = i < n_setups ? N_ROUNDS * i : N_ROUNDS * (i - n_setups) + 1;
        if (qsf_clock_ns() - begin_ns >= MOST_NS)
            break;
        const bool is_ring = setup->method == QSF_IO_URING;
        const double speed = (is_ring ? URING_WEIGHT : 1.0) *
                             measure(is_ring ? uring : direct, setup, buffer, part_idx * part_bytes,
                                     (part_idx + 1) * part_bytes);
        speeds[which] = QSF_MAX(speed, speeds[which]);
        best = QSF_MAX(speed, best);
    }
    const qsf_io_setup *chosen = NULL;
    for (size_t i = 0; i < n_setups; i++)
        if (speeds[i] > 0.0 && speeds[i] >= NEARLY_BEST * best &&
            (chosen == NULL || is_lighter(&setups[i], chosen)))
            chosen = &setups[i];
    return chosen;
}

/* io is open for direct reads. Chooses the usual depth or the probe's result; *io is then open for
 * the chosen method. */
static void choose_past_cache(qsf_io *io, const qsf_io_wish *wish, void *buffer,
                              size_t buffer_bytes, qsf_io_setup *setup, bool *is_probed)
{
    *setup = (qsf_io_setup){QSF_IO_DIRECT, depth_for(wish, QSF_IO_DIRECT, USUAL_DEPTH)};
    if (io->file->n_bytes < LEAST_PROBED_BYTES || buffer == NULL)
        return;
    qsf_io uring;
    const bool has_uring = qsf_io_open(&uring, io->file, QSF_IO_URING) == QSF_OK;
    qsf_io_setup setups[N_CANDIDATES];
    const size_t n_setups = list_candidates(wish, buffer_bytes, has_uring, setups);
    if (n_setups >= 2) {
        const qsf_io_setup *const best = probe(io, &uring, setups, n_setups, buffer);
        if (best != NULL) {
            *setup = *best;
            *is_probed = true;
        }
    }
    if (setup->method == QSF_IO_URING) {
        qsf_io_close(io);
        *io = uring;
        return;
    }
    qsf_io_close(&uring);
}

static uint32_t usual_depth(uint32_t method)
{
    return method == QSF_IO_MMAP ? 1 : method == QSF_IO_URING ? USUAL_URING_DEPTH : USUAL_DEPTH;
}

static qsf_status open_as(qsf_io *io, qsf_file *file, const qsf_io_wish *wish, uint32_t method,
                          uint32_t usual, qsf_io_setup *setup)
{
    QSF_TRY(qsf_io_open(io, file, method));
    *setup = (qsf_io_setup){method, depth_for(wish, method, usual)};
    return QSF_OK;
}

qsf_status qsf_io_choose(qsf_io *io, qsf_file *file, const qsf_io_wish *wish, void *buffer,
                         size_t buffer_bytes, qsf_io_setup *setup, bool *is_probed)
{
    *io = (qsf_io){.direct = -1};
    *setup = (qsf_io_setup){0};
    *is_probed = false;
    QSF_FAIL_IF(
        wish->depth > QSF_IO_MAX_DEPTH || wish->max_threads < 1, ARG,
        "I/O depth is %u with %u reading threads, allowed: depth 0 .. %d, threads 1 or more",
        wish->depth, wish->max_threads, QSF_IO_MAX_DEPTH);
    if (wish->method != QSF_IO_AUTO)
        return open_as(io, file, wish, wish->method, usual_depth(wish->method), setup);
    if (wish->read_bytes <= wish->cache_bytes || qsf_io_is_cached(file))
        return open_as(io, file, wish, QSF_IO_BUFFERED, usual_depth(QSF_IO_BUFFERED), setup);
    const qsf_status status = qsf_io_open(io, file, QSF_IO_DIRECT);
    if (status == QSF_ERR_UNSUPPORTED)
        return open_as(io, file, wish, QSF_IO_BUFFERED, usual_depth(QSF_IO_BUFFERED), setup);
    QSF_TRY(status);
    choose_past_cache(io, wish, buffer, buffer_bytes, setup, is_probed);
    return QSF_OK;
}
