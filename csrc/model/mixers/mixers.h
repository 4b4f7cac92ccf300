/* mixers.h - the table of mixers: how a layer uses earlier tokens.
 *
 * A layer is a mixer and an FFN (ffn.h). A mixer reads the residual, adds to it, and stores
 * what later tokens need in a cache of each segment's sequence: keys and values, or a recurrent
 * state. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "model/chunk.h"
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
qsf_state_describe_fn qsf_mix_conv_describe;

extern const qsf_mixer qsf_mixers[QSF_MIXER_COUNT]; /* by qsf_mixer_kind */

/* Describes the state of a layer by its mixer. */
void qsf_mixers_describe_state(const qsf_config *c, uint32_t layer, qsf_state_layer *out);
