/* mix_attention.h - the mixer that attends to earlier tokens. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "model/chunk.h"
#include "model/ops.h"

/* an entry of the table in mixers.h */
qsf_status qsf_mix_attention(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                             uint32_t layer_idx);
