/* bench_kernels.c - speed of the matrix products: weight bytes and multiply-adds per second.
 *
 * One line of JSON per type, instruction set and number of tokens: the median, best and
 * worst of several runs on one thread. The weights (default 64 MiB, argument 1: MiB) are
 * read in stripes of 64 tile rows, as a thread of the engine takes them.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "platform/clock.h"

#define N_BLOCKS 32 /* rows of 2048 columns */
#define STRIPE_TILE_ROWS 64
#define MAX_TOKENS 64
#define N_RUNS 9

typedef struct bench {
    unsigned char *tiles; /* [n_stripes, 64, 32] tiles of any type */
    size_t n_bytes;
    float *f32;        /* [64, 2048] */
    int8_t *q;         /* [64, 2048] */
    int8_t *q_low;     /* [64, 2048] */
    float *scale;      /* [64, 32] */
    int32_t *sum;      /* [64, 32] */
    float *scaled_sum; /* [64, 32] */
    int32_t *fine_sum; /* [64, 32] */
    float *y;          /* [64, 1024] */
} bench;

static void *need(size_t n_bytes)
{
    void *const p = malloc(n_bytes);
    if (p == NULL) {
        fprintf(stderr, "bench_kernels: no memory for %zu bytes\n", n_bytes);
        exit(2);
    }
    return p;
}

static void bench_init(bench *b, const qsf_kernels *k, size_t n_bytes)
{
    const size_t n_x = (size_t)MAX_TOKENS * N_BLOCKS * QSF_BLOCK;
    b->n_bytes = n_bytes;
    b->tiles = need(n_bytes);
    /* As halves these bytes are ordinary numbers, in every place of every type. */
    for (size_t i = 0; i < n_bytes; i++)
        b->tiles[i] = (unsigned char)(i % 2 == 1 ? 0x20 + i / 2 % 16 : i * 37 % 256);
    b->f32 = need(n_x * sizeof *b->f32);
    for (size_t i = 0; i < n_x; i++)
        b->f32[i] = (float)(i * 7919 % 2001) / 1000.0F - 1.0F;
    b->q = need(n_x);
    b->q_low = need(n_x);
    b->scale = need(n_x / QSF_BLOCK * sizeof *b->scale);
    b->scaled_sum = need(n_x / QSF_BLOCK * sizeof *b->scaled_sum);
    b->fine_sum = need(n_x / QSF_BLOCK * sizeof *b->fine_sum);
    b->sum = need(n_x / QSF_BLOCK * sizeof *b->sum);
    const qsf_act_row out = {b->q, b->q_low, b->scale, b->sum, b->scaled_sum, b->fine_sum};
    k->quantise(b->f32, n_x / QSF_BLOCK, &out);
    b->y = need((size_t)MAX_TOKENS * STRIPE_TILE_ROWS * QSF_TILE_ROWS * sizeof *b->y);
}

static void bench_destroy(bench *b)
{
    free(b->tiles);
    free(b->f32);
    free(b->q);
    free(b->q_low);
    free(b->scale);
    free(b->scaled_sum);
    free(b->sum);
    free(b->fine_sum);
    free(b->y);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds for all stripes. */
static double run_once(const bench *b, qsf_matmul_fn *matmul, size_t n_tokens, size_t n_stripes,
                       size_t stripe_bytes)
{
    const qsf_acts x = {n_tokens, N_BLOCKS, b->f32,        b->q,       b->q_low,
                        b->scale, b->sum,   b->scaled_sum, b->fine_sum};
    const uint64_t start_ns = qsf_clock_ns();
    for (size_t s = 0; s < n_stripes; s++)
        matmul(b->tiles + s * stripe_bytes, STRIPE_TILE_ROWS, &x, b->y,
               (size_t)STRIPE_TILE_ROWS * QSF_TILE_ROWS);
    return (double)(qsf_clock_ns() - start_ns) * 1e-9;
}

static void measure(const bench *b, const qsf_kernels *k, qsf_dtype dtype, size_t n_tokens)
{
    const size_t n_tiles = (size_t)STRIPE_TILE_ROWS * N_BLOCKS;
    const size_t stripe_bytes = n_tiles * qsf_dtype_tile_bytes(dtype);
    /* Few stripes where the kernel computes rather than reads, so that no run takes long. */
    const size_t n_all = b->n_bytes / stripe_bytes;
    const size_t n_some = n_all / n_tokens > 0 ? n_all / n_tokens : 1;
    const size_t n_stripes = strcmp(k->isa_name, "scalar") == 0 ? 1 : n_some;
    const int n_runs = strcmp(k->isa_name, "scalar") == 0 ? 1 : N_RUNS;
    double seconds[N_RUNS];
    for (int i = 0; i < n_runs; i++)
        seconds[i] = run_once(b, k->matmul[dtype], n_tokens, n_stripes, stripe_bytes);
    qsort(seconds, (size_t)n_runs, sizeof seconds[0], by_value);
    const double gb = (double)(n_stripes * stripe_bytes) * 1e-9;
    const double gmadds =
        (double)(n_stripes * n_tiles * QSF_TILE_ROWS * QSF_BLOCK * n_tokens) * 1e-9;
    const double median = seconds[n_runs / 2];
    printf("{\"kernel\": \"matmul\", \"type\": \"%s\", \"isa\": \"%s\", \"tokens\": %zu, "
           "\"weights_gb_s\": %.2f, \"gmadd_s\": %.1f, \"gmadd_s_best\": %.1f, "
           "\"gmadd_s_worst\": %.1f, \"runs\": %d}\n",
           qsf_dtype_name(dtype), k->isa_name, n_tokens, gb / median, gmadds / median,
           gmadds / seconds[0], gmadds / seconds[n_runs - 1], n_runs);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static const qsf_dtype dtypes[] = {QSF_DTYPE_4BIT, QSF_DTYPE_8BIT, QSF_DTYPE_F16};
    static const size_t tokens[] = {1, 2, 4, 8, 16, MAX_TOKENS};
    const unsigned long mib = argc > 1 ? strtoul(argv[1], NULL, 10) : 64;
    if (mib < 8 || mib > 65536) { /* 8: one stripe of f16 is 4 MiB */
        fprintf(stderr, "usage: bench_kernels [MiB of weights, 8..65536]\n");
        return 2;
    }
    qsf_kernels k;
    qsf_kernels_init(&k, QSF_ISA_SCALAR);
    bench b;
    bench_init(&b, &k, (size_t)mib << 20);
    for (int isa = QSF_ISA_COUNT - 1; isa >= QSF_ISA_SCALAR; isa--) {
        if (!qsf_isa_has((qsf_isa)isa))
            continue;
        qsf_kernels_init(&k, (qsf_isa)isa);
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++)
            for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++)
                if (isa != (int)QSF_ISA_SCALAR || tokens[t] == 1)
                    measure(&b, &k, dtypes[d], tokens[t]);
    }
    bench_destroy(&b);
    return 0;
}
