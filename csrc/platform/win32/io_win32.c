/* io_win32.c - buffered and direct reads: through the page cache of Windows, and past it. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"
#include "platform/file_calls.h"
#include "platform/io_cached.h"
#include "platform/io_way.h"
#include "platform/win32/file_win32.h"

static qsf_status open_buffered(qsf_io *io)
{
    (void)io;
    return QSF_OK;
}

static qsf_status fail_direct(const char *reason, DWORD code)
{
    char why[QSF_SYSTEM_ERROR_BYTES];
    qsf_system_error_text((int)code, why);
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "I/O method direct: %s: %s", reason, why);
}

/* The trial read fails if a sector of the disk is larger than QSF_IO_ALIGN, and on network drives.
 */
qsf_status qsf_io_direct_open(qsf_io *io)
{
    HANDLE handle = qsf_file_reopen_direct(io->file->handle);
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
        (void)CloseHandle(qsf_file_handle(io->direct));
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
