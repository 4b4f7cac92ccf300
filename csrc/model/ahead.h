/* ahead.h - guesses which experts the next layer will choose, so that the disk reads some of them
 * while this layer's last experts and the next attention are computed.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/ops.h"

/* Call it after the dense part of the layer whose experts are requested. Overwrites the scores,
 * biases and rows of the routed scratch. */
qsf_status qsf_ahead_guess(qsf_ops *o, uint32_t layer_idx);
