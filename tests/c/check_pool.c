/* check_pool.c - every item once, in allowed pieces, on workers that really work. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "sanitized.h"
#include "platform/clock.h"
#include "platform/cpu.h"
#include "platform/pool.h"
#include "platform/linux/procfile.h"

#define MAX_ITEMS 2000
#define MEETING_NS (UINT64_C(15) * 1000000000) /* only a broken pool waits so long */

typedef struct started_pool {
    void *block;
    qsf_pool *pool;
} started_pool;

static started_pool start(uint32_t n_threads)
{
    started_pool s = {aligned_alloc(64, qsf_pool_bytes(n_threads)), NULL};
    CHECK_EQ(qsf_pool_bytes(n_threads) % 64, 0);
    if (!CHECK(s.block != NULL))
        return s;
    memset(s.block, 0, qsf_pool_bytes(n_threads));
    CHECK_OK(qsf_pool_init(s.block, n_threads, false, &s.pool));
    CHECK_EQ(qsf_pool_thread_count(s.pool), n_threads);
    return s;
}

static void stop(started_pool *s)
{
    qsf_pool_destroy(s->pool);
    free(s->block);
}

/* Not atomic: the pool itself must order these writes before the caller's reads. */
typedef struct tally {
    uint32_t n_visits[MAX_ITEMS];
    atomic_size_t n_calls;
    atomic_size_t smallest_piece;
    atomic_size_t n_bad_workers;
    size_t n_threads;
} tally;

static void count_visits(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    tally *const t = arg;
    for (size_t i = begin; i < end; i++)
        t->n_visits[i]++;
    atomic_fetch_add(&t->n_calls, 1);
    if (worker_idx >= t->n_threads)
        atomic_fetch_add(&t->n_bad_workers, 1);
    size_t smallest = atomic_load(&t->smallest_piece);
    while (end - begin < smallest &&
           !atomic_compare_exchange_weak(&t->smallest_piece, &smallest, end - begin)) {
    }
}

static void check_one_run(qsf_pool *pool, size_t n_items, size_t min_piece)
{
    static tally t;
    memset(&t, 0, sizeof t);
    t.smallest_piece = SIZE_MAX;
    t.n_threads = qsf_pool_thread_count(pool);
    qsf_pool_run(pool, n_items, min_piece, count_visits, &t);
    size_t n_wrong = 0;
    for (size_t i = 0; i < MAX_ITEMS; i++)
        n_wrong += t.n_visits[i] != (i < n_items);
    bool ok = CHECK_EQ(n_wrong, 0);
    ok &= CHECK_EQ(t.n_bad_workers, 0);
    if (n_items <= min_piece || n_items == 0)
        ok &= CHECK_EQ(t.n_calls, n_items > 0);
    else
        ok &= CHECK(t.smallest_piece >= min_piece && t.smallest_piece > 0);
    if (!ok && check_is_printed())
        printf("    n_items=%zu min_piece=%zu n_threads=%zu\n", n_items, min_piece, t.n_threads);
}

static void check_every_item_once(void)
{
    static const size_t items[] = {0,  1,  2,  3,  4,  5,   7,   8,   9,    15,   16,
                                   17, 31, 33, 63, 64, 127, 128, 500, 1001, 1999, MAX_ITEMS};
    static const size_t pieces[] = {0, 1, 2, 3, 4, 16, 17, 1000, 5000, SIZE_MAX};
    static const uint32_t threads[] = {1, 2, 3, 4, 8};
    for (size_t k = 0; k < COUNT_OF(threads); k++) {
        started_pool s = start(threads[k]);
        for (size_t i = 0; i < COUNT_OF(items); i++)
            for (size_t j = 0; j < COUNT_OF(pieces); j++)
                check_one_run(s.pool, items[i], pieces[j]);
        stop(&s);
    }
}

static void add_to_sums(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    uint64_t *const sums = arg; /* [n_items] */
    (void)worker_idx;
    for (size_t i = begin; i < end; i++)
        sums[i] += i + 1;
}

/* Many small runs; then all on one core, more threads than that: slow at worst, never stuck. */
static void check_many_small_runs(bool is_one_core)
{
    enum { N_ITEMS = 24 };
    const uint64_t n_runs = is_one_core ? 2000 : 10000;
#if defined(__linux__)
    cpu_set_t before;
    cpu_set_t one;
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, &one);
    CHECK_EQ(sched_setaffinity(0, sizeof one, is_one_core ? &one : &before), 0);
#endif
    for (uint32_t n_threads = 2; n_threads <= 4; n_threads += 2) {
        started_pool s = start(n_threads);
        uint64_t sums[N_ITEMS] = {0};
        for (uint64_t i = 0; i < n_runs; i++)
            qsf_pool_run(s.pool, N_ITEMS, 1, add_to_sums, sums);
        for (size_t i = 0; i < N_ITEMS; i++)
            CHECK_EQ_U64(sums[i], (i + 1) * n_runs);
        stop(&s);
    }
#if defined(__linux__)
    CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
#endif
}

static void sleep_ms(long ms)
{
    const struct timespec pause = {0, ms * 1000000};
    nanosleep(&pause, NULL);
}

/* As many items as threads, none of which ends before all have begun: this only goes
 * well when every worker takes part. */
typedef struct meeting {
    atomic_size_t n_arrived;
    size_t n_expected;
    atomic_bool missed;
    atomic_size_t workers_seen; /* a bit for each */
    atomic_size_t n_bad_masks;
    bool workers_linger;
} meeting;

static void meet(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    meeting *const m = arg;
    atomic_fetch_add(&m->n_arrived, end - begin);
    atomic_fetch_or(&m->workers_seen, (size_t)1 << worker_idx);
    const uint64_t give_up_ns = qsf_clock_ns() + MEETING_NS;
    while (atomic_load(&m->n_arrived) < m->n_expected) {
        if (qsf_clock_ns() > give_up_ns) {
            atomic_store(&m->missed, true);
            return;
        }
        sched_yield();
    }
    if (worker_idx == 0)
        return;
    sigset_t mask;
    sigemptyset(&mask);
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    if (sigismember(&mask, SIGINT) != 1 || sigismember(&mask, SIGTERM) != 1 ||
        sigismember(&mask, SIGSEGV) != 0)
        atomic_fetch_add(&m->n_bad_masks, 1);
    if (m->workers_linger)
        sleep_ms(3);
}

static void check_workers_take_part(void)
{
    for (uint32_t n_threads = 2; n_threads <= 4; n_threads++) {
        started_pool s = start(n_threads);
        for (int round = 0; round < 6; round++) {
            meeting m = {0};
            m.n_expected = n_threads;
            m.workers_linger = round % 2 == 1; /* the caller goes to sleep over it */
            if (round >= 2)
                sleep_ms(20); /* the workers have gone to sleep */
            qsf_pool_run(s.pool, n_threads, 1, meet, &m);
            CHECK(!m.missed);
            CHECK_EQ(m.n_arrived, n_threads);
            CHECK_EQ(m.workers_seen, ((size_t)1 << n_threads) - 1);
            CHECK_EQ(m.n_bad_masks, 0);
        }
        stop(&s);
    }
    sigset_t mask;
    sigemptyset(&mask);
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    CHECK_EQ(sigismember(&mask, SIGINT), 0); /* of the caller, as it was */
}

static void check_start_and_stop(void)
{
    for (uint32_t i = 0; i < 200; i++) {
        started_pool s = start(1 + i % 5);
        if (i % 3 == 0)
            check_one_run(s.pool, 100, 1);
        if (i % 7 == 0)
            sleep_ms(1);
        stop(&s);
    }
    started_pool s = start(QSF_POOL_MAX_THREADS);
    check_one_run(s.pool, MAX_ITEMS, 1);
    stop(&s);
    qsf_pool_destroy(NULL);
    static const uint32_t counts[] = {0, QSF_POOL_MAX_THREADS + 1, UINT32_MAX};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        alignas(64) unsigned char block[64];
        qsf_pool *pool = (qsf_pool *)(void *)block;
        CHECK_STATUS(qsf_pool_init(block, counts[i], false, &pool), QSF_ERR_ARG);
        CHECK(pool == NULL);
    }
}

/* What the child makes of a pool for whose stacks there is no room. */
enum { CHILD_REFUSED = 10, CHILD_NO_LIMIT = 11, CHILD_STARTED = 12, CHILD_WRONG = 13 };

/* A joined thread may still be listed for a moment. */
static bool is_alone(void)
{
    const uint64_t give_up_ns = qsf_clock_ns() + MEETING_NS;
    for (;;) {
        char text[QSF_PROCFILE_BYTES];
        uint64_t n_running;
        if (!qsf_procfile_read("/proc/self/status", text, sizeof text) ||
            !qsf_procfile_field(text, "Threads:", &n_running) || qsf_clock_ns() > give_up_ns)
            return false;
        if (n_running == 1)
            return true;
        sched_yield();
    }
}

static int start_without_room(void)
{
    enum { N_THREADS = 64 };
    static alignas(64) unsigned char block[64 * 1024];
    char text[QSF_PROCFILE_BYTES];
    uint64_t mapped_kib;
    qsf_pool *pool;
    if (qsf_pool_bytes(N_THREADS) > sizeof block)
        return CHILD_WRONG;
    /* Room for some of the 63 stacks. An emulator may not enforce such a limit. */
    if (!qsf_procfile_read("/proc/self/status", text, sizeof text) ||
        !qsf_procfile_field(text, "VmSize:", &mapped_kib))
        return CHILD_NO_LIMIT;
    const rlim_t limit_bytes = (rlim_t)mapped_kib * 1024 + 16 * QSF_POOL_STACK_BYTES;
    const struct rlimit limit = {limit_bytes, limit_bytes};
    if (setrlimit(RLIMIT_AS, &limit) != 0 || mmap(NULL, 64 * QSF_POOL_STACK_BYTES, PROT_READ,
                                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)
        return CHILD_NO_LIMIT;
    const qsf_status status = qsf_pool_init(block, N_THREADS, false, &pool);
    if (status == QSF_OK)
        return CHILD_STARTED;
    return status == QSF_ERR_NOMEM && pool == NULL &&
                   strstr(qsf_error_detail(), "cannot start a thread") != NULL && is_alone()
               ? CHILD_REFUSED
               : CHILD_WRONG;
}

static void check_no_room_for_threads(void)
{
    if (IS_SANITIZED) {
        printf("check_pool: skipped under a sanitizer: no room for threads\n");
        return;
    }
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0)
        _exit(start_without_room());
    int how = 0;
    if (!CHECK(child > 0) || !CHECK_EQ(waitpid(child, &how, 0), child))
        return;
    CHECK(WIFEXITED(how));
    if (WEXITSTATUS(how) == CHILD_NO_LIMIT)
        printf("check_pool: skipped without RLIMIT_AS: no room for threads\n");
    else
        CHECK_EQ(WEXITSTATUS(how), CHILD_REFUSED);
}

static void check_run_counts(void)
{
    started_pool s = start(3);
    uint64_t sums[64] = {0};
    const qsf_pool_counts before = qsf_pool_count(s.pool);
    CHECK_EQ_U64(before.n_runs, 0);
    qsf_pool_run(s.pool, 0, 1, add_to_sums, sums);   /* nothing to do is no run */
    qsf_pool_run(s.pool, 1, 1, add_to_sums, sums);   /* too little to share */
    qsf_pool_run(s.pool, 64, 33, add_to_sums, sums); /* not two pieces */
    qsf_pool_run(s.pool, 64, 32, add_to_sums, sums);
    qsf_pool_run(s.pool, 2, 1, add_to_sums, sums);
    const qsf_pool_counts after = qsf_pool_count(s.pool);
    CHECK_EQ_U64(after.n_runs, 4);
    CHECK_EQ_U64(after.n_shared_runs, 2);
    CHECK(after.shared_ns > 0);
    stop(&s);
}

#define N_GUIDED 1000
#define LEAST_GUIDED 10

/* Two threads each wait in their first piece: the caller until the worker has begun, the worker
 * until everything but its own piece is done. */
typedef struct slow_worker {
    atomic_bool has_begun;
    atomic_size_t n_done;
    atomic_bool is_alone; /* the rest was not done in time */
} slow_worker;

static void wait_for_others(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    slow_worker *const w = arg;
    const uint64_t give_up_ns = qsf_clock_ns() + UINT64_C(10000000000);
    const bool is_first_of_worker = worker_idx == 1 && !atomic_exchange(&w->has_begun, true);
    while (worker_idx == 0 && !atomic_load(&w->has_begun) && qsf_clock_ns() < give_up_ns)
        sched_yield();
    while (is_first_of_worker && atomic_load(&w->n_done) + (end - begin) < N_GUIDED) {
        if (qsf_clock_ns() > give_up_ns) {
            atomic_store(&w->is_alone, true);
            break;
        }
        sched_yield();
    }
    atomic_fetch_add(&w->n_done, end - begin);
}

static void check_items_of_a_slow_worker(void)
{
    started_pool s = start(2);
    for (int i = 0; i < 20; i++) {
        slow_worker w = {0};
        qsf_pool_run(s.pool, N_GUIDED, LEAST_GUIDED, wait_for_others, &w);
        CHECK_EQ(w.n_done, N_GUIDED);
        CHECK(w.has_begun && !w.is_alone);
    }
    stop(&s);
}

#if defined(__linux__)

#define MAX_PINNED 16

typedef struct placement {
    meeting met;
    cpu_set_t sets[MAX_PINNED];
    uint64_t slices_ns[MAX_PINNED];
} placement;

/* Slice of the calling thread: 0 before Linux 6.12 and where a sandbox hides it. */
static uint64_t slice_ns(void)
{
    uint64_t attributes[6] = {0}; /* sched_attr: the slice is the fourth */
    return syscall(SYS_sched_getattr, 0, attributes, sizeof attributes, 0) == 0 ? attributes[3] : 0;
}

static void note_place(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    placement *const p = arg;
    meet(&p->met, begin, end, worker_idx);
    CPU_ZERO(&p->sets[worker_idx]);
    sched_getaffinity(0, sizeof p->sets[worker_idx], &p->sets[worker_idx]);
    p->slices_ns[worker_idx] = slice_ns();
}

/* Workers have a core each, which is not the first, and short slices, so that they interrupt what
 * else runs; the caller keeps what it had. */
static void check_pinned(void)
{
    static placement p;
    cpu_set_t before;
    uint32_t cpus[MAX_PINNED];
    qsf_pool *pool;
    const uint64_t before_ns = slice_ns();
    void *const block = aligned_alloc(64, qsf_pool_bytes(MAX_PINNED));
    if (!CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0) || !CHECK(block != NULL))
        return;
    uint32_t n_cores = qsf_cpu_list_cores(cpus, MAX_PINNED);
    CHECK(n_cores >= 1);
    n_cores = n_cores < MAX_PINNED ? n_cores : MAX_PINNED;
    for (uint32_t n_threads = 1; n_threads <= n_cores; n_threads++) {
        memset(&p, 0, sizeof p);
        memset(block, 0, qsf_pool_bytes(MAX_PINNED));
        p.met.n_expected = n_threads;
        if (!CHECK_OK(qsf_pool_init(block, n_threads, true, &pool)))
            break;
        qsf_pool_run(pool, n_threads, 1, note_place, &p);
        CHECK(!p.met.missed);
        for (uint32_t i = 1; i < n_threads; i++) {
            CHECK_EQ(CPU_COUNT(&p.sets[i]), 1);
            CHECK(CPU_ISSET(cpus[i], &p.sets[i]));
            CHECK(before_ns == 0 || p.slices_ns[i] == 100000);
        }
        CHECK(CPU_EQUAL(&p.sets[0], &before));
        CHECK_EQ_U64(p.slices_ns[0], before_ns);
        qsf_pool_destroy(pool);
    }
    if (n_cores < MAX_PINNED)
        CHECK_STATUS(qsf_pool_init(block, n_cores + 1, true, &pool), QSF_ERR_ARG);
    free(block);
}

#endif

int main(void)
{
    check_no_room_for_threads();
    check_every_item_once();
    check_many_small_runs(false);
    check_many_small_runs(true);
    check_workers_take_part();
    check_start_and_stop();
    check_run_counts();
    check_items_of_a_slow_worker();
#if defined(__linux__)
    check_pinned();
#endif
    return check_report("check_pool");
}
