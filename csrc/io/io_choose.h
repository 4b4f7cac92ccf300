/* io_choose.h - chooses how to read: for this file, this disk and the free memory. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "io/io.h"

typedef struct qsf_io_wish {
    uint32_t method;      /* a qsf_io_method; an error if the system lacks it */
    uint32_t depth;       /* 0: choose */
    uint32_t max_threads; /* most reading threads; memory for their stacks is planned */
    uint64_t
        cache_bytes;     /* free memory for the page cache, in addition to the model's own memory */
    uint64_t read_bytes; /* bytes that every pass reads */
} qsf_io_wish;

/* A buffer of QSF_IO_PROBE_BYTES lets the probe try all setups; a smaller one limits the depth. */
#define QSF_IO_PROBE_READ_BYTES ((size_t)512 * 1024)
#define QSF_IO_PROBE_BYTES (8 * QSF_IO_PROBE_READ_BYTES)

/* Chooses a setup and opens *io for it. The first condition that holds decides:
 *
 *     wish->method is not AUTO                            that method, or QSF_ERR_UNSUPPORTED
 *     the page cache holds most of the file, or
 *     read_bytes <= cache_bytes                           buffered
 *     direct reads do not work                            buffered
 *     the file or the buffer is too small for a probe     direct, depth 4
 *     else                                                the fastest setup of the probe
 *
 * A depth in `wish` holds in all cases; no setup uses more than max_threads threads. The probe
 * takes about 250 ms (more only if single reads are that slow). It reads into `buffer`
 * [buffer_bytes], aligned to QSF_IO_ALIGN. Among setups within 5 % of the fastest it prefers fewer
 * threads, then less depth. *is_probed: true if the result comes from the probe.
 * QSF_ERR_ARG: the depth is above QSF_IO_MAX_DEPTH, or the method does not exist. */
qsf_status qsf_io_choose(qsf_io *io, qsf_file *file, const qsf_io_wish *wish, void *buffer,
                         size_t buffer_bytes, qsf_io_setup *setup, bool *is_probed);
