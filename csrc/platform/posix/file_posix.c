/* file_posix.c - files through POSIX open, fstat, pread and pwrite: buffered and direct reads, and
 * which pages the system has in its page cache.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <sys/vfs.h>
#endif

#include "base/status.h"

static int fd_of(const qsf_file *f)
{
    return (int)f->handle;
}

static const char *kind_name(mode_t mode)
{
    if (S_ISDIR(mode))
        return "a folder";
    if (S_ISFIFO(mode))
        return "a pipe";
    if (S_ISSOCK(mode))
        return "a socket";
    return "a device";
}

qsf_status qsf_file_open(qsf_file *f, const char *path)
{
    f->handle = -1;
    f->n_bytes = 0;
    f->reads_until_fault = -1;
    f->fault_kind = QSF_FAULT_FAIL;

    /* Without O_NONBLOCK, opening a pipe would wait for its other end. */
    int fd;
    do {
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } while (fd < 0 && errno == EINTR);
    QSF_FAIL_IF(fd < 0, IO, "cannot open %s: %s", path, strerror(errno));

    struct stat about;
    if (fstat(fd, &about) != 0) {
        const int why = errno;
        close(fd);
        return QSF_FAIL(IO, "cannot inspect %s: %s", path, strerror(why));
    }
    if (!S_ISREG(about.st_mode)) {
        close(fd);
        return QSF_FAIL(IO, "cannot open %s: it is %s, not a regular file", path,
                        kind_name(about.st_mode));
    }
    f->handle = fd;
    f->n_bytes = (uint64_t)about.st_size;
    return QSF_OK;
}

/* Returns a descriptor, or -1 with errno. */
static int open_unnamed(const char *folder)
{
#if defined(O_TMPFILE)
    const int unnamed = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (unnamed >= 0 || (errno != EOPNOTSUPP && errno != EISDIR))
        return unnamed;
#endif
    char path[4096]; /* for file systems without unnamed files */
    const int n = snprintf(path, sizeof path, "%s/qsf-XXXXXX", folder);
    if (n < 0 || (size_t)n >= sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    const int fd = mkstemp(path);
    if (fd < 0)
        return -1;
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    unlink(path);
    return fd;
}

/* True if files there take memory: tmpfs, ramfs. */
static bool is_in_memory(int fd)
{
#if defined(__linux__)
    struct statfs about;
    return fstatfs(fd, &about) == 0 && ((uint64_t)about.f_type == UINT64_C(0x01021994) ||
                                        (uint64_t)about.f_type == UINT64_C(0x858458f6));
#else
    (void)fd;
    return false;
#endif
}

qsf_status qsf_file_create_unnamed(qsf_file *f, const char *folder)
{
    *f = (qsf_file){.handle = open_unnamed(folder), .reads_until_fault = -1};
    QSF_FAIL_IF(f->handle < 0, IO, "cannot create a file in %s: %s", folder, strerror(errno));
    if (is_in_memory(fd_of(f))) {
        qsf_file_close(f);
        return QSF_FAIL(ARG, "%s lies in memory, not on a disk: name another folder", folder);
    }
#if defined(POSIX_FADV_RANDOM)
    (void)posix_fadvise(fd_of(f), 0, 0, POSIX_FADV_RANDOM); /* pages on their way are locked */
#endif
    return QSF_OK;
}

void qsf_file_close(qsf_file *f)
{
    if (f->handle >= 0)
        close(fd_of(f));
    f->handle = -1;
}

int qsf_file_read_once(intptr_t handle, uint64_t offset, void *dst, size_t n_bytes,
                       size_t *done_bytes)
{
    ssize_t got;
    do {
        got = pread((int)handle, dst, n_bytes, (off_t)offset);
    } while (got < 0 && errno == EINTR);
    *done_bytes = got > 0 ? (size_t)got : 0;
    return got < 0 ? errno : 0;
}

int qsf_file_write_once(intptr_t handle, uint64_t offset, const void *src, size_t n_bytes,
                        size_t *done_bytes)
{
    ssize_t put;
    do {
        put = pwrite((int)handle, src, n_bytes, (off_t)offset);
    } while (put < 0 && errno == EINTR);
    *done_bytes = put > 0 ? (size_t)put : 0;
    return put < 0 ? errno : 0;
}

void qsf_system_error_text(int code, char text[QSF_SYSTEM_ERROR_BYTES])
{
    (void)snprintf(text, QSF_SYSTEM_ERROR_BYTES, "%s", strerror(code));
}

/* ---- buffered and direct reads: through the page cache, and past it ---- */

static qsf_status open_buffered(qsf_io *io)
{
#if defined(POSIX_FADV_SEQUENTIAL)
    (void)posix_fadvise(fd_of(io->file), 0, 0,
                        POSIX_FADV_SEQUENTIAL); /* the system may read ahead */
#else
    (void)io;
#endif
    return QSF_OK;
}

static void stop_readahead(const qsf_io *io)
{
#if defined(POSIX_FADV_RANDOM)
    (void)posix_fadvise(fd_of(io->file), 0, 0, POSIX_FADV_RANDOM);
#else
    (void)io;
#endif
}

#if defined(O_DIRECT) || defined(F_NOCACHE)

static qsf_status fail_direct(const char *reason, int system_errno)
{
    return QSF_FAIL(UNSUPPORTED, "I/O method direct: %s: %s", reason, strerror(system_errno));
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
        *fd = open_past_cache(fd_of(io->file));
    } while (*fd < 0 && errno == EINTR);
    if (*fd < 0)
        return errno == EINVAL ? fail_direct("the file system does not support it", errno)
                               : fail_direct("cannot open the file a second time", errno);
    struct stat first;
    struct stat second;
    if (fstat(fd_of(io->file), &first) != 0 || fstat(*fd, &second) != 0)
        return fail_direct("cannot inspect the file", errno);
    QSF_FAIL_IF(first.st_dev != second.st_dev || first.st_ino != second.st_ino, UNSUPPORTED,
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
    QSF_FAIL_IF(error != 0, IO, "direct read of %zu bytes at 0: %s", sizeof block, strerror(error));
    return QSF_OK;
}

#else

static qsf_status reopen(const qsf_io *io, int *fd)
{
    (void)io;
    (void)fd;
    return QSF_FAIL(UNSUPPORTED, "I/O method direct: this system does not support it");
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
        close((int)io->direct);
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

/* ---- which pages of a file the system has in its page cache ---- */

/* Two system calls find that out. mincore() has no side effect, but on Linux reports every page as
 * resident if the process may not write to the file. preadv2(RWF_NOWAIT), of Linux only, is always
 * right, but a miss may start readahead; so it is used only for pages that mincore() reports, and
 * stops once the misses decide. */

#define N_PLACES 64

/* True if mincore() reports the page that begins at `off` as resident. */
static bool is_resident(const qsf_file *file, uint64_t off, size_t page_bytes)
{
    void *const page = mmap(NULL, page_bytes, PROT_READ, MAP_SHARED, fd_of(file), (off_t)off);
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
    return us == 0 || (fstat(fd_of(file), &about) == 0 && about.st_uid == us);
}

static bool reads_at_once(const qsf_file *file, uint64_t off)
{
#if defined(RWF_NOWAIT)
    unsigned char byte;
    const struct iovec to = {.iov_base = &byte, .iov_len = 1};
    /* A system call, because glibc has preadv2() only from 2.26 and musl from 1.2.5. */
    if (syscall(SYS_preadv2, fd_of(file), &to, 1, (long)off, (long)(off >> 32), RWF_NOWAIT) == 1)
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
