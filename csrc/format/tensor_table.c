/* tensor_table.c - reads and checks the tensor table (docs/format.md, section 4), and outliers.
 *
 * Offsets are recomputed from the sizes, so a tensor stays inside its unit, and tensors and their
 * padding fill the unit:
 *
 *     unit   |header|data.........|pad|header|data....|pad|
 *            0      64                ^ next               ^ raw bytes
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sections.h"

#include <inttypes.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/status.h"
#include "format/records.h"
#include "types/dtype.h"

#define N_INDICES 65536U /* values of qsf_tensor.index */
#define SEEN_BYTES (QSF_TENSOR_TYPE_COUNT * N_INDICES / 8)

/* The (type, index) pairs that occurred in one unit. Nearly every index is 0, so the bitmap for
 * other indices is acquired only when the first one comes. */
typedef struct seen_set {
    bool zero_types[QSF_TENSOR_TYPE_COUNT]; /* (type, index 0) */
    unsigned char *others;                  /* [SEEN_BYTES]; NULL until needed */
} seen_set;

static qsf_status add_seen(qsf_reader *r, seen_set *seen, const qsf_tensor *t)
{
    bool was_seen;
    if (t->index == 0) {
        was_seen = seen->zero_types[t->type];
        seen->zero_types[t->type] = true;
    } else {
        if (seen->others == NULL)
            QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, SEEN_BYTES, "tensor indices",
                                    &seen->others));
        const uint32_t bit = t->type * N_INDICES + t->index;
        was_seen = (seen->others[bit / 8] >> bit % 8 & 1) != 0;
        seen->others[bit / 8] |= (unsigned char)(1U << bit % 8);
    }
    QSF_FAIL_IF(was_seen, FORMAT, "tensor table: unit %u has type %u, index %d twice", t->unit_idx,
                t->type, t->index);
    return QSF_OK;
}

/* Clears the set in time proportional to the unit's tensors, not to the bitmap. */
static void clear_seen(seen_set *seen, const qsf_tensor *tensors, uint32_t n_tensors)
{
    memset(seen->zero_types, 0, sizeof seen->zero_types);
    for (uint32_t i = 0; seen->others != NULL && i < n_tensors; i++)
        seen->others[(tensors[i].type * N_INDICES + tensors[i].index) / 8] = 0;
}

/* Computes the size of a tensor's data without padding. False if its shape, type and layout are not
 * allowed together. */
static bool measure(const qsf_tensor *t, uint64_t *data_bytes)
{
    if (t->n_rows < 1 || t->n_rows > QSF_MAX_EXTENT_ROWS || t->n_cols < 1 ||
        t->n_cols > QSF_MAX_EXTENT_ROWS)
        return false;
    const bool is_table =
        t->type >= QSF_TENSOR_Q_OUTLIERS && t->type <= QSF_TENSOR_FFN_DOWN_OUTLIERS;
    if ((t->layout == QSF_LAYOUT_OUTLIERS) != is_table)
        return false;
    if (t->layout == QSF_LAYOUT_OUTLIERS)
        return qsf_outliers_measure(t, data_bytes);
    if (t->layout == QSF_LAYOUT_VECTOR) {
        *data_bytes = (uint64_t)t->n_cols * qsf_dtype_scalar_bytes(t->dtype);
        return t->n_rows == 1 && *data_bytes != 0;
    }
    const size_t head_cols = QSF_BLOCK * qsf_tiles_per_head(qsf_form_of(t->dtype));
    if (head_cols > QSF_BLOCK && t->n_cols % head_cols != 0)
        return false;
    /* At most 2^20 x 2^18 tiles of 4096 bytes: no overflow. */
    const uint64_t n_tiles =
        (uint64_t)qsf_ceil_div(t->n_rows, QSF_TILE_ROWS) * qsf_ceil_div(t->n_cols, QSF_BLOCK);
    *data_bytes = n_tiles * qsf_dtype_tile_bytes(t->dtype);
    return t->layout == QSF_LAYOUT_TILES && *data_bytes != 0;
}

static bool is_known(uint32_t type)
{
    return type < QSF_TENSOR_FIRST_FREE ||
           (type >= QSF_TENSOR_ROUTER_BIAS && type <= QSF_TENSOR_EXPERT_SCALE) ||
           (type >= QSF_TENSOR_CONV && type < QSF_TENSOR_TYPE_COUNT);
}

/* Parses one entry and checks all that does not depend on other entries. */
static qsf_status parse_tensor(const qsf_reader *r, const unsigned char *entry, uint32_t entry_idx,
                               qsf_tensor *t)
{
    t->unit_idx = qsf_load_u32(entry);
    t->type = qsf_load_u32(entry + 4);
    t->n_rows = qsf_load_u32(entry + 8);
    t->n_cols = qsf_load_u32(entry + 12);
    t->dtype = entry[16];
    t->layout = entry[17];
    t->index = qsf_load_u16(entry + 18);
    t->n_entries = qsf_load_u32(entry + 20);
    t->data_off = qsf_load_u64(entry + 24);
    QSF_FAIL_IF(t->unit_idx >= r->n_units, FORMAT,
                "tensor table: entry %u is of unit %u, allowed: 0 .. %u", entry_idx, t->unit_idx,
                r->n_units - 1);
    QSF_FAIL_IF(!is_known(t->type), UNSUPPORTED,
                "tensor table: entry %u has tensor type %u, which this build does not know",
                entry_idx, t->type);
    QSF_FAIL_IF(t->n_entries != 0 && t->layout != QSF_LAYOUT_OUTLIERS, FORMAT,
                "tensor table: reserved of entry %u is %08x, allowed: 0", entry_idx, t->n_entries);
    QSF_FAIL_IF(!measure(t, &t->data_bytes), FORMAT,
                "tensor table: entry %u is [%u, %u] of layout %d in type %d (%s) with %u outliers, "
                "allowed: layout 0, 1 row, f16 or f32; layout 1, a tile type; or, for types %d .. "
                "%d alone, layout 2, f16, an outlier or more, at most one in %u weights; each "
                "dimension 1 .. %u",
                entry_idx, t->n_rows, t->n_cols, t->layout, t->dtype, qsf_dtype_name(t->dtype),
                t->n_entries, QSF_TENSOR_Q_OUTLIERS, QSF_TENSOR_FFN_DOWN_OUTLIERS,
                QSF_LEAST_WEIGHTS_PER_OUTLIER, QSF_MAX_EXTENT_ROWS);
    return QSF_OK;
}

/* Assigns the entries from *at on to unit_idx and checks that they fill it exactly. */
static qsf_status place_unit(qsf_reader *r, seen_set *seen, uint32_t unit_idx, uint32_t *at)
{
    qsf_unit *const u = &r->units[unit_idx];
    u->first_tensor = *at;
    uint64_t off = 0;
    for (; *at < r->n_tensors && r->tensors[*at].unit_idx == unit_idx; (*at)++) {
        const qsf_tensor *const t = &r->tensors[*at];
        QSF_TRY(add_seen(r, seen, t));
        QSF_FAIL_IF(t->data_off != off + QSF_TENSOR_HEADER_BYTES ||
                        !qsf_extent_inside(t->data_off, t->data_bytes, u->raw_bytes),
                    FORMAT,
                    "tensor table: entry %u has %" PRIu64 " bytes at %" PRIu64
                    ", allowed: at %" PRIu64 ", inside unit %u of %" PRIu64 " bytes",
                    *at, t->data_bytes, t->data_off, off + QSF_TENSOR_HEADER_BYTES, unit_idx,
                    u->raw_bytes);
        /* Cannot wrap: the data is inside a unit, whose bytes are fewer than 2^63. */
        off = t->data_off + t->data_bytes;
        off = (off + (QSF_DATA_ALIGN - 1)) & ~(uint64_t)(QSF_DATA_ALIGN - 1);
    }
    const uint32_t n_tensors = *at - u->first_tensor;
    QSF_FAIL_IF(off != u->raw_bytes, FORMAT,
                "tensor table: the %u tensors of unit %u take %" PRIu64
                " bytes, the unit has %" PRIu64,
                n_tensors, unit_idx, off, u->raw_bytes);
    QSF_FAIL_IF(n_tensors != u->n_tensors, FORMAT,
                "tensor table: unit %u has %u tensors, its index says %u", unit_idx, n_tensors,
                u->n_tensors);
    clear_seen(seen, r->tensors + u->first_tensor, n_tensors);
    return QSF_OK;
}

static qsf_status check_is(const qsf_tensor *t, uint32_t type, uint8_t layout, uint32_t n_rows,
                           uint32_t n_cols)
{
    QSF_FAIL_IF(t->type != type || t->index != 0 || t->layout != layout || t->n_rows != n_rows ||
                    t->n_cols != n_cols,
                FORMAT,
                "tensor table: unit %u has type %u, index %d, layout %d, [%u, %u] where type %u, "
                "index 0, layout %d, [%u, %u] belongs",
                t->unit_idx, t->type, t->index, t->layout, t->n_rows, t->n_cols, type, layout,
                n_rows, n_cols);
    return QSF_OK;
}

/* Checks the table with embeddings of each layer: if ARCH has their width, a row for each token
 * with those of all layers. An encoder makes them of the token's embedding alone. */
static qsf_status check_own_table(const qsf_reader *r)
{
    const bool needs_table = r->arch.own_width != 0 && r->arch.is_encoder == 0;
    QSF_FAIL_IF((r->own_table_unit != 0) != needs_table, FORMAT,
                "ARCH: own embeddings (key 13) of width %u, the file has %d tables of them, "
                "expected %d",
                r->arch.own_width, r->own_table_unit != 0, needs_table);
    if (r->own_table_unit == 0)
        return QSF_OK;
    const qsf_unit *const u = &r->units[r->own_table_unit];
    QSF_FAIL_IF(u->n_tensors != 1, FORMAT, "tensor table: the own table has %u tensors, allowed: 1",
                u->n_tensors);
    return check_is(&r->tensors[u->first_tensor], QSF_TENSOR_OWN_TABLE, QSF_LAYOUT_TILES,
                    r->header.n_vocab, r->header.n_layers * r->arch.own_width);
}

/* Checks the head at t[*i], which is one matrix or two, and goes behind it: the first has whole
 * tiles, the second the rows after them. */
static qsf_status check_head(const qsf_header *h, const qsf_tensor *t, uint32_t n_tensors,
                             uint32_t *i)
{
    const bool is_split = *i + 1 < n_tensors && t[*i + 1].type == QSF_TENSOR_HEAD_REST;
    const uint32_t n_rows = is_split ? t[*i].n_rows : h->n_vocab;
    QSF_FAIL_IF(
        is_split && (n_rows >= h->n_vocab || n_rows % QSF_TILE_ROWS != 0), FORMAT,
        "tensor table: the head's first part has %u rows, allowed: multiples of %d below %u",
        n_rows, QSF_TILE_ROWS, h->n_vocab);
    QSF_TRY(check_is(&t[(*i)++], QSF_TENSOR_HEAD, QSF_LAYOUT_TILES, n_rows, h->dim));
    if (!is_split)
        return QSF_OK;
    return check_is(&t[(*i)++], QSF_TENSOR_HEAD_REST, QSF_LAYOUT_TILES, h->n_vocab - n_rows,
                    h->dim);
}

/* Checks the fixed contents of the embedding unit and the final unit, which layers must not have.
 */
static qsf_status check_contents(const qsf_reader *r)
{
    const qsf_header *const h = &r->header;
    const qsf_unit *const embd = &r->units[r->embedding_unit];
    const qsf_unit *const finl = &r->units[r->final_unit];
    QSF_FAIL_IF(embd->n_tensors != 1, FORMAT,
                "tensor table: the embedding unit has %u tensors, allowed: 1", embd->n_tensors);
    QSF_TRY(check_is(&r->tensors[embd->first_tensor], QSF_TENSOR_EMBEDDING, QSF_LAYOUT_TILES,
                     h->n_vocab, h->dim));
    QSF_TRY(check_own_table(r));
    for (uint32_t i = 0; i < r->n_tensors; i++)
        QSF_FAIL_IF(r->tensors[i].unit_idx != r->embedding_unit &&
                        r->tensors[i].unit_idx != r->final_unit &&
                        (r->own_table_unit == 0 || r->tensors[i].unit_idx != r->own_table_unit) &&
                        ((r->tensors[i].type >= QSF_TENSOR_EMBEDDING &&
                          r->tensors[i].type <= QSF_TENSOR_FINAL_NORM_BIAS) ||
                         r->tensors[i].type == QSF_TENSOR_HEAD_BIAS ||
                         r->tensors[i].type == QSF_TENSOR_DENSE ||
                         r->tensors[i].type == QSF_TENSOR_JOIN ||
                         r->tensors[i].type == QSF_TENSOR_HEAD_REST ||
                         r->tensors[i].type == QSF_TENSOR_FINAL_QUERY ||
                         r->tensors[i].type == QSF_TENSOR_OWN_TABLE),
                    FORMAT,
                    "tensor table: entry %u of a layer or expert has type %u, allowed there: all "
                    "but %d .. %d, %d, %d, %d, %d, %d and %d",
                    i, r->tensors[i].type, QSF_TENSOR_EMBEDDING, QSF_TENSOR_FINAL_NORM_BIAS,
                    QSF_TENSOR_HEAD_BIAS, QSF_TENSOR_OWN_TABLE, QSF_TENSOR_DENSE, QSF_TENSOR_JOIN,
                    QSF_TENSOR_HEAD_REST, QSF_TENSOR_FINAL_QUERY);

    /* In the order of use: the query of residual blocks, norm, its bias if any, the head's bias if
     * any and the head, unless tied.
     */
    const qsf_tensor *const t = &r->tensors[finl->first_tensor];
    const bool has_query = r->arch.block_layers != 0;
    uint32_t i = has_query ? 1 : 0;
    if (has_query)
        QSF_TRY(check_is(&t[0], QSF_TENSOR_FINAL_QUERY, QSF_LAYOUT_VECTOR, 1, h->dim));
    QSF_FAIL_IF(i == finl->n_tensors, FORMAT, "tensor table: the final unit has no norm");
    QSF_TRY(check_is(&t[i++], QSF_TENSOR_FINAL_NORM, QSF_LAYOUT_VECTOR, 1, h->dim));
    if (i < finl->n_tensors && t[i].type == QSF_TENSOR_FINAL_NORM_BIAS)
        QSF_TRY(check_is(&t[i++], QSF_TENSOR_FINAL_NORM_BIAS, QSF_LAYOUT_VECTOR, 1, h->dim));
    if (i < finl->n_tensors && t[i].type == QSF_TENSOR_DENSE) {
        const uint32_t n_rows = QSF_MIN(t[i].n_rows, QSF_MAX_DIM);
        QSF_TRY(check_is(&t[i++], QSF_TENSOR_DENSE, QSF_LAYOUT_TILES, n_rows, h->dim));
    }
    if (i < finl->n_tensors && t[i].type == QSF_TENSOR_JOIN)
        QSF_TRY(
            check_is(&t[i++], QSF_TENSOR_JOIN, QSF_LAYOUT_TILES, h->dim, 2 * r->arch.target_dim));
    if (i < finl->n_tensors && t[i].type == QSF_TENSOR_HEAD_BIAS)
        QSF_TRY(check_is(&t[i++], QSF_TENSOR_HEAD_BIAS, QSF_LAYOUT_VECTOR, 1, h->n_vocab));
    const bool has_head = r->arch.tied_head == 0 && r->arch.is_encoder == 0;
    if (i < finl->n_tensors && has_head)
        QSF_TRY(check_head(h, t, finl->n_tensors, &i));
    else if (has_head)
        return QSF_FAIL(FORMAT,
                        "tensor table: the final unit has no output head (type %d), and ARCH does "
                        "not tie it to the embedding",
                        QSF_TENSOR_HEAD);
    QSF_FAIL_IF(i < finl->n_tensors, FORMAT,
                "tensor table: the final unit has type %u after its last tensor (head %s)",
                t[i].type, has_head ? "not tied" : "tied or none");
    return QSF_OK;
}

static qsf_status parse_table(qsf_reader *r, const unsigned char *bytes)
{
    for (uint32_t i = 0; i < r->n_tensors; i++)
        QSF_TRY(parse_tensor(r, bytes + (size_t)i * QSF_TENSOR_ENTRY_BYTES, i, &r->tensors[i]));
    seen_set seen = {0};
    uint32_t at = 0;
    qsf_status status = QSF_OK;
    for (uint32_t u = 0; status == QSF_OK && u < r->n_units; u++) {
        const uint32_t template_idx = r->units[u].template_idx;
        if (template_idx == u)
            status = place_unit(r, &seen, u, &at);
        else
            r->units[u].first_tensor = r->units[template_idx].first_tensor;
    }
    qsf_ledger_release(r->ledger, QSF_USE_TABLES, seen.others, SEEN_BYTES);
    QSF_TRY(status);
    QSF_FAIL_IF(at != r->n_tensors, FORMAT,
                "tensor table: entry %u is of unit %u, allowed: sorted by unit", at,
                r->tensors[at].unit_idx);
    return check_contents(r);
}

qsf_status qsf_tensor_table_read(qsf_reader *r)
{
    const qsf_section *const tens = qsf_reader_section(r, "TENS");
    const size_t n_bytes = (size_t)tens->n_bytes;
    QSF_FAIL_IF(n_bytes % QSF_TENSOR_ENTRY_BYTES != 0, FORMAT,
                "section TENS has %zu bytes, allowed: multiples of %d", n_bytes,
                QSF_TENSOR_ENTRY_BYTES);
    r->n_tensors = (uint32_t)(n_bytes / QSF_TENSOR_ENTRY_BYTES);
    unsigned char *bytes;
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, r->n_tensors * sizeof *r->tensors,
                            "the tensor table", &r->tensors));
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, n_bytes, "the tensor table", &bytes));
    qsf_status status = qsf_reader_read_section(r, tens, bytes);
    if (status == QSF_OK)
        status = parse_table(r, bytes);
    qsf_ledger_release(r->ledger, QSF_USE_TABLES, bytes, n_bytes);
    return status;
}

/* ---- sparse outliers ---- */

/*     u32 first [tile rows + 1]   number of entries before each tile row; the last is the total
 *     entries                     u16 step, f16 delta
 *
 * Position p = 16 * column + row in the tile row. The first entry is at step - 1, each next one
 * step positions later. */

#define F16_EXPONENT 0x7C00U       /* all ones: infinite or NaN */
#define SUM_ENTRIES ((size_t)4096) /* the sum of their steps is below 2^32 */

static size_t tile_row_count(const qsf_tensor *t)
{
    return qsf_ceil_div(t->n_rows, QSF_TILE_ROWS);
}

bool qsf_outliers_measure(const qsf_tensor *t, uint64_t *data_bytes)
{
    const uint64_t n_weights = (uint64_t)t->n_rows * t->n_cols; /* at most 2^48 */
    if (t->dtype != QSF_DTYPE_F16 || t->n_entries < 1 || t->n_entries > QSF_MAX_OUTLIERS ||
        (uint64_t)t->n_entries * QSF_LEAST_WEIGHTS_PER_OUTLIER > n_weights)
        return false;
    *data_bytes =
        4 * ((uint64_t)tile_row_count(t) + 1) + (uint64_t)t->n_entries * QSF_OUTLIER_ENTRY_BYTES;
    return true;
}

/* True if all steps are 1 or more and all deltas finite. *end becomes the last position + 1. Sums
 * of SUM_ENTRIES steps fit 32 bits, which is faster; the total fits 64. */
static bool are_plain(const unsigned char *entries, size_t n_entries, uint64_t *end)
{
    uint32_t n_bad = 0;
    *end = 0;
    for (size_t begin = 0; begin < n_entries; begin += SUM_ENTRIES) {
        const size_t left = n_entries - begin;
        const size_t n = QSF_MIN(left, SUM_ENTRIES);
        uint32_t sum = 0;
        for (size_t i = begin; i < begin + n; i++) {
            const uint32_t entry = qsf_load_u32(entries + i * QSF_OUTLIER_ENTRY_BYTES);
            const uint32_t exponent = entry >> 16 & F16_EXPONENT;
            sum += entry & 0xFFFF;
            n_bad += (uint32_t)((entry & 0xFFFF) == 0) | (uint32_t)(exponent == F16_EXPONENT);
        }
        *end += sum;
    }
    return n_bad == 0;
}

/* True if the rows of all entries of an incomplete tile row are below n_rows. */
static bool are_above(const unsigned char *entries, size_t n_entries, size_t n_rows)
{
    uint64_t end = 0;
    bool ok = true;
    for (size_t i = 0; i < n_entries; i++) {
        end += qsf_load_u16(entries + i * QSF_OUTLIER_ENTRY_BYTES);
        ok &= (end - 1) % QSF_TILE_ROWS < n_rows;
    }
    return ok;
}

bool qsf_outliers_find(const qsf_outliers *o, size_t tile_row, const unsigned char **entries,
                       size_t *n_entries)
{
    const qsf_tensor *const t = o->tensor;
    const size_t n_tile_rows = tile_row_count(t);
    const uint32_t first = qsf_load_u32(o->bytes + 4 * tile_row);
    const uint32_t end = qsf_load_u32(o->bytes + 4 * tile_row + 4);
    if (first > end || end > t->n_entries || (tile_row == 0 && first != 0) ||
        (tile_row + 1 == n_tile_rows && end != t->n_entries))
        return false;
    const size_t rows_left = t->n_rows - tile_row * QSF_TILE_ROWS;
    *n_entries = end - first;
    *entries = o->bytes + 4 * (n_tile_rows + 1) + (size_t)first * QSF_OUTLIER_ENTRY_BYTES;
    uint64_t position_end;
    return are_plain(*entries, *n_entries, &position_end) &&
           position_end <= (uint64_t)t->n_cols * QSF_TILE_ROWS &&
           (rows_left >= QSF_TILE_ROWS || are_above(*entries, *n_entries, rows_left));
}

qsf_status qsf_outliers_check(const qsf_outliers *o)
{
    const qsf_tensor *const t = o->tensor;
    const unsigned char *entries;
    size_t n_entries;
    for (size_t i = 0; i < tile_row_count(t); i++)
        QSF_FAIL_IF(!qsf_outliers_find(o, i, &entries, &n_entries), FORMAT,
                    "unit %u: the outliers of tensor type %u in tile row %zu are not in order, "
                    "inside [%u, %u] and finite",
                    t->unit_idx, t->type, i, t->n_rows, t->n_cols);
    return QSF_OK;
}
