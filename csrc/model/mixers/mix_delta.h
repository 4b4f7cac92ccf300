/* mix_delta.h - the mixer of the gated delta rule (Qwen 3.5, Olmo Hybrid).
 *
 *     q, k, v = silu(conv(Q h, K h, V h)); q, k normalised by head
 *     beta = factor * sigmoid(BETA h), decay = exp(-rate * softplus(a + bias)), a = DECAY h
 *     o = the delta rule of q, k, v, beta, decay (kernels.h); out(norm(o) * silu(GATE h))
 *
 * KDA (Kimi Linear): a decay for each channel of a head's keys, GATE_UP GATE h, DECAY_UP DECAY h,
 * and a sigmoid of the gate.
 *
 * Its state is that of heads (state_heads.h).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* Of the table in mixers.h */
qsf_status qsf_mix_delta(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                         uint32_t layer_idx);
