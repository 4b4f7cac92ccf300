/* directory.c - reads and checks the directory and the layer index: docs/format.md, sections
 * 2 and 3.
 *
 * Before allocating for a count, it checks that the file contains the bytes the count describes.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/directory.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "format/extents.h"

typedef struct tag_row {
    char tag[5];
    bool is_needed; /* every file must have it */
    bool is_table;  /* at most QSF_MAX_TABLE_BYTES */
    bool is_unit;   /* aligned to QSF_UNIT_ALIGN */
} tag_row;

static const tag_row known_tags[] = {
    {"LAYR", true, true, false},   {"EMBD", true, false, true},   {"FINL", true, false, true},
    {"ARCH", true, true, false},   {"TENS", true, true, false},   {"EBND", true, true, false},
    {"WPOS", false, false, false}, {"META", false, false, false}, {"TOKN", false, false, false},
    {"CHAT", false, false, false}, {"TEXT", false, true, false},  {"KIND", false, true, false},
    {"ROPE", false, true, false},
};

#define N_KNOWN_TAGS (sizeof known_tags / sizeof known_tags[0])

static const tag_row *find_tag(const char *tag)
{
    for (size_t i = 0; i < N_KNOWN_TAGS; i++)
        if (memcmp(known_tags[i].tag, tag, 4) == 0)
            return &known_tags[i];
    return NULL;
}

static qsf_status check_entry(const qsf_reader *r, const qsf_section *s, uint32_t flags,
                              uint32_t reserved)
{
    char tag[5];
    qsf_section_name(s->tag, tag);
    if ((flags & ~QSF_SECTION_REQUIRED) != 0 || reserved != 0)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "section %s: flags %08" PRIx32 " and reserved %08" PRIx32
                        ", allowed: flags 0 or 1, reserved 0",
                        tag, flags, reserved);
    const tag_row *const row = find_tag(s->tag);
    if (row == NULL && (flags & QSF_SECTION_REQUIRED) != 0)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED,
                        "section %s is required to read the file, and this build does not know it",
                        tag);
    if (s->n_bytes == 0)
        return QSF_FAIL(QSF_ERR_FORMAT, "section %s is empty, allowed: 1 byte or more", tag);
    if (!qsf_extent_inside(s->off, s->n_bytes, r->file.n_bytes))
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "section %s: %" PRIu64 " bytes at %" PRIu64
                        " are not inside the file of %" PRIu64 " bytes",
                        tag, s->n_bytes, s->off, r->file.n_bytes);
    if (row != NULL && row->is_table && s->n_bytes > QSF_MAX_TABLE_BYTES)
        return QSF_FAIL(QSF_ERR_FORMAT, "section %s has %" PRIu64 " bytes, allowed: up to %u", tag,
                        s->n_bytes, QSF_MAX_TABLE_BYTES);
    if (row != NULL && row->is_unit && s->off % QSF_UNIT_ALIGN != 0)
        return QSF_FAIL(QSF_ERR_FORMAT, "section %s is at %" PRIu64 ", allowed: multiples of %d",
                        tag, s->off, QSF_UNIT_ALIGN);
    for (const qsf_section *earlier = r->sections; earlier < s; earlier++)
        if (memcmp(earlier->tag, s->tag, 4) == 0)
            return QSF_FAIL(QSF_ERR_FORMAT, "section %s occurs twice in the directory", tag);
    return QSF_OK;
}

/* Checks that the file has all needed sections, and their sizes against the header. */
static qsf_status check_sections(const qsf_reader *r, const qsf_header_links *links)
{
    for (size_t i = 0; i < N_KNOWN_TAGS; i++)
        if (known_tags[i].is_needed && qsf_reader_section(r, known_tags[i].tag) == NULL)
            return QSF_FAIL(QSF_ERR_FORMAT, "the file has no section %s", known_tags[i].tag);
    const qsf_header *const h = &r->header;
    const qsf_section *const wpos = qsf_reader_section(r, "WPOS");
    const bool is_learned = h->positions == QSF_POSITIONS_LEARNED;
    if (is_learned && wpos == NULL)
        return QSF_FAIL(QSF_ERR_FORMAT, "the positions are learned, but there is no section WPOS");
    const struct {
        const qsf_section *section;
        uint64_t n_bytes;
    } sizes[] = {
        {qsf_reader_section(r, "LAYR"), (uint64_t)h->n_layers * QSF_LAYER_ENTRY_BYTES},
        {qsf_reader_section(r, "EBND"), (uint64_t)r->n_bands * 4},
        {is_learned ? wpos : NULL, (uint64_t)h->max_tokens * h->dim * 2},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (sizes[i].section != NULL && sizes[i].section->n_bytes != sizes[i].n_bytes)
            return QSF_FAIL(QSF_ERR_FORMAT,
                            "section %s has %" PRIu64 " bytes, the header makes it %" PRIu64,
                            sizes[i].section->tag, sizes[i].section->n_bytes, sizes[i].n_bytes);
    const struct {
        const char *tag;
        uint64_t off;
    } offsets[] = {{"LAYR", links->layr_off}, {"EMBD", links->embd_off}, {"FINL", links->finl_off}};
    for (size_t i = 0; i < sizeof offsets / sizeof offsets[0]; i++) {
        const qsf_section *const s = qsf_reader_section(r, offsets[i].tag);
        if (s->off != offsets[i].off)
            return QSF_FAIL(QSF_ERR_FORMAT,
                            "section %s is at %" PRIu64 ", the header says %" PRIu64, s->tag,
                            s->off, offsets[i].off);
    }
    const uint32_t layr_crc32 = qsf_reader_section(r, "LAYR")->crc32;
    if (layr_crc32 != links->layr_crc32)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "section LAYR: checksum is %08" PRIx32 " in the directory, %08" PRIx32
                        " in the header",
                        layr_crc32, links->layr_crc32);
    return QSF_OK;
}

qsf_status qsf_directory_read(qsf_reader *r, const qsf_header_links *links)
{
    unsigned char bytes[QSF_MAX_SECTIONS * QSF_DIRECTORY_ENTRY_BYTES];
    const size_t n_bytes = (size_t)links->n_sections * QSF_DIRECTORY_ENTRY_BYTES;
    if (!qsf_extent_inside(links->directory_off, n_bytes, r->file.n_bytes))
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "directory: %zu bytes at %" PRIu64 " are not inside the file of %" PRIu64
                        " bytes",
                        n_bytes, links->directory_off, r->file.n_bytes);
    QSF_TRY(qsf_file_read_at(&r->file, links->directory_off, bytes, n_bytes));
    const uint32_t crc32 = qsf_crc32(0, bytes, n_bytes);
    if (crc32 != links->directory_crc32)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "directory: checksum is %08" PRIx32 ", the header says %08" PRIx32, crc32,
                        links->directory_crc32);
    r->directory_off = links->directory_off;
    r->n_sections = links->n_sections;
    r->sections =
        qsf_ledger_acquire(r->ledger, QSF_USE_TABLES, links->n_sections * sizeof *r->sections);
    if (r->sections == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "no memory for the list of sections: %zu KB",
                        links->n_sections * sizeof *r->sections >> 10);
    for (uint32_t i = 0; i < links->n_sections; i++) {
        const unsigned char *const entry = bytes + (size_t)i * QSF_DIRECTORY_ENTRY_BYTES;
        qsf_section *const s = &r->sections[i];
        memcpy(s->tag, entry, 4);
        s->off = qsf_load_u64(entry + 8);
        s->n_bytes = qsf_load_u64(entry + 16);
        s->crc32 = qsf_load_u32(entry + 24);
        QSF_TRY(check_entry(r, s, qsf_load_u32(entry + 4), qsf_load_u32(entry + 28)));
    }
    r->n_bands = (uint32_t)qsf_ceil_div(r->header.n_vocab, QSF_TILE_ROWS);
    return check_sections(r, links);
}

static qsf_status check_layer(const qsf_reader *r, uint32_t layer_idx, const qsf_unit *u,
                              uint32_t reserved)
{
    const char *const prefix = "layer index: layer";
    if (u->off % QSF_UNIT_ALIGN != 0 ||
        !qsf_extent_inside(u->off, u->stored_bytes, r->file.n_bytes))
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "%s %" PRIu32 ": %" PRIu64 " bytes at %" PRIu64
                        ", allowed: at a multiple of %d, inside the file of %" PRIu64 " bytes",
                        prefix, layer_idx, u->stored_bytes, u->off, QSF_UNIT_ALIGN,
                        r->file.n_bytes);
    if (u->stored_bytes == 0 || u->raw_bytes == 0)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "%s %" PRIu32 ": %" PRIu64 " bytes stored, %" PRIu64
                        " raw, allowed: 1 or more",
                        prefix, layer_idx, u->stored_bytes, u->raw_bytes);
    if (u->dtype >= QSF_DTYPE_COUNT)
        return QSF_FAIL(QSF_ERR_FORMAT, "%s %" PRIu32 ": quantisation type is %d, allowed: 0 .. %d",
                        prefix, layer_idx, u->dtype, QSF_DTYPE_COUNT - 1);
    if (u->compression >= QSF_COMPRESSION_COUNT)
        return QSF_FAIL(QSF_ERR_FORMAT, "%s %" PRIu32 ": compression is %d, allowed: 0 .. %d",
                        prefix, layer_idx, u->compression, QSF_COMPRESSION_COUNT - 1);
    if (u->compression == QSF_COMPRESSION_NONE && u->stored_bytes != u->raw_bytes)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "%s %" PRIu32 ": %" PRIu64 " bytes stored, %" PRIu64
                        " raw, allowed: the same without compression",
                        prefix, layer_idx, u->stored_bytes, u->raw_bytes);
    if (!isfinite(u->importance) || u->importance < 0.0F)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "%s %" PRIu32 ": importance is %g, allowed: finite, 0 or more", prefix,
                        layer_idx, (double)u->importance);
    if (reserved != 0)
        return QSF_FAIL(QSF_ERR_FORMAT, "%s %" PRIu32 ": reserved is %08" PRIx32 ", allowed: 0",
                        prefix, layer_idx, reserved);
    return QSF_OK;
}

/* bytes [n_layers * QSF_LAYER_ENTRY_BYTES] */
static qsf_status parse_layers(qsf_reader *r, const unsigned char *bytes)
{
    for (uint32_t i = 0; i < r->header.n_layers; i++) {
        const unsigned char *const entry = bytes + (size_t)i * QSF_LAYER_ENTRY_BYTES;
        qsf_unit *const u = &r->units[i + 1];
        u->off = qsf_load_u64(entry);
        u->stored_bytes = qsf_load_u32(entry + 8);
        u->raw_bytes = qsf_load_u32(entry + 12);
        u->dtype = entry[16];
        u->compression = entry[17];
        u->n_tensors = qsf_load_u16(entry + 18);
        u->crc32 = qsf_load_u32(entry + 20);
        u->importance = qsf_load_f32(entry + 24);
        QSF_TRY(check_layer(r, i, u, qsf_load_u32(entry + 28)));
    }
    return QSF_OK;
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

qsf_status qsf_directory_read_units(qsf_reader *r)
{
    const qsf_section *const layr = qsf_reader_section(r, "LAYR");
    const size_t n_bytes = (size_t)layr->n_bytes;
    r->n_units = r->header.n_layers + 2;
    r->n_units_file = r->n_units;
    r->units = qsf_ledger_acquire(r->ledger, QSF_USE_TABLES, r->n_units * sizeof *r->units);
    if (r->units == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "no memory for the list of units: %zu KB",
                        r->n_units * sizeof *r->units >> 10);
    unsigned char *const bytes = qsf_ledger_acquire(r->ledger, QSF_USE_TABLES, n_bytes);
    if (bytes == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "no memory for the layer index: %zu KB", n_bytes >> 10);
    qsf_status status = qsf_reader_read_section(r, layr, bytes);
    if (status == QSF_OK)
        status = parse_layers(r, bytes);
    qsf_ledger_release(r->ledger, QSF_USE_TABLES, bytes, n_bytes);
    QSF_TRY(status);
    fill_unit(r, "EMBD", &r->units[0]);
    fill_unit(r, "FINL", &r->units[r->n_units - 1]);

    qsf_extent *extents = NULL;
    size_t n_extents = 0;
    QSF_TRY(qsf_extents_create(r, &extents, &n_extents));
    status = qsf_extents_check_apart(extents, n_extents);
    qsf_extents_destroy(r, extents, n_extents);
    return status;
}
