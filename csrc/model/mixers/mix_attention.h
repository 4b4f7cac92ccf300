/* mix_attention.h - the mixer that attends to the tokens before.
 *
 * A layer is a mixer, which lets a token see those before it, and an FFN (ffn.h). A mixer reads the
 * residual, adds to it, and keeps what later tokens need in its cache of each segment's sequence.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_MIX_ATTENTION_H
#define QSF_MODEL_MIX_ATTENTION_H

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* x += attention(norm(x)) for the rows of the chunk, in the stream's unit. Errors of the stream,
 * and of the files of cold pages. */
qsf_status qsf_mix_attention(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                             uint32_t layer_idx);

#endif
