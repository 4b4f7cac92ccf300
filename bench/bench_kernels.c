/* bench_kernels.c - speed of the matrix products, compared with the machine's limits.
 *
 * usage: bench_kernels [--isa NAME] [--type NAME] [--tokens N] [--mib N] [--threads N]
 *                      [--huge 0|1] [--runs N] [--table]
 *
 * One line per instruction set, type and number of tokens (all by default): GB/s of
 * weights read and G multiply-adds/s. For comparison, measured in turn with each run on the same
 * threads: the GB/s of a loop that only reads the same weights, the multiply-adds/s of a loop of
 * that instruction alone (vpdpbusd; tdpbsud; vpmaddubsw), and the reached share of each. 8-bit
 * weights are multiplied with two bytes of every activation: a multiply-add counts twice against
 * the roofline. All are medians of --runs (21).
 *
 * The weights, matrices of 5632 rows and 2048 columns, fill --mib MiB (256), which should exceed
 * the caches, in huge pages if the system has some (--huge 0: in small ones). --threads N threads
 * (1) take stripes of 32 tile rows, as the engine's do. The scalar kernels only run on request.
 * --table prints the table of docs/benchmarks.md: for each type the share of the binding limit,
 * reading or multiplying, for 1, 8, 64 and 512 tokens.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

#include "kernels/kernels.h"
#include "platform/clock.h"
#include "platform/pool.h"
#include "machine/roofline.h"

#define N_BLOCKS 32 /* rows of 2048 columns */
#define STRIPE_TILE_ROWS 32
#define STRIPE_TILES ((size_t)STRIPE_TILE_ROWS * N_BLOCKS)
#define STRIPE_ROWS ((size_t)STRIPE_TILE_ROWS * QSF_TILE_ROWS)
#define N_ROWS (11 * STRIPE_ROWS) /* of a matrix: outputs of two tokens are 22 KB apart */
#define MAX_TOKENS 512
#define MAX_RUNS 99
/* Duration of a run, also of multiply-adds alone: less than a time slice of the scheduler, and
 * equal for both, because a shorter run would be disturbed less often. */
#define RUN_NS 2000000
#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

#define ID(id, ...) (id),
static const qsf_dtype dtypes[] = {QSF_CODED_TYPES(ID) QSF_FLOAT_TYPES(ID)};
static const size_t token_counts[] = {1, 2, 4, 8, 16, 64, MAX_TOKENS};
static const size_t table_counts[] = {1, 8, 64, MAX_TOKENS};

typedef struct options {
    const char *isa;  /* NULL: all */
    const char *type; /* NULL: all */
    size_t n_tokens;  /* 0: all */
    size_t mib;
    size_t n_threads;
    size_t n_runs;
    bool huge;
    bool table;
} options;

typedef struct bench {
    options opt;
    unsigned char *tiles; /* [n_bytes], of any type */
    size_t n_bytes;
    float *f32;           /* [512, 2048] */
    int8_t *q;            /* [512, 2048] */
    int8_t *q_low;        /* [512, 2048] */
    float *scale;         /* [512, 32] */
    int32_t *sum;         /* [512, 32] */
    qsf_act_parts *parts; /* [512, 32] */
    float *scaled_sum;    /* [512, 32] */
    int32_t *fine_sum;    /* [512, 32] */
    float *y;             /* [n_threads, 512, 5632] */
    void *pool_block;
    qsf_pool *pool;
    qsf_roofline_read_fn *read;
} bench;

/* The measured work: `matmul` on some stripes, and plain reads of the same stripes. */
typedef struct work {
    const bench *b;
    qsf_matmul_fn *matmul;
    qsf_roofline_madds_fn *madds; /* or NULL */
    qsf_acts x;
    size_t stripe_bytes;
    size_t first; /* stripe */
    size_t n_stripes;
    size_t n_rounds; /* of madds */
} work;

/* Medians. */
typedef struct result {
    double gb_s;
    double read_gb_s;
    double gmadd_s;
    double roofline_gmadd_s; /* 0: unknown */
} result;

static void *need(void *p)
{
    if (p == NULL) {
        fprintf(stderr, "bench_kernels: not enough memory\n");
        exit(2);
    }
    return p;
}

/* Whole huge pages, or none; never freed. */
static unsigned char *weights_alloc(size_t n_bytes, bool huge)
{
    void *const p = need(aligned_alloc((size_t)2 << 20, n_bytes));
#if defined(MADV_HUGEPAGE)
    (void)madvise(p, n_bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)huge;
#endif
    return p;
}

static void bench_init(bench *b)
{
    const size_t n_x = (size_t)MAX_TOKENS * N_BLOCKS * QSF_BLOCK;
    const size_t n_x_blocks = n_x / QSF_BLOCK;
    b->n_bytes = b->opt.mib << 20;
    b->tiles = weights_alloc(b->n_bytes, b->opt.huge);
    /* As halves, and as exponents of MXFP4, these bytes are ordinary numbers at every place of
     * every type: special numbers are slow. */
    for (size_t i = 0; i < b->n_bytes; i++)
        b->tiles[i] = (unsigned char)(i % 2 == 1 ? 0x20 + i / 2 % 16 : 0x60 + i * 37 % 64);
    b->f32 = need(malloc(n_x * sizeof *b->f32));
    for (size_t i = 0; i < n_x; i++)
        b->f32[i] = (float)(i * 7919 % 2001) / 1000.0F - 1.0F;
    b->q = need(malloc(n_x));
    b->q_low = need(malloc(n_x));
    b->scale = need(malloc(n_x_blocks * sizeof *b->scale));
    b->sum = need(malloc(n_x_blocks * sizeof *b->sum));
    b->parts = need(malloc(n_x_blocks * sizeof *b->parts));
    b->scaled_sum = need(malloc(n_x_blocks * sizeof *b->scaled_sum));
    b->fine_sum = need(malloc(n_x_blocks * sizeof *b->fine_sum));
    qsf_kernels k;
    qsf_kernels_init(&k, QSF_ISA_SCALAR);
    const qsf_act_row out = {b->q,     b->q_low,      b->scale,   b->sum,
                             b->parts, b->scaled_sum, b->fine_sum};
    k.quantise(b->f32, n_x_blocks, false, &out);
    b->y = need(calloc(b->opt.n_threads * MAX_TOKENS * N_ROWS, sizeof *b->y));
    b->pool_block = need(calloc(1, qsf_pool_bytes((uint32_t)b->opt.n_threads)));
    if (qsf_pool_init(b->pool_block, (uint32_t)b->opt.n_threads, false, &b->pool) != QSF_OK) {
        fprintf(stderr, "bench_kernels: cannot start %zu threads\n", b->opt.n_threads);
        exit(2);
    }
    b->read = qsf_roofline_reader();
}

static void bench_destroy(bench *b)
{
    qsf_pool_destroy(b->pool);
    free(b->pool_block);
    free(b->tiles);
    free(b->f32);
    free(b->q);
    free(b->q_low);
    free(b->scale);
    free(b->sum);
    free(b->parts);
    free(b->scaled_sum);
    free(b->fine_sum);
    free(b->y);
}

static void multiply_stripes(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const work *const w = arg;
    float *const y = w->b->y + worker_idx * MAX_TOKENS * N_ROWS;
    for (size_t s = begin; s < end; s++)
        w->matmul(w->b->tiles + (w->first + s) * w->stripe_bytes, STRIPE_TILE_ROWS, &w->x,
                  y + s * STRIPE_ROWS % N_ROWS, N_ROWS);
}

static void read_stripes(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const work *const w = arg;
    (void)worker_idx;
    (void)w->b->read(w->b->tiles + (w->first + begin) * w->stripe_bytes,
                     (end - begin) * w->stripe_bytes);
}

/* The same on every thread; items are threads. */
static void multiply_alone(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const work *const w = arg;
    (void)worker_idx;
    for (size_t i = begin; i < end; i++)
        (void)w->madds(w->n_rounds);
}

static double seconds_of(const work *w, size_t n_items, qsf_pool_fn *fn)
{
    work copy = *w;
    const uint64_t start_ns = qsf_clock_ns();
    qsf_pool_run(w->b->pool, n_items, 1, fn, &copy);
    return (double)(qsf_clock_ns() - start_ns + 1) * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts seconds [n]. */
static double median(double *seconds, size_t n)
{
    qsort(seconds, n, sizeof *seconds, by_value);
    return seconds[n / 2];
}

/* Chooses as many stripes as take RUN_NS, at least a few per thread and at most all; and as many
 * rounds of multiply-adds. Warms up the caches. */
static void size_up(work *w)
{
    const bench *const b = w->b;
    const size_t n_all = b->n_bytes / w->stripe_bytes;
    w->n_stripes = b->opt.n_threads < n_all ? b->opt.n_threads : n_all;
    const double once = seconds_of(w, w->n_stripes, multiply_stripes);
    const double wanted = (double)w->n_stripes * (RUN_NS * 1e-9 / once);
    const size_t n = wanted < (double)n_all ? (size_t)wanted : n_all;
    w->n_stripes = n < w->n_stripes ? w->n_stripes : n / b->opt.n_threads * b->opt.n_threads;
    if (w->madds == NULL)
        return;
    w->n_rounds = 10000;
    const double roofline_once = seconds_of(w, 1, multiply_alone);
    w->n_rounds = (size_t)(10000 * (RUN_NS * 1e-9 / roofline_once)) + 1;
}

static result measure(work *w)
{
    const bench *const b = w->b;
    const size_t n_runs = b->opt.n_runs;
    double seconds[3][MAX_RUNS]; /* of multiplying, of reading, of multiplying alone */
    size_up(w);
    const size_t n_all = b->n_bytes / w->stripe_bytes;
    for (size_t i = 0; i < n_runs; i++) {
        seconds[0][i] = seconds_of(w, w->n_stripes, multiply_stripes);
        w->first = (w->first + w->n_stripes) % (n_all - w->n_stripes + 1);
        seconds[1][i] = seconds_of(w, w->n_stripes, read_stripes);
        w->first = (w->first + w->n_stripes) % (n_all - w->n_stripes + 1);
        if (w->madds != NULL)
            seconds[2][i] = seconds_of(w, b->opt.n_threads, multiply_alone);
    }
    const double gb = (double)(w->n_stripes * w->stripe_bytes) * 1e-9;
    const double gmadds = (double)(w->n_stripes * STRIPE_TILES * QSF_TILE_ROWS * QSF_BLOCK) *
                          (double)w->x.n_tokens * 1e-9;
    const double at_median = median(seconds[0], n_runs);
    result r = {.gb_s = gb / at_median,
                .read_gb_s = gb / median(seconds[1], n_runs),
                .gmadd_s = gmadds / at_median};
    if (w->madds != NULL)
        r.roofline_gmadd_s =
            w->madds(w->n_rounds) * (double)b->opt.n_threads * 1e-9 / median(seconds[2], n_runs);
    return r;
}

static void print_head(const options *opt)
{
    if (opt->table) {
        printf("| instruction set | type | 1 row | 8 | 64 | 512 |\n|---|---|---|---|---|---|\n");
        return;
    }
    printf("%zu MiB of weights in %s pages, %zu thread%s, medians of %zu runs\n\n", opt->mib,
           opt->huge ? "huge" : "small", opt->n_threads, opt->n_threads == 1 ? "" : "s",
           opt->n_runs);
    printf("%-8s %-14s %6s | %8s %8s %6s | %8s %8s %6s\n", "isa", "type", "tokens", "GB/s",
           "reading", "part", "Gmadd/s", "limit", "part");
}

static double read_part(const result *r)
{
    return r->gb_s / r->read_gb_s;
}

/* 0 if the limit is unknown */
static double roofline_part(qsf_dtype dtype, const result *r)
{
    const double per_madd = dtype == QSF_DTYPE_8BIT ? 2.0 : 1.0;
    return r->roofline_gmadd_s > 0 ? per_madd * r->gmadd_s / r->roofline_gmadd_s : 0;
}

static void print_result(const char *isa, qsf_dtype dtype, size_t n_tokens, const result *r)
{
    printf("%-8s %-14s %6zu | %8.2f %8.2f %5.0f%% | %8.1f ", isa, qsf_dtype_name(dtype), n_tokens,
           r->gb_s, r->read_gb_s, 100 * read_part(r), r->gmadd_s);
    if (r->roofline_gmadd_s > 0)
        printf("%8.1f %5.0f%%\n", r->roofline_gmadd_s, 100 * roofline_part(dtype, r));
    else
        printf("%8s %6s\n", "-", "-");
    fflush(stdout);
}

static result measure_tokens(const bench *b, const qsf_kernels *k, qsf_isa isa, qsf_dtype dtype,
                             size_t n_tokens)
{
    work w = {.b = b,
              .matmul = k->matmul[dtype],
              .madds = qsf_dtype_is_quantised(dtype) ? qsf_roofline_madds(isa) : NULL,
              .x = {n_tokens, N_BLOCKS, b->f32, b->q, b->q_low, b->scale, b->sum, b->parts,
                    b->scaled_sum, b->fine_sum},
              .stripe_bytes = STRIPE_TILES * qsf_dtype_tile_bytes(dtype)};
    return measure(&w);
}

/* One line of the table; "m" marks shares of the memory's speed. */
static void print_parts(const bench *b, const qsf_kernels *k, qsf_isa isa, qsf_dtype dtype)
{
    printf("| %s | %s |", k->isa_name, qsf_dtype_name(dtype));
    for (size_t t = 0; t < COUNT_OF(table_counts); t++) {
        const result r = measure_tokens(b, k, isa, dtype, table_counts[t]);
        const double read = read_part(&r);
        const double multiply = roofline_part(dtype, &r);
        printf(" %.0f%s |", 100 * (read > multiply ? read : multiply), read > multiply ? " m" : "");
        fflush(stdout);
    }
    printf("\n");
}

static void bench_isa(const bench *b, qsf_isa isa)
{
    qsf_kernels scalar;
    qsf_kernels k;
    qsf_kernels_init(&scalar, QSF_ISA_SCALAR);
    qsf_kernels_init(&k, isa);
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        if (b->opt.type != NULL && strcmp(b->opt.type, qsf_dtype_name(dtypes[d])) != 0)
            continue;
        /* Types without a kernel of this level run the scalar one, which would take minutes. */
        const bool is_scalar = k.matmul[dtypes[d]] == scalar.matmul[dtypes[d]];
        if (b->opt.table && qsf_dtype_is_quantised(dtypes[d]) && !is_scalar)
            print_parts(b, &k, isa, dtypes[d]);
        for (size_t t = 0; t < COUNT_OF(token_counts) && !b->opt.table; t++) {
            const size_t n_tokens = b->opt.n_tokens != 0 ? b->opt.n_tokens : token_counts[t];
            if (t > 0 && (b->opt.n_tokens != 0 || is_scalar))
                continue;
            const result r = measure_tokens(b, &k, isa, dtypes[d], n_tokens);
            print_result(k.isa_name, dtypes[d], n_tokens, &r);
        }
    }
}

static _Noreturn void usage(void)
{
    fprintf(stderr, "usage: bench_kernels [--isa NAME] [--type NAME] [--tokens 1..512]\n"
                    "       [--mib 16..65536] [--threads 1..64] [--huge 0|1] [--runs 1..99] "
                    "[--table]\n");
    exit(2);
}

static size_t number(const char *text, size_t least, size_t most)
{
    char *end;
    const unsigned long long value = text == NULL ? 0 : strtoull(text, &end, 10);
    if (text == NULL || *text == '\0' || *end != '\0' || value < least || value > most)
        usage();
    return (size_t)value;
}

static options options_of(int argc, char **argv)
{
    options o = {.mib = 256, .n_threads = 1, .n_runs = 21, .huge = true};
    for (int i = 1; i < argc; i++) {
        const char *const name = argv[i];
        if (strcmp(name, "--table") == 0) {
            o.table = true;
            continue;
        }
        const char *const value = ++i < argc ? argv[i] : NULL;
        if (value == NULL)
            usage();
        if (strcmp(name, "--isa") == 0)
            o.isa = value;
        else if (strcmp(name, "--type") == 0)
            o.type = value;
        else if (strcmp(name, "--tokens") == 0)
            o.n_tokens = number(value, 1, MAX_TOKENS);
        else if (strcmp(name, "--mib") == 0)
            o.mib = number(value, 16, 65536) / 2 * 2;
        else if (strcmp(name, "--threads") == 0)
            o.n_threads = number(value, 1, 64);
        else if (strcmp(name, "--huge") == 0)
            o.huge = number(value, 0, 1) != 0;
        else if (strcmp(name, "--runs") == 0)
            o.n_runs = number(value, 1, MAX_RUNS);
        else
            usage();
    }
    if (o.table && o.n_tokens != 0)
        usage();
    return o;
}

static bool is_chosen(const options *opt, qsf_isa isa)
{
    if (opt->isa == NULL)
        return isa != QSF_ISA_SCALAR;
    return strcmp(opt->isa, qsf_isa_name(isa)) == 0;
}

int main(int argc, char **argv)
{
    bench b = {.opt = options_of(argc, argv)};
    bool any = false;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++)
        any = any || b.opt.type == NULL || strcmp(b.opt.type, qsf_dtype_name(dtypes[d])) == 0;
    if (!any) {
        fprintf(stderr, "bench_kernels: no type of weights is called %s\n", b.opt.type);
        return 2;
    }
    any = false;
    for (int isa = 0; isa < QSF_ISA_COUNT; isa++)
        any = any || (qsf_isa_has((qsf_isa)isa) && is_chosen(&b.opt, (qsf_isa)isa));
    if (!any) {
        fprintf(stderr, "bench_kernels: this machine lacks that instruction set\n");
        return 2;
    }
    bench_init(&b);
    print_head(&b.opt);
    for (int isa = QSF_ISA_COUNT - 1; isa >= 0; isa--)
        if (qsf_isa_has((qsf_isa)isa) && is_chosen(&b.opt, (qsf_isa)isa))
            bench_isa(&b, (qsf_isa)isa);
    bench_destroy(&b);
    return 0;
}
