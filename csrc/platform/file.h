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

typedef struct qsf_file {
    int fd; /* -1: closed */
    uint64_t n_bytes;
    /* Tests: so many reads go well, then one fails, then none. Negative: never. */
    _Atomic int64_t reads_until_fault;
} qsf_file;

/* `path` is UTF-8. QSF_ERR_IO: missing, unreadable, or not a regular file; the text
 * names the path. On failure the file is closed (fd -1). */
qsf_status qsf_file_open(qsf_file *f, const char *path);
void qsf_file_close(qsf_file *f);

/* Reads exactly n_bytes. QSF_ERR_IO: the system refused; QSF_ERR_FORMAT: the file
 * ends early (it shrank after it was opened). Any thread. */
qsf_status qsf_file_read_at(qsf_file *f, uint64_t offset, void *dst, size_t n_bytes);

#endif
