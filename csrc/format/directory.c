/* directory.c - reads and checks the directory: docs/format.md, section 2.
 *
 * Before allocating for a count, it checks that the file contains the bytes the count describes.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sections.h"

#include <inttypes.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "types/dtype.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "format/extents.h"

typedef struct tag_row {
    char tag[5];
    bool is_needed; /* every file must have it */
    bool is_table;  /* at most QSF_MAX_TABLE_BYTES */
} tag_row;

static const tag_row known_tags[] = {
    {"UNIT", true, true},   {"ARCH", true, true},   {"TENS", true, true},   {"EBND", true, true},
    {"KIND", false, true},  {"ROPE", false, true},  {"TEXT", false, true},  {"WPOS", false, false},
    {"META", false, false}, {"TOKN", false, false}, {"CHAT", false, false},
};

#define N_KNOWN_TAGS (sizeof known_tags / sizeof known_tags[0])

static const tag_row *find_tag(const char *tag)
{
    for (size_t i = 0; i < N_KNOWN_TAGS; i++)
        if (memcmp(known_tags[i].tag, tag, 4) == 0)
            return &known_tags[i];
    return NULL;
}

static qsf_status check_entry(const qsf_reader *r, const qsf_section *s, uint32_t reserved)
{
    char tag[5];
    qsf_section_name(s->tag, tag);
    QSF_FAIL_IF((s->flags & ~QSF_SECTION_REQUIRED) != 0 || reserved != 0, FORMAT,
                "section %s: flags %08x and reserved %08x, allowed: flags 0 or 1, reserved 0", tag,
                s->flags, reserved);
    const tag_row *const row = find_tag(s->tag);
    QSF_FAIL_IF(row == NULL && (s->flags & QSF_SECTION_REQUIRED) != 0, UNSUPPORTED,
                "section %s is required to read the file, and this build does not know it", tag);
    QSF_FAIL_IF(s->n_bytes == 0, FORMAT, "section %s is empty, allowed: 1 byte or more", tag);
    QSF_FAIL_IF(!qsf_extent_inside(s->off, s->n_bytes, r->file.n_bytes), FORMAT,
                "section %s: %" PRIu64 " bytes at %" PRIu64 " are not inside the file of %" PRIu64
                " bytes",
                tag, s->n_bytes, s->off, r->file.n_bytes);
    QSF_FAIL_IF(row != NULL && row->is_table && s->n_bytes > QSF_MAX_TABLE_BYTES, FORMAT,
                "section %s has %" PRIu64 " bytes, allowed: up to %u", tag, s->n_bytes,
                QSF_MAX_TABLE_BYTES);
    for (const qsf_section *earlier = r->sections; earlier < s; earlier++)
        QSF_FAIL_IF(memcmp(earlier->tag, s->tag, 4) == 0, FORMAT,
                    "section %s occurs twice in the directory", tag);
    return QSF_OK;
}

/* Checks that the file has all needed sections, and their sizes against the header. */
static qsf_status check_sections(const qsf_reader *r, const qsf_header_links *links)
{
    for (size_t i = 0; i < N_KNOWN_TAGS; i++)
        QSF_FAIL_IF(known_tags[i].is_needed && qsf_reader_section(r, known_tags[i].tag) == NULL,
                    FORMAT, "the file has no section %s", known_tags[i].tag);
    const qsf_header *const h = &r->header;
    const qsf_section *const wpos = qsf_reader_section(r, "WPOS");
    const bool is_learned = h->positions == QSF_POSITIONS_LEARNED;
    QSF_FAIL_IF(is_learned && wpos == NULL, FORMAT,
                "the positions are learned, but there is no section WPOS");
    const uint64_t bands_bytes = (uint64_t)r->n_bands * 4;         /* of each of one table or two */
    const uint64_t n_positions = (uint64_t)h->max_tokens * h->dim; /* numbers: f16, or f32 */
    const qsf_section *const ebnd = qsf_reader_section(r, "EBND");
    const bool wpos_is_f32 = is_learned && wpos->n_bytes == n_positions * 4;
    const struct {
        const qsf_section *section;
        uint64_t n_bytes;
    } sizes[] = {
        {ebnd, ebnd->n_bytes == 2 * bands_bytes ? 2 * bands_bytes : bands_bytes},
        {is_learned ? wpos : NULL, n_positions * (wpos_is_f32 ? 4 : 2)},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        QSF_FAIL_IF(sizes[i].section != NULL && sizes[i].section->n_bytes != sizes[i].n_bytes,
                    FORMAT, "section %s has %" PRIu64 " bytes, the header makes it %" PRIu64,
                    sizes[i].section->tag, sizes[i].section->n_bytes, sizes[i].n_bytes);
    const qsf_section *const unit = qsf_reader_section(r, "UNIT");
    QSF_FAIL_IF(unit->off != links->unit_index_off, FORMAT,
                "section UNIT is at %" PRIu64 ", the header says %" PRIu64, unit->off,
                links->unit_index_off);
    QSF_FAIL_IF(unit->crc32 != links->unit_index_crc32, DAMAGED,
                "section UNIT: checksum is %08x in the directory, %08x in the header", unit->crc32,
                links->unit_index_crc32);
    return QSF_OK;
}

qsf_status qsf_directory_read(qsf_reader *r, const qsf_header_links *links)
{
    unsigned char bytes[QSF_MAX_SECTIONS * QSF_DIRECTORY_ENTRY_BYTES];
    const size_t n_bytes = (size_t)links->n_sections * QSF_DIRECTORY_ENTRY_BYTES;
    QSF_FAIL_IF(!qsf_extent_inside(links->directory_off, n_bytes, r->file.n_bytes), FORMAT,
                "directory: %zu bytes at %" PRIu64 " are not inside the file of %" PRIu64 " bytes",
                n_bytes, links->directory_off, r->file.n_bytes);
    QSF_TRY(qsf_file_read_at(&r->file, links->directory_off, bytes, n_bytes));
    const uint32_t crc32 = qsf_crc32(0, bytes, n_bytes);
    QSF_FAIL_IF(crc32 != links->directory_crc32, DAMAGED,
                "directory: checksum is %08x, the header says %08x", crc32, links->directory_crc32);
    r->directory_off = links->directory_off;
    r->n_sections = links->n_sections;
    r->sections =
        qsf_ledger_acquire(r->ledger, QSF_USE_TABLES, links->n_sections * sizeof *r->sections);
    QSF_FAIL_IF(r->sections == NULL, NOMEM, "no memory for the list of sections: %zu KB",
                links->n_sections * sizeof *r->sections >> 10);
    for (uint32_t i = 0; i < links->n_sections; i++) {
        const unsigned char *const entry = bytes + (size_t)i * QSF_DIRECTORY_ENTRY_BYTES;
        qsf_section *const s = &r->sections[i];
        memcpy(s->tag, entry, 4);
        s->off = qsf_load_u64(entry + 8);
        s->n_bytes = qsf_load_u64(entry + 16);
        s->crc32 = qsf_load_u32(entry + 24);
        s->flags = qsf_load_u32(entry + 4);
        QSF_TRY(check_entry(r, s, qsf_load_u32(entry + 28)));
    }
    r->n_bands = (uint32_t)qsf_ceil_div(r->header.n_vocab, QSF_TILE_ROWS);
    return check_sections(r, links);
}
