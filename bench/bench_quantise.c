/* bench_quantise.c - how many weights a second each type is rounded at, on one core, by each rule;
 * and the seconds of error feedback for two usual shapes.
 *
 * One line of JSON each: the best of a few runs on random weights, in processor time, so that a
 * busy machine distorts less. "mb_s" is of the fp16 weights.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "types/dtype.h"
#include "include/qsf.h"

#define N_ROWS 256
#define N_COLS 4096
#define N_RUNS 5

static uint64_t noise = 1;

/* About normal. */
static float draw(void)
{
    float sum = -2.0F;
    for (int i = 0; i < 4; i++) {
        noise = noise * 6364136223846793005U + 1442695040888963407U;
        sum += (float)(noise >> 40) / (float)(1U << 24);
    }
    return sum;
}

static double seconds_since(clock_t start)
{
    return (double)(clock() - start) / CLOCKS_PER_SEC;
}

static void *get(size_t n_bytes)
{
    void *const p = calloc(n_bytes, 1);
    if (p == NULL) {
        fprintf(stderr, "bench_quantise: no memory for %zu bytes\n", n_bytes);
        exit(1);
    }
    return p;
}

static void bench_type(uint32_t dtype, uint32_t rule, const float *rows, void *tiles, size_t cap)
{
    const qsf_rounding how = {dtype, rule, 0.0F, NULL};
    qsf_rounding_sums sums = {0};
    double best_s = 1e9;
    for (int i = 0; i < N_RUNS; i++) {
        const clock_t start = clock();
        if (qsf_quantise_rows(&how, rows, N_ROWS, N_COLS, tiles, cap, NULL, &sums) != QSF_OK)
            exit(1);
        const double seconds = seconds_since(start);
        best_s = seconds < best_s ? seconds : best_s;
    }
    const double n = (double)N_ROWS * N_COLS;
    printf("{\"bench\": \"quantise\", \"type\": \"%s\", \"rule\": \"%s\", \"weights_m_s\": %.1f, "
           "\"mb_s\": %.0f, \"loss\": %.6f}\n",
           qsf_dtype_name(dtype), rule == QSF_RULE_SEARCH ? "search" : "nearest", n / best_s * 1e-6,
           2 * n / best_s * 1e-6, sums.squared_error / sums.source_energy);
}

static void bench_feedback(size_t n_rows, size_t n_cols)
{
    const qsf_rounding how = {QSF_DTYPE_4BIT, QSF_RULE_SEARCH, 0.0F, NULL};
    const size_t cap = n_rows * n_cols;
    float *const rows = get(n_rows * n_cols * sizeof *rows);
    float *const factor = get(n_cols * n_cols * sizeof *factor);
    float *const work = get(qsf_feedback_work_floats(n_cols) * sizeof *work);
    int32_t *const order = get(n_cols * sizeof *order);
    void *const tiles = get(cap);
    qsf_rounding_sums sums = {0};
    for (size_t i = 0; i < n_rows * n_cols; i++)
        rows[i] = draw();
    for (size_t k = 0; k < n_cols; k++) {
        order[k] = (int32_t)k;
        for (size_t m = k; m < n_cols; m++)
            factor[k * n_cols + m] = m == k ? 1.0F : 1e-3F;
    }
    const clock_t start = clock();
    if (qsf_feedback_rows(&how, rows, n_rows, n_cols, factor, order, work,
                          qsf_feedback_work_floats(n_cols), tiles, cap, NULL, &sums) != QSF_OK)
        exit(1);
    printf("{\"bench\": \"feedback\", \"rows\": %zu, \"cols\": %zu, \"seconds\": %.2f}\n", n_rows,
           n_cols, seconds_since(start));
    free(rows);
    free(factor);
    free(work);
    free(order);
    free(tiles);
}

int main(void)
{
    const size_t cap = (size_t)N_ROWS * N_COLS * sizeof(float);
    float *const rows = get(cap);
    void *const tiles = get(cap);
    for (size_t i = 0; i < (size_t)N_ROWS * N_COLS; i++)
        rows[i] = 0.02F * draw();
    for (uint32_t dtype = 0; dtype < QSF_DTYPE_COUNT; dtype++) {
        if (!qsf_dtype_is_quantised(dtype))
            continue;
        bench_type(dtype, QSF_RULE_NEAREST, rows, tiles, cap);
        bench_type(dtype, QSF_RULE_SEARCH, rows, tiles, cap);
    }
    free(rows);
    free(tiles);
    bench_feedback(4096, 4096);
    bench_feedback(4096, 11008);
    return 0;
}
