/* absent.c - replaces Linux's own functions on other systems: a mapping that the kernel copies
 * from, and a look into the page cache. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"
#include "platform/io_cached.h"
#include "platform/io_way.h"

bool qsf_io_is_cached(const qsf_file *file)
{
    (void)file;
    return false;
}

static qsf_status refuse(qsf_io *io)
{
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "I/O method %s: this system lacks it", io->way->name);
}

static void close_nothing(qsf_io *io)
{
    (void)io;
}

const qsf_io_way qsf_io_mmap_way = {.name = "mmap", .open = refuse, .close = close_nothing};
