/* fake_pread.h - this program's own pread, so that interruptions and short reads come when asked
 * for.
 *
 * It stands in for the system's in the library too, which is linked statically.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_FAKE_PREAD_H
#define QSF_TESTS_FAKE_PREAD_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include "io/io.h"

static struct {
    int n_interrupts;  /* so many calls fail with EINTR first */
    size_t most_bytes; /* that one call delivers; 0: as many as wanted */
    int fail_errno;    /* 0: none */
    int n_calls;
    bool is_odd; /* a call was not for whole blocks */
} fake;

ssize_t pread(int fd, void *dst, size_t n_bytes, off_t offset)
{
    fake.n_calls++;
    fake.is_odd |= offset % QSF_IO_ALIGN != 0 || n_bytes % QSF_IO_ALIGN != 0 ||
                   (uintptr_t)dst % QSF_IO_ALIGN != 0;
    if (fake.n_interrupts > 0) {
        fake.n_interrupts--;
        errno = EINTR;
        return -1;
    }
    if (fake.fail_errno != 0) {
        errno = fake.fail_errno;
        return -1;
    }
    const struct iovec to = {.iov_base = dst, .iov_len = n_bytes};
    const ssize_t got = preadv(fd, &to, 1, offset);
    if (fake.most_bytes == 0 || got <= (ssize_t)fake.most_bytes)
        return got;
    memset((unsigned char *)dst + fake.most_bytes, 0xDD, (size_t)got - fake.most_bytes);
    return (ssize_t)fake.most_bytes;
}

#endif
