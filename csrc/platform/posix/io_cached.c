/* io_cached.c - finds out which pages of a file the system has in its page cache.
 *
 * It combines two system calls. mincore() has no side effect, but on Linux reports every page as
 * resident if the process may not write to the file. preadv2(RWF_NOWAIT), of Linux only, is always
 * right, but a miss may start readahead; so it is used only for pages that mincore() reports, and
 * stops once the misses decide.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/io_cached.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(RWF_NOWAIT)
#include <sys/syscall.h>
#endif

#include "platform/posix/descriptor.h"

#define N_PLACES 64

/* True if mincore() reports the page that begins at `off` as resident. */
static bool is_resident(const qsf_file *file, uint64_t off, size_t page_bytes)
{
    void *const page = mmap(NULL, page_bytes, PROT_READ, MAP_SHARED, qsf_file_fd(file), (off_t)off);
    if (page == MAP_FAILED)
        return false;
    unsigned char bits = 0;
    const bool is_valid = mincore(page, page_bytes, (void *)&bits) == 0;
    (void)munmap(page, page_bytes);
    return is_valid && (bits & 1) != 0;
}

/* True if mincore() reports real values to this process. */
static bool is_ours(const qsf_file *file)
{
    struct stat about;
    const uid_t us = geteuid();
    return us == 0 || (fstat(qsf_file_fd(file), &about) == 0 && about.st_uid == us);
}

static bool reads_at_once(const qsf_file *file, uint64_t off)
{
#if defined(RWF_NOWAIT)
    unsigned char byte;
    const struct iovec to = {.iov_base = &byte, .iov_len = 1};
    /* Not by preadv2(), which glibc has from 2.26 and musl from 1.2.5. */
    if (syscall(SYS_preadv2, qsf_file_fd(file), &to, 1, (long)off, (long)(off >> 32), RWF_NOWAIT) ==
        1)
        return true;
    if (errno == EAGAIN)
        return false;
#endif
    (void)off;
    return is_ours(file); /* some file systems, such as tmpfs, lack RWF_NOWAIT */
}

bool qsf_io_is_cached(const qsf_file *file)
{
    const long asked_bytes = sysconf(_SC_PAGESIZE);
    const size_t page_bytes = asked_bytes > 0 ? (size_t)asked_bytes : 4096;
    const uint64_t n_pages = file->n_bytes / page_bytes;
    const uint64_t n_places = n_pages < N_PLACES ? n_pages : N_PLACES;
    uint64_t n_missing = 0;
    for (uint64_t i = 0; i < n_places && 2 * n_missing < n_places; i++)
        if (!is_resident(file, n_pages * i / n_places * page_bytes, page_bytes))
            n_missing++;
    for (uint64_t i = 0; i < n_places && 2 * n_missing < n_places; i++) {
        const uint64_t off = n_pages * i / n_places * page_bytes;
        if (is_resident(file, off, page_bytes) && !reads_at_once(file, off))
            n_missing++;
    }
    return 2 * n_missing < n_places;
}
