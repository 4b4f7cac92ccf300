/* directory.c - reads and checks header and directory: docs/format.md, sections 1 and 2.
 *
 * Before allocating for a count, it checks that the file contains the bytes the count describes.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sections.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "format/records.h"
#include "types/dtype.h"

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
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, links->n_sections * sizeof *r->sections,
                            "the list of sections", &r->sections));
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

/* ---- the header ---- */

static qsf_status check_range(const char *field, uint32_t value, uint32_t least, uint32_t most)
{
    QSF_FAIL_IF(value < least || value > most, FORMAT, "header: %s is %u, allowed: %u .. %u", field,
                value, least, most);
    return QSF_OK;
}

static qsf_status check_token(const char *field, uint32_t id, uint32_t n_vocab)
{
    QSF_FAIL_IF(id != QSF_TOKEN_NONE && id >= n_vocab, FORMAT,
                "header: %s is %u, allowed: below the vocabulary of %u, or none", field, id,
                n_vocab);
    return QSF_OK;
}

/* Checks magic, version, size and checksums before any other field is used. */
static qsf_status check_identity(const unsigned char *bytes, uint64_t file_bytes)
{
    QSF_FAIL_IF(memcmp(bytes, "QSF1", 4) != 0, FORMAT,
                "not a QSF file: it begins with %02x %02x %02x %02x, not with \"QSF1\"", bytes[0],
                bytes[1], bytes[2], bytes[3]);
    const uint32_t version = qsf_load_u32(bytes + 4);
    QSF_FAIL_IF(version != QSF_FILE_VERSION, UNSUPPORTED,
                "file version %u, this build reads version %d: %s", version, QSF_FILE_VERSION,
                version < QSF_FILE_VERSION
                    ? "`qsf convert MODEL FILE` makes it again from the original model"
                    : "`pip install --upgrade qsf` gets a newer one");
    const uint32_t header_bytes = qsf_load_u32(bytes + 8);
    QSF_FAIL_IF(header_bytes != QSF_HEADER_BYTES, FORMAT, "header: size is %u, allowed: %d",
                header_bytes, QSF_HEADER_BYTES);
    const uint32_t stored[2] = {qsf_load_u32(bytes + 96), qsf_load_u32(bytes + 124)};
    const uint32_t real[2] = {qsf_crc32(0, bytes, 96), qsf_crc32(0, bytes + 100, 24)};
    for (int i = 0; i < 2; i++)
        QSF_FAIL_IF(stored[i] != real[i], DAMAGED,
                    "header: checksum of bytes %s is %08x, stored is %08x",
                    i == 0 ? "0..95" : "100..123", real[i], stored[i]);
    const uint32_t low_bytes = qsf_load_u32(bytes + 92);
    QSF_FAIL_IF(
        low_bytes != (file_bytes & 0xFFFFFFFF), DAMAGED,
        "the file has %" PRIu64
        " bytes, but its header was written for one of %u (mod 2^32): truncated or extended",
        file_bytes, low_bytes);
    return QSF_OK;
}

static qsf_status check_dimensions(const qsf_header *h)
{
    QSF_FAIL_IF(h->architecture >= QSF_ARCHITECTURE_COUNT, UNSUPPORTED,
                "architecture %u, this build reads 0 .. %d", h->architecture,
                QSF_ARCHITECTURE_COUNT - 1);
    QSF_TRY(check_range("number of layers", h->n_layers, 1, QSF_MAX_LAYERS));
    QSF_TRY(check_range("hidden dimension", h->dim, 1, QSF_MAX_DIM));
    QSF_TRY(check_range("number of attention heads", h->n_heads, 1, QSF_MAX_HEADS));
    QSF_TRY(check_range("number of KV heads", h->n_kv_heads, 1, h->n_heads));
    QSF_FAIL_IF(h->n_heads % h->n_kv_heads != 0, FORMAT,
                "header: %u KV heads do not divide %u attention heads", h->n_kv_heads, h->n_heads);
    QSF_TRY(check_range("vocabulary", h->n_vocab, 1, QSF_MAX_VOCAB));
    QSF_TRY(check_range("maximum sequence length", h->max_tokens, 1, QSF_MAX_TOKENS));
    QSF_TRY(check_range("FFN dimension", h->ffn_dim, 1, QSF_MAX_FFN_DIM));
    return check_range("head dimension", h->head_dim, 1, QSF_MAX_HEAD_DIM);
}

qsf_status qsf_header_check(const qsf_header *h)
{
    QSF_TRY(check_dimensions(h));
    QSF_TRY(check_range("quantisation type", h->dtype, 0, QSF_DTYPE_COUNT - 1));
    QSF_TRY(check_range("activation", h->activation, 0, QSF_ACTIVATION_HEADER_COUNT - 1));
    QSF_TRY(check_range("normalisation", h->norm, 0, QSF_NORM_COUNT - 1));
    QSF_TRY(check_range("positions", h->positions, 0, QSF_POSITIONS_COUNT - 1));
    if (h->positions == QSF_POSITIONS_ROPE) {
        QSF_FAIL_IF(!isfinite(h->rope_theta) || !(h->rope_theta > 0.0F), FORMAT,
                    "header: RoPE theta is %g, allowed with RoPE: finite and above 0",
                    (double)h->rope_theta);
    } else if (!(h->rope_theta == 0.0F)) {
        return QSF_FAIL(FORMAT, "header: RoPE theta is %g, allowed without RoPE: 0",
                        (double)h->rope_theta);
    }
    QSF_TRY(check_token("BOS id", h->bos_id, h->n_vocab));
    QSF_TRY(check_token("EOS id", h->eos_id, h->n_vocab));
    return check_token("PAD id", h->pad_id, h->n_vocab);
}

static qsf_status check_links(const unsigned char *bytes, const qsf_header_links *links)
{
    QSF_FAIL_IF(links->directory_off % 8 != 0, FORMAT,
                "header: directory offset is %" PRIu64 ", allowed: multiples of 8",
                links->directory_off);
    QSF_TRY(check_range("number of directory entries", links->n_sections, 1, QSF_MAX_SECTIONS));
    QSF_TRY(check_range("block size", qsf_load_u16(bytes + 116), QSF_BLOCK, QSF_BLOCK));
    QSF_TRY(check_range("rows per tile", bytes[118], QSF_TILE_ROWS, QSF_TILE_ROWS));
    return check_range("flags (reserved)", bytes[119], 0, 0);
}

qsf_status qsf_header_parse(const unsigned char *bytes, uint64_t file_bytes, qsf_header *h,
                            qsf_header_links *links)
{
    QSF_TRY(check_identity(bytes, file_bytes));
    *h = (qsf_header){
        .architecture = qsf_load_u32(bytes + 12),
        .n_layers = qsf_load_u32(bytes + 16),
        .dim = qsf_load_u32(bytes + 20),
        .n_heads = qsf_load_u32(bytes + 24),
        .n_kv_heads = qsf_load_u32(bytes + 28),
        .n_vocab = qsf_load_u32(bytes + 32),
        .max_tokens = qsf_load_u32(bytes + 36),
        .ffn_dim = qsf_load_u32(bytes + 40),
        .head_dim = qsf_load_u32(bytes + 44),
        .dtype = bytes[48],
        .activation = bytes[49],
        .norm = bytes[50],
        .positions = bytes[51],
        .rope_theta = qsf_load_f32(bytes + 52),
        .bos_id = qsf_load_u32(bytes + 80),
        .eos_id = qsf_load_u32(bytes + 84),
        .pad_id = qsf_load_u32(bytes + 88),
    };
    if (h->n_kv_heads == 0)
        h->n_kv_heads = h->n_heads;
    *links = (qsf_header_links){
        .unit_index_off = qsf_load_u64(bytes + 56),
        .embedding_off = qsf_load_u64(bytes + 64),
        .final_off = qsf_load_u64(bytes + 72),
        .directory_off = qsf_load_u64(bytes + 100),
        .n_sections = qsf_load_u32(bytes + 108),
        .directory_crc32 = qsf_load_u32(bytes + 112),
        .unit_index_crc32 = qsf_load_u32(bytes + 120),
    };
    QSF_TRY(qsf_header_check(h));
    return check_links(bytes, links);
}
