/* mtp.h - the input of the MTP head (multi-token prediction), which a checkpoint brings along.
 *
 * The head is one more layer. At position p it reads the embedding of token p and the final hidden
 * state of token p - 1, and guesses token p + 1:
 *
 *     x = join @ [token_norm(embedding) | hidden_norm(hidden)]; hidden' = end_norm(layer(x))
 *     logits = the model's head @ hidden'; hidden' stands for the hidden state of token p + 1
 *
 * Its keys and values lie in the sequence's cache like those of other layers. Each pass stores them
 * for its tokens, with the true hidden states; a guess stores those of its own position, which the
 * pass that follows replaces. Guesses are checked like all drafts, so nothing here changes a text.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/chunk.h"
#include "model/embedding.h"
#include "model/ops.h"

/* What the head computes with */
typedef struct qsf_mtp {
    qsf_ops *ops;
    qsf_embedding *embedding; /* rows of */
    const qsf_tensor *table;
} qsf_mtp;

/* Returns the final hidden state [dim, padded to dim_stride] of the token at `position`; NULL: it
 * is not known. */
const float *qsf_mtp_hidden(const qsf_sequence *q, uint32_t position, size_t dim_stride);

/* Stores keys and values of the MTP head, and the last hidden states, for the rows of the chunk, of
 * which x is the residual after the last layer of the trunk. x stays. In the head's unit. */
qsf_status qsf_mtp_store(const qsf_mtp *m, const qsf_chunk *chunk);

/* x = the head's input for the only row of the chunk, of the token `token`. In the head's unit. */
qsf_status qsf_mtp_begin(const qsf_mtp *m, uint32_t token, const float *hidden);
