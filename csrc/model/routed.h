/* routed.h - the routed part of a layer: the experts that each token of a chunk chose.
 *
 * Tokens are sorted by expert; experts run in ascending order and add weight * output to the rows
 * of their tokens. So a row's sum has one order, whatever else is in the chunk, is cached or runs
 * at the same time.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_ROUTED_H
#define QSF_MODEL_ROUTED_H

#include "model/ops.h"

/* Chooses the experts of every row of x and requests them; computes the gates of the dense part.
 * Comes before the dense part in the file. */
qsf_status qsf_routed_choose(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx, const qsf_acts *x);

/* y = gate * y of the dense part, or 0 without one; then adds the experts' outputs for x, the rows
 * that chose them. Ends the request. */
qsf_status qsf_routed_add(qsf_ops *o, const qsf_layer *l, const float *x);

#endif
