/* mix_latent.h - latent attention, absorbed: heads attend to the latents of keys and values.
 *
 *     c = norm(first rows of K h), k_r = rope(the others): one key [c, k_r] and value c of all
 * heads q = Q h, or Q_UP norm(Q h); of each head [q_n, q_r]: its query is [K_UP q_n, rope(q_r)]
 *     out(V_UP attended), K_UP and V_UP by heads
 *
 * Prompts and single tokens are computed alike, so bits do not depend on how a prompt is cut.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* an entry of the table in mixers.h, for attention with a latent_rank */
qsf_status qsf_mix_latent(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                          uint32_t layer_idx);
