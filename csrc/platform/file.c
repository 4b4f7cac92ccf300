/* file.c - the faults that a test injects into reads of a file. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/file.h"

#include <inttypes.h>

#include "base/status.h"
#include "platform/clock.h"

/* Counts down and returns the fault of this read. */
static qsf_fault_kind next_fault(qsf_file *f)
{
    if (atomic_load_explicit(&f->reads_until_fault, memory_order_relaxed) < 0)
        return QSF_FAULT_NONE;
    if (atomic_fetch_sub_explicit(&f->reads_until_fault, 1, memory_order_relaxed) != 0)
        return QSF_FAULT_NONE;
    return atomic_load_explicit(&f->fault_kind, memory_order_relaxed);
}

qsf_status qsf_file_end_read(qsf_file *f, uint64_t offset, void *dst, size_t n_bytes)
{
    switch (next_fault(f)) {
    case QSF_FAULT_FAIL:
        return QSF_FAIL(QSF_ERR_IO, "read of %zu bytes at %" PRIu64 ": fault injected by a test",
                        n_bytes, offset);
    case QSF_FAULT_SHORT:
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "file ends early (injected by a test): wanted %zu bytes at %" PRIu64,
                        n_bytes, offset);
    case QSF_FAULT_SLOW:
        qsf_sleep_ms(QSF_FAULT_SLOW_MS);
        break;
    case QSF_FAULT_CORRUPT:
        if (n_bytes > 0)
            ((unsigned char *)dst)[n_bytes / 2] ^= 1;
        break;
    case QSF_FAULT_NONE:
        break;
    }
    return QSF_OK;
}
