/* model_memory.h - the memory that an open model can give back, and take again later.
 *
 * What is given back are resident units, which are streamed from then on: a bit slower, the same
 * results. Down to the least plan, so that the process is not the one that gets killed. The plan
 * follows what is held. The model's lock is held and it is between units.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_MODEL_MEMORY_H
#define QSF_ENGINE_MODEL_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "include/qsf.h"

typedef struct qsf_memory_move {
    bool has_disturbed; /* units of the stream moved, or reading ahead began anew */
    bool is_done;       /* memory moved; else all is as before and may be tried again */
    uint64_t n_bytes;
} qsf_memory_move;

/* Gives back wanted_bytes, or all that can be given: units, then most of the ring. */
qsf_memory_move qsf_model_give(qsf_model *m, uint64_t wanted_bytes);

/* Takes one step back towards the plan, if it costs at most room_bytes: first the ring, since
 * without room to read ahead all passes are slow, then a unit. */
qsf_memory_move qsf_model_take(qsf_model *m, uint64_t room_bytes);

/* What the next step of qsf_model_take costs; 0: nothing was given back. */
uint64_t qsf_model_next_cost_bytes(const qsf_model *m);

#endif
