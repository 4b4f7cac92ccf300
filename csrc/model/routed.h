/* routed.h - the routed part of a layer: the experts that each token of a chunk chose.
 *
 * Tokens are sorted by expert; experts run in ascending order and add weight * output to the rows
 * of their tokens. So a row's sum has one order, whatever else is in the chunk, is cached or runs
 * at the same time.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/ops.h"

/* Chooses the experts of every row of x, the router's input, and requests them. Comes before the
 * dense part in the file. */
qsf_status qsf_routed_choose(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx, const qsf_acts *x);

/* Computes the gates of the dense part, whose input x is. */
qsf_status qsf_routed_gates(qsf_ops *o, const qsf_layer *l, const qsf_acts *x);

/* y, the dense part's output, or 0 without one, is multiplied by its gate and normalised, if the
 * layer does so; then the experts' outputs for x are added, after normalising their sum if the
 * layer does so. Ends the request. */
qsf_status qsf_routed_add(qsf_ops *o, const qsf_layer *l, const float *x);
