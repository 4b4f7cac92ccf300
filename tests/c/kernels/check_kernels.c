/* check_kernels.c - all kernels on all instruction sets: sizes, hostile data, guard bytes, speed.
 *
 * One program of several sources, one for each group of kernels. ctest runs it once per group.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_data.h"

static const char usage[] =
    "usage: check_kernels [--only GROUP] [--isa NAME] [--seed N]\n"
    "groups: attend dequant_row exp kv_store matmul matmul_exact quantise vecops\n";

typedef struct group {
    const char *name;
    int (*check)(void);
} group;

static const group groups[] = {
    {"exp", check_exp},           {"vecops", check_vecops},
    {"quantise", check_quantise}, {"kv_store", check_kv_store},
    {"attend", check_attend},     {"dequant_row", check_dequant_row},
    {"matmul", check_matmul},     {"matmul_exact", check_matmul_exact},
};

uint64_t random_seed = 20260;
uint64_t random_state;
qsf_kernels scalar;
qsf_kernels levels[QSF_ISA_COUNT];
size_t n_levels;

typedef struct options {
    const char *only; /* NULL: all groups */
    const char *isa;  /* NULL: all levels */
} options;

static bool parse_options(int argc, char **argv, options *o)
{
    for (int i = 1; i < argc; i += 2) {
        char *end = NULL;
        if (i + 1 == argc)
            return false;
        if (strcmp(argv[i], "--only") == 0)
            o->only = argv[i + 1];
        else if (strcmp(argv[i], "--isa") == 0)
            o->isa = argv[i + 1];
        else if (strcmp(argv[i], "--seed") == 0)
            random_seed = strtoull(argv[i + 1], &end, 10);
        else
            return false;
        if (end != NULL && (*end != '\0' || end == argv[i + 1]))
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

int main(int argc, char **argv)
{
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
    int n_run = 0;
    int n_failed = 0;
    for (size_t i = 0; i < COUNT_OF(groups); i++) {
        if (o.only != NULL && strcmp(o.only, groups[i].name) != 0)
            continue;
        random_restart(0);
        n_failed += groups[i].check();
        n_run++;
    }
    if (n_run == 0)
        fputs(usage, stderr);
    return n_run == 0 ? 2 : n_failed > 0;
}
