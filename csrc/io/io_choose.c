/* io_choose.c - chooses how to read a file: by option, cache state or free memory. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/checked.h"
#include "base/status.h"
#include "io/io.h"
#include "platform/file.h"

static qsf_status open_as(qsf_io *io, qsf_file *file, const qsf_io_wish *wish, uint32_t method,
                          qsf_io_setup *setup)
{
    QSF_TRY(qsf_io_open(io, file, method));
    const uint32_t usual = method == QSF_IO_MMAP ? 1 : QSF_IO_USUAL_DEPTH;
    const uint32_t depth = wish->depth != 0 ? wish->depth : usual;
    const bool is_queue = io->way->queue_fns != NULL; /* else each read takes a thread */
    *setup = (qsf_io_setup){method, is_queue ? depth : QSF_MIN(depth, wish->max_threads),
                            wish->depth != 0};
    return QSF_OK;
}

qsf_status qsf_io_choose(qsf_io *io, qsf_file *file, const qsf_io_wish *wish, qsf_io_setup *setup)
{
    *io = (qsf_io){.direct = -1};
    *setup = (qsf_io_setup){0};
    QSF_FAIL_IF(
        wish->depth > QSF_IO_MAX_DEPTH || wish->max_threads < 1, ARG,
        "I/O depth is %u with %u reading threads, allowed: depth 0 .. %d, threads 1 or more",
        wish->depth, wish->max_threads, QSF_IO_MAX_DEPTH);
    if (wish->method != QSF_IO_AUTO)
        return open_as(io, file, wish, wish->method, setup);
    if (wish->read_bytes <= wish->cache_bytes || qsf_io_is_cached(file))
        return open_as(io, file, wish, QSF_IO_BUFFERED, setup);
    const qsf_status status = open_as(io, file, wish, QSF_IO_DIRECT, setup);
    return status == QSF_ERR_UNSUPPORTED ? open_as(io, file, wish, QSF_IO_BUFFERED, setup) : status;
}
