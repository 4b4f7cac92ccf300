/* file.c - complete reads and writes by the calls of the system, and the faults that a test injects
 * into reads.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/file.h"

#include <inttypes.h>

#include "base/checked.h"
#include "base/status.h"
#include "platform/clock.h"

/* Counts down and returns the fault of this read. */
static qsf_fault_kind next_fault(qsf_file *f)
{
    if (atomic_load_explicit(&f->reads_until_fault, memory_order_relaxed) < 0)
        return QSF_FAULT_NONE;
    if (atomic_fetch_sub_explicit(&f->reads_until_fault, 1, memory_order_relaxed) != 0)
        return QSF_FAULT_NONE;
    return atomic_load_explicit(&f->fault_kind, memory_order_relaxed);
}

qsf_status qsf_file_end_read(qsf_file *f, uint64_t offset, void *dst, size_t n_bytes)
{
    switch (next_fault(f)) {
    case QSF_FAULT_FAIL:
        return QSF_FAIL(IO, "read of %zu bytes at %" PRIu64 ": fault injected by a test", n_bytes,
                        offset);
    case QSF_FAULT_SHORT:
        return QSF_FAIL(FORMAT,
                        "file ends early (injected by a test): wanted %zu bytes at %" PRIu64,
                        n_bytes, offset);
    case QSF_FAULT_SLOW:
        qsf_sleep_ms(QSF_FAULT_SLOW_MS);
        break;
    case QSF_FAULT_CORRUPT:
        if (n_bytes > 0)
            ((unsigned char *)dst)[n_bytes / 2] ^= 1;
        break;
    case QSF_FAULT_NONE:
        break;
    }
    return QSF_OK;
}

qsf_status qsf_file_read_at(qsf_file *f, uint64_t offset, void *dst, size_t n_bytes)
{
    if (!qsf_extent_inside(offset, n_bytes, INT64_MAX)) /* offsets of the system are signed */
        return QSF_FAIL(FORMAT, "read of %zu bytes at %" PRIu64 " is beyond any file", n_bytes,
                        offset);
    size_t done_bytes = 0;
    while (done_bytes < n_bytes) {
        const size_t left_bytes = n_bytes - done_bytes;
        size_t got_bytes;
        const int error =
            qsf_file_read_once(f->handle, offset + done_bytes, (unsigned char *)dst + done_bytes,
                               left_bytes, &got_bytes);
        if (error != 0) {
            char why[QSF_SYSTEM_ERROR_BYTES];
            qsf_system_error_text(error, why);
            return QSF_FAIL(IO, "read of %zu bytes at %" PRIu64 ": %s", left_bytes,
                            offset + done_bytes, why);
        }
        QSF_FAIL_IF(got_bytes == 0, FORMAT,
                    "file ends %zu bytes early: wanted %zu at %" PRIu64 ", it had %" PRIu64
                    " bytes when opened",
                    left_bytes, n_bytes, offset, f->n_bytes);
        done_bytes += got_bytes;
    }
    return qsf_file_end_read(f, offset, dst, n_bytes);
}

qsf_status qsf_file_write_at(qsf_file *f, uint64_t offset, const void *src, size_t n_bytes)
{
    size_t done_bytes = 0;
    while (done_bytes < n_bytes) {
        size_t put_bytes;
        const int error = qsf_file_write_once(f->handle, offset + done_bytes,
                                              (const unsigned char *)src + done_bytes,
                                              n_bytes - done_bytes, &put_bytes);
        if (error != 0 || put_bytes == 0) {
            char why[QSF_SYSTEM_ERROR_BYTES] = "nothing was written";
            if (error != 0)
                qsf_system_error_text(error, why);
            return QSF_FAIL(IO, "write of %zu bytes at %" PRIu64 ": %s", n_bytes, offset, why);
        }
        done_bytes += put_bytes;
    }
    return QSF_OK;
}

/* ---- what all ways of reading share ---- */

qsf_status qsf_io_fail_short(const qsf_io *io, const qsf_io_read *read, size_t done_bytes)
{
    return QSF_FAIL(FORMAT,
                    "file ends %zu bytes early: wanted %zu at %" PRIu64 ", it had %" PRIu64
                    " bytes when opened",
                    read->need_bytes - done_bytes, read->need_bytes, read->off, io->file->n_bytes);
}

qsf_status qsf_io_fail_system(const qsf_io *io, const qsf_io_read *read, int error)
{
    char why[QSF_SYSTEM_ERROR_BYTES];
    qsf_system_error_text(error, why);
    return QSF_FAIL(IO, "%s read of %zu bytes at %" PRIu64 ": %s", io->way->name, read->n_bytes,
                    read->off, why);
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
        const int error = qsf_file_read_once(handle, read->off + from, read->dst + from,
                                             QSF_MIN(left_bytes, step_bytes), &got_bytes);
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
