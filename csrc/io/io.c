/* io.c - opens a file for a method, and hands reads to the method. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "io/io.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "io/io_ways.h"

const char *qsf_io_method_name(uint32_t method)
{
    static const char *const names[] = {"auto", "buffered", "direct", "uring", "mmap"};
    return method < sizeof names / sizeof names[0] ? names[method] : "unknown";
}

uint32_t qsf_io_lane_count(const qsf_io_setup *setup)
{
    return setup->method == QSF_IO_URING ? 1 : setup->depth;
}

uint32_t qsf_io_lane_depth(const qsf_io_setup *setup)
{
    return setup->method == QSF_IO_URING ? setup->depth : 1;
}

static qsf_status open_method(qsf_io *io)
{
    switch (io->method) {
    case QSF_IO_BUFFERED:
        qsf_io_buffered_advise(io);
        return QSF_OK;
    case QSF_IO_DIRECT:
        return qsf_io_direct_open(io);
    case QSF_IO_URING:
        QSF_TRY(qsf_io_direct_open(io));
        return qsf_io_uring_try(io);
    case QSF_IO_MMAP:
        return qsf_io_mmap_open(io);
    default:
        return QSF_FAIL(QSF_ERR_ARG, "there is no way to read number %" PRIu32, io->method);
    }
}

qsf_status qsf_io_open(qsf_io *io, qsf_file *file, uint32_t method)
{
    *io = (qsf_io){.file = file, .method = method, .direct_fd = -1};
    const qsf_status status = open_method(io);
    if (status != QSF_OK)
        qsf_io_close(io);
    return status;
}

void qsf_io_close(qsf_io *io)
{
    if (io->file == NULL)
        return;
    qsf_io_direct_close(io);
    qsf_io_mmap_close(io);
    *io = (qsf_io){.direct_fd = -1};
}

qsf_status qsf_io_lane_open(qsf_io_lane *lane, qsf_io *io, uint32_t depth)
{
    *lane = (qsf_io_lane){.io = io, .depth = depth};
    if (depth < 1 || depth > QSF_IO_MAX_DEPTH)
        return QSF_FAIL(QSF_ERR_ARG, "%" PRIu32 " reads at the same time, allowed: 1 to %d", depth,
                        QSF_IO_MAX_DEPTH);
    return io->method == QSF_IO_URING ? qsf_io_uring_lane_open(lane) : QSF_OK;
}

void qsf_io_lane_close(qsf_io_lane *lane)
{
    if (lane->ring != NULL)
        qsf_io_uring_lane_close(lane);
    lane->ring = NULL;
    lane->n_started = 0; /* what only waited to be read is forgotten */
}

qsf_status qsf_io_start(qsf_io_lane *lane, const qsf_io_read *read)
{
    assert(lane->n_started < lane->depth);
    assert(read->off % QSF_IO_ALIGN == 0 && read->n_bytes % QSF_IO_ALIGN == 0);
    assert((uintptr_t)read->dst % QSF_IO_ALIGN == 0);
    assert(read->need_bytes <= read->n_bytes);
    if (!qsf_extent_inside(read->off, read->n_bytes, INT64_MAX)) /* off_t is signed */
        return QSF_FAIL(QSF_ERR_FORMAT, "read of %zu bytes at %" PRIu64 " is beyond any file",
                        read->n_bytes, read->off);
    if (lane->ring != NULL)
        return qsf_io_uring_start(lane, read);
    lane->started[lane->n_started++] = *read;
    return QSF_OK;
}

/* Makes the read that was started first. */
static qsf_status finish_here(qsf_io_lane *lane, qsf_io_read *read)
{
    const qsf_io *const io = lane->io;
    *read = lane->started[0];
    lane->n_started--;
    memmove(lane->started, lane->started + 1, lane->n_started * sizeof *lane->started);
    if (io->method == QSF_IO_MMAP)
        return qsf_io_mmap_read(io, read);
    return qsf_io_pread(io, io->method == QSF_IO_DIRECT ? io->direct_fd : io->file->fd, read);
}

qsf_status qsf_io_finish(qsf_io_lane *lane, qsf_io_read *read)
{
    assert(lane->n_started > 0);
    QSF_TRY(lane->ring != NULL ? qsf_io_uring_finish(lane, read) : finish_here(lane, read));
    return qsf_file_end_read(lane->io->file, read->off, read->dst, read->need_bytes);
}

qsf_status qsf_io_fail_system(const char *name, const qsf_io_read *read, int system_errno)
{
    return QSF_FAIL(QSF_ERR_IO, "%s read of %zu bytes at %" PRIu64 ": %s", name, read->n_bytes,
                    read->off, strerror(system_errno));
}

qsf_status qsf_io_fail_short(const qsf_io *io, const qsf_io_read *read, size_t done_bytes)
{
    return QSF_FAIL(QSF_ERR_FORMAT,
                    "file ends %zu bytes early: wanted %zu at %" PRIu64 ", it had %" PRIu64
                    " bytes when opened",
                    read->need_bytes - done_bytes, read->need_bytes, read->off, io->file->n_bytes);
}
