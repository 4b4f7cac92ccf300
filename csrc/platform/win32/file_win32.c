/* file_win32.c - files through CreateFileW and overlapped reads and writes, buffered and direct. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/file.h"

#include <string.h>
#include <wchar.h>
#include <windows.h>

#include "base/status.h"

#define MAX_PATH_UNITS 2048 /* of UTF-16 */
#define MAX_CALL_BYTES ((DWORD)1 << 30)

static HANDLE handle_of(intptr_t handle)
{
    return (HANDLE)handle;
}

static qsf_status fail_io(const char *what, const char *path, DWORD code)
{
    char why[QSF_SYSTEM_ERROR_BYTES];
    qsf_system_error_text((int)code, why);
    return QSF_FAIL(IO, "%s %s: %s", what, path, why);
}

/* The path in UTF-16, whole and behind "\\?\" where it is longer than the 260 units that Windows
 * takes otherwise. Returns an error of the system or 0. */
static DWORD to_wide(const char *path, wchar_t wide[MAX_PATH_UNITS])
{
    if (MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, MAX_PATH_UNITS) == 0)
        return GetLastError();
    if (wcslen(wide) < MAX_PATH - 20 || wcsncmp(wide, L"\\\\", 2) == 0)
        return 0;
    wchar_t whole[MAX_PATH_UNITS];
    const DWORD n = GetFullPathNameW(wide, MAX_PATH_UNITS, whole, NULL);
    if (n == 0)
        return GetLastError();
    if (n + 4 >= MAX_PATH_UNITS)
        return ERROR_FILENAME_EXCED_RANGE;
    wmemcpy(wide, L"\\\\?\\", 4);
    wmemcpy(wide + 4, whole, n + 1);
    return 0;
}

qsf_status qsf_file_open(qsf_file *f, const char *path)
{
    *f = (qsf_file){.handle = -1, .reads_until_fault = -1};
    wchar_t wide[MAX_PATH_UNITS];
    const DWORD code = to_wide(path, wide);
    if (code != 0)
        return fail_io("cannot open", path, code);
    const DWORD attributes = GetFileAttributesW(wide);
    QSF_FAIL_IF(attributes != INVALID_FILE_ATTRIBUTES &&
                    (attributes & FILE_ATTRIBUTE_DIRECTORY) != 0,
                IO, "cannot open %s: it is a folder, not a regular file", path);
    HANDLE handle =
        CreateFileW(wide, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE,
                    NULL, OPEN_EXISTING, FILE_FLAG_OVERLAPPED, NULL);
    if (handle == INVALID_HANDLE_VALUE)
        return fail_io("cannot open", path, GetLastError());
    LARGE_INTEGER n_bytes;
    if (GetFileType(handle) != FILE_TYPE_DISK || !GetFileSizeEx(handle, &n_bytes)) {
        (void)CloseHandle(handle);
        return QSF_FAIL(IO, "cannot open %s: it is a device, not a regular file", path);
    }
    f->handle = (intptr_t)handle;
    f->n_bytes = (uint64_t)n_bytes.QuadPart;
    return QSF_OK;
}

qsf_status qsf_file_create_unnamed(qsf_file *f, const char *folder)
{
    *f = (qsf_file){.handle = -1, .reads_until_fault = -1};
    wchar_t wide[MAX_PATH_UNITS];
    wchar_t name[MAX_PATH + 1];
    DWORD code = to_wide(folder, wide);
    if (code == 0 && GetTempFileNameW(wide, L"qsf", 0, name) == 0)
        code = GetLastError();
    if (code != 0)
        return fail_io("cannot create a file in", folder, code);
    HANDLE handle = CreateFileW(
        name, GENERIC_READ | GENERIC_WRITE | DELETE, FILE_SHARE_DELETE, NULL, CREATE_ALWAYS,
        FILE_FLAG_OVERLAPPED | FILE_FLAG_DELETE_ON_CLOSE | FILE_FLAG_RANDOM_ACCESS, NULL);
    if (handle == INVALID_HANDLE_VALUE)
        return fail_io("cannot create a file in", folder, GetLastError());
    f->handle = (intptr_t)handle;
    return QSF_OK;
}

void qsf_file_close(qsf_file *f)
{
    if (f->handle != -1)
        (void)CloseHandle(handle_of(f->handle));
    f->handle = -1;
}

/* Where a call begins, and the event that it sets at its end: reads of other threads through the
 * same handle would set the handle's own. */
static DWORD begin(OVERLAPPED *at, uint64_t offset)
{
    *at = (OVERLAPPED){.Offset = (DWORD)(offset & UINT32_MAX), .OffsetHigh = (DWORD)(offset >> 32)};
    at->hEvent = CreateEventW(NULL, TRUE, FALSE, NULL);
    return at->hEvent != NULL ? 0 : GetLastError();
}

static int finish(intptr_t handle, OVERLAPPED *at, BOOL has_ended, size_t *n_bytes)
{
    DWORD code = has_ended ? 0 : GetLastError();
    DWORD done_bytes = 0;
    if (code == 0 || code == ERROR_IO_PENDING)
        code = GetOverlappedResult(handle_of(handle), at, &done_bytes, TRUE) ? 0 : GetLastError();
    (void)CloseHandle(at->hEvent);
    *n_bytes = done_bytes;
    return code == ERROR_HANDLE_EOF ? 0 : (int)code;
}

static DWORD step_of(size_t n_bytes)
{
    return n_bytes < MAX_CALL_BYTES ? (DWORD)n_bytes : MAX_CALL_BYTES;
}

int qsf_file_read_once(intptr_t handle, uint64_t offset, void *dst, size_t n_bytes,
                       size_t *done_bytes)
{
    OVERLAPPED at;
    const DWORD code = begin(&at, offset);
    if (code != 0)
        return (int)code;
    return finish(handle, &at, ReadFile(handle_of(handle), dst, step_of(n_bytes), NULL, &at),
                  done_bytes);
}

int qsf_file_write_once(intptr_t handle, uint64_t offset, const void *src, size_t n_bytes,
                        size_t *done_bytes)
{
    OVERLAPPED at;
    const DWORD code = begin(&at, offset);
    if (code != 0)
        return (int)code;
    return finish(handle, &at, WriteFile(handle_of(handle), src, step_of(n_bytes), NULL, &at),
                  done_bytes);
}

/* ---- buffered and direct reads: through the page cache, and past it ---- */

static qsf_status open_buffered(qsf_io *io)
{
    (void)io;
    return QSF_OK;
}

static qsf_status fail_direct(const char *reason, DWORD code)
{
    char why[QSF_SYSTEM_ERROR_BYTES];
    qsf_system_error_text((int)code, why);
    return QSF_FAIL(UNSUPPORTED, "I/O method direct: %s: %s", reason, why);
}

/* A second handle of the file, because the first stays bound to the cache. The trial read fails if
 * a sector of the disk is larger than QSF_IO_ALIGN, and on network drives.
 */
qsf_status qsf_io_direct_open(qsf_io *io)
{
    HANDLE handle = ReOpenFile(handle_of(io->file->handle), GENERIC_READ,
                               FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE,
                               FILE_FLAG_NO_BUFFERING | FILE_FLAG_OVERLAPPED);
    if (handle == INVALID_HANDLE_VALUE)
        return fail_direct("cannot open the file a second time", GetLastError());
    _Alignas(QSF_IO_ALIGN) unsigned char block[QSF_IO_ALIGN];
    size_t got_bytes;
    const int code = qsf_file_read_once((intptr_t)handle, 0, block, sizeof block, &got_bytes);
    if (code != 0) {
        (void)CloseHandle(handle);
        return fail_direct("the file system refuses reads of 4096 bytes", (DWORD)code);
    }
    io->direct = (intptr_t)handle;
    return QSF_OK;
}

void qsf_io_direct_close(qsf_io *io)
{
    if (io->direct != -1)
        (void)CloseHandle(handle_of(io->direct));
    io->direct = -1;
}

/* The system does not tell. */
bool qsf_io_is_cached(const qsf_file *file)
{
    (void)file;
    return false;
}

const qsf_io_way qsf_io_buffered_way = {
    .name = "buffered",
    .open = open_buffered,
    .read = qsf_io_read_buffered,
};

const qsf_io_way qsf_io_direct_way = {
    .name = "direct",
    .open = qsf_io_direct_open,
    .close = qsf_io_direct_close,
    .read = qsf_io_read_direct,
};
