/* contents.c - an open file for the tools of the Python package, and a check of all its bytes. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/contents.h"

#include <inttypes.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "format/records.h"
#include "format/sections.h"
#include "stream/unit_source.h"
#include "types/dtype.h"

/* The part that the caller sees comes first. */
typedef struct open_file {
    qsf_contents contents;
    qsf_ledger ledger;
    qsf_reader reader;
    qsf_extent *extents; /* [contents.n_extents], or NULL: nothing is verified yet */
} open_file;

qsf_status qsf_contents_open(const char *path, qsf_contents **out)
{
    QSF_REQUIRE(path, out);
    *out = NULL;
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, UINT64_MAX);
    open_file *f;
    QSF_TRY(qsf_ledger_take(&ledger, QSF_USE_HANDLE, sizeof *f, "an open file", &f));
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
    QSF_REQUIRE(header, arch, rope, kind);
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
        status = QSF_FAIL(NOMEM, "no memory to check %u layers", header->n_layers);
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
    void *buffer;
    QSF_TRY(qsf_ledger_take(&f->ledger, QSF_USE_STREAM, QSF_VERIFY_BUFFER_BYTES, "a read buffer",
                            &buffer));
    const qsf_status status = qsf_reader_verify_part(&f->reader, f->extents, n_extents, i, buffer,
                                                     QSF_VERIFY_BUFFER_BYTES);
    qsf_ledger_release(&f->ledger, QSF_USE_STREAM, buffer, QSF_VERIFY_BUFFER_BYTES);
    *end = f->extents[i].off + f->extents[i].n_bytes;
    return status;
}

/* ---- every byte against its own checksums and tables ---- */

/* Opening the file has verified header, directory, layer index and tables. The file may be larger
 * than memory, so the rest is read through one buffer. */

#define LEAST_BUFFER_BYTES (64U << 10)
#define DTYPE_OF_LAYER 0xFF

/* The position in the tensors of one unit while its raw bytes come in pieces of any size. */
typedef struct unit_walk {
    const qsf_reader *reader;
    uint32_t unit_idx;
    uint32_t tensor_idx; /* in reader->tensors */
    uint64_t raw_off;
    unsigned char header[QSF_TENSOR_HEADER_BYTES];
    uint32_t band_crc32;  /* of the current embedding band */
    unsigned char *table; /* [its data_bytes] the current table of sparse outliers, or NULL */
} unit_walk;

static bool is_zero(const unsigned char *p, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        if (p[i] != 0)
            return false;
    return true;
}

/* Checks that the header in the unit equals the entry of the tensor table. */
static qsf_status check_tensor_header(const unit_walk *w, const qsf_tensor *t)
{
    const unsigned char *const p = w->header;
    const qsf_unit *const u = &w->reader->units[w->unit_idx];
    const uint32_t dtype = p[12] == DTYPE_OF_LAYER ? u->dtype : p[12];
    QSF_FAIL_IF(qsf_load_u32(p) != t->type || qsf_load_u32(p + 4) != t->n_rows ||
                    qsf_load_u32(p + 8) != t->n_cols || dtype != t->dtype || p[13] != t->layout ||
                    qsf_load_u16(p + 14) != t->index || qsf_load_u32(p + 16) != t->n_entries ||
                    !is_zero(p + 20, sizeof w->header - 20),
                FORMAT, "unit %u: the tensor header at %" PRIu64 " differs from the tensor table",
                w->unit_idx, t->data_off - QSF_TENSOR_HEADER_BYTES);
    return QSF_OK;
}

/* Adds data bytes that lie in one embedding band. */
static qsf_status walk_band(unit_walk *w, const qsf_tensor *t, const unsigned char *p,
                            size_t n_bytes)
{
    const uint64_t band_bytes = t->data_bytes / w->reader->n_bands;
    const uint64_t at = w->raw_off - t->data_off;
    w->band_crc32 = qsf_crc32(at % band_bytes == 0 ? 0 : w->band_crc32, p, n_bytes);
    const uint64_t first = t->type == QSF_TENSOR_OWN_TABLE ? w->reader->n_bands : 0;
    const uint64_t band_idx = first + at / band_bytes;
    QSF_FAIL_IF((at + n_bytes) % band_bytes == 0 &&
                    w->band_crc32 != w->reader->band_crc32[band_idx],
                DAMAGED, "embedding band %" PRIu64 ": checksum is %08x, stored is %08x", band_idx,
                w->band_crc32, w->reader->band_crc32[band_idx]);
    return QSF_OK;
}

static void release_table(unit_walk *w)
{
    if (w->table != NULL)
        qsf_ledger_release(w->reader->ledger, QSF_USE_TABLES, w->table,
                           (size_t)w->reader->tensors[w->tensor_idx].data_bytes);
    w->table = NULL;
}

/* Collects data bytes of sparse outliers and checks them when all are there: an entry has no
 * meaning without the counts before it. */
static qsf_status walk_table(unit_walk *w, const qsf_tensor *t, const unsigned char *p,
                             size_t n_bytes)
{
    const size_t at = (size_t)(w->raw_off - t->data_off);
    const size_t data_bytes = (size_t)t->data_bytes;
    if (w->table == NULL)
        QSF_TRY(qsf_ledger_take(w->reader->ledger, QSF_USE_TABLES, data_bytes,
                                "the outliers of a matrix", &w->table));
    memcpy(w->table + at, p, n_bytes);
    if (at + n_bytes < data_bytes)
        return QSF_OK;
    const qsf_status status = qsf_outliers_check(&(qsf_outliers){t, w->table});
    release_table(w);
    return status;
}

/* Checks the next bytes up to the end of the header, band, data or padding that they are in. Sets
 * *n_bytes to the number of bytes checked. */
static qsf_status walk_part(unit_walk *w, const unsigned char *p, size_t *n_bytes)
{
    const qsf_tensor *const t = &w->reader->tensors[w->tensor_idx];
    const uint64_t data_end = t->data_off + t->data_bytes;
    const uint64_t pad_end = (data_end + (QSF_DATA_ALIGN - 1)) & ~(uint64_t)(QSF_DATA_ALIGN - 1);
    const uint64_t off = w->raw_off;
    uint64_t end = off < t->data_off ? t->data_off : off < data_end ? data_end : pad_end;
    const bool is_table = t->type == QSF_TENSOR_EMBEDDING || t->type == QSF_TENSOR_OWN_TABLE;
    const bool is_band = is_table && off >= t->data_off && off < data_end;
    if (is_band) {
        const uint64_t band_bytes = t->data_bytes / w->reader->n_bands;
        end = t->data_off + ((off - t->data_off) / band_bytes + 1) * band_bytes;
    }
    if (end - off < *n_bytes)
        *n_bytes = (size_t)(end - off);

    if (off < t->data_off) {
        memcpy(w->header + (QSF_TENSOR_HEADER_BYTES - (t->data_off - off)), p, *n_bytes);
        if (off + *n_bytes == t->data_off)
            QSF_TRY(check_tensor_header(w, t));
    } else if (is_band) {
        QSF_TRY(walk_band(w, t, p, *n_bytes));
    } else if (off < data_end && t->layout == QSF_LAYOUT_OUTLIERS) {
        QSF_TRY(walk_table(w, t, p, *n_bytes));
    } else if (off >= data_end && !is_zero(p, *n_bytes)) {
        return QSF_FAIL(FORMAT, "unit %u: the padding at %" PRIu64 " is not all zero", w->unit_idx,
                        data_end);
    }
    w->raw_off += *n_bytes;
    if (w->raw_off == pad_end)
        w->tensor_idx++;
    return QSF_OK;
}

static qsf_status walk(unit_walk *w, const unsigned char *p, size_t n_bytes)
{
    while (n_bytes > 0) {
        size_t n_part = n_bytes;
        QSF_TRY(walk_part(w, p, &n_part));
        p += n_part;
        n_bytes -= n_part;
    }
    return QSF_OK;
}

/* Reads the stored bytes of a unit from the file. */
typedef struct unit_bytes {
    qsf_reader *reader;
    uint64_t off; /* of the unit in the file */
    unsigned char *buffer;
    uint32_t running_crc32;
} unit_bytes;

static qsf_status take_from_file(void *arg, uint64_t off, size_t n_bytes, const unsigned char **out)
{
    unit_bytes *const b = arg;
    QSF_TRY(qsf_file_read_at(&b->reader->file, b->off + off, b->buffer, n_bytes));
    b->running_crc32 = qsf_crc32(b->running_crc32, b->buffer, n_bytes);
    *out = b->buffer;
    return QSF_OK;
}

/* buffers: cap_bytes for stored bytes, cap_bytes for raw bytes (each at least one block if the unit
 * is compressed), then the workspace of the codec. */
static qsf_status verify_unit(qsf_reader *r, uint32_t unit_idx, unsigned char *buffers,
                              size_t cap_bytes)
{
    const qsf_unit *const u = &r->units[unit_idx];
    unit_walk w = {.reader = r, .unit_idx = unit_idx};
    w.tensor_idx = u->first_tensor;
    unit_bytes bytes = {.reader = r, .off = u->off, .buffer = buffers};
    qsf_unit_source source = {
        .reader = r,
        .take = take_from_file,
        .take_arg = &bytes,
        .codec = buffers + 2 * cap_bytes,
        .codec_bytes = qsf_codec_workspace_bytes(u->compression),
    };
    unsigned char *const raw = buffers + cap_bytes;
    qsf_unit_source_begin(&source, unit_idx);
    qsf_status status = QSF_OK;
    /* An error in the contents is reported only if the checksum is right; otherwise the checksum
     * error names the cause. */
    qsf_status walked = QSF_OK;
    while (status == QSF_OK && qsf_unit_source_left_bytes(&source) > 0) {
        size_t n_bytes;
        status = qsf_unit_source_next(&source, raw, cap_bytes, &n_bytes);
        if (status == QSF_OK && walked == QSF_OK)
            walked = walk(&w, raw, n_bytes);
    }
    release_table(&w);
    QSF_TRY(status);
    QSF_TRY(qsf_unit_source_finish(&source));
    QSF_FAIL_IF(bytes.running_crc32 != u->crc32, DAMAGED,
                "unit %u (%" PRIu64 " bytes at %" PRIu64 "): checksum is %08x, stored is %08x",
                unit_idx, u->stored_bytes, u->off, bytes.running_crc32, u->crc32);
    return walked;
}

/* Acquires the buffers for decoding from the ledger for one unit. */
static qsf_status verify_compressed(qsf_reader *r, uint32_t unit_idx)
{
    const size_t all_bytes = 2 * (size_t)QSF_COMPRESSED_BLOCK_BYTES +
                             qsf_codec_workspace_bytes(r->units[unit_idx].compression);
    unsigned char *buffers;
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_STREAM, all_bytes, "decoding", &buffers));
    const qsf_status status = verify_unit(r, unit_idx, buffers, QSF_COMPRESSED_BLOCK_BYTES);
    qsf_ledger_release(r->ledger, QSF_USE_STREAM, buffers, all_bytes);
    return status;
}

/* Checks that bytes [off, end) of the file, which are padding, are zero. */
static qsf_status verify_zero(qsf_reader *r, uint64_t off, uint64_t end, unsigned char *buffer,
                              size_t buffer_bytes)
{
    while (off < end) {
        const size_t n_bytes = end - off < buffer_bytes ? (size_t)(end - off) : buffer_bytes;
        QSF_TRY(qsf_file_read_at(&r->file, off, buffer, n_bytes));
        QSF_FAIL_IF(!is_zero(buffer, n_bytes), DAMAGED,
                    "the padding in %" PRIu64 " .. %" PRIu64 " of the file is not all zero", off,
                    off + n_bytes - 1);
        off += n_bytes;
    }
    return QSF_OK;
}

static qsf_status verify_section(qsf_reader *r, const qsf_extent *e, unsigned char *buffer,
                                 size_t buffer_bytes)
{
    uint32_t crc32 = 0;
    for (uint64_t done = 0; done < e->n_bytes;) {
        const uint64_t left = e->n_bytes - done;
        const size_t n_bytes = left < buffer_bytes ? (size_t)left : buffer_bytes;
        QSF_TRY(qsf_file_read_at(&r->file, e->off + done, buffer, n_bytes));
        crc32 = qsf_crc32(crc32, buffer, n_bytes);
        done += n_bytes;
    }
    QSF_FAIL_IF(e->is_checked && crc32 != e->crc32, DAMAGED,
                "section %s (%" PRIu64 " bytes at %" PRIu64 "): checksum is %08x, stored is %08x",
                e->name, e->n_bytes, e->off, crc32, e->crc32);
    return QSF_OK;
}

static qsf_status verify_extent(qsf_reader *r, const qsf_extent *e, unsigned char *buffer,
                                size_t buffer_bytes)
{
    if (e->unit_idx == UINT32_MAX)
        return verify_section(r, e, buffer, buffer_bytes);
    if (r->units[e->unit_idx].compression != QSF_COMPRESSION_NONE)
        return verify_compressed(r, e->unit_idx);
    return verify_unit(r, e->unit_idx, buffer, buffer_bytes / 2);
}

qsf_status qsf_reader_verify_part(qsf_reader *r, const qsf_extent *extents, size_t n_extents,
                                  size_t i, void *buffer, size_t buffer_bytes)
{
    const qsf_extent *const e = &extents[i];
    const uint64_t end = i == 0 ? 0 : e[-1].off + e[-1].n_bytes;
    QSF_TRY(verify_zero(r, end, e->off, buffer, buffer_bytes));
    QSF_TRY(verify_extent(r, e, buffer, buffer_bytes));
    if (i + 1 < n_extents)
        return QSF_OK;
    return verify_zero(r, e->off + e->n_bytes, r->file.n_bytes, buffer, buffer_bytes);
}

qsf_status qsf_reader_verify(qsf_reader *r, void *buffer, size_t buffer_bytes)
{
    QSF_FAIL_IF(buffer_bytes < LEAST_BUFFER_BYTES, ARG,
                "internal error: a buffer of %zu bytes, allowed: %u or more", buffer_bytes,
                LEAST_BUFFER_BYTES);
    qsf_extent *extents = NULL;
    size_t n_extents = 0;
    QSF_TRY(qsf_extents_create(r, &extents, &n_extents));
    qsf_status status = QSF_OK;
    for (size_t i = 0; status == QSF_OK && i < n_extents; i++)
        status = qsf_reader_verify_part(r, extents, n_extents, i, buffer, buffer_bytes);
    qsf_extents_destroy(r, extents, n_extents);
    return status;
}

qsf_status qsf_file_verify(const char *path)
{
    QSF_REQUIRE(path);
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, UINT64_MAX);
    qsf_reader reader;
    QSF_TRY(qsf_reader_open(&reader, &ledger, path, -1));
    void *buffer;
    qsf_status status =
        qsf_ledger_take(&ledger, QSF_USE_STREAM, QSF_VERIFY_BUFFER_BYTES, "a read buffer", &buffer);
    if (status == QSF_OK)
        status = qsf_reader_verify(&reader, buffer, QSF_VERIFY_BUFFER_BYTES);
    qsf_ledger_release(&ledger, QSF_USE_STREAM, buffer, QSF_VERIFY_BUFFER_BYTES);
    qsf_reader_close(&reader);
    return status;
}
