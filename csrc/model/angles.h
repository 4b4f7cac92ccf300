/* angles.h - the angles of RoPE for the positions of a chunk. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/config.h"

/* The frequencies of layers that share a set's number, for the context of the model. */
typedef struct qsf_rope {
    bool is_interleaved;
    size_t n_pairs;
    size_t first_pair;        /* pairs of the sets before it */
    float factor;             /* of cos and sin */
    const float *frequencies; /* [n_pairs] */
} qsf_rope;

/* Fills ropes [n_ropes]. `own` [n_own_pairs] receives the frequencies made from header and ARCH. */
void qsf_ropes_choose(const qsf_config *c, const qsf_reader *r, uint32_t ctx_tokens, float *own,
                      qsf_rope *ropes);

/* Computes cos and sin [chunk_tokens, n_pairs] of each set, one set after the other, for
 * positions [n_tokens]. */
void qsf_ropes_fill(const qsf_rope *ropes, uint32_t n_ropes, const uint32_t *positions,
                    uint32_t n_tokens, size_t chunk_tokens, float *rope_cos, float *rope_sin);
