/* reader.c - opens a file in the order of docs/format.md: each step uses only numbers that
 * earlier steps have checked. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/records.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "base/bytes.h"
#include "base/status.h"
#include "format/sections.h"

static qsf_status read_arch(qsf_reader *r)
{
    const qsf_section *const s = qsf_reader_section(r, "ARCH");
    const size_t n_bytes = (size_t)s->n_bytes;
    unsigned char *bytes;
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, n_bytes, "section ARCH", &bytes));
    qsf_status status = qsf_reader_read_section(r, s, bytes);
    if (status == QSF_OK)
        status = qsf_arch_parse(bytes, n_bytes, &r->header, &r->arch);
    qsf_ledger_release(r->ledger, QSF_USE_TABLES, bytes, n_bytes);
    return status;
}

static uint32_t count_bands(const qsf_reader *r)
{
    return r->own_table_unit != 0 ? 2 * r->n_bands : r->n_bands;
}

static qsf_status read_bands(qsf_reader *r)
{
    const size_t n_bytes = count_bands(r) * sizeof *r->band_crc32;
    const qsf_section *const s = qsf_reader_section(r, "EBND");
    QSF_FAIL_IF(s->n_bytes != n_bytes, FORMAT,
                "section EBND has %" PRIu64 " bytes, the tables of the file make it %zu",
                s->n_bytes, n_bytes);
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, n_bytes, "checksums of embedding bands",
                            &r->band_crc32));
    QSF_TRY(qsf_reader_read_section(r, s, r->band_crc32));
    for (uint32_t i = 0; i < count_bands(r); i++) /* from the file's byte order to the machine's */
        r->band_crc32[i] = qsf_load_u32((const unsigned char *)&r->band_crc32[i]);
    return QSF_OK;
}

/* Layers after the last one with keys, values or a state of its own store nothing of a token. */
static void count_layers(qsf_reader *r)
{
    r->n_visits = 0;
    for (uint32_t i = 0; i < r->n_pass_layers; i++)
        r->n_visits += qsf_reader_visits(r, qsf_reader_layer(r, i));
    r->n_storing_layers = r->n_pass_layers;
    while (r->n_storing_layers > 1 &&
           qsf_reader_layer_kind(r, r->n_storing_layers - 1)->kv_source != 0)
        r->n_storing_layers--;
    r->has_mtp = qsf_reader_layer_kind(r, r->n_pass_layers - 1)->is_mtp != 0;
}

static qsf_status read_all(qsf_reader *r)
{
    unsigned char bytes[QSF_HEADER_BYTES];
    qsf_header_links links;
    QSF_FAIL_IF(r->file.n_bytes < QSF_HEADER_BYTES, FORMAT,
                "not a QSF file: %" PRIu64 " bytes, its header alone has %d", r->file.n_bytes,
                QSF_HEADER_BYTES);
    QSF_TRY(qsf_file_read_at(&r->file, 0, bytes, sizeof bytes));
    QSF_TRY(qsf_header_parse(bytes, r->file.n_bytes, &r->header, &links));
    QSF_TRY(qsf_directory_read(r, &links));
    QSF_TRY(qsf_index_read(r, &links));
    QSF_TRY(read_arch(r));
    QSF_TRY(qsf_rope_read(r));
    QSF_TRY(qsf_kinds_read(r));
    count_layers(r);
    QSF_TRY(qsf_index_link_experts(r));
    QSF_TRY(qsf_tensor_table_read(r));
    if (r->kind_table.bytes == NULL &&
        qsf_reader_tensor(r, r->layer_units[0], QSF_TENSOR_FFN_GATE) == NULL)
        r->kinds[0].ffn = QSF_FFN_PLAIN;
    return read_bands(r);
}

qsf_status qsf_reader_open(qsf_reader *r, qsf_ledger *ledger, const char *path,
                           int64_t reads_until_fault)
{
    memset(r, 0, sizeof *r);
    r->file.handle = -1;
    const uint64_t held_bytes = ledger->held_bytes;
    QSF_TRY(qsf_file_open(&r->file, path));
    r->ledger = ledger;
    r->file.reads_until_fault = reads_until_fault;
    const qsf_status status = read_all(r);
    if (status != QSF_OK) {
        qsf_reader_close(r);
        return status;
    }
    r->tables_bytes = ledger->held_bytes - held_bytes;
    return QSF_OK;
}

void qsf_reader_close(qsf_reader *r)
{
    if (r->ledger == NULL) /* zeroed or closed: its descriptor 0 is not a file of ours */
        return;
    qsf_ledger *const l = r->ledger;
    qsf_ledger_release(l, QSF_USE_TABLES, r->band_crc32, count_bands(r) * sizeof *r->band_crc32);
    qsf_ledger_release(l, QSF_USE_TABLES, r->tensors, r->n_tensors * sizeof *r->tensors);
    qsf_ledger_release(l, QSF_USE_TABLES, r->pass_units, r->n_stream_units * sizeof *r->pass_units);
    qsf_ledger_release(l, QSF_USE_TABLES, r->units, r->n_units * sizeof *r->units);
    qsf_ledger_release(l, QSF_USE_TABLES, r->kinds, r->n_kinds * sizeof *r->kinds);
    qsf_ledger_release(l, QSF_USE_TABLES, r->rope_sets, r->n_rope_sets * sizeof *r->rope_sets);
    qsf_ledger_release(l, QSF_USE_TABLES, r->kind_table.bytes, r->kind_table.n_bytes);
    qsf_ledger_release(l, QSF_USE_TABLES, r->rope_table.bytes, r->rope_table.n_bytes);
    qsf_ledger_release(l, QSF_USE_TABLES, r->sections, r->n_sections * sizeof *r->sections);
    qsf_file_close(&r->file);
    memset(r, 0, sizeof *r);
    r->file.handle = -1;
}

void qsf_reader_leave_out(qsf_reader *r, const bool *is_left_out)
{
    uint32_t n = 0;
    r->n_pass_layers = 0;
    for (uint32_t i = 0; i < r->n_stream_units; i++) {
        const bool is_layer = r->units[i].role == QSF_UNIT_LAYER;
        if ((is_layer && is_left_out[r->units[i].layer]) ||
            (i == r->final_unit && r->is_without_head))
            continue;
        r->n_pass_layers += is_layer;
        r->pass_units[n++] = i;
    }
    r->n_pass_units = n;
    assert(r->n_pass_layers > 0);
    count_layers(r);
}
