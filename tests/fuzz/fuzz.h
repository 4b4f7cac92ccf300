/* fuzz.h - what fuzz targets share: a check that aborts, and files in memory. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_FUZZ_H
#define QSF_TESTS_FUZZ_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "include/qsf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static inline void require(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "fuzz: %s; last text: %s\n", what, qsf_error_detail());
    abort();
}

#if defined(__linux__)

#include <sys/mman.h>
#include <unistd.h>

#define FUZZ_FILE_BYTES (1U << 20)

static inline bool is_about_the_file(qsf_status status)
{
    return status == QSF_ERR_FORMAT || status == QSF_ERR_DAMAGED || status == QSF_ERR_UNSUPPORTED;
}

/* The path of a file in memory with these bytes; the same file each time. */
static inline const char *store(const unsigned char *bytes, size_t n_bytes)
{
    static char path[64];
    static int fd = -1;
    if (fd < 0) {
        fd = memfd_create("fuzz", 0);
        require(fd >= 0, "no file in memory");
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    require(ftruncate(fd, 0) == 0, "truncate");
    require(pwrite(fd, bytes, n_bytes, 0) == (ssize_t)n_bytes, "write");
    return path;
}

#endif
#endif
