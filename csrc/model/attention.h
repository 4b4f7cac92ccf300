/* attention.h - attention of a chunk, from q, k and v.
 *
 * The first three functions are epilogues of the matmuls. Each works on one head, whose rows are
 * complete for all tokens of the chunk; different threads may work on different heads. Then
 * qsf_attention_run attends.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_ATTENTION_H
#define QSF_MODEL_ATTENTION_H

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* Rotates head `head` of q by the positions of its rows, and by Hadamard if the cache is
 * rotated. */
void qsf_attention_rotate_q(const qsf_ops *o, uint32_t head);

/* Rotates KV head `kv_head` of k likewise and stores it. */
void qsf_attention_store_k(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                           uint32_t kv_head);

/* Rotates KV head `kv_head` of v by Hadamard if the cache is rotated, and stores it. */
void qsf_attention_store_v(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                           uint32_t kv_head);

/* attended = softmax(q . k / sqrt(head_dim)) . v for every token and head of the chunk, whether a
 * prompt, one token, or tokens of many sequences. */
void qsf_attention_run(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer);

#endif
