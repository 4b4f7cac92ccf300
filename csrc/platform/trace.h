/* trace.h - events of a model's threads, written to memory of the caller while there is a trace.
 *
 * Whoever records holds the lock while he writes, and the memory is changed under it: after
 * qsf_trace_set(t, NULL, 0) nobody touches the caller's events any more. Without a trace,
 * recording is the test of one flag.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_TRACE_H
#define QSF_PLATFORM_TRACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"
#include "platform/thread.h"

typedef struct qsf_trace {
    atomic_bool is_on;
    qsf_mutex lock;          /* of the rest */
    qsf_trace_event *events; /* the caller's [cap_events]; NULL: there is no trace */
    size_t cap_events;
    size_t n_events;    /* these two stay when a trace ends, until the next */
    uint64_t n_dropped; /* came when the memory was full */
} qsf_trace;

qsf_status qsf_trace_init(qsf_trace *t);
void qsf_trace_destroy(qsf_trace *t);

/* Begins a trace into events [cap_events], in place of the one there may be; NULL ends it. */
void qsf_trace_set(qsf_trace *t, qsf_trace_event *events, size_t cap_events);

/* Events of the present trace or else the latest, and how many found no room. */
size_t qsf_trace_count(qsf_trace *t, uint64_t *n_dropped);

/* Is it worth making an event? NULL: never. */
static inline bool qsf_trace_is_on(const qsf_trace *t)
{
    return t != NULL && atomic_load_explicit(&t->is_on, memory_order_relaxed);
}

/* From any thread; for t NULL or without a trace it does nothing. */
void qsf_trace_record(qsf_trace *t, const qsf_trace_event *event);

#endif
