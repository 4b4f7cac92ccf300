/* file.h - a file opened for reading: size, and exact reads at an offset.
 *
 * A read is complete or failed: short reads and EINTR end here.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_FILE_H
#define QSF_PLATFORM_FILE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"

/* What a test asks to go wrong with one read. */
typedef enum qsf_fault_kind {
    QSF_FAULT_FAIL = 0,    /* QSF_ERR_IO, as from a bad sector */
    QSF_FAULT_SHORT = 1,   /* QSF_ERR_FORMAT, as from a file that ends early */
    QSF_FAULT_SLOW = 2,    /* the read takes QSF_FAULT_SLOW_MS longer; its result is right */
    QSF_FAULT_CORRUPT = 3, /* the read goes well, but for one bit of what it brought */
    QSF_FAULT_NONE = 4     /* none; never asked for */
} qsf_fault_kind;

#define QSF_FAULT_SLOW_MS 300

typedef struct qsf_file {
    int fd; /* -1: closed */
    uint64_t n_bytes;
    /* Tests: so many reads go well, then one is faulty, then none. Negative: never. */
    _Atomic int64_t reads_until_fault;
    _Atomic(qsf_fault_kind) fault_kind;
} qsf_file;

/* `path` is UTF-8. QSF_ERR_IO: missing, unreadable, or not a regular file; the text
 * names the path. On failure the file is closed (fd -1). */
qsf_status qsf_file_open(qsf_file *f, const char *path);
void qsf_file_close(qsf_file *f);

/* Reads exactly n_bytes. QSF_ERR_IO: the system refused; QSF_ERR_FORMAT: the file
 * ends early (it shrank after it was opened). Any thread. */
qsf_status qsf_file_read_at(qsf_file *f, uint64_t offset, void *dst, size_t n_bytes);

/* For those who read the file in another way (io.h): counts one read that went well, and makes
 * it the faulty one when it is its turn. n_bytes: what the caller will look at. */
qsf_status qsf_file_end_read(qsf_file *f, uint64_t offset, void *dst, size_t n_bytes);

#endif
