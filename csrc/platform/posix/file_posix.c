/* file_posix.c - files through POSIX open, fstat, pread and pwrite. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#if defined(__linux__)
#include <sys/vfs.h>
#endif
#include <unistd.h>

#include "base/status.h"
#include "platform/file_calls.h"
#include "platform/posix/descriptor.h"

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
    if (fd < 0)
        return QSF_FAIL(QSF_ERR_IO, "cannot open %s: %s", path, strerror(errno));

    struct stat about;
    if (fstat(fd, &about) != 0) {
        const int why = errno;
        close(fd);
        return QSF_FAIL(QSF_ERR_IO, "cannot inspect %s: %s", path, strerror(why));
    }
    if (!S_ISREG(about.st_mode)) {
        close(fd);
        return QSF_FAIL(QSF_ERR_IO, "cannot open %s: it is %s, not a regular file", path,
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
    if (f->handle < 0)
        return QSF_FAIL(QSF_ERR_IO, "cannot create a file in %s: %s", folder, strerror(errno));
    if (is_in_memory(qsf_file_fd(f))) {
        qsf_file_close(f);
        return QSF_FAIL(QSF_ERR_ARG, "%s lies in memory, not on a disk: name another folder",
                        folder);
    }
#if defined(POSIX_FADV_RANDOM)
    (void)posix_fadvise(qsf_file_fd(f), 0, 0,
                        POSIX_FADV_RANDOM); /* pages on their way are locked */
#endif
    return QSF_OK;
}

void qsf_file_close(qsf_file *f)
{
    if (f->handle >= 0)
        close(qsf_file_fd(f));
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
