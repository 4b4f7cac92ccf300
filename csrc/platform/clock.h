/* clock.h - monotonic time, waiting, and a stopwatch for the phases of a pass. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "include/qsf.h"

uint64_t qsf_clock_ns(void);

/* Lets the calling thread sleep for at least n_ms, also if signals arrive. */
void qsf_sleep_ms(uint32_t n_ms);

/* Splits the time of the computing thread into phases. A lap ends where one phase ends and the next
 * begins. The time since the previous lap belongs to the phase that ends, so all time between start
 * and the last lap is counted once. Waiting for the disk and decompressing happen inside laps of
 * other phases: they are set aside, that is, counted for their own phase and subtracted from the
 * lap. All functions but start do nothing for NULL. */
typedef struct qsf_stopwatch {
    uint64_t phase_ns[QSF_N_PHASES]; /* since start */
    uint64_t last_ns;                /* end of the latest lap */
    uint64_t aside_ns;               /* set aside since then */
} qsf_stopwatch;

/* Sets all phases to 0 and begins a lap at now_ns. */
void qsf_stopwatch_start(qsf_stopwatch *w, uint64_t now_ns);

/* Ends a lap: adds the time since the latest lap to `phase`. */
void qsf_stopwatch_lap(qsf_stopwatch *w, qsf_phase phase);

/* Ends a lap at now_ns, which the caller has read from the clock. Does nothing if now_ns is not
 * after the latest lap. */
void qsf_stopwatch_lap_at(qsf_stopwatch *w, qsf_phase phase, uint64_t now_ns);

/* Counts begin_ns .. end_ns, inside the current lap, for `phase` instead of the lap's phase. */
void qsf_stopwatch_set_aside(qsf_stopwatch *w, qsf_phase phase, uint64_t begin_ns, uint64_t end_ns);
