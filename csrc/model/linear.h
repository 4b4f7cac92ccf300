/* linear.h - linear layers in one parallel region, with their epilogues.
 *
 * Each parallel region waits for its slowest thread. So matrices that read the same input share a
 * region, and the thread that computed a row also runs its epilogue (residual, activation, RoPE,
 * KV cache) while the row is in its cache. The weights come in ascending ranges of as many tile
 * rows as the stream can hold. Neither the ranges nor the number of threads change a bit.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/adapter.h"
#include "model/ops.h"

/* Works on rows [begin, end) of a result, which are complete for all tokens of the chunk. Threads
 * may call it at the same time for different rows. */
typedef void qsf_epilogue_fn(const void *arg, size_t begin, size_t end);

/* y [n_tokens, y_stride] = x @ w^T, plus that of its outliers and adapters (+ bias [n_rows] unless
 * NULL); then the epilogue, unless NULL */
typedef struct qsf_linear {
    const qsf_tensor *w; /* [n_rows, n_cols] of the current unit */
    const float *bias;
    float *y;
    size_t y_stride;   /* n_rows or more */
    size_t group_rows; /* rows of a group, which the epilogue gets whole; divides n_rows */
    qsf_epilogue_fn *epilogue;
    const void *epilogue_arg;
    qsf_outliers outliers;
    const qsf_low_rank *low_rank; /* or NULL */
    float *low;                   /* [n_tokens, low_cols of the config], of the adapters */
} qsf_linear;

/* y = x @ w^T, with nothing else */
static inline qsf_linear qsf_linear_of(const qsf_tensor *w, float *y, size_t y_stride)
{
    return (qsf_linear){.w = w, .y = y, .y_stride = y_stride, .group_rows = 1};
}

/* Runs up to QSF_LINEAR_MAX matrices of the current unit on x, in file order. QSF_ERR_FORMAT:
 * sparse outliers are malformed. */
#define QSF_LINEAR_MAX 6
qsf_status qsf_linear_run(qsf_ops *o, const qsf_linear *linears, size_t n_linears,
                          const qsf_acts *x);

/* Runs a matrix of heads, each of head_rows rows in whole tiles, on input rows of their own: x
 * [heads * n_tokens], grouped by head. It has no side products. */
qsf_status qsf_linear_run_heads(qsf_ops *o, const qsf_linear *linear, size_t head_rows,
                                const qsf_acts *x);

/* Runs two matrices with equally many rows. When the epilogue of `second` gets rows, the same rows
 * of `first` are complete. `first` comes before `second` in the file and has no epilogue. */
qsf_status qsf_linear_run_pair(qsf_ops *o, const qsf_linear *first, const qsf_linear *second,
                               const qsf_acts *x);

/* A matrix of a unit that is wholly in memory, with input rows of its own. It has no side
 * products. */
typedef struct qsf_linear_apart {
    qsf_linear linear;
    const unsigned char *unit;
    qsf_acts x;
    float *tail; /* [x.n_tokens, 16] */
} qsf_linear_apart;

/* Runs up to QSF_LINEAR_APART_MAX matrices in one region; if paired, the first two are a pair as
 * above, then the next two, and so on. */
#define QSF_LINEAR_APART_MAX 16
void qsf_linear_run_apart(qsf_ops *o, const qsf_linear_apart *products, size_t n_products,
                          bool is_paired);

/* ---- shared by mixers and FFNs: the norms before them, and the product after them ---- */

/* Loads an optional vector of the current unit into vectors[i] of the scratch; *out becomes NULL if
 * t is. */
qsf_status qsf_block_load(qsf_ops *o, const qsf_tensor *t, size_t i, const float **out);

/* Loads the weights of a norm of the current unit into vectors 0 and 1; *out has no weight if
 * the layer lacks the norm. */
qsf_status qsf_block_load_norm(qsf_ops *o, const qsf_tensor *weight, const qsf_tensor *bias,
                               qsf_norm_weights *out);

/* *out = norm(x), or x without a norm, as matmul input */
qsf_status qsf_block_norm(qsf_ops *o, float *x, const qsf_tensor *weight, const qsf_tensor *bias,
                          qsf_acts *out);

/* *out = x [n_tokens, dim], normalised in place by a sub-norm if there is one, as matmul input */
qsf_status qsf_block_sub_norm(qsf_ops *o, float *x, uint32_t dim, const qsf_tensor *weight,
                              qsf_acts *out);

/* A product that is added to the residual */
typedef struct qsf_block_end {
    const qsf_tensor *w;
    const qsf_tensor *bias;
    const qsf_tensor *outliers;
    const qsf_low_rank *low_rank;
    const qsf_tensor *post_norm;
    bool is_kept; /* stays in y, because more will be added to it */
} qsf_block_end;

/* Loads the outliers and adapters of matrices `first` on, which run together as parts [n], at most
 * 3. */
qsf_status qsf_block_load_side(qsf_ops *o, const qsf_layer *l, qsf_layer_tensor first, size_t n,
                               qsf_linear *parts);

/* x += factor * (w @ in (+ bias)), normalised before it is added if there is a post norm */
qsf_status qsf_block_add_product(qsf_ops *o, const qsf_block_end *end, const qsf_acts *in);

/* Ends a mixer: adds the product of ATTN_OUT and rows of its result x [n_tokens, dim], whose
 * sub-norm is in place. */
qsf_status qsf_block_end_mixer(qsf_ops *o, const qsf_layer *l, float *x, uint32_t dim);
