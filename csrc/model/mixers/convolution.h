/* convolution.h - a causal convolution by channels, the first step of recurrent mixers.
 *
 * It reads rows of a chunk and, for the first rows of a segment, the n_taps - 1 rows before
 * it. These are the state, the oldest first; a row of the log begins with the convolution's row. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

typedef struct qsf_convolution {
    const qsf_ops *ops;
    uint32_t layer_idx;
    const float *rows; /* [chunk, stride] */
    size_t stride;
    size_t n_channels;
    const float *w;    /* [n_taps, n_channels] */
    const float *bias; /* [n_channels], or NULL */
} qsf_convolution;

/* Floats of the state of a layer */
static inline size_t qsf_convolution_floats(const qsf_layer_kind *k, size_t n_channels)
{
    return (k->n_taps - 1) * n_channels;
}

/* Computes the state after the logged rows; l->row_floats is their stride */
void qsf_convolution_replay(const qsf_state_layer *l, size_t n_kept, size_t n_channels,
                            const float *from, const float *rows, size_t n_rows, float *to);

/* out [0 .. end - begin) = channels begin .. end - 1 at row t of a segment */
void qsf_convolution_row(const qsf_convolution *c, const qsf_segment *g, uint32_t t, size_t begin,
                         size_t end, float *out);

/* Stores channels begin .. end - 1 of the states after a segment's own tokens, and of its
 * drafts. */
void qsf_convolution_keep(const qsf_convolution *c, const qsf_segment *g, size_t begin, size_t end);
