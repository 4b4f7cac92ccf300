/* model_memory.h - gives memory of an open model back to the system, and takes it again later.
 *
 * Evicts resident units, which are streamed from then on: slower, with the same results. The
 * smallest plan is the limit, so that the system does not kill this process. qsf_model.plan is
 * kept up to date. The caller holds the model's lock, between two units.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "include/qsf.h"

typedef struct qsf_memory_move {
    bool has_disturbed; /* units of the stream moved, or the ring was restarted */
    bool is_done;       /* if false, nothing changed and the caller may try again */
    uint64_t n_bytes;
} qsf_memory_move;

/* Releases wanted_bytes, or as much as possible: first slots of experts, then units, then most
 * of the ring. */
qsf_memory_move qsf_model_give(qsf_model *m, uint64_t wanted_bytes);

/* Takes one step back towards the plan if it costs at most room_bytes: first the ring, because
 * passes without read-ahead are slow, then one unit. */
qsf_memory_move qsf_model_take(qsf_model *m, uint64_t room_bytes);

/* Returns the cost of the next qsf_model_take; 0: nothing was released. */
uint64_t qsf_model_next_cost_bytes(const qsf_model *m);

/* ---- measures the system's memory and moves the model's, as pressure.h decides ---- */

/* Takes the first measurement. The model is open. */
void qsf_pressure_begin(qsf_model *m);

/* Takes a measurement if one is due, and moves memory. The caller holds the model's lock,
 * between two units. True: units of the stream moved. */
bool qsf_pressure_watch(qsf_model *m);
