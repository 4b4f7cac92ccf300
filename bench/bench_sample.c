/* bench_sample.c - the time to choose a token, by size of the vocabulary and way of choosing.
 *
 * One line of JSON each: the median and best of many choices from logits that are spread like
 * those of a language model (a few large ones, a bell of others).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sample.h"
#include "platform/clock.h"

#define MAX_VOCAB 128256
#define N_RUNS 201

static const qsf_adjustment unchanged;

static int by_value(const void *a, const void *b)
{
    const uint64_t *const x = a;
    const uint64_t *const y = b;
    return (*x > *y) - (*x < *y);
}

static void run(const qsf_kernels *k, uint32_t n_vocab, const qsf_sampling *how, const char *name)
{
    qsf_arena arena;
    qsf_sampler s;
    qsf_arena_init_measuring(&arena);
    qsf_sampler_layout(&s, &arena, n_vocab);
    const size_t n_bytes = arena.used_bytes;
    void *const block = aligned_alloc(QSF_ARENA_ALIGN, (n_bytes + 63) / 64 * 64);
    float *const logits = malloc(n_vocab * sizeof *logits);
    if (block == NULL || logits == NULL)
        exit(2);
    memset(block, 0, n_bytes);
    qsf_arena_init(&arena, block, n_bytes);
    qsf_sampler_layout(&s, &arena, n_vocab);
    uint64_t state = 1;
    for (uint32_t i = 0; i < n_vocab; i++) {
        double sum = 0.0;
        for (int j = 0; j < 6; j++)
            sum += qsf_random_uniform(&state) - 0.5;
        logits[i] = (float)(3.0 * sum) + (i % 997 == 5 ? 8.0f : 0.0f);
    }
    uint64_t ns[N_RUNS];
    uint64_t sum_of_tokens = 0;
    for (int i = 0; i < N_RUNS; i++) {
        uint32_t token = 0;
        const uint64_t start_ns = qsf_clock_ns();
        if (qsf_sampler_choose(&s, k, logits, how, &unchanged, &state, &token) != QSF_OK)
            exit(1);
        ns[i] = qsf_clock_ns() - start_ns;
        sum_of_tokens += token;
    }
    qsort(ns, N_RUNS, sizeof *ns, by_value);
    printf("{\"isa\": \"%s\", \"n_vocab\": %" PRIu32 ", \"how\": \"%s\", \"median_us\": %.1f, "
           "\"best_us\": %.1f, \"check\": %" PRIu64 "}\n",
           k->isa_name, n_vocab, name, (double)ns[N_RUNS / 2] / 1e3, (double)ns[0] / 1e3,
           sum_of_tokens);
    free(block);
    free(logits);
}

int main(void)
{
    static const struct {
        const char *name;
        qsf_sampling how;
    } ways[] = {
        {"greedy", {1.0f, 0.0f, 0, 1.0f, 0.0f, 0.0f, 0.0f}},
        {"temperature 0.7, top-k 40, top-p 0.9", {1.0f, 0.7f, 40, 0.9f, 0.0f, 0.0f, 0.0f}},
        {"temperature 0.7, top-p 0.9", {1.0f, 0.7f, 0, 0.9f, 0.0f, 0.0f, 0.0f}},
        {"temperature 0.7", {1.0f, 0.7f, 0, 1.0f, 0.0f, 0.0f, 0.0f}},
    };
    static const uint32_t sizes[] = {32000, MAX_VOCAB};
    qsf_kernels k;
    for (int isa = 0; isa < (int)QSF_ISA_COUNT; isa++) {
        if (!qsf_isa_has((qsf_isa)isa))
            continue;
        qsf_kernels_init(&k, (qsf_isa)isa);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            for (size_t w = 0; w < sizeof ways / sizeof ways[0]; w++)
                run(&k, sizes[i], &ways[w].how, ways[w].name);
    }
    return 0;
}
