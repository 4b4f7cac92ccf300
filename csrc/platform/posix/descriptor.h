/* descriptor.h - a handle of file.h and io_way.h is a file descriptor on POSIX systems. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "platform/io_way.h"

static inline int qsf_file_fd(const qsf_file *f)
{
    return (int)f->handle;
}

static inline int qsf_io_direct_fd(const qsf_io *io)
{
    return (int)io->direct;
}
