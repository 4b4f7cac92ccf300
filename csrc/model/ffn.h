/* ffn.h - the feed-forward part of a layer: dense, routed to experts, or both. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"
#include "kernels/kernels.h"
#include "model/ops.h"

/* x += dense(norm(x)) + experts(norm(x)) for the rows of the chunk, either of which may be missing.
 * Errors of the stream and of the experts. */
qsf_status qsf_ffn_run(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx);

/* ---- the routed part: the experts that each token of a chunk chose ---- */

/* Tokens are sorted by expert; experts run in ascending order and add weight * output to the rows
 * of their tokens. So a row's sum has one order, whatever else is in the chunk, is cached or runs
 * at the same time. */

/* Chooses the experts of every row of x, the router's input, and requests them. Comes before the
 * dense part in the file. */
qsf_status qsf_routed_choose(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx, const qsf_acts *x);

/* Computes the gates of the dense part, whose input x is. */
qsf_status qsf_routed_gates(qsf_ops *o, const qsf_layer *l, const qsf_acts *x);

/* y, the dense part's output, or 0 without one, is multiplied by its gate and normalised, if the
 * layer does so; then the experts' outputs for x are added, after normalising their sum if the
 * layer does so. Ends the request. */
qsf_status qsf_routed_add(qsf_ops *o, const qsf_layer *l, const float *x);

/* ---- which experts a token uses, and their weights: docs/format.md, section 7 ---- */

/* A changed choice affects a token more than any rounding: all of it is f32 in a fixed order. */

/* Chooses the experts of one token. logits [n_experts] become scores. selection_bias [n_experts] or
 * NULL. chosen [n_chosen] ascends; weights [n_chosen] are theirs. Of equal scores, and of NaN, the
 * lower number is chosen. */
void qsf_routing_choose(const qsf_kernels *k, const qsf_layer_kind *kind, float *logits,
                        const float *selection_bias, uint16_t *chosen, float *weights);
