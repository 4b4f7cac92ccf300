/* values.h - the values of a span, of every type of V pages. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "kernels/kernels.h"

/* Returns the range from the first slot that any row attends to, to the last; begin >= end if there
 * are none. */
qsf_span_range qsf_union_of_ranges(const qsf_span_range *ranges, size_t n_rows);

/* Lays out the values of a range if they are codes. Reads the blocks that the range meets. */
void qsf_span_values_prepare(const qsf_kernels *k, qsf_dtype dtype, const qsf_value_blocks *blocks,
                             qsf_span_range range, qsf_value_tiles *tiles);

/* Computes values [n_rows, 64], rows `stride` floats apart, as the contract of attention in
 * kernels.h says. e [n_rows, 256]; ranges inside `all`, which is prepared from these blocks. */
void qsf_span_values(const qsf_kernels *k, qsf_dtype dtype, const qsf_value_blocks *blocks,
                     const qsf_value_tiles *tiles, qsf_span_range all, const float *e,
                     const qsf_span_range *ranges, size_t n_rows, float *values, size_t stride);
