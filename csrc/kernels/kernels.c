/* kernels.c - fills the table of kernels for an instruction set. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernels.h"

#include <string.h>

#include "base/status.h"

size_t qsf_kv_value_block_bytes(qsf_dtype dtype)
{
    const size_t n_values = (size_t)QSF_KV_PAGE_TOKENS * QSF_BLOCK;
    if (!qsf_dtype_is_quantised(dtype))
        return n_values * qsf_dtype_scalar_bytes(dtype);
    if (dtype != QSF_DTYPE_8BIT && dtype != QSF_DTYPE_4BIT && dtype != QSF_DTYPE_2BIT)
        return 0;
    /* Bytes of the scales, mins and codes of two tiles. */
    return 2 * qsf_dtype_tile_bytes(dtype);
}

void qsf_kernels_init(qsf_kernels *k, qsf_isa isa)
{
    *k = (qsf_kernels){0};
    qsf_kernels_fill_scalar(k);
#if QSF_ARCH_X86
    if (isa >= QSF_ISA_AVX2)
        qsf_kernels_fill_avx2(k);
    if (isa == QSF_ISA_AVXVNNI)
        qsf_kernels_fill_avxvnni(k);
    if (isa >= QSF_ISA_AVX512)
        qsf_kernels_fill_avx512(k);
    if (isa >= QSF_ISA_AMX)
        qsf_kernels_fill_amx(k);
#endif
#if QSF_ARCH_ARM
    if (isa >= QSF_ISA_NEON)
        qsf_kernels_fill_neon(k);
    if (isa >= QSF_ISA_DOTPROD)
        qsf_kernels_fill_dotprod(k);
    if (isa >= QSF_ISA_I8MM)
        qsf_kernels_fill_i8mm(k);
#endif
    k->isa_name = qsf_isa_name(isa);
}

qsf_status qsf_kernels_check_rounding(const qsf_kernels *k)
{
    /* (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 is rounded to 1 + 2^-11 */
    if (k->sum_of_product(0x1.001p0F, 0x1.001p0F, -0x1.002p0F) == 0.0F)
        return QSF_OK;
    return QSF_FAIL(UNSUPPORTED, "this library was compiled so that a * b + c is rounded once, "
                                 "which changes results: compile it with -ffp-contract=off");
}

/* ---- the values of a span: codes become products of integers, 16 rows at a time ---- */

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
