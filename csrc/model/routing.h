/* routing.h - which experts a token uses, and their weights: docs/format.md, section 7.
 *
 * A changed choice affects a token more than any rounding: all of it is f32 in a fixed order. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "format/records.h"
#include "kernels/kernels.h"

/* Chooses the experts of one token. logits [n_experts] become scores. selection_bias [n_experts] or
 * NULL. chosen [n_chosen] ascends; weights [n_chosen] are theirs. Of equal scores, and of NaN, the
 * lower number is chosen. */
void qsf_routing_choose(const qsf_kernels *k, const qsf_layer_kind *kind, float *logits,
                        const float *selection_bias, uint16_t *chosen, float *weights);

/* Returns sigmoid(w . x), n values: 16 lanes of fmaf, added pairwise. */
float qsf_routing_gate(const qsf_kernels *k, const float *w, const float *x, uint32_t n);
