/* linear.h - groups of linear layers in one parallel region, with what follows them.
 *
 * A region costs a hand-over to the threads and a wait for the slowest of them, so matrices
 * that read the same input share one, and what is done to a row right after its product (bias,
 * residual, activation, positions, the KV cache) is done by the thread that has it in its cache.
 * The weights come in spans, ascending, of as many tile rows as the stream can hold; where
 * the spans end, as the number of threads, does not change a bit.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_LINEAR_H
#define QSF_MODEL_LINEAR_H

#include <stddef.h>

#include "model/ops.h"

/* Works on rows [begin, end) of a matrix's result, which are complete for all tokens of the
 * chunk. Different rows may be finished by different threads. */
typedef void qsf_finish_fn(const void *arg, size_t begin, size_t end);

/* y [n_tokens, y_stride] = x @ w^T, plus what the side table adds, if there is one (+ bias [n_rows]
 * unless NULL), then finish unless NULL */
typedef struct qsf_linear {
    const qsf_tensor *w; /* [n_rows, n_cols] of the begun unit */
    const float *bias;
    float *y;
    size_t y_stride;   /* n_rows or more */
    size_t group_rows; /* finish gets whole groups of so many rows; divides n_rows */
    qsf_finish_fn *finish;
    const void *finish_arg;
    qsf_outliers outliers;
} qsf_linear;

/* Runs up to QSF_LINEAR_MAX matrices of the begun unit on x, in the order in which they lie
 * there. QSF_ERR_FORMAT: a side table is malformed. */
#define QSF_LINEAR_MAX 3
qsf_status qsf_linear_run(qsf_ops *o, const qsf_linear *linears, size_t n_linears,
                          const qsf_acts *x);

/* Runs two matrices of as many rows, such that when rows of `second` are finished, the
 * same rows of `first` are complete. `first` lies before `second` and has no finish. */
qsf_status qsf_linear_run_pair(qsf_ops *o, const qsf_linear *first, const qsf_linear *second,
                               const qsf_acts *x);

#endif
