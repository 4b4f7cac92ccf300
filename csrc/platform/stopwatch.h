/* stopwatch.h - which phase of a call the computing thread's time belongs to.
 *
 * Laps: one look at the clock where one phase ends and the next begins, and all the time since the
 * look before belongs to the phase that ends. So no nanosecond between start and the last lap is
 * lost or counted twice. Waiting for the disk and decompressing happen inside laps of other
 * phases; they are measured where they happen and set aside: counted for their own phase, and
 * taken out of the lap. All functions but start do nothing for NULL.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_STOPWATCH_H
#define QSF_PLATFORM_STOPWATCH_H

#include <stdint.h>

#include "include/qsf.h"
#include "platform/trace.h"

typedef struct qsf_stopwatch {
    uint64_t phase_ns[QSF_N_PHASES]; /* since start */
    uint64_t last_ns;                /* when the latest lap ended */
    uint64_t aside_ns;               /* set aside since then */
    qsf_trace *trace;                /* borrowed, or NULL */
    uint32_t unit_idx;               /* for events: the unit that passes, as in the file, or NONE */
    uint32_t n_tokens;               /* for events: of the chunk */
} qsf_stopwatch;

/* All phases are 0, and a lap begins now. */
void qsf_stopwatch_start(qsf_stopwatch *w, qsf_trace *trace, uint64_t now_ns);

/* The time since the latest lap belongs to `phase`. */
void qsf_stopwatch_lap(qsf_stopwatch *w, qsf_phase phase);

/* The same up to now_ns, a time that was read from the clock anyway. One that is not after
 * the latest lap is no lap. */
void qsf_stopwatch_lap_at(qsf_stopwatch *w, qsf_phase phase, uint64_t now_ns);

/* begin_ns .. end_ns, inside the running lap, belongs to `phase` instead of that lap's. */
void qsf_stopwatch_set_aside(qsf_stopwatch *w, qsf_phase phase, uint64_t begin_ns, uint64_t end_ns,
                             uint64_t n_bytes);

#endif
