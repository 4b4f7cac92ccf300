/* trace.c - appending events to the caller's memory, under a lock. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/trace.h"

_Static_assert((int)QSF_TRACE_PASS == QSF_N_PHASES, "kinds of events continue after the phases");

const char *qsf_trace_kind_name(uint32_t kind)
{
    static const char *const names[] = {"pass", "read", "checksum", "sample"};
    const uint32_t idx = kind - QSF_N_PHASES;
    if (kind < QSF_N_PHASES)
        return qsf_phase_name(kind);
    return idx < sizeof names / sizeof names[0] ? names[idx] : "unknown";
}

qsf_status qsf_trace_init(qsf_trace *t)
{
    *t = (qsf_trace){.events = NULL};
    atomic_init(&t->is_on, false);
    return qsf_mutex_init(&t->lock);
}

void qsf_trace_destroy(qsf_trace *t)
{
    qsf_mutex_destroy(&t->lock);
}

void qsf_trace_set(qsf_trace *t, qsf_trace_event *events, size_t cap_events)
{
    qsf_mutex_lock(&t->lock);
    t->events = events;
    if (events != NULL) {
        t->cap_events = cap_events;
        t->n_events = 0;
        t->n_dropped = 0;
    }
    atomic_store_explicit(&t->is_on, events != NULL, memory_order_relaxed);
    qsf_mutex_unlock(&t->lock);
}

size_t qsf_trace_count(qsf_trace *t, uint64_t *n_dropped)
{
    qsf_mutex_lock(&t->lock);
    const size_t n_events = t->n_events;
    if (n_dropped != NULL)
        *n_dropped = t->n_dropped;
    qsf_mutex_unlock(&t->lock);
    return n_events;
}

void qsf_trace_record(qsf_trace *t, const qsf_trace_event *event)
{
    if (!qsf_trace_is_on(t))
        return;
    qsf_mutex_lock(&t->lock);
    if (t->events != NULL && t->n_events < t->cap_events)
        t->events[t->n_events++] = *event;
    else if (t->events != NULL)
        t->n_dropped++;
    qsf_mutex_unlock(&t->lock);
}
