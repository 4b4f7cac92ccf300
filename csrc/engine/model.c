/* model.c - closes a model, with its last session at the latest. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model.h"

#include "format/reader.h"

void qsf_model_release(qsf_model *m)
{
    qsf_ledger_release(&m->ledger, QSF_USE_KV, m->kv_memory, m->kv_memory_bytes);
    qsf_ledger_release(&m->ledger, QSF_USE_SCRATCH, m->scratch_memory, m->scratch_memory_bytes);
    qsf_ledger_release(&m->ledger, QSF_USE_EMBEDDING, m->embedding_memory,
                       m->embedding_memory_bytes);
    qsf_experts_destroy(&m->experts);
    qsf_stream_destroy(&m->stream);
    qsf_io_close(&m->io);
    if (m->drafter != NULL)
        qsf_model_release(m->drafter);
    if (!m->is_drafter)
        qsf_pool_destroy(m->pool);
    qsf_ledger_release(&m->ledger, QSF_USE_TABLES, m->tables_memory, m->tables_memory_bytes);
    qsf_ledger_release(&m->ledger, QSF_USE_TABLES, m->is_resident, m->is_resident_bytes);
    qsf_ledger_release(&m->ledger, QSF_USE_TABLES, m->layers, m->layers_bytes);
    qsf_reader_close(&m->reader);
    if (m->has_lock)
        qsf_mutex_destroy(&m->lock);
    if (m->has_choosing)
        qsf_mutex_destroy(&m->choosing);
    if (m->has_kv_lock)
        qsf_mutex_destroy(&m->kv_lock);
    qsf_ledger ledger = m->ledger; /* m, which holds the ledger, is released last */
    qsf_ledger_release(&ledger, QSF_USE_HANDLE, m, sizeof *m);
}

void qsf_model_close(qsf_model *m)
{
    if (m == NULL)
        return;
    qsf_mutex_lock(&m->lock);
    m->is_closed = true;
    const bool is_last = m->n_sessions == 0;
    qsf_mutex_unlock(&m->lock);
    if (is_last)
        qsf_model_release(m);
}

void qsf_model_forget_session(qsf_model *m)
{
    qsf_mutex_lock(&m->lock);
    m->n_sessions--;
    const bool is_last = m->is_closed && m->n_sessions == 0;
    qsf_mutex_unlock(&m->lock);
    if (is_last)
        qsf_model_release(m);
}
