/* io.h - reads a file by one of several methods; a read is started first and finished later.
 *
 * A qsf_io is a file opened for a method; threads share it. A qsf_io_queue belongs to one thread
 * and has up to `depth` reads in flight.
 *
 *     method     past the page cache   reads in flight
 *     buffered   no                    one for each queue
 *     direct     yes                   one for each queue
 *     uring      yes                   up to the depth of the queue
 *     mmap       no                    one for each queue; a read copies (see io_mmap.c)
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "platform/file.h"

/* Most reads in flight unless an option says more. */
#define QSF_IO_USUAL_DEPTH 8

/* A method and the number of reads in flight. */
typedef struct qsf_io_setup {
    uint32_t method; /* a qsf_io_method, not AUTO */
    uint32_t depth;  /* 1 .. QSF_IO_MAX_DEPTH */
    bool is_fixed;   /* the depth was asked for; else fewer reads are in flight if that is faster */
} qsf_io_setup;

/* Opens `file` for a method and tries a read. QSF_ERR_UNSUPPORTED: the system, the file system or
 * a sandbox does not allow the method; the text says which. */
qsf_status qsf_io_open(qsf_io *io, qsf_file *file, uint32_t method);
void qsf_io_close(qsf_io *io); /* accepts a zeroed or closed qsf_io */

/* Never NULL: "buffered", "direct", "uring", "mmap", "auto". */
const char *qsf_io_method_name(uint32_t method);

/* Turns off the kernel's readahead; use it in a memory control group. Pages of a readahead (8 MB on
 * some disks, 16 MB for sequential reads) are locked until they are read. If locked pages fill the
 * group, the kernel can reclaim nothing and kills the process. Elsewhere readahead is useful: it
 * fills the page cache with larger pages. */
void qsf_io_stop_readahead(const qsf_io *io);

/* Bytes of the page cache that `depth` reads in flight then lock, so that the kernel cannot reclaim
 * them; 0 past the page cache. AUTO counts as buffered. */
uint64_t qsf_io_locked_bytes(uint32_t method, uint32_t depth);

/* Number of queues (threads) of a setup, and the depth of each. */
uint32_t qsf_io_queue_count(const qsf_io_setup *setup);
uint32_t qsf_io_queue_depth(const qsf_io_setup *setup);

qsf_status qsf_io_queue_open(qsf_io_queue *queue, qsf_io *io, uint32_t depth);
/* Waits for the reads in flight and discards them; afterwards nothing writes to their dst. Any
 * thread may call it. Accepts a zeroed or closed queue. */
void qsf_io_queue_close(qsf_io_queue *queue);

/* Begins a read; fewer than `depth` reads may be in flight. All methods but uring do the work in
 * qsf_io_finish(). */
qsf_status qsf_io_start(qsf_io_queue *queue, const qsf_io_read *read);

/* Waits for any read in flight (there must be one), stores it in *read and returns its status:
 * QSF_OK, QSF_ERR_IO (error of the system) or QSF_ERR_FORMAT (the file ends before need_bytes).
 * Handles short reads and EINTR. Faults that a test injects happen here. */
qsf_status qsf_io_finish(qsf_io_queue *queue, qsf_io_read *read);

/* True if qsf_io_finish() may be called and need not wait; false if a read takes place there. */
bool qsf_io_has_ended(const qsf_io_queue *queue);

/* ---- chooses how to read: for this file and the free memory ---- */

typedef struct qsf_io_wish {
    uint32_t method;      /* a qsf_io_method; an error if the system lacks it */
    uint32_t depth;       /* 0: choose */
    uint32_t max_threads; /* most reading threads; memory for their stacks is planned */
    uint64_t
        cache_bytes;     /* free memory for the page cache, in addition to the model's own memory */
    uint64_t read_bytes; /* bytes that every pass reads */
} qsf_io_wish;

/* Chooses a setup and opens *io for it. The first condition that holds decides:
 *
 *     wish->method is not AUTO                            that method, or QSF_ERR_UNSUPPORTED
 *     the page cache holds most of the file, or
 *     read_bytes <= cache_bytes                           buffered
 *     direct reads do not work                            buffered
 *     else                                                direct
 *
 * A depth in `wish` holds in all cases; no setup uses more than max_threads threads.
 * QSF_ERR_ARG: the depth is above QSF_IO_MAX_DEPTH, or the method does not exist. */
qsf_status qsf_io_choose(qsf_io *io, qsf_file *file, const qsf_io_wish *wish, qsf_io_setup *setup);
