/* model.c - closes a model, with its last session at the latest. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model.h"

#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "format/records.h"
#include "types/dtype.h"

void qsf_model_release(qsf_model *m)
{
    qsf_adapters_release(m);
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
    qsf_mutex_destroy(&m->lock);
    qsf_mutex_destroy(&m->choosing);
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

/* ---- describes a model and its plan ---- */

static const char *const architecture_names[QSF_ARCHITECTURE_COUNT] = {
    [QSF_ARCHITECTURE_GPT2] = "gpt2",       [QSF_ARCHITECTURE_LLAMA] = "llama",
    [QSF_ARCHITECTURE_MISTRAL] = "mistral", [QSF_ARCHITECTURE_PHI] = "phi",
    [QSF_ARCHITECTURE_OTHER] = "other",
};

static uint64_t count_weights(const qsf_tensor *tensors, uint32_t n_tensors)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < n_tensors; i++)
        if (tensors[i].layout != QSF_LAYOUT_OUTLIERS) /* outliers repeat weights of a matrix */
            n += (uint64_t)tensors[i].n_rows * tensors[i].n_cols;
    return n;
}

static uint64_t count_parameters(const qsf_reader *r)
{
    uint64_t n = count_weights(r->tensors, r->n_tensors);
    for (uint32_t i = r->n_stream_units; i < r->n_units; i++) {
        const qsf_unit *const first = &r->units[r->units[i].template_idx];
        if (first != &r->units[i]) /* its tensors are listed under the first expert only */
            n += count_weights(r->tensors + first->first_tensor, first->n_tensors);
    }
    const qsf_section *const positions = qsf_reader_section(r, "WPOS");
    return positions != NULL ? n + (uint64_t)r->header.max_tokens * r->header.dim : n;
}

void qsf_model_info(qsf_model *m, qsf_model_facts *out)
{
    if (m == NULL || out == NULL)
        return;
    const qsf_header *const h = &m->reader.header;
    memset(out, 0, sizeof *out);
    snprintf(out->architecture, sizeof out->architecture, "%s",
             architecture_names[h->architecture]);
    snprintf(out->quant_type, sizeof out->quant_type, "%s", qsf_dtype_name(h->dtype));
    snprintf(out->isa_name, sizeof out->isa_name, "%s", m->kernels.isa_name);
    snprintf(out->io_name, sizeof out->io_name, "%s", qsf_io_method_name(m->io_setup.method));
    out->io_method = m->io_setup.method;
    out->io_depth = m->io_setup.depth;
    out->n_layers = m->plan.n_layers;
    out->dim = h->dim;
    out->vector_dim = m->config.vector_dim;
    out->n_heads = h->n_heads;
    out->n_kv_heads = h->n_kv_heads;
    out->head_dim = h->head_dim;
    out->ffn_dim = h->ffn_dim;
    out->n_vocab = h->n_vocab;
    out->max_tokens = h->max_tokens;
    out->is_windowed = m->pools.kv.n_groups > 1;
    out->bos_id = h->bos_id;
    out->eos_id = h->eos_id;
    out->pad_id = h->pad_id;
    out->n_parameters = count_parameters(&m->reader);
    out->file_bytes = m->reader.file.n_bytes;
    qsf_mutex_lock(&m->lock); /* memory pressure may change the plan */
    out->plan = m->plan;
    qsf_mutex_unlock(&m->lock);
}

size_t qsf_model_timeline(qsf_model *m, qsf_unit_time *out, size_t cap_units)
{
    if (m == NULL || out == NULL)
        return 0;
    qsf_mutex_lock(&m->lock);
    qsf_stream_timeline(&m->stream, out, cap_units);
    qsf_mutex_unlock(&m->lock);
    return m->reader.n_stream_units;
}

size_t qsf_model_memory_events(qsf_model *m, qsf_memory_event *out, size_t cap_events)
{
    if (m == NULL || out == NULL)
        return 0;
    qsf_mutex_lock(&m->lock);
    const size_t n_events = qsf_pressure_list_events(&m->pressure, out, cap_events);
    qsf_mutex_unlock(&m->lock);
    return n_events;
}

/* Tags have four characters. */
static const qsf_section *find_section(const qsf_model *m, const char *tag)
{
    return strlen(tag) == 4 ? qsf_reader_section(&m->reader, tag) : NULL;
}

uint64_t qsf_model_section_bytes(const qsf_model *m, const char *tag)
{
    if (m == NULL || tag == NULL)
        return 0;
    const qsf_section *const section = find_section(m, tag);
    return section != NULL ? section->n_bytes : 0;
}

qsf_status qsf_model_section(qsf_model *m, const char *tag, void *dst, uint64_t cap_bytes)
{
    QSF_REQUIRE(m, tag, dst);
    const qsf_section *const section = find_section(m, tag);
    QSF_FAIL_IF(section == NULL, ARG, "the file has no section %s", tag);
    QSF_FAIL_IF(section->n_bytes > cap_bytes, ARG,
                "section %s has %llu bytes, but the buffer only %llu", tag,
                (unsigned long long)section->n_bytes, (unsigned long long)cap_bytes);
    qsf_mutex_lock(&m->lock);
    const qsf_status status = qsf_reader_read_section(&m->reader, section, dst);
    qsf_mutex_unlock(&m->lock);
    return status;
}
