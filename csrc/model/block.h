/* block.h - shared by mixers and FFNs: the norms before them, and the product after them that is
 * added to the residual. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/linear.h"

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
    const qsf_tensor *post_norm;
    bool is_kept; /* stays in y, because more will be added to it */
} qsf_block_end;

/* Loads the outliers of matrices `first` on, which run together as parts [n]. */
qsf_status qsf_block_load_outliers(qsf_ops *o, const qsf_layer *l, qsf_layer_tensor first, size_t n,
                                   qsf_linear *parts);

/* x += factor * (w @ in (+ bias)), normalised before it is added if there is a post norm */
qsf_status qsf_block_add_product(qsf_ops *o, const qsf_block_end *end, const qsf_acts *in);

/* Ends a mixer: adds the product of ATTN_OUT and rows of its result x [n_tokens, dim], whose
 * sub-norm is in place. */
qsf_status qsf_block_end_mixer(qsf_ops *o, const qsf_layer *l, float *x, uint32_t dim);
