/* check_kernels.c - all kernels on all instruction sets: sizes, hostile data, guard bytes, speed.
 *
 * One program of several sources. ctest runs it once for each group that --list prints.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_data.h"
#include "platform/clock.h"

#define N_SAMPLES 9
#define SAMPLE_NS 200000 /* far above what reading the clock takes */

static const char usage[] =
    "usage: check_kernels [--only GROUP] [--isa NAME] [--seed N] [--bench PART] | --list\n"
    "--list prints the groups, one a line.\n"
    "--bench also times the runs whose description has PART, such as \"matmul 4bit, 1 tokens\":\n"
    "medians in ns, on scalar and on each instruction set.\n";

typedef struct group {
    const char *name;
    int (*check)(void);
} group;

/* The longest first, which ctest begins with. */
static const group groups[] = {
    {"matmul", check_matmul},     {"matmul_exact", check_matmul_exact}, {"attend", check_attend},
    {"hadamard", check_hadamard}, {"dequant_row", check_dequant_row},   {"exp", check_exp},
    {"outliers", check_outliers}, {"quantise", check_quantise},         {"recur", check_recur},
    {"vecops", check_vecops},     {"low_rank", check_low_rank},
};

uint64_t random_seed = 20260;
uint64_t random_state;
qsf_kernels scalar;
qsf_kernels levels[QSF_ISA_COUNT];
size_t n_levels;
const char *bench_part;

typedef struct options {
    const char *only; /* NULL: all groups */
    const char *isa;  /* NULL: all levels */
} options;

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a;
    const uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static uint64_t time_runs(const qsf_kernels *k, kernel_run *run, const void *args, output *out,
                          const float *before, size_t n_runs)
{
    const uint64_t start_ns = qsf_clock_ns();
    for (size_t i = 0; i < n_runs; i++) {
        if (before != NULL)
            memcpy(out->at, before, out->n_bytes);
        run(k, args, out->at);
    }
    return qsf_clock_ns() - start_ns;
}

void bench_line(const char *what, kernel_run *run, const void *args, const float *before,
                size_t n_bytes)
{
    output out = output_make(n_bytes);
    printf("%-60s", what);
    for (size_t i = 0; i <= n_levels; i++) {
        const qsf_kernels *const k = i == 0 ? &scalar : &levels[i - 1];
        uint64_t samples[N_SAMPLES];
        size_t n_runs = 1;
        while (time_runs(k, run, args, &out, before, n_runs) < SAMPLE_NS)
            n_runs *= 2;
        for (size_t s = 0; s < N_SAMPLES; s++)
            samples[s] = time_runs(k, run, args, &out, before, n_runs);
        qsort(samples, N_SAMPLES, sizeof samples[0], by_value);
        printf(" %s %.0f", k->isa_name, (double)samples[N_SAMPLES / 2] / (double)n_runs);
    }
    printf("\n");
    free(out.block);
}

static bool parse_options(int argc, char **argv, options *o)
{
    for (int i = 1; i < argc; i++) {
        const char *const name = argv[i];
        if (++i == argc)
            return false;
        char *end = NULL;
        if (strcmp(name, "--only") == 0)
            o->only = argv[i];
        else if (strcmp(name, "--bench") == 0)
            bench_part = argv[i];
        else if (strcmp(name, "--isa") == 0)
            o->isa = argv[i];
        else if (strcmp(name, "--seed") == 0)
            random_seed = strtoull(argv[i], &end, 10);
        else
            return false;
        if (end != NULL && (*end != '\0' || end == argv[i]))
            return false;
    }
    return true;
}

/* Fills `scalar` and `levels`; says which level this machine lacks. false: it lacks the one
 * that was asked for. */
static bool init_levels(const char *only_isa)
{
    bool found = only_isa == NULL || strcmp(only_isa, "scalar") == 0;
    qsf_kernels_init(&scalar, QSF_ISA_SCALAR);
    for (int isa = QSF_ISA_SCALAR + 1; isa < QSF_ISA_COUNT; isa++) {
        const char *const name = qsf_isa_name((qsf_isa)isa);
        if (only_isa != NULL && strcmp(only_isa, name) != 0)
            continue;
        if (!qsf_isa_has((qsf_isa)isa)) {
            printf("SKIPPED: %s, which this machine lacks\n", name);
            continue;
        }
        qsf_kernels_init(&levels[n_levels++], (qsf_isa)isa);
        found = true;
    }
    return found;
}

/* Runs the groups that were asked for; the number that failed, or -1 if there was none. */
static int run_groups(const options *o)
{
    int n_run = 0;
    int n_failed = 0;
    for (size_t i = 0; i < COUNT_OF(groups); i++) {
        if (o->only != NULL && strcmp(o->only, groups[i].name) != 0)
            continue;
        random_restart(0);
        n_failed += groups[i].check();
        n_run++;
    }
    return n_run > 0 ? n_failed : -1;
}

static int list_groups(void)
{
    for (size_t i = 0; i < COUNT_OF(groups); i++)
        printf("%s\n", groups[i].name);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--list") == 0)
        return list_groups();
    options o = {NULL, NULL};
    if (!parse_options(argc, argv, &o)) {
        fputs(usage, stderr);
        return 2;
    }
    if (!init_levels(o.isa)) {
        fprintf(stderr, "check_kernels: no instruction set \"%s\" here\n", o.isa);
        return 2;
    }
    printf("check_kernels: seed %" PRIu64 " (repeat: --seed %" PRIu64 ")\n", random_seed,
           random_seed);
    const int n_failed = run_groups(&o);
    if (n_failed < 0)
        fputs(usage, stderr);
    return n_failed < 0 ? 2 : n_failed > 0;
}
