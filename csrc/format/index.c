/* index.c - reads and checks section UNIT (docs/format.md, section 3), and lists all extents. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sections.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/status.h"
#include "format/records.h"
#include "types/dtype.h"

/* Checks the fields of an entry that need no other entry. */
static qsf_status check_unit(const qsf_reader *r, uint32_t i, const qsf_unit *u)
{
    QSF_FAIL_IF(u->off % QSF_UNIT_ALIGN != 0 ||
                    !qsf_extent_inside(u->off, u->stored_bytes, r->file.n_bytes),
                FORMAT,
                "unit %u: %" PRIu64 " bytes at %" PRIu64
                ", allowed: at a multiple of %d, inside the file of %" PRIu64 " bytes",
                i, u->stored_bytes, u->off, QSF_UNIT_ALIGN, r->file.n_bytes);
    QSF_FAIL_IF(u->stored_bytes == 0 || u->raw_bytes == 0, FORMAT,
                "unit %u: %" PRIu64 " bytes stored, %" PRIu64 " raw, allowed: 1 or more", i,
                u->stored_bytes, u->raw_bytes);
    QSF_FAIL_IF(u->dtype >= QSF_DTYPE_COUNT, FORMAT,
                "unit %u: quantisation type is %d, allowed: 0 .. %d", i, u->dtype,
                QSF_DTYPE_COUNT - 1);
    const int most_compression =
        u->role == QSF_UNIT_LAYER ? QSF_COMPRESSION_COUNT - 1 : QSF_COMPRESSION_NONE;
    QSF_FAIL_IF(u->compression > most_compression, FORMAT,
                "unit %u: compression is %d, allowed: 0 .. %d", i, u->compression,
                most_compression);
    QSF_FAIL_IF(u->compression == QSF_COMPRESSION_NONE && u->stored_bytes != u->raw_bytes, FORMAT,
                "unit %u: %" PRIu64 " bytes stored, %" PRIu64
                " raw, allowed: the same without compression",
                i, u->stored_bytes, u->raw_bytes);
    QSF_FAIL_IF(!isfinite(u->importance) || u->importance < 0.0F, FORMAT,
                "unit %u: importance is %g, allowed: finite, 0 or more", i, (double)u->importance);
    return QSF_OK;
}

static uint64_t rank_of(const qsf_unit *u)
{
    return (uint64_t)u->role << 32 | (uint64_t)u->layer << 16 | u->expert;
}

/* Checks role, layer and expert of the unit, and that units ascend by them. */
static qsf_status check_role(const qsf_reader *r, uint32_t i, const qsf_unit *u)
{
    const bool is_of_layer = u->role == QSF_UNIT_LAYER || u->role == QSF_UNIT_EXPERT;
    QSF_FAIL_IF(u->role >= QSF_UNIT_ROLE_COUNT, UNSUPPORTED,
                "unit %u has role %d, this build knows 0 .. %d", i, u->role,
                QSF_UNIT_ROLE_COUNT - 1);
    QSF_FAIL_IF(u->layer >= (is_of_layer ? r->header.n_layers : 1) ||
                    (u->expert != 0 && u->role != QSF_UNIT_EXPERT),
                FORMAT, "unit %u of role %d is of layer %d, expert %d; the file has %u layers", i,
                u->role, u->layer, u->expert, r->header.n_layers);
    QSF_FAIL_IF(i > 0 && rank_of(u) <= rank_of(u - 1), FORMAT,
                "unit %u (role %d, layer %d, expert %d) comes after role %d, layer %d, expert %d, "
                "allowed: ascending",
                i, u->role, u->layer, u->expert, u[-1].role, u[-1].layer, u[-1].expert);
    return QSF_OK;
}

/* Checks whose tensors a unit has. */
static qsf_status check_template(const qsf_reader *r, uint32_t i, const qsf_unit *u)
{
    const uint32_t first = u->template_idx;
    if (first == i)
        return QSF_OK;
    QSF_FAIL_IF(first > i || u->role != QSF_UNIT_EXPERT ||
                    r->units[first].role != QSF_UNIT_EXPERT ||
                    r->units[first].template_idx != first,
                FORMAT,
                "unit %u has the tensors of unit %u, allowed: itself; of an expert also an earlier "
                "one with tensors of its own",
                i, first);
    const qsf_unit *const t = &r->units[first];
    QSF_FAIL_IF(
        u->raw_bytes != t->raw_bytes || u->dtype != t->dtype || u->n_tensors != t->n_tensors,
        FORMAT,
        "unit %u has %u tensors, %" PRIu64
        " bytes, type %d; unit %u, whose tensors it has: %u, %" PRIu64 ", %d",
        i, u->n_tensors, u->raw_bytes, u->dtype, first, t->n_tensors, t->raw_bytes, t->dtype);
    return QSF_OK;
}

/* A prompt reads the experts of a layer as one consecutive run. */
static qsf_status check_ascent(uint32_t i, const qsf_unit *u)
{
    if (i == 0 || u->role != QSF_UNIT_EXPERT || u[-1].role != QSF_UNIT_EXPERT ||
        u->off >= u[-1].off + u[-1].stored_bytes)
        return QSF_OK;
    return QSF_FAIL(FORMAT, "unit %u is at %" PRIu64 ", allowed: behind expert unit %u", i, u->off,
                    i - 1);
}

/* entry [QSF_UNIT_ENTRY_BYTES] */
static qsf_status parse_unit(qsf_reader *r, uint32_t i, const unsigned char *entry)
{
    qsf_unit *const u = &r->units[i];
    *u = (qsf_unit){
        .off = qsf_load_u64(entry),
        .stored_bytes = qsf_load_u64(entry + 8),
        .raw_bytes = qsf_load_u64(entry + 16),
        .crc32 = qsf_load_u32(entry + 24),
        .importance = qsf_load_f32(entry + 28),
        .role = entry[32],
        .dtype = entry[33],
        .compression = entry[34],
        .layer = qsf_load_u16(entry + 36),
        .expert = qsf_load_u16(entry + 38),
        .n_tensors = qsf_load_u32(entry + 40),
        .template_idx = qsf_load_u32(entry + 44),
    };
    QSF_FAIL_IF(entry[35] != 0, FORMAT, "unit %u: reserved is %02x, allowed: 0", i, entry[35]);
    QSF_TRY(check_role(r, i, u));
    QSF_TRY(check_unit(r, i, u));
    QSF_TRY(check_template(r, i, u));
    return check_ascent(i, u);
}

/* Finds the embedding, the layers and the final unit, one each, before the experts: roles ascend.
 */
static qsf_status find_roles(qsf_reader *r, const qsf_header_links *links)
{
    uint32_t n_of[QSF_UNIT_ROLE_COUNT] = {0};
    uint32_t first_of[QSF_UNIT_ROLE_COUNT] = {0};
    for (uint32_t i = 0; i < r->n_units; i++)
        if (n_of[r->units[i].role]++ == 0)
            first_of[r->units[i].role] = i;
    QSF_FAIL_IF(
        n_of[QSF_UNIT_EMBEDDING] != 1 || n_of[QSF_UNIT_FINAL] != 1 ||
            n_of[QSF_UNIT_LAYER] != r->header.n_layers,
        FORMAT, "section UNIT has %u embeddings, %u layers, %u final units, allowed: 1, %u, 1",
        n_of[QSF_UNIT_EMBEDDING], n_of[QSF_UNIT_LAYER], n_of[QSF_UNIT_FINAL], r->header.n_layers);
    r->n_experts = n_of[QSF_UNIT_EXPERT];
    QSF_FAIL_IF(r->n_experts > QSF_MAX_EXPERTS, FORMAT,
                "section UNIT has %u experts, allowed: up to %u", r->n_experts, QSF_MAX_EXPERTS);
    QSF_FAIL_IF(n_of[QSF_UNIT_OWN_TABLE] > 1, FORMAT,
                "section UNIT has %u own tables, allowed: 0, 1", n_of[QSF_UNIT_OWN_TABLE]);
    r->own_table_unit = first_of[QSF_UNIT_OWN_TABLE];
    r->n_stream_units = r->n_units - r->n_experts - n_of[QSF_UNIT_OWN_TABLE];
    r->embedding_unit = first_of[QSF_UNIT_EMBEDDING];
    r->final_unit = first_of[QSF_UNIT_FINAL];
    const struct {
        const char *name;
        uint64_t off;
        uint64_t header_off;
    } ends[] = {{"embedding", r->units[r->embedding_unit].off, links->embedding_off},
                {"final unit", r->units[r->final_unit].off, links->final_off}};
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++)
        QSF_FAIL_IF(ends[i].off != ends[i].header_off, FORMAT,
                    "the %s is at %" PRIu64 ", the header says %" PRIu64, ends[i].name, ends[i].off,
                    ends[i].header_off);
    return QSF_OK;
}

/* Lists the units of a pass: roles are numbered in its order. */
static qsf_status list_pass(qsf_reader *r)
{
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, r->n_stream_units * sizeof *r->pass_units,
                            "the units of a pass", &r->pass_units));
    for (uint32_t i = 0; i < r->n_stream_units; i++) {
        if (r->units[i].role == QSF_UNIT_LAYER && r->n_pass_layers++ == 0)
            r->layer_units = &r->pass_units[i];
        r->pass_units[i] = i;
    }
    r->n_pass_units = r->n_stream_units;
    return QSF_OK;
}

static qsf_status parse_index(qsf_reader *r, const unsigned char *bytes,
                              const qsf_header_links *links)
{
    for (uint32_t i = 0; i < r->n_units; i++)
        QSF_TRY(parse_unit(r, i, bytes + (size_t)i * QSF_UNIT_ENTRY_BYTES));
    QSF_TRY(find_roles(r, links));
    return list_pass(r);
}

static qsf_status check_apart(qsf_reader *r)
{
    qsf_extent *extents = NULL;
    size_t n_extents = 0;
    QSF_TRY(qsf_extents_create(r, &extents, &n_extents));
    qsf_status status = qsf_extents_check_apart(extents, n_extents);
    if (status == QSF_OK)
        status = qsf_extents_check_end(extents, n_extents, r->file.n_bytes);
    qsf_extents_destroy(r, extents, n_extents);
    return status;
}

qsf_status qsf_index_read(qsf_reader *r, const qsf_header_links *links)
{
    const qsf_section *const s = qsf_reader_section(r, "UNIT");
    const size_t n_bytes = (size_t)s->n_bytes; /* at most QSF_MAX_TABLE_BYTES */
    QSF_FAIL_IF(n_bytes % QSF_UNIT_ENTRY_BYTES != 0, FORMAT,
                "section UNIT has %zu bytes, allowed: multiples of %d", n_bytes,
                QSF_UNIT_ENTRY_BYTES);
    r->n_units = (uint32_t)(n_bytes / QSF_UNIT_ENTRY_BYTES);
    unsigned char *bytes;
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, r->n_units * sizeof *r->units,
                            "the list of units", &r->units));
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, n_bytes, "the list of units", &bytes));
    qsf_status status = qsf_reader_read_section(r, s, bytes);
    if (status == QSF_OK)
        status = parse_index(r, bytes, links);
    qsf_ledger_release(r->ledger, QSF_USE_TABLES, bytes, n_bytes);
    QSF_TRY(status);
    return check_apart(r);
}

qsf_status qsf_index_link_experts(qsf_reader *r)
{
    const uint32_t end = r->n_stream_units + r->n_experts;
    uint32_t at = r->n_stream_units;
    for (uint32_t i = 0; i < r->n_pass_layers; i++) {
        qsf_unit *const u = &r->units[r->layer_units[i]];
        const uint32_t n_experts = r->kinds[u->kind].n_experts;
        u->first_expert = at;
        for (uint32_t expert = 0; expert < n_experts; expert++, at++)
            QSF_FAIL_IF(at == end || r->units[at].layer != u->layer ||
                            r->units[at].expert != expert,
                        FORMAT, "layer %d has %u experts, but section UNIT no expert %u of it",
                        u->layer, n_experts, expert);
    }
    QSF_FAIL_IF(at != end, FORMAT, "section UNIT has expert %d of layer %d, the layer has %u",
                r->units[at].expert, r->units[at].layer,
                r->kinds[r->units[r->layer_units[r->units[at].layer]].kind].n_experts);
    return QSF_OK;
}

/* ---- extents ---- */

/* Insertion sort from the back: writers store extents in order, so each takes one comparison. A
 * hostile order of 4354 extents, the most possible without experts, costs some milliseconds. */
static void insert(qsf_extent *extents, size_t *n, const qsf_extent *e)
{
    size_t at = *n;
    for (; at > 0 && extents[at - 1].off > e->off; at--)
        extents[at] = extents[at - 1];
    extents[at] = *e;
    (*n)++;
}

static qsf_extent unit_extent(const qsf_reader *r, uint32_t unit_idx)
{
    static const char names[QSF_UNIT_ROLE_COUNT][12] = {
        [QSF_UNIT_EMBEDDING] = "embedding", [QSF_UNIT_LAYER] = "layer",
        [QSF_UNIT_FINAL] = "final unit",    [QSF_UNIT_EXPERT] = "expert",
        [QSF_UNIT_OWN_TABLE] = "own table",
    };
    const qsf_unit *const u = &r->units[unit_idx];
    qsf_extent e = {.off = u->off,
                    .n_bytes = u->stored_bytes,
                    .crc32 = u->crc32,
                    .is_checked = true,
                    .unit_idx = unit_idx};
    memcpy(e.name, names[u->role], sizeof e.name);
    return e;
}

/* Puts the experts, which ascend, among extents [n] from the back; there is room for them. */
static void merge_experts(const qsf_reader *r, qsf_extent *extents, size_t n)
{
    for (uint32_t left = r->n_experts; left > 0;) {
        const qsf_extent e = unit_extent(r, qsf_reader_expert_unit(r, left - 1));
        qsf_extent *const at = &extents[n + left - 1];
        if (n > 0 && extents[n - 1].off > e.off) {
            *at = extents[--n];
            continue;
        }
        *at = e;
        left--;
    }
}

qsf_status qsf_extents_create(const qsf_reader *r, qsf_extent **out, size_t *n_extents)
{
    const size_t cap = 2 + (size_t)r->n_sections + r->n_units;
    qsf_extent *extents;
    *out = NULL;
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, cap * sizeof *extents, "the list of extents",
                            &extents));
    size_t n = 0;
    insert(extents, &n,
           &(qsf_extent){.n_bytes = QSF_HEADER_BYTES, .unit_idx = UINT32_MAX, .name = "header"});
    insert(extents, &n,
           &(qsf_extent){.off = r->directory_off,
                         .n_bytes = (uint64_t)r->n_sections * QSF_DIRECTORY_ENTRY_BYTES,
                         .unit_idx = UINT32_MAX,
                         .name = "directory"});
    for (uint32_t i = 0; i < r->n_sections; i++) {
        const qsf_section *const s = &r->sections[i];
        qsf_extent e = {.off = s->off,
                        .n_bytes = s->n_bytes,
                        .crc32 = s->crc32,
                        .is_checked = true,
                        .unit_idx = UINT32_MAX};
        qsf_section_name(s->tag, e.name);
        insert(extents, &n, &e);
    }
    for (uint32_t i = 0; i < r->n_stream_units; i++) {
        const qsf_extent e = unit_extent(r, i);
        insert(extents, &n, &e);
    }
    if (r->own_table_unit != 0) {
        const qsf_extent e = unit_extent(r, r->own_table_unit);
        insert(extents, &n, &e);
    }
    merge_experts(r, extents, n);
    *out = extents;
    *n_extents = cap;
    return QSF_OK;
}

void qsf_extents_destroy(const qsf_reader *r, qsf_extent *extents, size_t n_extents)
{
    qsf_ledger_release(r->ledger, QSF_USE_TABLES, extents, n_extents * sizeof *extents);
}

qsf_status qsf_extents_check_apart(const qsf_extent *extents, size_t n_extents)
{
    for (size_t i = 1; i < n_extents; i++) {
        const qsf_extent *const a = &extents[i - 1];
        const qsf_extent *const b = &extents[i];
        QSF_FAIL_IF(b->off - a->off < a->n_bytes, FORMAT,
                    "%s (%" PRIu64 " bytes at %" PRIu64 ") overlaps %s (%" PRIu64
                    " bytes at %" PRIu64 ")",
                    a->name, a->n_bytes, a->off, b->name, b->n_bytes, b->off);
    }
    return QSF_OK;
}

qsf_status qsf_extents_check_end(const qsf_extent *extents, size_t n_extents, uint64_t file_bytes)
{
    const qsf_extent *const last = &extents[n_extents - 1];
    const uint64_t end = last->off + last->n_bytes; /* inside the file, as of every extent */
    QSF_FAIL_IF(file_bytes - end > UINT32_MAX, DAMAGED,
                "the file has %" PRIu64 " MB, but its last part ends at %" PRIu64
                " MB: truncated or extended",
                file_bytes >> 20, end >> 20);
    return QSF_OK;
}
