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
