/* state_heads.h - mixers whose heads have a matrix as their state: the delta rule, and SSD.
 *
 * q, k and v of a token lie in one row, in an order that is the mixer's, and go through a
 * convolution together. The value heads are divided equally among the key heads: neighbouring
 * ones, or tiled, n_key_heads apart. The state of a layer is that of the convolution, then [value
 * heads][blocks of 32 columns][key_dim][32]. A row of the log has the convolution's row, keys, d
 * of the value heads, and all decays.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/chunk.h"
#include "model/mixers/convolution.h"
#include "model/ops.h"

typedef struct qsf_head_sizes {
    size_t n_key_heads;
    size_t n_value_heads;
    size_t key_dim;
    size_t value_dim;
    size_t keys; /* floats of all heads; likewise the next */
    size_t values;
    size_t channels;
    size_t q_off; /* offsets of the parts of a row */
    size_t k_off;
    size_t v_off;
    size_t n_decays; /* of a token; a row of steps has the value heads' betas before them */
    size_t n_steps;
    size_t n_blocks; /* of a value head */
    size_t block_floats;
    size_t first_block; /* floats of a state before it */
    bool is_tiled;
} qsf_head_sizes;

qsf_head_sizes qsf_head_sizes_of(const qsf_layer_kind *k);

/* The argument of the parallel loops */
typedef struct qsf_heads_job qsf_heads_job;
struct qsf_heads_job {
    qsf_head_sizes z;
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    qsf_convolution conv; /* of q, k, v in one row; the rows become o after it */
    /* Makes the steps and the decays of a row */
    void (*gates)(const qsf_heads_job *job, float *steps, float *decays);
    const float *decay_rate; /* [n_decays] */
    const float *decay_bias; /* [n_decays] */
    qsf_state_rule_fn *rule;
    const float *skip;    /* [value heads], as the rule has it; or NULL */
    bool has_normed_keys; /* q and k are normalised by head */
    /* Called for each head of a segment after its o is complete; may be NULL */
    void (*finish)(const qsf_heads_job *job, const qsf_segment *g, size_t head);
    const float *norm; /* of `finish` */
};

/* The job of a layer, without weights and functions */
qsf_heads_job qsf_heads_begin(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer_idx);

/* Runs the convolution, then the rule: o of value head h is at h * value_dim of a row of q. */
void qsf_heads_run(qsf_heads_job *job);

/* an entry of the table in mixers.h */
void qsf_heads_describe(const qsf_config *c, uint32_t layer, qsf_state_layer *out);
