/* pressure.h - decides when memory must be released to the system, and when it may be taken
 * again.
 *
 * The decision depends only on measurements of the system, not on the model. model_memory.h
 * calls it between units, at most every quarter of a second, and acts. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "include/qsf.h"

/* Measurements of the system at one moment. */
typedef struct qsf_pressure_signs {
    uint64_t now_ns;
    uint64_t available_bytes; /* MemAvailable, or what the control group leaves if lower */
    uint64_t total_bytes;     /* of the machine or the group */
    double stalled_percent; /* share of the last 10 s in which all tasks waited for memory (PSI) */
} qsf_pressure_signs;

#define QSF_PRESSURE_EVENTS 16

typedef void qsf_pressure_look_fn(void *arg, qsf_pressure_signs *out);

typedef struct qsf_pressure {
    qsf_pressure_look_fn *look; /* reads the measurements; tests replace it */
    void *look_arg;
    uint64_t pause_ns; /* between two measurements */
    uint64_t open_ns;
    uint64_t next_look_ns;
    uint64_t low_bytes;       /* less available memory means pressure; 0: unknown */
    uint64_t next_cost_bytes; /* bytes that acquiring the next unit again needs; 0: no unit was
                                 released */
    uint64_t calm_since_ns;   /* 0: not calm */
    uint64_t calm_ns;         /* how long calm must last before memory is taken */
    uint64_t last_give_ns;
    uint64_t last_take_ns;                        /* 0: none since the last release */
    uint64_t n_events;                            /* since open; only the latest events are kept */
    qsf_memory_event events[QSF_PRESSURE_EVENTS]; /* event i at i % QSF_PRESSURE_EVENTS */
    uint64_t n_given_back;
    uint64_t n_taken_again;
    uint64_t given_back_bytes;
    uint64_t taken_again_bytes;
} qsf_pressure;

/* Sets low_bytes from the memory that is available right after open, less the planned memory that
 * is not touched yet. */
void qsf_pressure_init(qsf_pressure *p, const qsf_pressure_signs *signs);

/* Decides without touching the model: *give > 0 bytes to release, or *take > 0 bytes that may be
 * taken (at least next_cost_bytes), or neither. */
void qsf_pressure_judge(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t *give,
                        uint64_t *take);

/* True if the next measurement is due at now_ns. */
bool qsf_pressure_is_due(const qsf_pressure *p, uint64_t now_ns);

/* Records that n_bytes were released (is_given) or taken; n_units_resident is the number
 * afterwards. */
void qsf_pressure_record(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t n_bytes,
                         bool is_given, uint32_t n_units_resident);

/* Copies the latest events, oldest first; returns their number. */
size_t qsf_pressure_list_events(const qsf_pressure *p, qsf_memory_event *out, size_t cap_events);
