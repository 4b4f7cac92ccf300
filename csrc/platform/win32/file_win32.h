/* file_win32.h - handles of files, and reads at an offset. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_WIN32_FILE_WIN32_H
#define QSF_PLATFORM_WIN32_FILE_WIN32_H

#include <windows.h>

#include "platform/io_way.h"

static inline HANDLE qsf_file_handle(intptr_t handle)
{
    return (HANDLE)handle;
}

/* A second handle of the same file whose reads pass by the cache of the system, to which the first
 * stays bound. INVALID_HANDLE_VALUE on failure. */
HANDLE qsf_file_reopen_direct(intptr_t handle);

/* Reads at most n_bytes at `offset` of a handle that was opened with FILE_FLAG_OVERLAPPED, so that
 * several threads read at once. Returns an error of the system or 0; *got_bytes is 0 at the end of
 * the file. */
DWORD qsf_file_read_once(intptr_t handle, uint64_t offset, void *dst, size_t n_bytes,
                         size_t *got_bytes);

#endif
