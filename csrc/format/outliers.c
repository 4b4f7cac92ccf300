/* outliers.c - reads and checks the sparse outliers of a matrix.
 *
 *     u32 first [tile rows + 1]   number of entries before each tile row; the last is the total
 *     entries                     u16 step, f16 delta
 *
 * Position p = 16 * column + row in the tile row. The first entry is at step - 1, each next one
 * step positions later.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/outliers.h"

#include "base/bytes.h"
#include "base/checked.h"
#include "types/dtype.h"
#include "base/status.h"

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
        const size_t n = left < SUM_ENTRIES ? left : SUM_ENTRIES;
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
