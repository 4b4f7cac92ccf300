/* io_way.h - a way to read is a table of functions; the records that all ways use.
 *
 * A way reads in the calling thread, or the system works on several reads of a queue at the same
 * time (queue_fns).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"
#include "platform/file.h"

#define QSF_IO_ALIGN 4096 /* alignment of offset, address and size of a read */
#define QSF_IO_MAX_DEPTH 32
/* Reads through the page cache are made in steps of this size. */
#define QSF_IO_CACHED_STEP_BYTES ((size_t)256 * 1024)

typedef struct qsf_io_queue qsf_io_queue;
typedef struct qsf_io_way qsf_io_way;

typedef struct qsf_io {
    qsf_file *file; /* borrowed */
    uint32_t method;
    const qsf_io_way *way;
    intptr_t direct; /* handle of the same file for direct reads; -1: not used */
    const unsigned char *map;
} qsf_io;

/* off, dst and n_bytes are multiples of QSF_IO_ALIGN. The file may end inside the read, but not
 * before need_bytes; bytes of dst after the file's end are undefined. */
typedef struct qsf_io_read {
    uint64_t off;
    unsigned char *dst;
    size_t n_bytes;
    size_t need_bytes;
    uint64_t tag; /* for the caller */
} qsf_io_read;

struct qsf_io_queue {
    qsf_io *io; /* borrowed */
    uint32_t depth;
    uint32_t n_started;
    qsf_io_read started[QSF_IO_MAX_DEPTH]; /* n_started of them; a queue has its own slots */
    void *ring;                            /* made by queue_fns->open; else NULL */
};

/* Reads that the system performs while the thread continues. `open` makes queue->ring, `close`
 * waits for the reads in flight and frees it. */
typedef struct qsf_io_queue_fns {
    qsf_status (*open)(qsf_io_queue *queue);
    void (*close)(qsf_io_queue *queue);
    qsf_status (*start)(qsf_io_queue *queue, const qsf_io_read *read);
    qsf_status (*finish)(qsf_io_queue *queue, qsf_io_read *read);
    bool (*has_ended)(const qsf_io_queue *queue); /* `finish` need not wait */
} qsf_io_queue_fns;

struct qsf_io_way {
    const char *name;
    /* Sets io->direct or io->map and tries a read. On failure it changes neither. */
    qsf_status (*open)(qsf_io *io);
    void (*close)(qsf_io *io); /* also after a failed open; NULL: nothing is open */
    /* Reads in the calling thread, completely or not at all. NULL: the way has queue_fns. */
    qsf_status (*read)(const qsf_io *io, const qsf_io_read *read);
    const qsf_io_queue_fns *queue_fns;
    void (*stop_readahead)(const qsf_io *io); /* NULL: the kernel does not read ahead */
};

extern const qsf_io_way qsf_io_buffered_way;
extern const qsf_io_way qsf_io_direct_way;
extern const qsf_io_way qsf_io_uring_way;
extern const qsf_io_way qsf_io_mmap_way;

/* Opens io->direct and tries a read through it; closes it. */
qsf_status qsf_io_direct_open(qsf_io *io);
void qsf_io_direct_close(qsf_io *io);

/* `read` through the page cache, and through io->direct. */
qsf_status qsf_io_read_buffered(const qsf_io *io, const qsf_io_read *read);
qsf_status qsf_io_read_direct(const qsf_io *io, const qsf_io_read *read);

/* The errors of a read: an error of the system (QSF_ERR_IO), the file ends early
 * (QSF_ERR_FORMAT). */
qsf_status qsf_io_fail_system(const qsf_io *io, const qsf_io_read *read, int error);
qsf_status qsf_io_fail_short(const qsf_io *io, const qsf_io_read *read, size_t done_bytes);
