/* io.c - opens a file for a method, and hands reads to the method. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "io/io.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"

/* Returns NULL if no method has this number. */
static const qsf_io_way *way_of(uint32_t method)
{
    static const qsf_io_way *const ways[] = {
        [QSF_IO_BUFFERED] = &qsf_io_buffered_way,
        [QSF_IO_DIRECT] = &qsf_io_direct_way,
        [QSF_IO_URING] = &qsf_io_uring_way,
        [QSF_IO_MMAP] = &qsf_io_mmap_way,
    };
    return method < sizeof ways / sizeof ways[0] ? ways[method] : NULL;
}

static bool has_queue(const qsf_io_setup *setup)
{
    const qsf_io_way *const way = way_of(setup->method);
    return way != NULL && way->queue_fns != NULL;
}

const char *qsf_io_method_name(uint32_t method)
{
    const qsf_io_way *const way = way_of(method);
    return way != NULL ? way->name : method == QSF_IO_AUTO ? "auto" : "unknown";
}

void qsf_io_stop_readahead(const qsf_io *io)
{
    if (io->way != NULL && io->way->stop_readahead != NULL)
        io->way->stop_readahead(io);
}

uint64_t qsf_io_locked_bytes(uint32_t method, uint32_t depth)
{
    switch (method) {
    case QSF_IO_DIRECT:
    case QSF_IO_URING:
        return 0;
    case QSF_IO_MMAP: /* the step being copied, and the next one */
        return UINT64_C(2) * depth * QSF_IO_CACHED_STEP_BYTES;
    default:
        return (uint64_t)depth * QSF_IO_CACHED_STEP_BYTES;
    }
}

uint32_t qsf_io_queue_count(const qsf_io_setup *setup)
{
    return has_queue(setup) ? 1 : setup->depth;
}

uint32_t qsf_io_queue_depth(const qsf_io_setup *setup)
{
    return has_queue(setup) ? setup->depth : 1;
}

qsf_status qsf_io_open(qsf_io *io, qsf_file *file, uint32_t method)
{
    *io = (qsf_io){.direct = -1};
    const qsf_io_way *const way = way_of(method);
    QSF_FAIL_IF(way == NULL, ARG, "I/O method %u does not exist", method);
    *io = (qsf_io){.file = file, .method = method, .way = way, .direct = -1};
    const qsf_status status = way->open(io);
    if (status != QSF_OK)
        qsf_io_close(io);
    return status;
}

void qsf_io_close(qsf_io *io)
{
    if (io->way == NULL)
        return;
    if (io->way->close != NULL)
        io->way->close(io);
    *io = (qsf_io){.direct = -1};
}

qsf_status qsf_io_queue_open(qsf_io_queue *queue, qsf_io *io, uint32_t depth)
{
    *queue = (qsf_io_queue){.io = io, .depth = depth};
    QSF_FAIL_IF(depth < 1 || depth > QSF_IO_MAX_DEPTH, ARG, "I/O depth is %u, allowed: 1 .. %d",
                depth, QSF_IO_MAX_DEPTH);
    return io->way->queue_fns != NULL ? io->way->queue_fns->open(queue) : QSF_OK;
}

void qsf_io_queue_close(qsf_io_queue *queue)
{
    if (queue->ring != NULL)
        queue->io->way->queue_fns->close(queue);
    queue->ring = NULL;
    queue->n_started = 0; /* drops reads that have not started */
}

qsf_status qsf_io_start(qsf_io_queue *queue, const qsf_io_read *read)
{
    assert(queue->n_started < queue->depth);
    assert(read->off % QSF_IO_ALIGN == 0 && read->n_bytes % QSF_IO_ALIGN == 0);
    assert((uintptr_t)read->dst % QSF_IO_ALIGN == 0);
    assert(read->need_bytes <= read->n_bytes);
    if (!qsf_extent_inside(read->off, read->n_bytes, INT64_MAX)) /* off_t is signed */
        return QSF_FAIL(FORMAT, "read of %zu bytes at %" PRIu64 " is beyond any file",
                        read->n_bytes, read->off);
    if (queue->ring != NULL)
        return queue->io->way->queue_fns->start(queue, read);
    queue->started[queue->n_started++] = *read;
    return QSF_OK;
}

/* Performs the oldest started read in this thread. */
static qsf_status finish_here(qsf_io_queue *queue, qsf_io_read *read)
{
    *read = queue->started[0];
    queue->n_started--;
    memmove(queue->started, queue->started + 1, queue->n_started * sizeof *queue->started);
    return queue->io->way->read(queue->io, read);
}

qsf_status qsf_io_finish(qsf_io_queue *queue, qsf_io_read *read)
{
    assert(queue->n_started > 0);
    QSF_TRY(queue->ring != NULL ? queue->io->way->queue_fns->finish(queue, read)
                                : finish_here(queue, read));
    return qsf_file_end_read(queue->io->file, read->off, read->dst, read->need_bytes);
}

bool qsf_io_has_ended(const qsf_io_queue *queue)
{
    return queue->ring != NULL && queue->n_started > 0 &&
           queue->io->way->queue_fns->has_ended(queue);
}
