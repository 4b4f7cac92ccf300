/* check_sample.c - the sampler against a plain restatement of its rules. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "engine/sample.h"

#define N_VOCAB 50

static _Alignas(QSF_ARENA_ALIGN) unsigned char block[1 << 14];

static void make_sampler(qsf_sampler *s)
{
    qsf_arena arena;
    qsf_arena_init(&arena, block, sizeof block);
    memset(block, 0, sizeof block);
    qsf_sampler_layout(s, &arena, N_VOCAB);
    CHECK(!arena.failed);
}

static void random_logits(float *logits, uint64_t *state)
{
    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = (float)floor(qsf_random_uniform(state) * 40.0) / 5.0f - 3.0f; /* with ties */
}

/* Which ids may be drawn, and with what weight: sorts everything, keeps prefixes. */
static void plain_weights(const float *logits, const qsf_sampling *how, double *weight)
{
    uint32_t order[N_VOCAB];
    double w[N_VOCAB];
    for (uint32_t i = 0; i < N_VOCAB; i++)
        order[i] = i;
    for (uint32_t i = 0; i < N_VOCAB; i++)
        for (uint32_t j = i + 1; j < N_VOCAB; j++)
            if (logits[order[j]] > logits[order[i]] ||
                (logits[order[j]] == logits[order[i]] && order[j] < order[i])) {
                const uint32_t swap = order[i];
                order[i] = order[j];
                order[j] = swap;
            }
    const uint32_t limit = how->top_k == 0 || how->top_k > N_VOCAB ? N_VOCAB : how->top_k;
    double total = 0.0;
    for (uint32_t i = 0; i < limit; i++) {
        w[i] =
            exp(((double)logits[order[i]] - (double)logits[order[0]]) / (double)how->temperature);
        total += w[i];
    }
    double before = 0.0;
    for (uint32_t i = 0; i < N_VOCAB; i++)
        weight[i] = 0.0;
    for (uint32_t i = 0; i < limit; i++) {
        const bool is_in_p = i == 0 || how->top_p == 1.0f || before < (double)how->top_p * total;
        if (is_in_p && w[i] >= (double)how->min_p)
            weight[order[i]] = w[i];
        before += w[i];
    }
}

/* Draws often and compares the frequencies with the plain weights. */
static void check_frequencies(const qsf_sampling *how, uint64_t seed)
{
    enum { N_DRAWS = 20000 };
    qsf_sampler s;
    make_sampler(&s);
    float logits[N_VOCAB];
    double weight[N_VOCAB];
    uint32_t n_drawn[N_VOCAB] = {0};
    uint64_t state = seed;
    random_logits(logits, &state);
    plain_weights(logits, how, weight);
    double total = 0.0;
    for (int i = 0; i < N_VOCAB; i++)
        total += weight[i];
    for (int i = 0; i < N_DRAWS; i++) {
        uint32_t token = N_VOCAB;
        CHECK_OK(qsf_sampler_choose(&s, logits, how, NULL, 0, &state, &token));
        if (!CHECK(token < N_VOCAB))
            return;
        n_drawn[token]++;
    }
    for (int i = 0; i < N_VOCAB; i++) {
        const double p = weight[i] / total;
        /* Six standard deviations of a binomial count, and one for rounding. */
        const double bound = 6.0 * sqrt(N_DRAWS * p * (1.0 - p)) + 1.0;
        CHECK(p > 0.0 || n_drawn[i] == 0);
        if (!CHECK(fabs(n_drawn[i] - N_DRAWS * p) <= bound))
            printf("  seed %llu id %d: drawn %u, expected %.1f\n", (unsigned long long)seed, i,
                   n_drawn[i], N_DRAWS * p);
    }
}

static void check_filters(void)
{
    const qsf_sampling cases[] = {
        {1.0f, 1.0f, 0, 1.0f, 0.0f},  {1.0f, 0.7f, 0, 1.0f, 0.0f},  {1.0f, 1.5f, 5, 1.0f, 0.0f},
        {1.0f, 1.0f, 1, 1.0f, 0.0f},  {1.0f, 1.0f, 0, 0.5f, 0.0f},  {1.0f, 1.0f, 0, 0.01f, 0.0f},
        {1.0f, 1.0f, 10, 0.8f, 0.0f}, {1.0f, 1.0f, 0, 1.0f, 0.2f},  {1.0f, 0.7f, 40, 0.9f, 0.05f},
        {1.0f, 1.0f, 50, 1.0f, 0.0f}, {1.0f, 1.0f, 99, 0.9f, 0.0f}, {1.0f, 1.0f, 3, 1.0f, 1.0f},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (uint64_t seed = 1; seed <= 3; seed++)
            check_frequencies(&cases[i], seed + 10 * i);
}

static void check_greedy(void)
{
    qsf_sampler s;
    make_sampler(&s);
    qsf_sampling how = {1.0f, 0.0f, 0, 1.0f, 0.0f};
    float logits[N_VOCAB] = {0};
    uint64_t state = 7;
    uint32_t token = 99;
    logits[3] = 2.0f;
    logits[9] = 2.0f;
    CHECK_OK(qsf_sampler_choose(&s, logits, &how, NULL, 0, &state, &token));
    CHECK_EQ(token, 3);
    CHECK_EQ(state, 7); /* greedy draws nothing */

    /* The penalty counts a token once, however often it occurred. */
    const uint32_t recent[] = {3, 3, 3};
    how.repetition_penalty = 1.25f;
    logits[9] = 1.5f;
    CHECK_OK(qsf_sampler_choose(&s, logits, &how, recent, 3, &state, &token));
    CHECK_EQ(token, 3); /* 2 / 1.25 = 1.6 */
    how.repetition_penalty = 1.5f;
    CHECK_OK(qsf_sampler_choose(&s, logits, &how, recent, 3, &state, &token));
    CHECK_EQ(token, 9);
    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = -1.0f;
    const uint32_t all_but_ten[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    CHECK_OK(qsf_sampler_choose(&s, logits, &how, all_but_ten, 10, &state, &token));
    CHECK_EQ(token, 10); /* negative logits move down, not up */
}

static void check_not_finite(void)
{
    qsf_sampler s;
    make_sampler(&s);
    const qsf_sampling how = {1.0f, 0.0f, 0, 1.0f, 0.0f};
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        float logits[N_VOCAB] = {0};
        uint64_t state = 0;
        uint32_t token;
        logits[N_VOCAB - 1] = bad[i];
        CHECK_STATUS(qsf_sampler_choose(&s, logits, &how, NULL, 0, &state, &token),
                     QSF_ERR_NUMERIC);
    }
}

static void check_extremes(void)
{
    qsf_sampler s;
    make_sampler(&s);
    const qsf_sampling how = {1.0f, 1e-6f, 0, 0.9f, 0.0f};
    float logits[N_VOCAB];
    uint64_t state = 5;
    uint32_t token = 99;
    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = i % 2 == 0 ? 3e38f : -3e38f;
    logits[8] = 3.1e38f;
    CHECK_OK(qsf_sampler_choose(&s, logits, &how, NULL, 0, &state, &token));
    CHECK_EQ(token, 8);
}

/* A penalty near 0 drives the scores of recent tokens to infinity: one of them it is, always. */
static void check_infinite_penalty(void)
{
    static const qsf_sampling ways[] = {
        {1e-30f, 0.0f, 0, 1.0f, 0.0f}, {1e-30f, 1.0f, 0, 1.0f, 0.0f}, {1e-30f, 1.0f, 5, 1.0f, 0.0f},
        {1e-30f, 1.0f, 0, 0.9f, 0.0f}, {1e-30f, 1.0f, 3, 0.5f, 0.1f}, {1e-30f, 1.0f, 0, 1.0f, 0.1f},
    };
    static const uint32_t recent[] = {20, 31};
    qsf_sampler s;
    make_sampler(&s);
    float logits[N_VOCAB];
    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = 1e20f;
    for (size_t w = 0; w < sizeof ways / sizeof ways[0]; w++) {
        uint64_t state = w;
        for (int draw = 0; draw < 20; draw++) {
            uint32_t token = 99;
            CHECK_OK(qsf_sampler_choose(&s, logits, &ways[w], recent, 2, &state, &token));
            CHECK(token == 20 || token == 31);
        }
    }
}

/* splitmix64 from state 0: the published first outputs. */
static void check_generator(void)
{
    uint64_t state = 0;
    CHECK(qsf_random_uniform(&state) == (double)(UINT64_C(0xE220A8397B1DCDAF) >> 11) * 0x1p-53);
    CHECK(qsf_random_uniform(&state) == (double)(UINT64_C(0x6E789E6AA1B965F4) >> 11) * 0x1p-53);
    CHECK(qsf_random_uniform(&state) == (double)(UINT64_C(0x06C45D188009454F) >> 11) * 0x1p-53);
}

int main(void)
{
    check_generator();
    check_greedy();
    check_filters();
    check_not_finite();
    check_extremes();
    check_infinite_penalty();
    return check_report("check_sample");
}
