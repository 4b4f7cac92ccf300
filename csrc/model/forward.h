/* forward.h - one chunk of tokens through all layers.
 *
 * Requests each unit from the stream in the order of the pass. Use its results only if it returned
 * QSF_OK: only then did all bytes that it read pass their checksums.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "model/chunk.h"
#include "model/embedding.h"
#include "model/ops.h"

typedef struct qsf_forward {
    qsf_ops ops;
    const qsf_ends *ends;
    const unsigned char *positions; /* [max_tokens, dim], learned positions; or NULL */
    bool has_f32_positions;         /* else they are f16 */
    qsf_embedding embedding;        /* zeroed: no cache */
    const float *hidden; /* [n_hidden_rows, dim_stride] of the latest chunk: the last norm's; after
                            a guess the one that stands for the token's */
} qsf_forward;

qsf_status qsf_forward_run(qsf_forward *f, const qsf_chunk *chunk);

/* logits [n_vocab] = those of the MTP head for the token after `token`, the only one of the
 * segment, which is behind position 0; hidden: of the token before it (mtp.h). */
qsf_status qsf_forward_guess(qsf_forward *f, const qsf_segment *segment, uint32_t token,
                             const float *hidden, float *logits);
