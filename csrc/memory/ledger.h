/* ledger.h - yes or no to every allocation of a model, by use, under one ceiling.
 *
 * Invariant: the sum of what is held never exceeds ceiling_bytes. The only caller of
 * platform/heap. Not thread-safe: allocations happen at open, session creation and
 * close, under the model's lock.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MEMORY_LEDGER_H
#define QSF_MEMORY_LEDGER_H

#include <stddef.h>
#include <stdint.h>

typedef enum qsf_use {
    QSF_USE_HANDLE,    /* the model's own record */
    QSF_USE_TABLES,    /* index, tensor table, positions, pool, sessions */
    QSF_USE_WEIGHTS,   /* resident units */
    QSF_USE_STREAM,    /* the window that streamed units pass through */
    QSF_USE_EMBEDDING, /* a band of embedding rows */
    QSF_USE_KV,        /* KV pages */
    QSF_USE_SCRATCH,   /* activations, logits, sampling */
    QSF_USE_TEXT,      /* a vocabulary, and what encoding takes */
    QSF_USE_COUNT
} qsf_use;

typedef struct qsf_ledger {
    uint64_t ceiling_bytes;
    uint64_t held_bytes;
    uint64_t peak_bytes;
    uint64_t held_by_use[QSF_USE_COUNT];
    uint64_t n_acquired; /* requests granted so far */
    /* Tests: so many requests go well, then one fails, then none. Negative: never. */
    int64_t grants_until_fault;
} qsf_ledger;

/* Without a ceiling: UINT64_MAX. */
void qsf_ledger_init(qsf_ledger *l, uint64_t ceiling_bytes);

/* 64-byte aligned, zeroed; NULL when it would exceed the ceiling, when the system has
 * none, or when a test asks for a fault. n_bytes >= 1. */
void *qsf_ledger_acquire(qsf_ledger *l, qsf_use use, size_t n_bytes);

/* Gives back what acquire returned, with the same use and size; NULL is fine. */
void qsf_ledger_release(qsf_ledger *l, qsf_use use, void *p, size_t n_bytes);

/* Never NULL: "weights", "kv", ... */
const char *qsf_use_name(qsf_use use);

#endif
