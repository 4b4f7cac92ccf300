/* cancel.h - flags by which other threads, or signal handlers, end a computation. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* The cancel flags of all sessions of a pass. */
typedef struct qsf_cancel {
    const atomic_bool *const *flags; /* [n] */
    size_t n;
} qsf_cancel;

/* True if every flag is set: all requests are cancelled. NULL counts as not set. */
static inline bool qsf_cancel_is_set(const qsf_cancel *cancel)
{
    if (cancel == NULL)
        return false;
    for (size_t i = 0; i < cancel->n; i++)
        if (!atomic_load_explicit(cancel->flags[i], memory_order_relaxed))
            return false;
    return true;
}
