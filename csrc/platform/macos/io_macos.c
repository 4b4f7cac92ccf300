/* io_macos.c - macOS has no queue of reads of files: the method `uring` is refused. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"
#include "platform/io_way.h"

static qsf_status refuse(qsf_io *io)
{
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "I/O method %s: this system lacks it", io->way->name);
}

const qsf_io_way qsf_io_uring_way = {.name = "uring", .open = refuse};
