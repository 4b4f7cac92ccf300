/* absent.c - replaces what only Linux has: a mapping that the kernel copies from, and
 * a queue of reads. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"
#include "platform/file.h"

static qsf_status refuse(qsf_io *io)
{
    return QSF_FAIL(UNSUPPORTED, "I/O method %s: this system lacks it", io->way->name);
}

static void close_nothing(qsf_io *io)
{
    (void)io;
}

const qsf_io_way qsf_io_uring_way = {.name = "uring", .open = refuse};
const qsf_io_way qsf_io_mmap_way = {.name = "mmap", .open = refuse, .close = close_nothing};
