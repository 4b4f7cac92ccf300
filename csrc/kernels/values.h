/* values.h - the values of a span, of every type of V pages. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_KERNELS_VALUES_H
#define QSF_KERNELS_VALUES_H

#include "kernels/kernels.h"

/* Computes values [n_rows, 64], rows `stride` floats apart, as the contract of attention in
 * kernels.h says. e [n_rows, 256], blocks [8]: a block of 64 dims of each V page of the span. Reads
 * those from the first slot that any row attends to to the last, and no others. */
void qsf_span_values(const qsf_kernels *k, qsf_dtype dtype, const unsigned char *const *blocks,
                     const float *e, const qsf_span_range *ranges, size_t n_rows, float *values,
                     size_t stride);

#endif
