/* ffn.h - the feed-forward part of a layer: dense, routed to experts, or both. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "model/ops.h"

/* x += dense(norm(x)) + experts(norm(x)) for the rows of the chunk, either of which may be missing.
 * Errors of the stream and of the experts. */
qsf_status qsf_ffn_run(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx);
