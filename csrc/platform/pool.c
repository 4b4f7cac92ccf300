/* pool.c - the workers, and the gate through which they come to a job.
 *
 * A worker is never waited for unless it is at work: the caller opens the gate, works
 * until no piece is left, closes the gate, and waits only for those who came through it.
 * One who wakes up late finds the gate closed and goes back to sleep. So a run costs
 * little when a core is busy elsewhere, and one core is enough for any number of
 * threads.
 *
 *   gate:  | generation of the job, 32 bits | open, 1 bit | workers inside, 31 bits |
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/pool.h"

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/status.h"
#include "platform/cpu.h"
#include "platform/thread.h"

#define CACHE_LINE 64
#define N_SPINS 4000 /* about 50 us: longer than the gap between two matmuls of a step */
/* More pieces even out cores of different speed, and each costs one atomic addition. */
#define PIECES_PER_THREAD 8

#define GATE_OPEN (UINT64_C(1) << 31)
#define GATE_INSIDE (GATE_OPEN - 1)
#define GATE_GENERATION_SHIFT 32

typedef struct pool_worker {
    qsf_pool *pool;
    qsf_thread thread;
    uint32_t worker_idx;
} pool_worker;

struct qsf_pool {
    /* Written once before the workers start, n_started by the caller of init only. */
    uint32_t n_threads;
    uint32_t n_started;
    qsf_mutex lock;
    qsf_condition job_ready;  /* workers wait for a generation they have not seen */
    qsf_condition gate_empty; /* the caller waits for the last one inside */

    /* The job: written by the caller while the gate is closed and nobody is inside. */
    qsf_pool_fn *fn;
    void *arg;
    size_t n_pieces;
    size_t piece_items;   /* of each piece */
    size_t longer_pieces; /* the first of them have one item more */

    alignas(CACHE_LINE) _Atomic uint64_t gate;
    atomic_bool stopping;
    atomic_uint n_asleep;
    alignas(CACHE_LINE) atomic_size_t next_piece;
    alignas(CACHE_LINE) pool_worker workers[]; /* [n_threads - 1] */
};

static inline void spin_pause(void)
{
#if QSF_ARCH_X86
    __builtin_ia32_pause();
#elif QSF_ARCH_ARM
    __asm__ volatile("yield");
#endif
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void work_on_pieces(qsf_pool *p, size_t worker_idx)
{
    for (;;) {
        const size_t i = atomic_fetch_add_explicit(&p->next_piece, 1, memory_order_relaxed);
        if (i >= p->n_pieces)
            return;
        const size_t begin = i * p->piece_items + smaller(i, p->longer_pieces);
        const size_t end = begin + p->piece_items + (i < p->longer_pieces);
        p->fn(p->arg, begin, end, worker_idx);
    }
}

static uint32_t generation_of(uint64_t gate)
{
    return (uint32_t)(gate >> GATE_GENERATION_SHIFT);
}

/* False: the job is over. */
static bool enter_gate(qsf_pool *p)
{
    uint64_t gate = atomic_load(&p->gate);
    while ((gate & GATE_OPEN) != 0)
        if (atomic_compare_exchange_weak(&p->gate, &gate, gate + 1))
            return true;
    return false;
}

static void leave_gate(qsf_pool *p)
{
    const uint64_t before = atomic_fetch_sub(&p->gate, 1);
    if ((before & GATE_OPEN) != 0 || (before & GATE_INSIDE) != 1)
        return;
    /* The caller may be about to sleep: with the lock, it is either before its look at
     * the gate or already waiting. */
    qsf_mutex_lock(&p->lock);
    qsf_condition_wake_all(&p->gate_empty);
    qsf_mutex_unlock(&p->lock);
}

static bool has_news(qsf_pool *p, uint32_t seen_generation)
{
    return generation_of(atomic_load(&p->gate)) != seen_generation || atomic_load(&p->stopping);
}

static void wait_for_news(qsf_pool *p, uint32_t seen_generation)
{
    for (uint32_t i = 0; i < N_SPINS; i++) {
        if (has_news(p, seen_generation))
            return;
        spin_pause();
    }
    /* First counted, then looked again; the caller first opens, then looks at the count.
     * One of the two sees the other. */
    qsf_mutex_lock(&p->lock);
    atomic_fetch_add(&p->n_asleep, 1);
    while (!has_news(p, seen_generation))
        qsf_condition_wait(&p->job_ready, &p->lock);
    atomic_fetch_sub(&p->n_asleep, 1);
    qsf_mutex_unlock(&p->lock);
}

static void *run_worker(void *arg)
{
    const pool_worker *const worker = arg;
    qsf_pool *const p = worker->pool;
    uint32_t seen_generation = 0;
    for (;;) {
        wait_for_news(p, seen_generation);
        if (atomic_load(&p->stopping))
            return NULL;
        seen_generation = generation_of(atomic_load(&p->gate));
        if (enter_gate(p)) {
            work_on_pieces(p, worker->worker_idx);
            leave_gate(p);
        }
    }
}

static void wake_sleepers(qsf_pool *p)
{
    if (atomic_load(&p->n_asleep) == 0)
        return;
    qsf_mutex_lock(&p->lock);
    qsf_condition_wake_all(&p->job_ready);
    qsf_mutex_unlock(&p->lock);
}

static bool is_empty(qsf_pool *p)
{
    return (atomic_load(&p->gate) & GATE_INSIDE) == 0;
}

static void wait_until_empty(qsf_pool *p)
{
    for (uint32_t i = 0; i < N_SPINS; i++) {
        if (is_empty(p))
            return;
        spin_pause();
    }
    qsf_mutex_lock(&p->lock);
    while (!is_empty(p))
        qsf_condition_wait(&p->gate_empty, &p->lock);
    qsf_mutex_unlock(&p->lock);
}

void qsf_pool_run(qsf_pool *p, size_t n_items, size_t min_piece, qsf_pool_fn *fn, void *arg)
{
    if (n_items == 0)
        return;
    const size_t least_items = min_piece > 0 ? min_piece : 1;
    const size_t n_pieces =
        smaller(n_items / least_items, (size_t)p->n_threads * PIECES_PER_THREAD);
    if (p->n_threads == 1 || n_pieces <= 1) {
        fn(arg, 0, n_items, 0);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    p->n_pieces = n_pieces;
    p->piece_items = n_items / n_pieces;
    p->longer_pieces = n_items % n_pieces;
    atomic_store_explicit(&p->next_piece, 0, memory_order_relaxed);

    const uint64_t closed = atomic_load(&p->gate);
    const uint32_t generation = generation_of(closed) + 1;
    assert((closed & (GATE_OPEN | GATE_INSIDE)) == 0);
    atomic_store(&p->gate, (uint64_t)generation << GATE_GENERATION_SHIFT | GATE_OPEN);
    wake_sleepers(p);
    work_on_pieces(p, 0);
    atomic_fetch_and(&p->gate, ~GATE_OPEN);
    wait_until_empty(p);
}

size_t qsf_pool_bytes(uint32_t n_threads)
{
    const size_t n_workers = n_threads > 0 ? n_threads - 1 : 0;
    const size_t n_bytes = sizeof(qsf_pool) + n_workers * sizeof(pool_worker);
    return (n_bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

static void stop_workers(qsf_pool *p)
{
    qsf_mutex_lock(&p->lock);
    atomic_store(&p->stopping, true);
    qsf_condition_wake_all(&p->job_ready);
    qsf_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->n_started; i++)
        qsf_thread_join(&p->workers[i].thread);
    p->n_started = 0;
}

static qsf_status init_signals(qsf_pool *p)
{
    QSF_TRY(qsf_mutex_init(&p->lock));
    qsf_status status = qsf_condition_init(&p->job_ready);
    if (status == QSF_OK) {
        status = qsf_condition_init(&p->gate_empty);
        if (status != QSF_OK)
            qsf_condition_destroy(&p->job_ready);
    }
    if (status != QSF_OK)
        qsf_mutex_destroy(&p->lock);
    return status;
}

qsf_status qsf_pool_init(void *block, uint32_t n_threads, qsf_pool **out)
{
    *out = NULL;
    if (n_threads < 1 || n_threads > QSF_POOL_MAX_THREADS)
        return QSF_FAIL(QSF_ERR_ARG, "%u threads; a pool has 1 to %d", n_threads,
                        QSF_POOL_MAX_THREADS);
    assert((uintptr_t)block % CACHE_LINE == 0);
    qsf_pool *const p = block;
    p->n_threads = n_threads;
    p->n_started = 0;
    atomic_init(&p->gate, 0);
    atomic_init(&p->stopping, false);
    atomic_init(&p->n_asleep, 0);
    atomic_init(&p->next_piece, 0);
    QSF_TRY(init_signals(p));
    while (p->n_started < n_threads - 1) {
        pool_worker *const worker = &p->workers[p->n_started];
        worker->pool = p;
        worker->worker_idx = p->n_started + 1;
        const qsf_status status =
            qsf_thread_start(&worker->thread, QSF_POOL_STACK_BYTES, run_worker, worker);
        if (status != QSF_OK) {
            qsf_pool_destroy(p);
            return status;
        }
        p->n_started++;
    }
    *out = p;
    return QSF_OK;
}

void qsf_pool_destroy(qsf_pool *p)
{
    if (p == NULL)
        return;
    stop_workers(p);
    qsf_condition_destroy(&p->gate_empty);
    qsf_condition_destroy(&p->job_ready);
    qsf_mutex_destroy(&p->lock);
}

uint32_t qsf_pool_thread_count(const qsf_pool *p)
{
    return p->n_threads;
}
