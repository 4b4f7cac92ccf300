/* mixers.h - the table of mixers: how a layer uses earlier tokens.
 *
 * A layer is a mixer and an FFN (ops.h). A mixer reads the residual, adds to it, and stores
 * what later tokens need in a cache of each segment's sequence: keys and values, or a recurrent
 * state. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/ops.h"

/* x += mixer(norm(x)) for the rows of the chunk, in the stream's unit. Errors of the stream, and of
 * the files of cold pages. */
typedef qsf_status qsf_mixer_run_fn(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                                    uint32_t layer_idx);

typedef struct qsf_mixer {
    qsf_mixer_run_fn *run;                 /* NULL: nothing is mixed */
    qsf_state_describe_fn *describe_state; /* NULL: the mixer has no state */
} qsf_mixer;

/* The entries of the table: each file says what its mixer computes. Attention runs as latent
 * attention if its layer has a latent_rank. */
qsf_mixer_run_fn qsf_mix_attention;
qsf_mixer_run_fn qsf_mix_latent;
qsf_mixer_run_fn qsf_mix_conv;
qsf_mixer_run_fn qsf_mix_delta;
qsf_mixer_run_fn qsf_mix_ssd;
qsf_mixer_run_fn qsf_mix_attention_and_ssd;
qsf_mixer_run_fn qsf_mix_relative;
qsf_state_describe_fn qsf_mix_conv_describe;
qsf_state_describe_fn qsf_mix_relative_describe;

extern const qsf_mixer qsf_mixers[QSF_MIXER_COUNT]; /* by qsf_mixer_kind */

/* Describes the state of a layer by its mixer. */
void qsf_mixers_describe_state(const qsf_config *c, uint32_t layer, qsf_state_layer *out);

/* ---- of the relative mixer, whose layers are in residual blocks ---- */

/* It leaves the FFN's input in `input`. x += convolution(y), y: what the FFN made of it. */
qsf_status qsf_relative_end(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                            uint32_t layer_idx);

/* y = what the final query finds in the blocks of n_layers and in x, for the rows that are left */
qsf_status qsf_relative_final(qsf_ops *o, const qsf_tensor *query, uint32_t n_layers);

/* ---- the first step of recurrent mixers ---- */

/* A causal convolution by channels. It reads rows of a chunk and, for the first rows of a segment,
 * the n_taps - 1 rows before it. These are the state, the oldest first; a row of the log begins
 * with the convolution's row. */

typedef struct qsf_convolution {
    const qsf_ops *ops;
    uint32_t layer_idx;
    const float *rows; /* [chunk, stride] */
    size_t stride;
    size_t n_channels;
    size_t first;      /* channels of other convolutions before it, in the state and in the log */
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

/* Returns the channels at a position that rows of the segment see, from the chunk or from the
 * state. */
const float *qsf_convolution_at(const qsf_convolution *c, const qsf_segment *g, int64_t position);

/* Stores channels begin .. end - 1 of the states after a segment's own tokens, and of its
 * drafts. */
void qsf_convolution_keep(const qsf_convolution *c, const qsf_segment *g, size_t begin, size_t end);

/* ---- mixers whose heads have a matrix as their state: the delta rule, and SSD ---- */

/* q, k and v of a token lie in one row, in an order that is the mixer's, and go through a
 * convolution together. The value heads are divided equally among the key heads: neighbouring
 * ones, or tiled, n_key_heads apart. The state of a layer is that of the convolution, then [value
 * heads][blocks of 32 columns][key_dim][32]. A row of the log has the convolution's row, keys, d
 * of the value heads, and all decays. */

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
