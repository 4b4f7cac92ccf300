/* mix_ssd.h - the mixer of Mamba-2, a state space model (SSD).
 *
 *     x, B, C = silu(conv(IN h)); step = softplus(STEP h + bias), decay = exp(-rate * step)
 *     o = the SSD rule of C, B, x, step, decay (kernels.h); out(norm(o * silu(GATE h)))
 *
 * C, B and x are what queries, keys and values are to the delta rule; a group is a key head. The
 * norm is optional and computed for each group. The state is that of heads (state_heads.h).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* Entries of the table in mixers.h; the second one also runs attention, which reads the same
 * norm(x). */
qsf_status qsf_mix_ssd(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk, uint32_t layer_idx);
qsf_status qsf_mix_attention_and_ssd(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                                     uint32_t layer_idx);
