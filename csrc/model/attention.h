/* attention.h - from q, k and v of a chunk to what the heads gather.
 *
 * The three finish functions are the epilogue of the matmuls: each takes one head whose rows
 * are complete for all tokens of the chunk, and different heads may be finished by different
 * threads. When all are finished, run attends.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_ATTENTION_H
#define QSF_MODEL_ATTENTION_H

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* Turns head `head` of q by the positions of the rows, and as the cache is turned. */
void qsf_attention_finish_q(const qsf_ops *o, uint32_t head);

/* Turns KV head `kv_head` of k likewise and stores it. */
void qsf_attention_finish_k(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                            uint32_t kv_head);

/* Turns KV head `kv_head` of v as the cache is turned and stores it. */
void qsf_attention_finish_v(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                            uint32_t kv_head);

/* attended = softmax(q . k / sqrt(head_dim)) . v for every token and head of the chunk: one
 * sequence's prompt, one token, or tokens of many sequences. */
void qsf_attention_run(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer);

#endif
