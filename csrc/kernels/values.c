/* values.c - the values of a span: codes become products of integers, 16 rows at a time. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/values.h"

#include <string.h>

qsf_span_range qsf_union_of_ranges(const qsf_span_range *ranges, size_t n_rows)
{
    qsf_span_range all = {QSF_KV_SPAN_TOKENS, 0};
    for (size_t r = 0; r < n_rows; r++) {
        if (ranges[r].begin >= ranges[r].end)
            continue;
        all.begin = ranges[r].begin < all.begin ? ranges[r].begin : all.begin;
        all.end = ranges[r].end > all.end ? ranges[r].end : all.end;
    }
    return all;
}

void qsf_span_values_prepare(const qsf_kernels *k, qsf_dtype dtype, const qsf_value_blocks *blocks,
                             qsf_span_range range, qsf_value_tiles *tiles)
{
    if (k->value_tiles[dtype] != NULL)
        k->value_tiles[dtype](blocks, range, tiles);
}

void qsf_span_values(const qsf_kernels *k, qsf_dtype dtype, const qsf_value_blocks *blocks,
                     const qsf_value_tiles *tiles, qsf_span_range all, const float *e,
                     const qsf_span_range *ranges, size_t n_rows, float *values, size_t stride)
{
    if (k->value_tiles[dtype] == NULL || all.begin >= all.end) {
        for (size_t r = 0; r < n_rows; r++)
            memset(values + r * stride, 0, QSF_BLOCK * sizeof *values);
        if (all.begin < all.end)
            k->add_values[dtype](blocks, e, ranges, n_rows, values, stride);
        return;
    }
    const qsf_span_range parts = {all.begin / QSF_BLOCK, (all.end + QSF_BLOCK - 1) / QSF_BLOCK};
    qsf_value_weights weights;
    for (size_t first = 0; first < n_rows; first += QSF_VALUE_ROWS) {
        const size_t left = n_rows - first;
        const size_t n = left < QSF_VALUE_ROWS ? left : QSF_VALUE_ROWS;
        k->value_weights(e + first * QSF_KV_SPAN_TOKENS, ranges + first, n, parts, tiles, &weights);
        k->value_products(tiles, &weights, parts, n, values + first * stride, stride);
    }
}
