/* pool.c - the workers, and the gate through which they enter a job.
 *
 * The caller opens the gate, works until no piece is left, closes the gate, and waits only for the
 * workers that have entered. A worker that wakes up late finds the gate closed and sleeps again. So
 * a busy core delays a run little, and one core is enough for any number of threads.
 *
 *   gate:  | generation of the job, 32 bits | open, 1 bit | workers inside, 31 bits |
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/pool.h"

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>

#include "base/status.h"
#include "platform/clock.h"
#include "platform/cpu.h"
#include "platform/thread.h"

#define CACHE_LINE 64
/* Longer than the gap between two regions of a step and than waking a thread takes. Measured in
 * time, because a pause instruction takes 10 to 150 cycles. */
#define SPIN_NS 100000
/* After this time a spinning thread yields its core, because the thread it waits for may need it.
 * Without a taker, yielding costs less than sleeping. */
#define ALONE_NS 5000
#define PAUSES_PER_LOOK 32 /* pauses between clock readings; a reading costs 1 to a few pauses */
/* A piece is 1 / SHARES of a thread's remaining items. First pieces are large; last ones are
 * small, because all threads wait for the last one. */
#define SHARES 2

/* ThreadSanitizer keeps some 900 KiB of its own on each stack. Without optimisation, each value of
 * a kernel has a place of its own there. */
#if defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
#define EXTRA_STACK_BYTES (1024 * 1024)
#else
#define EXTRA_STACK_BYTES 0
#endif

#define GATE_OPEN (UINT64_C(1) << 31)
#define GATE_INSIDE (GATE_OPEN - 1)
#define GATE_GENERATION_SHIFT 32

typedef struct pool_worker {
    /* Items [begin, end) of the job that belong to this worker and are not taken: begin << 32 |
     * end. The worker takes pieces at the front, where its prefetching continues; workers
     * without items take some at the end. */
    alignas(CACHE_LINE) _Atomic uint64_t range;
    qsf_pool *pool;
    qsf_thread thread;
    uint32_t worker_idx;
} pool_worker;

struct qsf_pool {
    /* Written before the workers start; n_started only by the caller of init. */
    uint32_t n_threads;
    uint32_t n_started;
    qsf_mutex lock;
    qsf_condition job_ready;  /* workers wait for a generation they have not seen */
    qsf_condition gate_empty; /* the caller waits for the last one inside */

    /* The job: written by the caller while the gate is closed and no worker is inside. */
    qsf_pool_fn *fn;
    void *arg;
    size_t least_items; /* smallest piece */

    qsf_pool_counts counts; /* used by the caller only */
    uint64_t end_ns;        /* used by the caller only: end of the latest run; 0: not shared */

    alignas(CACHE_LINE) _Atomic uint64_t gate;
    atomic_bool stopping;
    atomic_uint n_asleep;
    pool_worker workers[]; /* [n_threads]; the first is the caller */
};

static inline void spin_pause(void)
{
#if QSF_ARCH_X86
    __builtin_ia32_pause();
#elif QSF_ARCH_ARM
    __asm__ volatile("yield");
#endif
}

/* How long a thread has been spinning. */
typedef struct spinning {
    uint32_t n_pauses;
    uint64_t end_ns;
} spinning;

/* Pauses. Returns false if the thread should sleep now. */
static bool spin_on(spinning *s)
{
    spin_pause();
    if (++s->n_pauses % PAUSES_PER_LOOK != 0)
        return true;
    const uint64_t now_ns = qsf_clock_ns();
    if (s->end_ns == 0)
        s->end_ns = now_ns + SPIN_NS;
    else if (now_ns + SPIN_NS > s->end_ns + ALONE_NS)
        qsf_thread_yield();
    return now_ns < s->end_ns;
}

static uint64_t range_of(size_t begin, size_t end)
{
    return (uint64_t)begin << 32 | end;
}

static size_t range_begin(uint64_t range)
{
    return (size_t)(range >> 32);
}

static size_t range_end(uint64_t range)
{
    return (size_t)(range & UINT32_MAX);
}

/* Gives each thread an equal part of the items, but none fewer than the smallest piece. */
static void share_items(qsf_pool *p, size_t n_items)
{
    const size_t most_ranges = n_items / p->least_items;
    const size_t n_ranges = p->n_threads < most_ranges ? p->n_threads : most_ranges;
    for (size_t i = 0; i < p->n_threads; i++) {
        const size_t begin = i < n_ranges ? n_items * i / n_ranges : 0;
        const size_t end = i < n_ranges ? n_items * (i + 1) / n_ranges : 0;
        atomic_store_explicit(&p->workers[i].range, range_of(begin, end), memory_order_relaxed);
    }
}

/* Takes the next piece of a worker's own items, [*begin, *end); false if none is left. */
static bool take_piece(const qsf_pool *p, pool_worker *worker, size_t *begin, size_t *end)
{
    uint64_t range = atomic_load_explicit(&worker->range, memory_order_relaxed);
    while (range_begin(range) < range_end(range)) {
        const size_t left = range_end(range) - range_begin(range);
        size_t n = left / SHARES;
        if (n < p->least_items)
            n = p->least_items;
        if (left < n || left - n < p->least_items)
            n = left;
        *begin = range_begin(range);
        *end = *begin + n;
        if (atomic_compare_exchange_weak_explicit(&worker->range, &range,
                                                  range_of(*end, range_end(range)),
                                                  memory_order_relaxed, memory_order_relaxed))
            return true;
    }
    return false;
}

/* Gives a worker without items half of another's; false if that has none. */
static bool take_half(const qsf_pool *p, pool_worker *worker, pool_worker *other)
{
    uint64_t range = atomic_load_explicit(&other->range, memory_order_relaxed);
    while (range_begin(range) < range_end(range)) {
        const size_t left = range_end(range) - range_begin(range);
        const size_t kept = left / 2 < p->least_items ? 0 : left - left / 2;
        const size_t at = range_begin(range) + kept;
        if (atomic_compare_exchange_weak_explicit(&other->range, &range,
                                                  range_of(range_begin(range), at),
                                                  memory_order_relaxed, memory_order_relaxed)) {
            atomic_store_explicit(&worker->range, range_of(at, range_end(range)),
                                  memory_order_relaxed);
            return true;
        }
    }
    return false;
}

static bool take_of_others(qsf_pool *p, pool_worker *worker)
{
    for (uint32_t i = 1; i < p->n_threads; i++)
        if (take_half(p, worker, &p->workers[(worker->worker_idx + i) % p->n_threads]))
            return true;
    return false;
}

static void work_on_pieces(qsf_pool *p, pool_worker *worker)
{
    size_t begin;
    size_t end;
    do {
        while (take_piece(p, worker, &begin, &end))
            p->fn(p->arg, begin, end, worker->worker_idx);
    } while (take_of_others(p, worker));
}

static uint32_t generation_of(uint64_t gate)
{
    return (uint32_t)(gate >> GATE_GENERATION_SHIFT);
}

/* Returns false if the gate is closed. */
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
    /* The caller may be about to sleep. Under the lock it either has not checked the gate yet or is
     * already waiting. */
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
    spinning s = {0};
    do {
        if (has_news(p, seen_generation))
            return;
    } while (spin_on(&s));
    /* The worker first counts itself, then checks the gate; the caller first opens the gate, then
     * reads the count. So one of them sees the other. */
    qsf_mutex_lock(&p->lock);
    atomic_fetch_add(&p->n_asleep, 1);
    while (!has_news(p, seen_generation))
        qsf_condition_wait(&p->job_ready, &p->lock);
    atomic_fetch_sub(&p->n_asleep, 1);
    qsf_mutex_unlock(&p->lock);
}

static void *run_worker(void *arg)
{
    pool_worker *const worker = arg;
    qsf_pool *const p = worker->pool;
    uint32_t seen_generation = 0;
    qsf_thread_hurry();
    for (;;) {
        wait_for_news(p, seen_generation);
        if (atomic_load(&p->stopping))
            return NULL;
        seen_generation = generation_of(atomic_load(&p->gate));
        if (enter_gate(p)) {
            work_on_pieces(p, worker);
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
    spinning s = {0};
    do {
        if (is_empty(p))
            return;
    } while (spin_on(&s));
    qsf_mutex_lock(&p->lock);
    while (!is_empty(p))
        qsf_condition_wait(&p->gate_empty, &p->lock);
    qsf_mutex_unlock(&p->lock);
}

/* Runs the job with the workers, in a new generation of the gate. */
static void run_together(qsf_pool *p)
{
    const uint64_t closed = atomic_load(&p->gate);
    const uint32_t generation = generation_of(closed) + 1;
    assert((closed & (GATE_OPEN | GATE_INSIDE)) == 0);
    atomic_store(&p->gate, (uint64_t)generation << GATE_GENERATION_SHIFT | GATE_OPEN);
    wake_sleepers(p);
    work_on_pieces(p, &p->workers[0]);
    atomic_fetch_and(&p->gate, ~GATE_OPEN);
    wait_until_empty(p);
}

void qsf_pool_run(qsf_pool *p, size_t n_items, size_t min_piece, qsf_pool_fn *fn, void *arg)
{
    assert(n_items <= UINT32_MAX);
    if (n_items == 0)
        return;
    const size_t least_items = min_piece > 0 ? min_piece : 1;
    p->counts.n_runs++;
    p->end_ns = 0;
    if (p->n_threads == 1 || n_items / 2 < least_items) {
        fn(arg, 0, n_items, 0);
        return;
    }
    const uint64_t start_ns = qsf_clock_ns();
    p->fn = fn;
    p->arg = arg;
    p->least_items = least_items;
    share_items(p, n_items);
    run_together(p);
    p->counts.n_shared_runs++;
    p->end_ns = qsf_clock_ns();
    p->counts.shared_ns += p->end_ns - start_ns;
}

size_t qsf_pool_bytes(uint32_t n_threads)
{
    return sizeof(qsf_pool) + n_threads * sizeof(pool_worker); /* both are whole cache lines */
}

/* Chooses one processor of each core; the first is for the caller. */
static qsf_status choose_cpus(uint32_t n_threads, uint32_t *cpus)
{
    const uint32_t n_cores = qsf_cpu_list_cores(cpus, n_threads);
    QSF_FAIL_IF(n_cores == 0, UNSUPPORTED, "this system cannot pin threads");
    QSF_FAIL_IF(n_cores < n_threads, ARG,
                "%u threads cannot be pinned: this process may run on %u physical cores", n_threads,
                n_cores);
    return QSF_OK;
}

qsf_status qsf_pool_init(void *block, uint32_t n_threads, bool pin, qsf_pool **out)
{
    *out = NULL;
    QSF_FAIL_IF(n_threads < 1 || n_threads > QSF_POOL_MAX_THREADS, ARG,
                "%u threads, allowed: 1 .. %d", n_threads, QSF_POOL_MAX_THREADS);
    assert((uintptr_t)block % CACHE_LINE == 0);
    qsf_pool *const p = block;
    uint32_t cpus[QSF_POOL_MAX_THREADS];
    if (pin)
        QSF_TRY(choose_cpus(n_threads, cpus));
    *p = (qsf_pool){.n_threads = n_threads};
    p->workers[0].worker_idx = 0;
    qsf_status status = qsf_mutex_init(&p->lock);
    if (status == QSF_OK)
        status = qsf_condition_init(&p->job_ready);
    if (status == QSF_OK)
        status = qsf_condition_init(&p->gate_empty);
    while (status == QSF_OK && p->n_started < n_threads - 1) {
        pool_worker *const worker = &p->workers[p->n_started + 1];
        worker->pool = p;
        worker->worker_idx = p->n_started + 1;
        status = qsf_thread_start(&worker->thread, QSF_POOL_STACK_BYTES + EXTRA_STACK_BYTES,
                                  run_worker, worker);
        if (status == QSF_OK)
            p->n_started++;
        if (status == QSF_OK && pin)
            status = qsf_thread_pin(&worker->thread, cpus[p->n_started]);
    }
    if (status == QSF_OK)
        *out = p;
    else
        qsf_pool_destroy(p);
    return status;
}

void qsf_pool_destroy(qsf_pool *p)
{
    if (p == NULL)
        return;
    if (p->n_started > 0) {
        qsf_mutex_lock(&p->lock);
        atomic_store(&p->stopping, true);
        qsf_condition_wake_all(&p->job_ready);
        qsf_mutex_unlock(&p->lock);
    }
    for (uint32_t i = 1; i <= p->n_started; i++)
        qsf_thread_join(&p->workers[i].thread);
    qsf_condition_destroy(&p->gate_empty);
    qsf_condition_destroy(&p->job_ready);
    qsf_mutex_destroy(&p->lock);
}

qsf_pool_counts qsf_pool_count(const qsf_pool *p)
{
    return p->counts;
}

uint64_t qsf_pool_end_ns(const qsf_pool *p)
{
    return p->end_ns;
}

uint32_t qsf_pool_thread_count(const qsf_pool *p)
{
    return p->n_threads;
}
