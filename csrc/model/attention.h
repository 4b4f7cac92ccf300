/* attention.h - attention of a chunk: norms, RoPE and storing of the heads, then the attention. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/ops.h"

/* ---- norms, RoPE and storing of the heads of q, k and v before attention ---- */

/* The first three functions are for epilogues of the matmuls. Each works on one head, whose rows
 * are complete; different threads may work on different heads or rows. */

/* Finishes head `head` of q in rows begin .. end - 1: the head's own norm if there is one, the
 * query temperature, RoPE, and Hadamard if the cache is rotated. weight: of the Q norm, or NULL */
void qsf_heads_finish_q(const qsf_ops *o, const float *weight, uint32_t head, size_t begin,
                        size_t end);

/* Finishes KV head `kv_head` of k likewise, without a temperature, and stores it. */
void qsf_heads_store_k(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                       const float *weight, uint32_t kv_head, size_t begin, size_t end);

/* Rotates KV head `kv_head` of v by Hadamard if the cache is rotated, and stores it, for all
 * rows. */
void qsf_heads_store_v(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer, uint32_t kv_head);

/* Apply the epilogue to row t of latent attention. A query has two parts: that for K_UP gets the
 * temperature, the other RoPE and Hadamard too. The latent k [head_dim] is rotated, its parts
 * separately, and stored as the key, whose first part is the value. */
void qsf_heads_turn_latent_q(const qsf_ops *o, size_t t, float *nope, float *rope);
void qsf_heads_store_latent(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer, size_t t,
                            float *k);

/* Normalises q and k over their whole width, then finishes all heads of all rows. */
void qsf_heads_finish_whole(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                            const float *q_weight, const float *k_weight);

/* Multiplies the parts [n] of x, which are of the heads of row t, by the sigmoid of their gates. */
void qsf_heads_gate(const qsf_ops *o, size_t t, float *x, size_t n);

/* attended = softmax(score(q . k)) . v for every token and head of the chunk, whether a prompt, one
 * token, or tokens of many sequences. The layer's kind says how q . k becomes a score. sinks
 * [n_heads], or NULL: a score of each head that has no value. Errors are of the files of cold pages
 * (cache/kv/kvcache.h). */
qsf_status qsf_attention_run(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                             const float *sinks);

/* The argument of the epilogues and loops of a mixer with attention */
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
