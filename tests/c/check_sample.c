/* check_sample.c - the sampler against a plain restatement of its rules, token by token. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "engine/model.h"

#define N_VOCAB 50

#define MAX_VOCAB 5000

static const qsf_adjustment unchanged;

static _Alignas(QSF_ARENA_ALIGN) unsigned char block[1 << 18];
static qsf_kernels kernels;

static void make_sampler_of(qsf_sampler *s, uint32_t n_vocab)
{
    qsf_arena arena;
    qsf_arena_init(&arena, block, sizeof block);
    memset(block, 0, sizeof block);
    qsf_sampler_layout(s, &arena, n_vocab);
    CHECK(!arena.failed);
}

/* Pearson's statistic of counts of n cells, less its mean, in standard deviations. */
static double excess_of(const uint32_t *n_drawn, const double *p, int n, double n_draws)
{
    double sum = 0.0;
    for (int i = 0; i < n; i++)
        sum += pow(n_drawn[i] - n_draws * p[i], 2.0) / (n_draws * p[i]);
    return (sum - (n - 1)) / sqrt(2.0 * (n - 1));
}

/* Draws of one seed, or of many seeds one after the other, have the frequencies of
 * the weights, alone and in pairs with the draw before. */
static void check_chi_square(bool has_one_seed)
{
    enum { n_draws = 300000, N = 6 };
    static const float logits[N] = {0.0f, 1.5f, -3.0f, 0.2f, 1.4f, -0.8f};
    const qsf_sampling how = {1.0f, 1.0f, 0, 1.0f, 0.0f, 0.0f, 0.0f};
    qsf_sampler s;
    make_sampler_of(&s, N);
    double p[N];
    double pairs[N * N];
    double total = 0.0;
    for (int i = 0; i < N; i++)
        total += exp((double)logits[i]);
    for (int i = 0; i < N; i++)
        p[i] = exp((double)logits[i]) / total;
    for (int i = 0; i < N * N; i++)
        pairs[i] = p[i / N] * p[i % N];
    uint32_t n_drawn[N] = {0};
    uint32_t n_pairs[N * N] = {0};
    uint64_t state = 42;
    uint32_t before = 0;
    for (uint64_t i = 0; i < n_draws; i++) {
        uint32_t token = 0;
        state = has_one_seed ? state : i;
        CHECK_OK(qsf_sampler_choose(&s, &kernels, logits, &how, &unchanged, &state, &token));
        n_drawn[token]++;
        n_pairs[before * N + token] += i > 0;
        before = token;
    }
    CHECK(excess_of(n_drawn, p, N, n_draws) < 5.0);
    CHECK(excess_of(n_pairs, pairs, N * N, n_draws - 1) < 5.0);
}

/* The token that is chosen from `logits` [N_VOCAB] when n of `recent` came before. */
static uint32_t choose(const float *logits, const qsf_sampling *how, const uint32_t *recent,
                       size_t n, uint64_t *state)
{
    const qsf_adjustment change = {.recent = recent, .n_recent = n, .n_counted = n};
    uint32_t token = UINT32_MAX;
    qsf_sampler s;
    make_sampler_of(&s, N_VOCAB);
    CHECK_OK(qsf_sampler_choose(&s, &kernels, logits, how, &change, state, &token));
    return token;
}

static void check_greedy(void)
{
    static const uint32_t recent[] = {3, 3, 3};
    static const uint32_t all_but_ten[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    qsf_sampling how = {.repetition_penalty = 1.0f, .top_p = 1.0f};
    float logits[N_VOCAB] = {[3] = 2.0f, [9] = 2.0f};
    uint64_t state = 7;
    CHECK_EQ(choose(logits, &how, NULL, 0, &state), 3);
    CHECK_EQ(state, 7); /* greedy draws nothing */

    /* The penalty counts a token once, however often it occurred. */
    how.repetition_penalty = 1.25f;
    logits[9] = 1.5f;
    CHECK_EQ(choose(logits, &how, recent, 3, &state), 3); /* 2 / 1.25 = 1.6 */
    how.repetition_penalty = 1.5f;
    CHECK_EQ(choose(logits, &how, recent, 3, &state), 9);
    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = -1.0f;
    CHECK_EQ(choose(logits, &how, all_but_ten, 10, &state), 10); /* these move down, not up */
}

static void check_extremes(void)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    const qsf_sampling how = {1.0f, 1e-6f, 0, 0.9f, 0.0f, 0.0f, 0.0f};
    float logits[N_VOCAB];
    uint64_t state = 5;
    uint32_t token = 99;
    qsf_sampler s;
    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = i % 2 == 0 ? 3e38f : -3e38f;
    logits[8] = 3.1e38f;
    CHECK_EQ(choose(logits, &how, NULL, 0, &state), 8);
    make_sampler_of(&s, N_VOCAB);
    for (int i = 0; i < 3; i++) {
        logits[N_VOCAB - 1] = bad[i];
        CHECK_STATUS(qsf_sampler_choose(&s, &kernels, logits, &how, &unchanged, &state, &token),
                     QSF_ERR_NUMERIC);
    }
}

/* A penalty near 0 drives the scores of recent tokens to infinity: one of them it is, always. */
static void check_infinite_penalty(void)
{
    static const qsf_sampling ways[] = {
        {1e-30f, 0.0f, 0, 1.0f, 0.0f, 0.0f, 0.0f}, {1e-30f, 1.0f, 0, 1.0f, 0.0f, 0.0f, 0.0f},
        {1e-30f, 1.0f, 5, 1.0f, 0.0f, 0.0f, 0.0f}, {1e-30f, 1.0f, 0, 0.9f, 0.0f, 0.0f, 0.0f},
        {1e-30f, 1.0f, 3, 0.5f, 0.1f, 0.0f, 0.0f}, {1e-30f, 1.0f, 0, 1.0f, 0.1f, 0.0f, 0.0f},
    };
    static const uint32_t recent[] = {20, 31};
    float logits[N_VOCAB];
    for (int i = 0; i < N_VOCAB; i++)
        logits[i] = 1e20f;
    for (uint64_t i = 0; i < 20 * COUNT_OF(ways); i++) {
        uint64_t state = i;
        const uint32_t token = choose(logits, &ways[i % COUNT_OF(ways)], recent, 2, &state);
        CHECK(token == 20 || token == 31);
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

/* ---- large vocabularies: the very token, for every instruction set ---- */

static const float *ordered_by;

static int falling(const void *a, const void *b)
{
    const uint32_t *const i = a;
    const uint32_t *const j = b;
    if (ordered_by[*i] != ordered_by[*j])
        return ordered_by[*i] > ordered_by[*j] ? -1 : 1;
    return *i < *j ? -1 : 1;
}

/* The rules, step by step, on everything in order. */
static uint32_t plain_choice(const float *logits, uint32_t n, const qsf_sampling *how,
                             uint64_t draw)
{
    static uint32_t order[MAX_VOCAB];
    static double w[MAX_VOCAB];
    const bool is_cut = (how->top_k != 0 && how->top_k < n) || how->top_p < 1.0f;
    const uint32_t limit = how->top_k == 0 || how->top_k > n ? n : how->top_k;
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    ordered_by = logits;
    qsort(order, n, sizeof *order, falling);
    const double best = (double)logits[order[0]];
    if (how->temperature == 0.0f)
        return order[0];
    if (!is_cut) /* in the order of the ids, then */
        for (uint32_t i = 0; i < n; i++)
            order[i] = i;
    double total = 0.0;
    for (uint32_t i = 0; i < limit; i++) {
        w[i] = exp(((double)logits[order[i]] - best) / (double)how->temperature);
        total += w[i];
    }
    double sum = 0.0;
    for (uint32_t i = 0; i < limit; i++) {
        const bool is_in_p = !is_cut || i == 0 || sum < (double)how->top_p * total;
        if (!is_in_p || w[i] < (double)how->min_p)
            w[i] = 0.0;
        sum += w[i];
    }
    uint32_t first = 0;
    double least = INFINITY;
    for (uint32_t i = 0; i < limit; i++) {
        uint64_t state = qsf_random_after(draw, order[i]);
        const double time = -log1p(-qsf_random_uniform(&state)) / w[i];
        if (w[i] == 0.0 || time >= least)
            continue;
        least = time;
        first = order[i];
    }
    return first;
}

static void check_large_one(uint32_t n, const qsf_sampling *how, int kind, uint64_t seed)
{
    static float logits[MAX_VOCAB];
    qsf_sampler s;
    make_sampler_of(&s, n);
    uint64_t state = seed;
    for (uint32_t i = 0; i < n; i++) {
        const double u = qsf_random_uniform(&state);
        logits[i] = kind == 0   ? (float)(12.0 * u - 6.0)
                    : kind == 1 ? (float)floor(u * 30.0) /* with many ties */
                                : (float)i * (how->top_k % 2 == 0 ? 0.01f : -0.01f);
    }
    for (int i = 0; i < 10; i++) {
        uint64_t same_state = state;
        uint32_t token = UINT32_MAX;
        const uint64_t draw = how->temperature == 0.0f ? 0 : qsf_random_next(&same_state);
        CHECK_OK(qsf_sampler_choose(&s, &kernels, logits, how, &unchanged, &state, &token));
        CHECK_EQ_U64(state, same_state);
        if (!CHECK_EQ(token, plain_choice(logits, n, how, draw)) && check_is_printed())
            printf("    %s, %u logits of kind %d, temperature %g, top-k %u, top-p %g\n",
                   kernels.isa_name, n, kind, (double)how->temperature, how->top_k,
                   (double)how->top_p);
    }
}

static void check_large(size_t stride)
{
    static const qsf_sampling ways[] = {
        {1.0f, 0.0f, 0, 1.0f, 0.0f, 0.0f, 0.0f},   {1.0f, 0.7f, 40, 0.9f, 0.0f, 0.0f, 0.0f},
        {1.0f, 1.0f, 0, 1.0f, 0.0f, 0.0f, 0.0f},   {1.0f, 0.8f, 0, 1.0f, 0.01f, 0.0f, 0.0f},
        {1.0f, 1.0f, 1, 1.0f, 0.0f, 0.0f, 0.0f},   {1.0f, 1.3f, 257, 1.0f, 0.0f, 0.0f, 0.0f},
        {1.0f, 3.0f, 0, 0.999f, 0.0f, 0.0f, 0.0f}, {1.0f, 0.5f, 0, 0.5f, 0.0f, 0.0f, 0.0f},
        {1.0f, 9.0f, 0, 0.97f, 0.3f, 0.0f, 0.0f},  {1.0f, 1.0f, 999, 0.9f, 0.1f, 0.0f, 0.0f},
    };
    static const uint32_t sizes[] = {1, 15, 17, 256, 257, 1000, MAX_VOCAB};
    size_t n_cases = 0;
    for (size_t i = 0; i < COUNT_OF(sizes); i++)
        for (size_t w = 0; w < COUNT_OF(ways); w++)
            for (int kind = 0; kind < 3; kind++)
                if (n_cases++ % stride == 0)
                    check_large_one(sizes[i], &ways[w], kind, 1 + 31 * w);
}

/* One value that is not finite, anywhere. */
static void check_finite_everywhere(void)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    float x[300];
    float tops[2 * QSF_STRIP_BUCKETS];
    float most;
    for (size_t n = 1; n <= 300; n += n < 70 ? 1 : 46) {
        for (size_t i = 0; i < n; i++)
            x[i] = i % 2 == 0 ? 3e38f : -3e38f;
        CHECK(kernels.bucket_max(x, n, tops, &most));
        for (size_t i = 0; i < n; i++) {
            const float kept = x[i];
            x[i] = bad[i % 3];
            CHECK(!kernels.bucket_max(x, n, tops, &most));
            x[i] = kept;
        }
    }
}

/* Every instruction set against plain C, bit by bit. */
static void check_same_bits(const qsf_kernels *plain)
{
    static float x[MAX_VOCAB];
    static float e[2][MAX_VOCAB + 1];
    static float sums[2][MAX_VOCAB / QSF_STRIP + 2];
    static float tops[2][(MAX_VOCAB / QSF_STRIP + 2) * QSF_STRIP_BUCKETS];
    uint64_t state = 77;
    for (uint32_t n = 1; n <= MAX_VOCAB; n += 1 + n / 3) {
        for (uint32_t i = 0; i < n; i++)
            x[i] = (float)(qsf_random_uniform(&state) * 60.0 - 30.0);
        if (n > 20)
            x[n / 2] = -INFINITY;
        memset(e, 0x55, sizeof e);
        memset(sums, 0x55, sizeof sums);
        memset(tops, 0x55, sizeof tops);
        float best[2];
        CHECK_EQ(plain->bucket_max(x, n, tops[0], &best[0]), n <= 20);
        CHECK_EQ(kernels.bucket_max(x, n, tops[1], &best[1]), n <= 20);
        CHECK(best[0] == best[1]);
        const float factor = n % 2 == 0 ? 1.4f : INFINITY;
        plain->weigh(x, n, best[0], factor, n % 3 == 0 ? 0.01f : 0.0f, e[0], sums[0]);
        kernels.weigh(x, n, best[0], factor, n % 3 == 0 ? 0.01f : 0.0f, e[1], sums[1]);
        CHECK(memcmp(tops[0], tops[1], sizeof tops[0]) == 0);
        CHECK(memcmp(e[0], e[1], sizeof e[0]) == 0); /* and nothing behind the last */
        CHECK(memcmp(sums[0], sums[1], sizeof sums[0]) == 0);
    }
}

/* Against sums in f64 by libm, for vocabularies of one strip, of several, and of one token. */
static void check_logprobs(void)
{
    static float x[MAX_VOCAB];
    static uint32_t tokens[MAX_VOCAB + 1];
    static float logprobs[MAX_VOCAB + 1];
    uint64_t state = 5;
    for (uint32_t n = 1; n <= MAX_VOCAB; n += 1 + n / 2) {
        qsf_sampler s;
        make_sampler_of(&s, n);
        double total = 0.0;
        for (uint32_t i = 0; i < n; i++) {
            x[i] = (float)floor(qsf_random_uniform(&state) * 100.0) / 5.0f - 10.0f; /* with ties */
            total += exp((double)x[i]);
        }
        const size_t n_tokens = n % 2 == 0 ? (n < 20 ? n : 20) + 1 : 1 + (size_t)(n == 1);
        tokens[0] = n / 2;
        CHECK_OK(qsf_sampler_logprobs(&s, &kernels, x, tokens, logprobs, n_tokens));
        CHECK_EQ(tokens[0], n / 2);
        for (size_t i = 0; i < n_tokens; i++) {
            const double expected = (double)x[tokens[i]] - log(total);
            CHECK(fabs((double)logprobs[i] - expected) <= 1e-5);
        }
        for (size_t i = 1; i + 1 < n_tokens; i++)
            CHECK(x[tokens[i]] > x[tokens[i + 1]] ||
                  (x[tokens[i]] == x[tokens[i + 1]] && tokens[i] < tokens[i + 1]));
        for (uint32_t i = 0; n_tokens > 1 && i < n; i++)
            CHECK(x[i] <= x[tokens[1]]);
        x[n - 1] = NAN;
        CHECK_STATUS(qsf_sampler_logprobs(&s, &kernels, x, tokens, logprobs, n_tokens),
                     QSF_ERR_NUMERIC);
    }
}

int main(void)
{
    const size_t stride = check_stride();
    qsf_kernels plain;
    qsf_kernels_init(&plain, QSF_ISA_SCALAR);
    for (int isa = 0; isa < (int)QSF_ISA_COUNT; isa++) {
        if (!qsf_isa_has((qsf_isa)isa))
            continue;
        qsf_kernels_init(&kernels, (qsf_isa)isa);
        check_large(stride);
        check_finite_everywhere();
        check_logprobs();
        check_same_bits(&plain);
    }
    check_generator();
    check_greedy();
    check_chi_square(true);
    check_chi_square(false);
    check_extremes();
    check_infinite_penalty();
    return check_report("check_sample");
}
