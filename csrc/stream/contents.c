/* contents.c - an open file for the tools of the Python package. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/contents.h"

#include "base/status.h"
#include "format/extents.h"
#include "format/records.h"
#include "format/sections.h"

/* The part that the caller sees comes first. */
typedef struct open_file {
    qsf_contents contents;
    qsf_ledger ledger;
    qsf_reader reader;
    qsf_extent *extents; /* [contents.n_extents], or NULL: nothing is verified yet */
} open_file;

qsf_status qsf_contents_open(const char *path, qsf_contents **out)
{
    QSF_REQUIRE(path);
    QSF_REQUIRE(out);
    *out = NULL;
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, UINT64_MAX);
    open_file *const f = qsf_ledger_acquire(&ledger, QSF_USE_HANDLE, sizeof *f);
    if (f == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "no memory to open a file: %zu bytes", sizeof *f);
    f->ledger = ledger;
    qsf_reader *const r = &f->reader;
    const qsf_status status = qsf_reader_open(r, &f->ledger, path, -1);
    if (status != QSF_OK) {
        qsf_contents_close(&f->contents);
        return status;
    }
    f->contents = (qsf_contents){
        .file_bytes = r->file.n_bytes,
        .header = &r->header,
        .arch = &r->arch,
        .kinds = r->kinds,
        .rope_sets = r->rope_sets,
        .sections = r->sections,
        .units = r->units,
        .tensors = r->tensors,
        .n_kinds = r->n_kinds,
        .n_rope_sets = r->n_rope_sets,
        .n_sections = r->n_sections,
        .n_units = r->n_units,
        .n_tensors = r->n_tensors,
        .n_extents = 2 + r->n_sections + r->n_units,
    };
    *out = &f->contents;
    return QSF_OK;
}

void qsf_contents_close(qsf_contents *c)
{
    if (c == NULL)
        return;
    open_file *const f = (open_file *)c;
    if (f->extents != NULL)
        qsf_extents_destroy(&f->reader, f->extents, c->n_extents);
    qsf_reader_close(&f->reader);
    qsf_ledger ledger = f->ledger; /* its last entry is the block that contains it */
    qsf_ledger_release(&ledger, QSF_USE_HANDLE, f, sizeof *f);
}

qsf_status qsf_contents_check(const qsf_header *header, const qsf_table *arch,
                              const qsf_table *rope, const qsf_table *kind)
{
    QSF_REQUIRE(header);
    QSF_REQUIRE(arch);
    QSF_REQUIRE(rope);
    QSF_REQUIRE(kind);
    QSF_TRY(qsf_header_check(header));
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, UINT64_MAX);
    qsf_reader r = {.header = *header,
                    .n_pass_layers = header->n_layers,
                    .rope_table = *rope,
                    .kind_table = *kind,
                    .ledger = &ledger};
    const size_t units_bytes = header->n_layers * sizeof *r.units;
    const size_t order_bytes = header->n_layers * sizeof *r.pass_units;
    r.units = qsf_ledger_acquire(&ledger, QSF_USE_TABLES, units_bytes);
    r.pass_units = qsf_ledger_acquire(&ledger, QSF_USE_TABLES, order_bytes);
    qsf_status status = QSF_OK;
    if (r.units == NULL || r.pass_units == NULL)
        status = QSF_FAIL(QSF_ERR_NOMEM, "no memory to check %u layers", header->n_layers);
    for (uint32_t i = 0; status == QSF_OK && i < header->n_layers; i++) {
        r.units[i] = (qsf_unit){.role = QSF_UNIT_LAYER, .layer = (uint16_t)i};
        r.pass_units[i] = i;
    }
    r.layer_units = r.pass_units;
    if (status == QSF_OK)
        status = qsf_arch_parse(arch->bytes, arch->n_bytes, &r.header, &r.arch);
    if (status == QSF_OK)
        status = qsf_rope_read(&r);
    if (status == QSF_OK)
        status = qsf_kinds_read(&r);
    qsf_ledger_release(&ledger, QSF_USE_TABLES, r.rope_sets, r.n_rope_sets * sizeof *r.rope_sets);
    qsf_ledger_release(&ledger, QSF_USE_TABLES, r.kinds, r.n_kinds * sizeof *r.kinds);
    qsf_ledger_release(&ledger, QSF_USE_TABLES, r.units, units_bytes);
    qsf_ledger_release(&ledger, QSF_USE_TABLES, r.pass_units, order_bytes);
    return status;
}

qsf_status qsf_contents_read(qsf_contents *c, uint32_t i, void *dst)
{
    return qsf_reader_read_section(&((open_file *)c)->reader, &c->sections[i], dst);
}

qsf_status qsf_contents_verify(qsf_contents *c, uint32_t i, uint64_t *end)
{
    open_file *const f = (open_file *)c;
    size_t n_extents = c->n_extents;
    if (f->extents == NULL)
        QSF_TRY(qsf_extents_create(&f->reader, &f->extents, &n_extents));
    void *const buffer = qsf_ledger_acquire(&f->ledger, QSF_USE_STREAM, QSF_VERIFY_BUFFER_BYTES);
    if (buffer == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "no memory for a read buffer of %zu MB",
                        QSF_VERIFY_BUFFER_BYTES >> 20);
    const qsf_status status = qsf_reader_verify_part(&f->reader, f->extents, n_extents, i, buffer,
                                                     QSF_VERIFY_BUFFER_BYTES);
    qsf_ledger_release(&f->ledger, QSF_USE_STREAM, buffer, QSF_VERIFY_BUFFER_BYTES);
    *end = f->extents[i].off + f->extents[i].n_bytes;
    return status;
}
