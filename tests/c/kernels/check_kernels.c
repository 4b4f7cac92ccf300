/* check_kernels.c - all kernels on all instruction sets: sizes, hostile data, guard bytes, speed.
 *
 * One program of several sources. ctest runs it once for each group that --list prints.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_data.h"

static const char usage[] =
    "usage: check_kernels [--only GROUP] [--isa NAME] [--seed N] [--bench] | --list\n"
    "--list prints the groups, one a line.\n"
    "--bench prints speeds (ns per 1000 elements, medians) instead of checking.\n";

typedef struct group {
    const char *name;
    int (*check)(void);
    void (*bench)(void); /* NULL: none */
} group;

/* The longest first, which ctest begins with. */
static const group groups[] = {
    {"matmul", check_matmul, bench_matmul},
    {"matmul_exact", check_matmul_exact, bench_matmul_exact},
    {"attend", check_attend, bench_attend},
    {"hadamard", check_hadamard, bench_hadamard},
    {"dequant_row", check_dequant_row, bench_dequant_row},
    {"exp", check_exp, NULL},
    {"kv_store", check_kv_store, bench_kv_store},
    {"outliers", check_outliers, NULL},
    {"quantise", check_quantise, bench_quantise},
    {"recur", check_recur, bench_recur},
    {"vecops", check_vecops, bench_vecops},
};

uint64_t random_seed = 20260;
uint64_t random_state;
qsf_kernels scalar;
qsf_kernels levels[QSF_ISA_COUNT];
size_t n_levels;

typedef struct options {
    const char *only; /* NULL: all groups */
    const char *isa;  /* NULL: all levels */
    bool bench;
} options;

static bool parse_options(int argc, char **argv, options *o)
{
    for (int i = 1; i < argc; i++) {
        const char *const name = argv[i];
        if (strcmp(name, "--bench") == 0) {
            o->bench = true;
            continue;
        }
        if (++i == argc)
            return false;
        char *end = NULL;
        if (strcmp(name, "--only") == 0)
            o->only = argv[i];
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
        if (!o->bench)
            n_failed += groups[i].check();
        else if (groups[i].bench != NULL)
            groups[i].bench();
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
    options o = {NULL, NULL, false};
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
    if (o.bench) {
        printf("%-36s %10s", "ns per 1000 elements", "scalar");
        for (size_t i = 0; i < n_levels; i++)
            printf(" %10s", levels[i].isa_name);
        printf("\n");
    }
    const int n_failed = run_groups(&o);
    if (n_failed < 0)
        fputs(usage, stderr);
    return n_failed < 0 ? 2 : n_failed > 0;
}
