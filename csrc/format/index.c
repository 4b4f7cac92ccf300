/* index.c - reads and checks the layer index and the index of experts: docs/format.md, section 3.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/index.h"

#include <inttypes.h>
#include <math.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "types/dtype.h"
#include "base/status.h"
#include "format/extents.h"

/* What one of the indices lists. */
typedef struct listed {
    const char *tag;
    const char *prefix;  /* of error texts */
    uint32_t first_unit; /* in r->units */
    uint32_t n;
} listed;

/* Checks an entry by itself; all but the last field of an entry has the same meaning in both. */
static qsf_status check_unit(const qsf_reader *r, const listed *l, uint32_t i, const qsf_unit *u)
{
    if (u->off % QSF_UNIT_ALIGN != 0 ||
        !qsf_extent_inside(u->off, u->stored_bytes, r->file.n_bytes))
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "%s %" PRIu32 ": %" PRIu64 " bytes at %" PRIu64
                        ", allowed: at a multiple of %d, inside the file of %" PRIu64 " bytes",
                        l->prefix, i, u->stored_bytes, u->off, QSF_UNIT_ALIGN, r->file.n_bytes);
    if (u->stored_bytes == 0 || u->raw_bytes == 0)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "%s %" PRIu32 ": %" PRIu64 " bytes stored, %" PRIu64
                        " raw, allowed: 1 or more",
                        l->prefix, i, u->stored_bytes, u->raw_bytes);
    if (u->dtype >= QSF_DTYPE_COUNT)
        return QSF_FAIL(QSF_ERR_FORMAT, "%s %" PRIu32 ": quantisation type is %d, allowed: 0 .. %d",
                        l->prefix, i, u->dtype, QSF_DTYPE_COUNT - 1);
    if (u->compression >= QSF_COMPRESSION_COUNT)
        return QSF_FAIL(QSF_ERR_FORMAT, "%s %" PRIu32 ": compression is %d, allowed: 0 .. %d",
                        l->prefix, i, u->compression, QSF_COMPRESSION_COUNT - 1);
    if (u->compression == QSF_COMPRESSION_NONE && u->stored_bytes != u->raw_bytes)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "%s %" PRIu32 ": %" PRIu64 " bytes stored, %" PRIu64
                        " raw, allowed: the same without compression",
                        l->prefix, i, u->stored_bytes, u->raw_bytes);
    if (!isfinite(u->importance) || u->importance < 0.0F)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "%s %" PRIu32 ": importance is %g, allowed: finite, 0 or more", l->prefix,
                        i, (double)u->importance);
    return QSF_OK;
}

/* Checks what only entries of experts must fulfil; `first` is the last field: the number of the
 * first expert with the same tensors. */
static qsf_status check_expert(const qsf_reader *r, uint32_t i, const qsf_unit *u, uint32_t first)
{
    const qsf_unit *const experts = r->units + r->n_units_file;
    if (u->compression != QSF_COMPRESSION_NONE)
        return QSF_FAIL(QSF_ERR_FORMAT, "expert %" PRIu32 ": compression is %d, allowed: 0", i,
                        u->compression);
    if (i > 0 && u->off < experts[i - 1].off + experts[i - 1].stored_bytes)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "expert %" PRIu32 " is at %" PRIu64 ", allowed: behind expert %" PRIu32, i,
                        u->off, i - 1);
    if (first > i || (first < i && experts[first].template_idx != r->n_units_file + first))
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "expert %" PRIu32 " has the tensors of expert %" PRIu32
                        ", allowed: itself, or an earlier one with tensors of its own",
                        i, first);
    if (u->raw_bytes != experts[first].raw_bytes || u->dtype != experts[first].dtype ||
        u->n_tensors != experts[first].n_tensors)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "expert %" PRIu32 " has %" PRIu32 " tensors, %" PRIu64
                        " bytes, type %d; expert %" PRIu32 ", whose tensors it has: %" PRIu32
                        ", %" PRIu64 ", %d",
                        i, u->n_tensors, u->raw_bytes, u->dtype, first, experts[first].n_tensors,
                        experts[first].raw_bytes, experts[first].dtype);
    return QSF_OK;
}

/* bytes [l->n * QSF_LAYER_ENTRY_BYTES] */
static qsf_status parse_index(qsf_reader *r, const listed *l, const unsigned char *bytes)
{
    const bool is_expert = l->first_unit == r->n_units_file;
    for (uint32_t i = 0; i < l->n; i++) {
        const unsigned char *const entry = bytes + (size_t)i * QSF_LAYER_ENTRY_BYTES;
        qsf_unit *const u = &r->units[l->first_unit + i];
        const uint32_t last_field = qsf_load_u32(entry + 28);
        u->off = qsf_load_u64(entry);
        u->stored_bytes = qsf_load_u32(entry + 8);
        u->raw_bytes = qsf_load_u32(entry + 12);
        u->dtype = entry[16];
        u->compression = entry[17];
        u->n_tensors = qsf_load_u16(entry + 18);
        u->crc32 = qsf_load_u32(entry + 20);
        u->importance = qsf_load_f32(entry + 24);
        QSF_TRY(check_unit(r, l, i, u));
        if (is_expert) {
            u->template_idx = r->n_units_file + last_field;
            QSF_TRY(check_expert(r, i, u, last_field));
        } else if (last_field != 0) {
            return QSF_FAIL(QSF_ERR_FORMAT, "%s %" PRIu32 ": reserved is %08" PRIx32 ", allowed: 0",
                            l->prefix, i, last_field);
        }
    }
    return QSF_OK;
}

static qsf_status read_index(qsf_reader *r, const listed *l)
{
    const qsf_section *const s = qsf_reader_section(r, l->tag);
    const size_t n_bytes = (size_t)s->n_bytes;
    unsigned char *const bytes = qsf_ledger_acquire(r->ledger, QSF_USE_TABLES, n_bytes);
    if (bytes == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "no memory for section %s: %zu KB", l->tag, n_bytes >> 10);
    qsf_status status = qsf_reader_read_section(r, s, bytes);
    if (status == QSF_OK)
        status = parse_index(r, l, bytes);
    qsf_ledger_release(r->ledger, QSF_USE_TABLES, bytes, n_bytes);
    return status;
}

/* Fills a unit that is a section: not compressed, of the file's quantisation type. */
static void fill_unit(const qsf_reader *r, const char *tag, qsf_unit *u)
{
    const qsf_section *const s = qsf_reader_section(r, tag);
    u->off = s->off;
    u->stored_bytes = s->n_bytes;
    u->raw_bytes = s->n_bytes;
    u->crc32 = s->crc32;
    u->dtype = r->header.dtype;
    u->importance = 1.0F;
}

/* Sets r->n_experts to the number of entries of EXPT, 0 without the section. */
static qsf_status count_experts(qsf_reader *r)
{
    const qsf_section *const s = qsf_reader_section(r, "EXPT");
    if (s == NULL)
        return QSF_OK;
    const uint64_t n = s->n_bytes / QSF_LAYER_ENTRY_BYTES;
    if (s->n_bytes % QSF_LAYER_ENTRY_BYTES != 0 || n > QSF_MAX_EXPERTS)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "section EXPT has %" PRIu64 " bytes, allowed: multiples of %d, up to %u",
                        s->n_bytes, QSF_LAYER_ENTRY_BYTES, QSF_MAX_EXPERTS * QSF_LAYER_ENTRY_BYTES);
    r->n_experts = (uint32_t)n;
    return QSF_OK;
}

qsf_status qsf_index_read(qsf_reader *r)
{
    r->n_units = r->header.n_layers + 2;
    r->n_units_file = r->n_units;
    QSF_TRY(count_experts(r));
    const size_t n_bytes = qsf_reader_n_all_units(r) * sizeof *r->units;
    r->units = qsf_ledger_acquire(r->ledger, QSF_USE_TABLES, n_bytes);
    if (r->units == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "no memory for the list of units: %zu KB", n_bytes >> 10);
    QSF_TRY(read_index(r, &(listed){"LAYR", "layer index: layer", 1, r->header.n_layers}));
    if (r->n_experts > 0)
        QSF_TRY(read_index(r, &(listed){"EXPT", "expert", r->n_units_file, r->n_experts}));
    fill_unit(r, "EMBD", &r->units[0]);
    fill_unit(r, "FINL", &r->units[r->n_units - 1]);

    qsf_extent *extents = NULL;
    size_t n_extents = 0;
    QSF_TRY(qsf_extents_create(r, &extents, &n_extents));
    qsf_status status = qsf_extents_check_apart(extents, n_extents);
    if (status == QSF_OK)
        status = qsf_extents_check_end(extents, n_extents, r->file.n_bytes);
    qsf_extents_destroy(r, extents, n_extents);
    return status;
}

qsf_status qsf_index_link_experts(qsf_reader *r)
{
    uint64_t n = 0; /* at most 4096 layers of 1024 experts */
    for (uint32_t i = 1; i + 1 < r->n_units_file; i++) {
        r->units[i].first_expert = r->n_units_file + (uint32_t)n;
        n += r->kinds[r->units[i].kind].n_experts;
    }
    if (n != r->n_experts)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "section EXPT has %" PRIu32 " experts, the layers have %" PRIu64,
                        r->n_experts, n);
    return QSF_OK;
}
