/* experts_private.h - shared by the computing thread and the reading threads of experts.
 *
 * Only the computing thread changes which expert a place holds; the threads change states,
 * under the lock. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "stream/experts.h"

static inline const qsf_unit *qsf_experts_unit(const qsf_experts *e, uint32_t expert)
{
    return &e->reader->units[qsf_reader_expert_unit(e->reader, expert)];
}

static inline uint32_t qsf_experts_of_layer(const qsf_reader *r, uint32_t layer_idx)
{
    return qsf_reader_layer_kind(r, layer_idx)->n_experts;
}

#define QSF_EXPERTS_NONE UINT32_MAX

/* Acquires memory for as many places as possible. */
qsf_status qsf_experts_acquire_places(qsf_experts *e);
void qsf_experts_release_place(qsf_experts *e, qsf_expert_slot *s);
/* Empties a place, and removes it from its expert. */
void qsf_experts_empty(qsf_experts *e, qsf_expert_slot *s);

/* Before a pass of n_tokens that uses nearly all experts, lends a quarter of the slots, at most
 * one for each expert of a layer, as transit slots: those of the least used experts. The next
 * layer's experts are read into them while this layer's attention is computed. */
void qsf_experts_lend_slots(qsf_experts *e, uint32_t n_tokens);
/* Returns lent slots. Nothing is in transit. */
void qsf_experts_return_slots(qsf_experts *e);

/* A reading thread of the qsf_experts. */
void *qsf_experts_read(void *experts);
