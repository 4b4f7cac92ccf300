/* ops.h - the operations of a transformer on the rows of a chunk: kernel + pool + stream.
 *
 * Work is split over output rows or tokens, never inside a sum, so the number of threads cannot
 * change a bit. Weights are acquired from the stream in the order of the pass, range by range
 * (linear.h): no operation assumes that a whole tensor is in memory.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/outliers.h"
#include "stream/experts.h"
#include "stream/stream.h"
#include "kernels/kernels.h"
#include "format/config.h"
#include "model/angles.h"
#include "model/scratch.h"
#include "platform/pool.h"
#include "platform/stopwatch.h"

typedef struct qsf_ops {
    const qsf_config *config;
    const qsf_kernels *kernels;
    qsf_pool *pool;
    qsf_stream *stream;
    qsf_experts *experts;
    const unsigned char
        *apart; /* raw bytes of another unit, which is used instead of the stream's; or NULL */
    qsf_scratch *scratch;
    const qsf_rope *ropes;      /* [n_ropes of the config] */
    const qsf_layer_kind *kind; /* of the layer that runs */
    bool stores_only;           /* a mixer ends when keys and values are stored */
    bool exact;                 /* f32 activations for all weight types */
    uint32_t n_tokens;          /* rows of the current chunk */
    qsf_stopwatch *stopwatch;   /* of the chunk, or NULL */
} qsf_ops;

/* Ends a lap of `phase`. After a parallel run the pool has the end time; otherwise the clock is
 * read. */
void qsf_ops_lap(const qsf_ops *o, qsf_phase phase);

/* Returns the smallest number of items in a piece of a parallel loop. A hand-over costs about a
 * microsecond, as much as 16 KiB of weights or 16 Ki multiply-adds. */
size_t qsf_ops_piece(size_t work_per_item);

/* As the functions of the stream, for the stream's unit or for `apart`. */
bool qsf_ops_is_resident(const qsf_ops *o, uint32_t unit_idx);
size_t qsf_ops_range_bytes(const qsf_ops *o, uint32_t unit_idx, uint64_t off);
qsf_status qsf_ops_acquire(qsf_ops *o, uint64_t off, size_t n_bytes, const unsigned char **out);

/* *out = a vector tensor [n_cols] of the current unit as f32, valid until the unit ends: in place
 * if it is resident and f32, else a copy in space [n_cols]. NULL for a NULL tensor. */
qsf_status qsf_ops_load_vector(qsf_ops *o, const qsf_tensor *t, float *space, const float **out);

/* *out = the sparse outliers of a matrix of the current unit, valid until the unit ends: in place
 * if resident, else a copy in the scratch from byte *n_used on. *n_used grows by its size. None for
 * a NULL tensor. */
qsf_status qsf_ops_load_outliers(qsf_ops *o, const qsf_tensor *t, size_t *n_used,
                                 qsf_outliers *out);

/* A norm: the weight [dim] and the bias [dim], which may be NULL. A NULL weight means no norm. */
typedef struct qsf_norm_weights {
    const float *weight;
    const float *bias;
} qsf_norm_weights;

/* Normalises a row, x [n], as the model does: RMS or layer norm. out may be x. */
void qsf_ops_norm_row(const qsf_ops *o, const float *x, const qsf_norm_weights *norm, size_t n,
                      float *out);

/* out [n_tokens, dim_stride] = norm(x [n_tokens, dim_stride]); out may be x. */
void qsf_ops_norm(qsf_ops *o, const float *x, const qsf_norm_weights *norm, float *out);

/* Describes the rows of x [n_tokens, dim] as matmul input: normalised if the norm has a weight, and
 * quantised unless exact, row by row in one pass. Rows lie at dim padded to 64; the padding becomes
 * zero. Normalised rows go to `normed`, which may be x. Valid until the next prepare or gather. */
qsf_acts qsf_ops_prepare(qsf_ops *o, float *x, uint32_t dim, const qsf_norm_weights *norm,
                         float *normed);

/* Describes rows[0 .. n_tokens) of x, which lie at dim_stride and are padded with zeros, as matmul
 * input: quantised unless exact, and copied to `copies`. Without copies only quantised weights may
 * read it. Valid until the next prepare or gather. */
qsf_acts qsf_ops_gather(qsf_ops *o, const float *x, const uint32_t *rows, float *copies);

/* gate[begin .. end) of n rows becomes activation(gate) * up for gated layers, else
 * activation(gate). */
void qsf_ops_activate(const qsf_ops *o, size_t first_row, size_t n, size_t begin, size_t end);

/* gate[begin .. end) of all rows, which lie at `stride`, becomes activation(gate) * up. */
void qsf_ops_activate_gated(const qsf_ops *o, size_t stride, size_t begin, size_t end);

/* x[begin .. end) += factor of the layer * y[begin .. end) for every row of the chunk. */
void qsf_ops_add_residual(const qsf_ops *o, size_t begin, size_t end);

/* x += factor of the layer * norm(y) for every row of the chunk. */
void qsf_ops_add_normed(qsf_ops *o, const qsf_norm_weights *norm);

/* Returns q_low of x as 8-bit activations of their own, with 16-bit activations. x is that of
 * qsf_ops_prepare or qsf_ops_gather, or rows of it. */
qsf_acts qsf_acts_low(const qsf_acts *x);

/* Returns rows [first, first + n) of x. */
qsf_acts qsf_acts_rows(const qsf_acts *x, size_t first, size_t n);
