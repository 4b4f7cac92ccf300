/* ops.h - the operations of a transformer on the rows of a chunk: kernel + pool + stream.
 *
 * Everything is split over output rows or tokens, never inside a sum, so the number
 * of threads cannot change a bit. Weights are asked of the stream in the order of the
 * pass and span by span: no operation assumes that a tensor, let alone a layer, is in
 * memory as a whole.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_OPS_H
#define QSF_MODEL_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/stream.h"
#include "kernels/kernels.h"
#include "model/config.h"
#include "model/scratch.h"
#include "platform/pool.h"

typedef struct qsf_ops {
    const qsf_config *config;
    const qsf_kernels *kernels;
    qsf_pool *pool;
    qsf_stream *stream;
    qsf_scratch *scratch;
    bool exact;        /* f32 activations whatever the weights */
    uint32_t n_tokens; /* rows of the chunk in hand */
} qsf_ops;

/* The least number of items in a piece of a parallel loop, so that it is worth its
 * hand-over, which costs about a microsecond: 16 KiB of weights or 16 Ki multiply-adds take
 * about as long. */
size_t qsf_ops_piece(size_t work_per_item);

/* Copies a vector tensor of the begun unit to `out` as f32 [n_cols]; a NULL tensor
 * gives *present = false and copies nothing. */
qsf_status qsf_ops_load_vector(qsf_ops *o, const qsf_tensor *t, float *out, bool *present);

/* Describes the rows of x [n_tokens, stride] as matmul input, quantised unless exact. Good until
 * the next prepare. */
qsf_acts qsf_ops_prepare(qsf_ops *o, const float *x, size_t stride);

/* y [n_tokens, y_stride] = x @ w^T (+ bias [n_rows] unless NULL) for a matrix of the
 * begun unit. y_stride may be as small as n_rows. */
qsf_status qsf_ops_linear(qsf_ops *o, const qsf_tensor *w, const qsf_acts *x, const float *bias,
                          float *y, size_t y_stride);

/* out [n_tokens, stride] = norm(x [n_tokens, stride]) * weight (+ bias unless NULL). */
void qsf_ops_norm(qsf_ops *o, const float *x, const float *weight, const float *bias, size_t stride,
                  float *out);

/* gate = activation(gate) * up for gated models, else gate = activation(gate). */
void qsf_ops_activate(qsf_ops *o);

/* x += y, row by row. */
void qsf_ops_add(qsf_ops *o, float *x, const float *y, size_t stride);

#endif
