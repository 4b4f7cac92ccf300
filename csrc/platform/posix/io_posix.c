/* io_posix.c - buffered and direct reads: pread through the page cache, and past it. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "platform/file_calls.h"
#include "platform/io_way.h"
#include "platform/posix/descriptor.h"

static qsf_status open_buffered(qsf_io *io)
{
#if defined(POSIX_FADV_SEQUENTIAL)
    (void)posix_fadvise(qsf_file_fd(io->file), 0, 0,
                        POSIX_FADV_SEQUENTIAL); /* the system may read ahead */
#else
    (void)io;
#endif
    return QSF_OK;
}

static void stop_readahead(const qsf_io *io)
{
#if defined(POSIX_FADV_RANDOM)
    (void)posix_fadvise(qsf_file_fd(io->file), 0, 0, POSIX_FADV_RANDOM);
#else
    (void)io;
#endif
}

#if defined(O_DIRECT) || defined(F_NOCACHE)

static qsf_status fail_direct(const char *reason, int system_errno)
{
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "I/O method direct: %s: %s", reason,
                    strerror(system_errno));
}

#if defined(O_DIRECT)

/* Through /proc, because the path may name another file by now. */
static int open_past_cache(int fd)
{
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    return open(name, O_RDONLY | O_CLOEXEC | O_DIRECT);
}

#else

/* macOS, where pages that the cache holds are still read from it. */
static int open_past_cache(int fd)
{
    char path[PATH_MAX];
    if (fcntl(fd, F_GETPATH, path) != 0)
        return -1;
    const int second = open(path, O_RDONLY | O_CLOEXEC);
    if (second >= 0)
        (void)fcntl(second, F_NOCACHE, 1);
    return second;
}

#endif

/* Opens a second descriptor, because all users of the first would read past the cache, too. */
static qsf_status reopen(const qsf_io *io, int *fd)
{
    do {
        *fd = open_past_cache(qsf_file_fd(io->file));
    } while (*fd < 0 && errno == EINTR);
    if (*fd < 0)
        return errno == EINVAL ? fail_direct("the file system does not support it", errno)
                               : fail_direct("cannot open the file a second time", errno);
    struct stat first;
    struct stat second;
    if (fstat(qsf_file_fd(io->file), &first) != 0 || fstat(*fd, &second) != 0)
        return fail_direct("cannot inspect the file", errno);
    if (first.st_dev != second.st_dev || first.st_ino != second.st_ino)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED,
                        "I/O method direct: the file's path names another file now");
    return QSF_OK;
}

/* A read fails with EINVAL if the file system accepts O_DIRECT but does not support it, or if its
 * logical block is larger than QSF_IO_ALIGN. */
static qsf_status try_read(int fd)
{
    _Alignas(QSF_IO_ALIGN) unsigned char block[QSF_IO_ALIGN];
    size_t got_bytes;
    const int error = qsf_file_read_once(fd, 0, block, sizeof block, &got_bytes);
    if (error == EINVAL || error == EOPNOTSUPP || error == ENOSYS)
        return fail_direct("the file system refuses reads of 4096 bytes", error);
    if (error != 0)
        return QSF_FAIL(QSF_ERR_IO, "direct read of %zu bytes at 0: %s", sizeof block,
                        strerror(error));
    return QSF_OK;
}

#else

static qsf_status reopen(const qsf_io *io, int *fd)
{
    (void)io;
    (void)fd;
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "I/O method direct: this system does not support it");
}

static qsf_status try_read(int fd)
{
    (void)fd;
    return QSF_OK;
}

#endif

qsf_status qsf_io_direct_open(qsf_io *io)
{
    int fd = -1;
    qsf_status status = reopen(io, &fd);
    if (status == QSF_OK)
        status = try_read(fd);
    if (status == QSF_OK)
        io->direct = fd;
    else if (fd >= 0)
        close(fd);
    return status;
}

void qsf_io_direct_close(qsf_io *io)
{
    if (io->direct >= 0)
        close(qsf_io_direct_fd(io));
    io->direct = -1;
}

const qsf_io_way qsf_io_buffered_way = {
    .name = "buffered",
    .open = open_buffered,
    .read = qsf_io_read_buffered,
    .stop_readahead = stop_readahead,
};

const qsf_io_way qsf_io_direct_way = {
    .name = "direct",
    .open = qsf_io_direct_open,
    .close = qsf_io_direct_close,
    .read = qsf_io_read_direct,
};
