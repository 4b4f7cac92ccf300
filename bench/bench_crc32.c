/* bench_crc32.c - the speed of each way to compute the checksum, and of joining two.
 *
 * One line of JSON each: the median and best of many runs, over bytes that stay in the cache
 * (64 KiB) and over bytes that come from memory (64 MiB). The ways take turns, so that a
 * machine that is busy for a while is so for all. The row "read" is what reading alone costs.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checksum/crc32.h"
#include "checksum/crc32_ways.h"
#include "platform/clock.h"
#include "machine/roofline.h"

#define SMALL_BYTES ((size_t)64 << 10)
#define LARGE_BYTES ((size_t)64 << 20)
#define SMALL_PASSES 100 /* in a run */
#define N_RUNS 21
#define N_JOINS 10000
#define READ QSF_CRC32_WAY_COUNT /* the row after the ways */

static volatile uint32_t sink;

static int by_value(const void *a, const void *b)
{
    const double *const x = a;
    const double *const y = b;
    return (*x > *y) - (*x < *y);
}

/* Bytes per ns of n_passes passes. */
static double measure(int way, const unsigned char *p, size_t n_bytes, size_t n_passes)
{
    qsf_crc32_fn *const fn = way == READ ? NULL : qsf_crc32_way_fn((qsf_crc32_way)way);
    qsf_roofline_read_fn *const read_fn = qsf_roofline_reader();
    const uint64_t start_ns = qsf_clock_ns();
    for (size_t i = 0; i < n_passes; i++) {
        if (fn != NULL)
            sink = fn(sink, p, n_bytes);
        else
            sink ^= (uint32_t)read_fn(p, n_bytes);
    }
    return (double)(n_bytes * n_passes) / (double)(qsf_clock_ns() - start_ns);
}

static void run(const unsigned char *p, size_t n_bytes, size_t n_passes)
{
    double rates[READ + 1][N_RUNS];
    for (int i = 0; i < N_RUNS; i++)
        for (int way = 0; way <= READ; way++)
            if (way == READ || qsf_crc32_way_fn((qsf_crc32_way)way) != NULL)
                rates[way][i] = measure(way, p, n_bytes, n_passes);
    for (int way = 0; way <= READ; way++) {
        if (way != READ && qsf_crc32_way_fn((qsf_crc32_way)way) == NULL)
            continue;
        qsort(rates[way], N_RUNS, sizeof rates[way][0], by_value);
        printf("{\"way\": \"%s\", \"n_bytes\": %zu, \"median_gb_s\": %.2f, \"best_gb_s\": %.2f}\n",
               way == READ ? "read" : qsf_crc32_way_name((qsf_crc32_way)way), n_bytes,
               rates[way][N_RUNS / 2], rates[way][N_RUNS - 1]);
    }
}

static void run_joins(uint64_t n_bytes)
{
    double ns[N_RUNS];
    for (int i = 0; i < N_RUNS; i++) {
        const uint64_t start_ns = qsf_clock_ns();
        for (int j = 0; j < N_JOINS; j++)
            sink = qsf_crc32_combine(sink, 1, n_bytes);
        ns[i] = (double)(qsf_clock_ns() - start_ns) / N_JOINS;
    }
    qsort(ns, N_RUNS, sizeof ns[0], by_value);
    printf("{\"way\": \"combine\", \"n_bytes\": %" PRIu64 ", \"median_ns\": %.0f, "
           "\"best_ns\": %.0f}\n",
           n_bytes, ns[N_RUNS / 2], ns[0]);
}

int main(void)
{
    unsigned char *const p = aligned_alloc(64, LARGE_BYTES);
    if (p == NULL)
        return 2;
    for (size_t i = 0; i < LARGE_BYTES; i++)
        p[i] = (unsigned char)(i * 2654435761U >> 24);
    run(p, SMALL_BYTES, SMALL_PASSES);
    run(p, LARGE_BYTES, 1);
    run_joins((uint64_t)1 << 20);
    run_joins(123456789);
    run_joins(UINT64_MAX - 1);
    free(p);
    return 0;
}
