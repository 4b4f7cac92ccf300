/* io_choose.h - which way of reading suits this file, this disk and the free memory. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_IO_IO_CHOOSE_H
#define QSF_IO_IO_CHOOSE_H

#include "io/io.h"

typedef struct qsf_io_wish {
    uint32_t method;      /* a qsf_io_method; a name that cannot be had is an error */
    uint32_t depth;       /* 0: chosen */
    uint32_t max_threads; /* that read: there is memory for the stacks of so many */
    qsf_io_setup known;   /* an earlier probe's result; method 0: none */
    uint64_t cache_bytes; /* what the page cache may still take, the model's own memory aside */
    uint64_t read_bytes;  /* what is read, again and again */
} qsf_io_wish;

/* A buffer of so many bytes lets the probe try all that it knows; with fewer, less deep ones. */
#define QSF_IO_PROBE_READ_BYTES ((size_t)512 * 1024)
#define QSF_IO_PROBE_BYTES (8 * QSF_IO_PROBE_READ_BYTES)

/* Decides and opens. In this order:
 *
 *     a method is named                                   that one, or QSF_ERR_UNSUPPORTED
 *     the page cache holds most of the file already, or
 *     read_bytes fit in cache_bytes                       buffered
 *     something is known, and can still be had            what is known
 *     direct cannot be had                                buffered
 *     the file or the buffer is too small for a probe     direct, four at a time
 *     else                                                what the probe finds fastest
 *
 * A wished depth is kept in each of these; none takes more threads than max_threads. The probe
 * takes about a quarter of a second (longer only where single reads take that long), reads into
 * `buffer` [buffer_bytes], which is aligned to QSF_IO_ALIGN, and prefers fewer threads and fewer
 * reads at the same time where they are as fast within 5 %. *is_probed: it was made.
 * QSF_ERR_ARG: a depth above QSF_IO_MAX_DEPTH, or no such method. */
qsf_status qsf_io_choose(qsf_io *io, qsf_file *file, const qsf_io_wish *wish, void *buffer,
                         size_t buffer_bytes, qsf_io_setup *setup, bool *is_probed);

#endif
