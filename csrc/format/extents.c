/* extents.c - lists the extents of a file and finds two that overlap. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/extents.h"

#include <inttypes.h>
#include <string.h>

#include "base/status.h"

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
    qsf_extent *const extents =
        qsf_ledger_acquire(r->ledger, QSF_USE_TABLES, cap * sizeof *extents);
    *out = NULL;
    QSF_FAIL_IF(extents == NULL, NOMEM, "no memory for the list of extents: %zu KB",
                cap * sizeof *extents >> 10);
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
