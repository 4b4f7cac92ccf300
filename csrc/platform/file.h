/* file.h - a file opened for reading, or one without a name: exact reads and writes at an offset.
 *
 * A read or write is complete or fails; these functions handle short ones and EINTR.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>

#include "include/qsf.h"

/* A fault that a test injects into one read. */
typedef enum qsf_fault_kind {
    QSF_FAULT_FAIL = 0,    /* returns QSF_ERR_IO, like a bad sector */
    QSF_FAULT_SHORT = 1,   /* returns QSF_ERR_FORMAT, like a file that ends early */
    QSF_FAULT_SLOW = 2,    /* takes QSF_FAULT_SLOW_MS longer; the data is right */
    QSF_FAULT_CORRUPT = 3, /* succeeds, but one bit of the data is wrong */
    QSF_FAULT_NONE = 4     /* no fault; tests never inject it */
} qsf_fault_kind;

#define QSF_FAULT_SLOW_MS 300

typedef struct qsf_file {
    intptr_t handle; /* of the system; -1: closed */
    uint64_t n_bytes;
    /* For tests: this many reads succeed, the next one is faulty, later ones succeed. Negative: no
     * read is faulty. */
    _Atomic int64_t reads_until_fault;
    _Atomic(qsf_fault_kind) fault_kind;
} qsf_file;

/* `path` is UTF-8. QSF_ERR_IO: the file is missing, unreadable or not a regular file; the text
 * names the path. On failure the handle is
 * -1. */
qsf_status qsf_file_open(qsf_file *f, const char *path);
void qsf_file_close(qsf_file *f);

/* Reads exactly n_bytes. QSF_ERR_IO: the system reports an error; QSF_ERR_FORMAT: the file ends
 * early (it shrank after it was opened). Any thread may call it. */
qsf_status qsf_file_read_at(qsf_file *f, uint64_t offset, void *dst, size_t n_bytes);

/* Creates a file without a name in `folder` (UTF-8), to read and write; its bytes are gone when it
 * is closed, or with the process. The system does not read ahead in it. QSF_ERR_IO: it cannot be
 * created; QSF_ERR_ARG: the folder lies in memory. The text names the folder. */
qsf_status qsf_file_create_unnamed(qsf_file *f, const char *folder);

/* Writes exactly n_bytes. QSF_ERR_IO: the system reports an error, such as a full disk. */
qsf_status qsf_file_write_at(qsf_file *f, uint64_t offset, const void *src, size_t n_bytes);

/* For reads by other means (io.h): counts one successful read and injects the fault of a test if
 * its turn has come. n_bytes: bytes that the caller will use. */
qsf_status qsf_file_end_read(qsf_file *f, uint64_t offset, void *dst, size_t n_bytes);

/* Samples pages all over the file. True if the page cache holds more than half of them; false if
 * the system cannot report it. Hardly changes the cache. */
bool qsf_io_is_cached(const qsf_file *file);

/* ---- calls that each system implements; file.c makes complete reads and writes from them ---- */

#define QSF_SYSTEM_ERROR_BYTES 160

/* One call of the system: n_bytes at `offset`, or fewer, which *done_bytes says; after a read 0 is
 * the end of the file. Calls interrupted by a signal are repeated. Any thread may call them.
 * Returns 0 or an error of the system. */
int qsf_file_read_once(intptr_t handle, uint64_t offset, void *dst, size_t n_bytes,
                       size_t *done_bytes);
int qsf_file_write_once(intptr_t handle, uint64_t offset, const void *src, size_t n_bytes,
                        size_t *done_bytes);

/* Writes the text of an error of the system. */
void qsf_system_error_text(int code, char text[QSF_SYSTEM_ERROR_BYTES]);

/* ---- a way to read is a table of functions; the records that all ways use ---- */

/* A way reads in the calling thread, or the system works on several reads of a queue at the same
 * time (queue_fns). */

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
