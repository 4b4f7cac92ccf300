/* bench_pool.c - what a parallel region costs, and what a busy core does to it.
 *
 * One line of JSON each, with the best, median, 90th percentile and mean:
 *   empty   a region with nothing to do, one after the other: what it costs the caller
 *   meet    one in which every thread waits for all others: to the last one's arrival and back
 *   asleep  the same after a pause in which the workers have gone to sleep
 *   even    a region of equal items, all threads alone on their cores
 *   stolen  the same while another process's thread computes on a core (one per run)
 * For the last two `ideal_us` is the time of one thread divided by the threads.
 * Argument 1: the most threads (default: physical cores).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "platform/clock.h"
#include "machine/cores.h"
#include "platform/cpu.h"
#include "platform/pool.h"
#include "platform/thread.h"

#define N_RUNS 2001
#define N_PAUSED_RUNS 101
#define N_ITEMS 128 /* tile rows of a matrix of 2048 */
#define ITEM_STEPS 4000

static uint64_t times_ns[N_RUNS];
static volatile uint64_t sink;

static int by_value(const void *a, const void *b)
{
    const uint64_t *const x = a;
    const uint64_t *const y = b;
    return (*x > *y) - (*x < *y);
}

static void report(const char *what, uint32_t n_threads, size_t n, double ideal_us)
{
    double sum_ns = 0.0;
    for (size_t i = 0; i < n; i++)
        sum_ns += (double)times_ns[i];
    qsort(times_ns, n, sizeof *times_ns, by_value);
    printf("{\"what\": \"%s\", \"threads\": %" PRIu32 ", \"best_us\": %.2f, \"median_us\": %.2f, "
           "\"p90_us\": %.2f, \"mean_us\": %.2f",
           what, n_threads, (double)times_ns[0] / 1e3, (double)times_ns[n / 2] / 1e3,
           (double)times_ns[n * 9 / 10] / 1e3, sum_ns / (double)n / 1e3);
    if (ideal_us > 0.0)
        printf(", \"ideal_us\": %.2f", ideal_us);
    printf("}\n");
    fflush(stdout);
}

static void do_nothing(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    (void)arg;
    (void)begin;
    (void)end;
    (void)worker_idx;
}

static atomic_size_t n_arrived;

/* An item ends when as many have arrived as there are items. */
static void meet(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const size_t n_expected = *(const size_t *)arg;
    (void)worker_idx;
    atomic_fetch_add(&n_arrived, end - begin);
    for (uint32_t i = 0; atomic_load(&n_arrived) < n_expected; i++)
        if (i % 1024 == 1023)
            sched_yield(); /* more threads than cores */
}

static uint64_t compute(uint64_t seed, size_t n_steps)
{
    for (size_t i = 0; i < n_steps; i++)
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
    return seed;
}

static void do_items(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    (void)arg;
    sink = compute(worker_idx, (end - begin) * ITEM_STEPS);
}

static void measure(qsf_pool *p, const char *what, qsf_pool_fn *fn, size_t n_items, size_t n_runs,
                    bool pause_between, double ideal_us)
{
    size_t n_expected = n_items;
    const struct timespec pause = {0, 5000000};
    for (size_t i = 0; i < n_runs; i++) {
        if (pause_between)
            nanosleep(&pause, NULL);
        atomic_store(&n_arrived, 0);
        const uint64_t start_ns = qsf_clock_ns();
        qsf_pool_run(p, n_items, 1, fn, &n_expected);
        times_ns[i] = qsf_clock_ns() - start_ns;
    }
    report(what, qsf_pool_thread_count(p), n_runs, ideal_us);
}

static void *steal(void *arg)
{
    atomic_bool *const is_over = arg;
    while (!atomic_load(is_over))
        sink = compute(sink, ITEM_STEPS);
    return NULL;
}

static void bench_threads(uint32_t n_threads, double one_thread_us)
{
    void *const block = aligned_alloc(64, qsf_pool_bytes(n_threads));
    qsf_pool *p;
    if (block == NULL)
        exit(2);
    memset(block, 0, qsf_pool_bytes(n_threads));
    if (qsf_pool_init(block, n_threads, false, &p) != QSF_OK)
        exit(1);
    const double ideal_us = one_thread_us / n_threads;
    measure(p, "empty", do_nothing, n_threads, N_RUNS, false, 0.0);
    measure(p, "meet", meet, n_threads, N_RUNS, false, 0.0);
    measure(p, "asleep", meet, n_threads, N_PAUSED_RUNS, true, 0.0);
    measure(p, "even", do_items, N_ITEMS, N_RUNS, false, ideal_us);
    atomic_bool is_over;
    qsf_thread thief;
    atomic_init(&is_over, false);
    if (qsf_thread_start(&thief, QSF_POOL_STACK_BYTES, steal, &is_over) == QSF_OK) {
        measure(p, "stolen", do_items, N_ITEMS, N_RUNS, false, ideal_us);
        atomic_store(&is_over, true);
        qsf_thread_join(&thief);
    }
    qsf_pool_destroy(p);
    free(block);
}

int main(int argc, char **argv)
{
    const uint32_t n_cores = qsf_core_count();
    const uint32_t most = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : n_cores;
    uint64_t best_ns = UINT64_MAX;
    for (int i = 0; i < 20; i++) {
        const uint64_t start_ns = qsf_clock_ns();
        do_items(NULL, 0, N_ITEMS, 0);
        const uint64_t n_ns = qsf_clock_ns() - start_ns;
        best_ns = n_ns < best_ns ? n_ns : best_ns;
    }
    for (uint32_t n = 2; n <= most && n <= QSF_POOL_MAX_THREADS; n++)
        bench_threads(n, (double)best_ns / 1e3);
    return 0;
}
