/* mix_delta.h - the mixer of the gated delta rule (Qwen3-Next, Qwen 3.5).
 *
 *     q, k, v = silu(conv(Q h, K h, V h)); q, k normalised by head
 *     beta = sigmoid(b), decay = exp(-rate * softplus(a + bias)), b = BETA h, a = DECAY h
 *     o = the delta rule of q, k, v, beta, decay (kernels.h); out(norm(o) * silu(GATE h))
 *
 * The value heads are divided equally among the key heads: neighbouring ones, or tiled,
 * n_key_heads apart. The state of a layer is that of the convolution, then [value heads][blocks of
 * 32 columns][key_dim][32]. A row of the log has the convolution's row, keys, d of the value
 * heads, and their decays.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_MIX_DELTA_H
#define QSF_MODEL_MIX_DELTA_H

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* an entry of the table in mixers.h */
qsf_status qsf_mix_delta(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                         uint32_t layer_idx);
void qsf_mix_delta_describe(const qsf_config *c, uint32_t layer, qsf_state_layer *out);

#endif
