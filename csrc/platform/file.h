/* file.h - a file opened for reading, or one without a name: exact reads and writes at an offset.
 *
 * A read or write is complete or fails; these functions handle short ones and EINTR.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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
