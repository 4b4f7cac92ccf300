/* trace.h - records events of a model's threads in memory of the caller.
 *
 * A lock protects each record and each change of the memory: after qsf_trace_set(t, NULL, 0) no
 * thread writes to the caller's events. Without a trace, recording only tests a flag.
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
    qsf_mutex lock;          /* protects the fields below */
    qsf_trace_event *events; /* the caller's [cap_events]; NULL: no trace */
    size_t cap_events;
    size_t n_events;    /* this and n_dropped stay valid until the next trace begins */
    uint64_t n_dropped; /* events for which there was no room */
} qsf_trace;

qsf_status qsf_trace_init(qsf_trace *t);
void qsf_trace_destroy(qsf_trace *t);

/* Begins a trace into events [cap_events] and ends any earlier trace. events NULL: only ends it. */
void qsf_trace_set(qsf_trace *t, qsf_trace_event *events, size_t cap_events);

/* Number of events of the current or else the latest trace, and of events dropped. */
size_t qsf_trace_count(qsf_trace *t, uint64_t *n_dropped);

/* True if a trace is active; false for NULL. */
static inline bool qsf_trace_is_on(const qsf_trace *t)
{
    return t != NULL && atomic_load_explicit(&t->is_on, memory_order_relaxed);
}

/* Records an event. Any thread may call it. Does nothing if t is NULL or no trace is active. */
void qsf_trace_record(qsf_trace *t, const qsf_trace_event *event);

#endif
