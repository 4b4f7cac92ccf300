/* file_win32.h - handles of files. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <windows.h>

#include "platform/io_way.h"

static inline HANDLE qsf_file_handle(intptr_t handle)
{
    return (HANDLE)handle;
}

/* A second handle of the same file whose reads pass by the cache of the system, to which the first
 * stays bound. INVALID_HANDLE_VALUE on failure. */
HANDLE qsf_file_reopen_direct(intptr_t handle);
