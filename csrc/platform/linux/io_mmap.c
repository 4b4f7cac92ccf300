/* io_mmap.c - reads copied from a mapping of the file.
 *
 * Another process may write to the file or truncate it, so pages of a mapping may change after
 * their checksum. A copy is computed with exactly as it was verified. The kernel makes the copy:
 * for it a missing page is the error EFAULT; for this process it would be the signal SIGBUS.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/status.h"
#include "platform/file.h"

#define AROUND_BYTES (UINT64_C(2) << 20) /* the largest page */

/* Copies [off, off + n_bytes) of the mapping. Returns 0 or an errno; *done_bytes counts the bytes
 * copied, also before an error. */
static int copy_out(const qsf_io *io, uint64_t off, unsigned char *dst, size_t n_bytes,
                    size_t *done_bytes)
{
    *done_bytes = 0;
    while (*done_bytes < n_bytes) {
        const struct iovec to = {.iov_base = dst + *done_bytes, .iov_len = n_bytes - *done_bytes};
        /* The system call does not write to the mapping, but its type is not const. */
        const struct iovec from = {.iov_base =
                                       (void *)((uintptr_t)io->map + (uintptr_t)off + *done_bytes),
                                   .iov_len = n_bytes - *done_bytes};
        const ssize_t got = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? errno : EFAULT;
        *done_bytes += (size_t)got;
    }
    return 0;
}

/* Advice must begin at a page of the system, which may be larger than 4096 bytes. */
static void advise(const qsf_io *io, uint64_t off, uint64_t n_bytes, int advice)
{
    const long page_bytes = sysconf(_SC_PAGESIZE);
    const uint64_t begin = page_bytes > 0 ? off - off % (uint64_t)page_bytes : off;
    if (begin >= io->file->n_bytes)
        return;
    const uint64_t most_bytes = io->file->n_bytes - begin;
    const uint64_t asked_bytes = off - begin + n_bytes;
    void *const from = (void *)((uintptr_t)io->map + (uintptr_t)begin);
    (void)madvise(from, (size_t)QSF_MIN(asked_bytes, most_bytes), advice);
}

/* Mapped pages count as memory of this process, so they are unmapped at once. Neighbours too: the
 * kernel also maps cached pages around the wanted one, even if they were just unmapped. */
static void unmap_pages(const qsf_io *io, uint64_t off, uint64_t n_bytes)
{
    const uint64_t before_bytes = QSF_MIN(off, AROUND_BYTES);
    advise(io, off - before_bytes, before_bytes + n_bytes + AROUND_BYTES, MADV_DONTNEED);
}

static qsf_status try_copy(const qsf_io *io)
{
    unsigned char block[64];
    size_t done_bytes;
    const size_t n_bytes = (size_t)QSF_MIN(io->file->n_bytes, sizeof block);
    const int error = copy_out(io, 0, block, n_bytes, &done_bytes);
    QSF_FAIL_IF(error == ENOSYS || error == EPERM || error == EACCES, UNSUPPORTED,
                "I/O method mmap: the system refuses process_vm_readv: %s", strerror(error));
    QSF_FAIL_IF(error != 0, IO, "mmap read of %zu bytes at 0: %s", n_bytes, strerror(error));
    return QSF_OK;
}

static void close_mapping(qsf_io *io)
{
    if (io->map != NULL)
        (void)munmap((void *)(uintptr_t)io->map, (size_t)io->file->n_bytes);
    io->map = NULL;
}

static qsf_status open_mapping(qsf_io *io)
{
    const uint64_t n_bytes = io->file->n_bytes;
    if (n_bytes == 0)
        return QSF_OK; /* an empty file cannot be mapped */
    QSF_FAIL_IF(n_bytes > SIZE_MAX / 2, UNSUPPORTED,
                "I/O method mmap: the file of %" PRIu64 " MB exceeds the address space",
                n_bytes >> 20);
    void *const map = mmap(NULL, (size_t)n_bytes, PROT_READ, MAP_SHARED, (int)io->file->handle, 0);
    QSF_FAIL_IF(map == MAP_FAILED, UNSUPPORTED,
                "I/O method mmap: cannot map the file of %" PRIu64 " MB: %s", n_bytes >> 20,
                strerror(errno));
    io->map = map;
    const qsf_status status = try_copy(io);
    if (status != QSF_OK) {
        close_mapping(io);
        return status;
    }
    unmap_pages(io, 0, QSF_IO_ALIGN);
    advise(io, 0, n_bytes, MADV_SEQUENTIAL);
    return QSF_OK;
}

static void stop_readahead(const qsf_io *io)
{
    if (io->map != NULL)
        advise(io, 0, io->file->n_bytes, MADV_RANDOM);
}

/* While a step is copied, the next one is being read; only these two are locked. */
static int copy_steps(const qsf_io *io, const qsf_io_read *read, size_t n_bytes, size_t *done_bytes)
{
    int error = 0;
    while (error == 0 && *done_bytes < n_bytes) {
        const uint64_t off = read->off + *done_bytes;
        const size_t step_bytes = QSF_MIN(n_bytes - *done_bytes, QSF_IO_CACHED_STEP_BYTES);
        size_t copied_bytes;
        advise(io, off, 2 * QSF_IO_CACHED_STEP_BYTES, MADV_WILLNEED);
        error = copy_out(io, off, read->dst + *done_bytes, step_bytes, &copied_bytes);
        *done_bytes += copied_bytes;
    }
    unmap_pages(io, read->off, read->n_bytes);
    return error;
}

static qsf_status read_mapping(const qsf_io *io, const qsf_io_read *read)
{
    const uint64_t file_bytes = io->file->n_bytes;
    const size_t n_bytes =
        read->off < file_bytes ? (size_t)QSF_MIN(file_bytes - read->off, read->n_bytes) : 0;
    if (n_bytes < read->need_bytes)
        return qsf_io_fail_short(io, read, n_bytes);
    size_t done_bytes = 0;
    const int error = copy_steps(io, read, n_bytes, &done_bytes);

    /* If the file shrank, bytes after its end are zeroes or missing pages. Only the size of the
     * file reveals the zeroes. */
    struct stat about;
    if (fstat((int)io->file->handle, &about) != 0)
        return qsf_io_fail_system(io, read, errno);
    const uint64_t now_bytes = (uint64_t)about.st_size;
    const size_t have_bytes =
        read->off < now_bytes ? (size_t)QSF_MIN(now_bytes - read->off, read->n_bytes) : 0;
    if (have_bytes < read->need_bytes)
        return qsf_io_fail_short(io, read, have_bytes);
    if (done_bytes < read->need_bytes)
        return qsf_io_fail_system(io, read, error == EFAULT ? EIO : error);
    return QSF_OK;
}

const qsf_io_way qsf_io_mmap_way = {
    .name = "mmap",
    .open = open_mapping,
    .close = close_mapping,
    .read = read_mapping,
    .stop_readahead = stop_readahead,
};
