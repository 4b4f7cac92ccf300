/* work.c - the memory of encoding: blocks that grow, within a bound. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/encode.h"

#include <string.h>

#include "base/status.h"

#define LEAST_BYTES 4096

void qsf_work_init(qsf_work *w)
{
    memset(w, 0, sizeof *w);
    qsf_ledger_init(&w->ledger, QSF_TEXT_WORK_BYTES);
}

void qsf_work_destroy(qsf_work *w)
{
    for (int i = 0; i < QSF_WORK_COUNT; i++)
        qsf_ledger_release(&w->ledger, QSF_USE_TEXT, w->blocks[i], w->block_bytes[i]);
}

qsf_status qsf_work_reserve(qsf_work *w, int idx, size_t n_bytes)
{
    if (n_bytes <= w->block_bytes[idx])
        return QSF_OK;
    size_t n_new = w->block_bytes[idx] + w->block_bytes[idx] / 2;
    if (n_new < LEAST_BYTES)
        n_new = LEAST_BYTES;
    if (n_new < n_bytes)
        n_new = n_bytes;
    void *const block = qsf_ledger_acquire(&w->ledger, QSF_USE_TEXT, n_new);
    QSF_FAIL_IF(block == NULL, NOMEM,
                "the text needs more than the %llu MB that encoding may take (%zu bytes more, %llu "
                "taken): encode it in parts",
                (unsigned long long)(QSF_TEXT_WORK_BYTES >> 20), n_new,
                (unsigned long long)w->ledger.held_bytes);
    if (w->blocks[idx] != NULL)
        memcpy(block, w->blocks[idx], w->block_bytes[idx]);
    qsf_ledger_release(&w->ledger, QSF_USE_TEXT, w->blocks[idx], w->block_bytes[idx]);
    w->blocks[idx] = block;
    w->block_bytes[idx] = n_new;
    return QSF_OK;
}
