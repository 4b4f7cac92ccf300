/* pressure.h - when the system is so short of memory that some must be given back, and when it has
 * so much again that some may be taken.
 *
 * A decision from what the system says; it knows no model. pressure_watch.h asks it between units,
 * at most every quarter of a second, and acts.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_PRESSURE_H
#define QSF_ENGINE_PRESSURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"

/* What the system says at one moment. */
typedef struct qsf_pressure_signs {
    uint64_t now_ns;
    uint64_t available_bytes; /* MemAvailable, or what a control group leaves where lower */
    uint64_t total_bytes;     /* of the machine or the group */
    double stalled_percent;   /* of the last 10 s in which all tasks waited for memory (PSI) */
} qsf_pressure_signs;

#define QSF_PRESSURE_EVENTS 16

typedef void qsf_pressure_look_fn(void *arg, qsf_pressure_signs *out);

typedef struct qsf_pressure {
    qsf_pressure_look_fn *look; /* at the system; tests plant signs of their own */
    void *look_arg;
    uint64_t pause_ns; /* between two looks */
    uint64_t open_ns;
    uint64_t next_look_ns;
    uint64_t low_bytes;       /* pressure: fewer than these are available; 0: nothing is known */
    uint64_t next_cost_bytes; /* of what would be taken again next; 0: nothing was given back */
    uint64_t calm_since_ns;   /* 0: not calm */
    uint64_t calm_ns;         /* how long it must be calm until something is taken */
    uint64_t last_give_ns;
    uint64_t last_take_ns;                        /* 0: none since the last giving */
    uint64_t n_events;                            /* since open; the latest are kept */
    qsf_memory_event events[QSF_PRESSURE_EVENTS]; /* event i at i % QSF_PRESSURE_EVENTS */
    uint64_t n_given_back;
    uint64_t n_taken_again;
    uint64_t given_back_bytes;
    uint64_t taken_again_bytes;
} qsf_pressure;

/* Sets the mark from what is available right after the model has been opened, less what its plan
 * has yet to touch. */
void qsf_pressure_init(qsf_pressure *p, const qsf_pressure_signs *signs);

/* The decision, free of side effects on the model: how many bytes to give back (*give > 0), or
 * how many may be taken again (*take > 0, at least next_cost_bytes), or neither. */
void qsf_pressure_judge(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t *give,
                        uint64_t *take);

/* Is it time to look, at now_ns? */
bool qsf_pressure_is_due(const qsf_pressure *p, uint64_t now_ns);

/* n_bytes were given back (is_given) or taken again; n_units_resident: since then. */
void qsf_pressure_record(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t n_bytes,
                         bool is_given, uint32_t n_units_resident);

/* Copies the latest events, oldest first; returns how many. */
size_t qsf_pressure_list_events(const qsf_pressure *p, qsf_memory_event *out, size_t cap_events);

#endif
