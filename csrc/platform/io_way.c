/* io_way.c - the error text that all ways of reading share. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/io_way.h"

#include <inttypes.h>

#include "base/status.h"

qsf_status qsf_io_fail_short(const qsf_io *io, const qsf_io_read *read, size_t done_bytes)
{
    return QSF_FAIL(QSF_ERR_FORMAT,
                    "file ends %zu bytes early: wanted %zu at %" PRIu64 ", it had %" PRIu64
                    " bytes when opened",
                    read->need_bytes - done_bytes, read->need_bytes, read->off, io->file->n_bytes);
}
