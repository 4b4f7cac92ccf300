/* pool.h - a parallel for over a range, on a fixed set of workers.
 *
 * The calling thread is worker 0 and works too, so a pool of one starts no thread.
 * Pieces are handed out dynamically, large ones first, so that a core that is slow or busy
 * elsewhere gets fewer; which worker gets a piece never matters for the result, because
 * a piece writes only its own outputs. Workers spin briefly, then sleep.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_POOL_H
#define QSF_PLATFORM_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"

#define QSF_POOL_MAX_THREADS 256
#define QSF_POOL_STACK_BYTES (256 * 1024)

typedef struct qsf_pool qsf_pool;

/* Works on items [begin, end); worker_idx < n_threads is stable within one call. */
typedef void qsf_pool_fn(void *arg, size_t begin, size_t end, size_t worker_idx);

/* Bytes that qsf_pool_init needs for n_threads, 64-byte aligned. */
size_t qsf_pool_bytes(uint32_t n_threads);

/* Makes a pool in `block` (qsf_pool_bytes, zeroed, borrowed until destroy) and starts
 * n_threads - 1 workers. With `pin` each worker stays on a physical core of its own, other
 * than the first that the process may use, which is left to the caller; the caller's thread
 * is never pinned. QSF_ERR_ARG: there are not as many cores; QSF_ERR_UNSUPPORTED: not on this
 * system. On failure nothing is running. */
qsf_status qsf_pool_init(void *block, uint32_t n_threads, bool pin, qsf_pool **out);

/* Stops and joins the workers; NULL is fine. */
void qsf_pool_destroy(qsf_pool *p);

uint32_t qsf_pool_thread_count(const qsf_pool *p);

/* What the caller's runs were. */
typedef struct qsf_pool_counts {
    uint64_t n_runs;
    uint64_t n_shared_runs; /* of them, with the workers: each ends in a barrier */
    uint64_t shared_ns;     /* spent in those */
} qsf_pool_counts;

/* Since init. Not while it runs. */
qsf_pool_counts qsf_pool_count(const qsf_pool *p);

/* When the latest run ended, if it was shared and so was timed; else 0. */
uint64_t qsf_pool_end_ns(const qsf_pool *p);

/* Runs fn over [0, n_items) in pieces of at least min_piece items and returns when
 * all are done; what is too little for two pieces runs in one call on the caller and
 * wakes nobody. One caller at a time, and fn must not run the pool again. */
void qsf_pool_run(qsf_pool *p, size_t n_items, size_t min_piece, qsf_pool_fn *fn, void *arg);

#endif
