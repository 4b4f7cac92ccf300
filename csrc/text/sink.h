/* sink.h - collects token ids: stores as many as fit the caller's array, and counts all. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct qsf_sink {
    uint32_t *ids; /* [cap] */
    size_t cap;
    size_t n;
} qsf_sink;

static inline void qsf_sink_put(qsf_sink *s, uint32_t id)
{
    if (s->n < s->cap)
        s->ids[s->n] = id;
    s->n++;
}
