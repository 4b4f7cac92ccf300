/* ledger.h - grants or refuses every allocation of a model under one ceiling, and counts by use.
 *
 * Invariant: held_bytes <= ceiling_bytes. Only the ledger calls platform/heap. Not thread-safe:
 * the model's lock protects open, session creation and close, where allocations happen.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "include/qsf.h"

typedef enum qsf_use {
    QSF_USE_HANDLE,    /* the model's own record */
    QSF_USE_TABLES,    /* index, tensor table, positions, pool, sessions */
    QSF_USE_WEIGHTS,   /* resident units */
    QSF_USE_ADAPTERS,  /* of low rank */
    QSF_USE_STREAM,    /* ring, decode buffer and workspace of streamed units */
    QSF_USE_EXPERTS,   /* slots of experts */
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
    uint64_t n_acquired; /* granted requests so far */
    /* For tests: this many requests succeed, the next one fails, later ones succeed. Negative: no
     * request fails. */
    int64_t grants_until_fault;
} qsf_ledger;

/* ceiling_bytes UINT64_MAX: no ceiling. */
void qsf_ledger_init(qsf_ledger *l, uint64_t ceiling_bytes);

/* Returns zeroed memory, aligned to 64 bytes, or NULL if the ceiling or the system does not allow
 * it, or if a test injects a fault. n_bytes >= 1. */
void *qsf_ledger_acquire(qsf_ledger *l, qsf_use use, size_t n_bytes);

/* As acquire; `out` is the address of a pointer. QSF_ERR_NOMEM names `what`. Of 0 bytes the pointer
 * becomes NULL. */
qsf_status qsf_ledger_take(qsf_ledger *l, qsf_use use, uint64_t n_bytes, const char *what,
                           void *out);

/* Acquires n items in a row, each of which is released separately. NULL also if the system cannot
 * do that (platform/heap.h). */
void *qsf_ledger_acquire_row(qsf_ledger *l, qsf_use use, size_t n, size_t item_bytes);

/* Frees memory from acquire, or an item of a row; use and n_bytes as there. Accepts NULL. */
void qsf_ledger_release(qsf_ledger *l, qsf_use use, void *p, size_t n_bytes);

/* Never NULL: "weights", "kv", ... */
const char *qsf_use_name(qsf_use use);
