/* bench.c - how long a kernel takes on each instruction set: medians, side by side. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_data.h"
#include "platform/clock.h"

#define N_SAMPLES 9
#define SAMPLE_NS 200000.0 /* far above what reading the clock takes */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double time_runs(const qsf_kernels *k, bench_run *run, const void *args, size_t n_runs)
{
    const uint64_t start_ns = qsf_clock_ns();
    for (size_t i = 0; i < n_runs; i++)
        run(k, args);
    return (double)(qsf_clock_ns() - start_ns);
}

/* ns of one run: the median of samples of many runs each */
static double median_ns(const qsf_kernels *k, bench_run *run, const void *args)
{
    double samples[N_SAMPLES];
    size_t n_runs = 1;
    while (time_runs(k, run, args, n_runs) < SAMPLE_NS)
        n_runs *= 2;
    for (size_t i = 0; i < N_SAMPLES; i++)
        samples[i] = time_runs(k, run, args, n_runs) / (double)n_runs;
    qsort(samples, N_SAMPLES, sizeof samples[0], by_value);
    return samples[N_SAMPLES / 2];
}

void bench_line(const char *what, double n_elements, bench_run *run, const void *args)
{
    printf("%-36s %10.2f", what, median_ns(&scalar, run, args) * 1000.0 / n_elements);
    for (size_t i = 0; i < n_levels; i++)
        printf(" %10.2f", median_ns(&levels[i], run, args) * 1000.0 / n_elements);
    printf("\n");
    fflush(stdout);
}
