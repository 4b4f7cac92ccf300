/* io_way.c - shared by all ways of reading: steps, and the texts of errors. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/io_way.h"

#include <inttypes.h>

#include "base/status.h"
#include "platform/file_calls.h"

qsf_status qsf_io_fail_short(const qsf_io *io, const qsf_io_read *read, size_t done_bytes)
{
    return QSF_FAIL(QSF_ERR_FORMAT,
                    "file ends %zu bytes early: wanted %zu at %" PRIu64 ", it had %" PRIu64
                    " bytes when opened",
                    read->need_bytes - done_bytes, read->need_bytes, read->off, io->file->n_bytes);
}

qsf_status qsf_io_fail_system(const qsf_io *io, const qsf_io_read *read, int error)
{
    char why[QSF_SYSTEM_ERROR_BYTES];
    qsf_system_error_text(error, why);
    return QSF_FAIL(QSF_ERR_IO, "%s read of %zu bytes at %" PRIu64 ": %s", io->way->name,
                    read->n_bytes, read->off, why);
}

/* Reads through a handle in steps of at most step_bytes, until need_bytes are there. */
static qsf_status read_steps(const qsf_io *io, intptr_t handle, const qsf_io_read *read,
                             size_t step_bytes)
{
    size_t done_bytes = 0;
    while (done_bytes < read->need_bytes) {
        /* A direct read must begin at a multiple of QSF_IO_ALIGN, so some bytes are read twice. */
        const size_t from = done_bytes / QSF_IO_ALIGN * QSF_IO_ALIGN;
        const size_t left_bytes = read->n_bytes - from;
        size_t got_bytes;
        const int error =
            qsf_file_read_once(handle, read->off + from, read->dst + from,
                               left_bytes < step_bytes ? left_bytes : step_bytes, &got_bytes);
        if (error != 0)
            return qsf_io_fail_system(io, read, error);
        if (from + got_bytes <= done_bytes)
            return qsf_io_fail_short(io, read, done_bytes);
        done_bytes = from + got_bytes;
    }
    return QSF_OK;
}

qsf_status qsf_io_read_buffered(const qsf_io *io, const qsf_io_read *read)
{
    return read_steps(io, io->file->handle, read, QSF_IO_CACHED_STEP_BYTES);
}

qsf_status qsf_io_read_direct(const qsf_io *io, const qsf_io_read *read)
{
    return read_steps(io, io->direct, read, SIZE_MAX);
}
