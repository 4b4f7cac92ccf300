/* attention.h - attention of a chunk, from q, k and v as heads.h leaves them. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* attended = softmax(score(q . k)) . v for every token and head of the chunk, whether a prompt, one
 * token, or tokens of many sequences. The layer's kind says how q . k becomes a score. sinks
 * [n_heads], or NULL: a score of each head that has no value. Errors are of the files of cold pages
 * (cache/kv/kvcold.h). */
qsf_status qsf_attention_run(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                             const float *sinks);

/* What the epilogues and loops of a mixer with attention need */
typedef struct qsf_mix_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer_idx;  /* of the keys and values */
    const float *q_norm; /* weights, or NULL */
    const float *k_norm;
    const float *sinks;
} qsf_mix_job;

/* Loads the norms and the sinks of a layer. */
qsf_status qsf_attention_load(qsf_ops *o, const qsf_layer *l, qsf_mix_job *job);
