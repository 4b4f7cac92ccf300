/* pool.h - a parallel for-loop on a fixed set of workers.
 *
 * The calling thread is worker 0, so a pool of one starts no thread. Workers share the items
 * equally, and a worker that has finished takes items of another, so a slow or busy core does
 * fewer. A piece writes only its own outputs, so the result does not depend on the worker. Workers
 * spin briefly, then sleep.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "include/qsf.h"

#define QSF_POOL_MAX_THREADS 256
#define QSF_POOL_STACK_BYTES (256 * 1024)

typedef struct qsf_pool qsf_pool;

/* Processes items [begin, end) in worker worker_idx < n_threads. */
typedef void qsf_pool_fn(void *arg, size_t begin, size_t end, size_t worker_idx);

/* Bytes that qsf_pool_init needs for n_threads; a multiple of 64. */
size_t qsf_pool_bytes(uint32_t n_threads);

/* Creates a pool in `block` (qsf_pool_bytes, aligned to 64 bytes, zeroed, borrowed until destroy)
 * and starts n_threads - 1 workers. With `pin` each worker stays on its own physical core. The
 * first core is left to the caller, whose thread is never pinned. QSF_ERR_ARG: too few cores;
 * QSF_ERR_UNSUPPORTED: the system cannot pin threads. On failure no worker runs. */
qsf_status qsf_pool_init(void *block, uint32_t n_threads, bool pin, qsf_pool **out);

/* Stops and joins the workers. Accepts NULL. */
void qsf_pool_destroy(qsf_pool *p);

uint32_t qsf_pool_thread_count(const qsf_pool *p);

/* Statistics of runs. */
typedef struct qsf_pool_counts {
    uint64_t n_runs;
    uint64_t n_shared_runs; /* runs with workers; each ends in a barrier */
    uint64_t shared_ns;     /* total time of the shared runs */
} qsf_pool_counts;

/* Statistics since init. Do not call it during a run. */
qsf_pool_counts qsf_pool_count(const qsf_pool *p);

/* The clock when the latest run ended, if several workers took part; else 0. */
uint64_t qsf_pool_end_ns(const qsf_pool *p);

/* Runs fn over [0, n_items) in pieces of at least min_piece items and returns when all are done. If
 * the items are too few for two pieces, the caller runs fn once and wakes no worker. n_items is
 * below 2^32. One caller at a time; fn must not call qsf_pool_run. */
void qsf_pool_run(qsf_pool *p, size_t n_items, size_t min_piece, qsf_pool_fn *fn, void *arg);
