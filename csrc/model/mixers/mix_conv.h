/* mix_conv.h - the mixer of a gated short convolution (LFM2): out(c * conv(b * x)).
 *
 * Its state is the last n_taps - 1 rows of b * x, the oldest first; so is a row of the log.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* an entry of the table in mixers.h */
qsf_status qsf_mix_conv(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk, uint32_t layer_idx);
void qsf_mix_conv_describe(const qsf_config *c, uint32_t layer, qsf_state_layer *out);
