/* adapters.c - the adapters of low rank that a model was opened with. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model.h"

#include <stdio.h>

#include "base/checked.h"
#include "base/status.h"
#include "checksum/crc32.h"

/* Returns `status`, and adds to the latest error text which file it is about. */
static qsf_status name_adapter(qsf_status status, const char *path)
{
    char detail[256];
    snprintf(detail, sizeof detail, "%s", qsf_error_detail());
    return qsf_fail(status, "the adapter %s: %s", path, detail);
}

qsf_status qsf_adapters_open(qsf_model *m, const char *base_path)
{
    for (uint32_t i = 0; i < m->options.n_adapters; i++) {
        const char *const path = m->options.adapters[i].path;
        const qsf_status status = qsf_adapter_open(&m->adapters[i], path, &m->reader, base_path);
        if (status != QSF_OK)
            return name_adapter(status, path);
        m->adapters[i].scale = m->options.adapters[i].scale;
        m->n_adapters++;
    }
    return QSF_OK;
}

uint64_t qsf_adapters_bytes(const qsf_model *m)
{
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < m->n_adapters; i++)
        n_bytes += qsf_round_up(qsf_adapter_bytes(&m->adapters[i]), QSF_DATA_ALIGN);
    return n_bytes;
}

uint32_t qsf_adapters_cols(const qsf_model *m)
{
    size_t n = 0;
    for (uint32_t i = 0; i < m->n_adapters; i++)
        n += qsf_round_up(m->adapters[i].most_rank, QSF_TILE_ROWS);
    return (uint32_t)n;
}

qsf_status qsf_adapters_load(qsf_model *m)
{
    QSF_TRY(qsf_ledger_take(&m->ledger, QSF_USE_ADAPTERS, qsf_adapters_bytes(m), "adapters",
                            &m->adapters_memory));
    unsigned char *memory = m->adapters_memory;
    for (uint32_t i = 0; i < m->n_adapters; i++) {
        const qsf_status status =
            qsf_adapter_load(&m->adapters[i], i, memory, &m->reader, &m->config, m->layers);
        if (status != QSF_OK)
            return name_adapter(status, m->options.adapters[i].path);
        memory += qsf_round_up(qsf_adapter_bytes(&m->adapters[i]), QSF_DATA_ALIGN);
    }
    m->options.adapters = NULL; /* belongs to the caller */
    return QSF_OK;
}

uint32_t qsf_adapters_check(const qsf_model *m)
{
    uint32_t crc = 0;
    for (uint32_t i = 0; i < m->n_adapters; i++) {
        crc = qsf_crc32(crc, m->adapters[i].crc32, sizeof m->adapters[i].crc32);
        crc = qsf_crc32(crc, &m->adapters[i].scale, sizeof m->adapters[i].scale);
    }
    return crc;
}

void qsf_adapters_release(qsf_model *m)
{
    for (uint32_t i = 0; i < m->n_adapters; i++)
        qsf_adapter_close(&m->adapters[i]);
    qsf_ledger_release(&m->ledger, QSF_USE_ADAPTERS, m->adapters_memory,
                       (size_t)qsf_adapters_bytes(m));
}
