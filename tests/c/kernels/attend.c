/* attend.c - attention over pages: every level against scalar bit by bit, and scalar
 * against the formula in double. Slots that no position uses hold NaN; pages that none uses
 * are NULL.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/half.h"
#include "kernel_data.h"

static const size_t head_dims[] = {1, 2, 15, 16, 32, 64, 80, 128};
static const size_t ranges[][2] = {{0, 1},   {0, 2},   {0, 15},   {0, 16},   {0, 17},   {0, 31},
                                   {0, 32},  {0, 33},  {5, 6},    {31, 33},  {31, 32},  {32, 33},
                                   {32, 64}, {20, 50}, {33, 130}, {63, 128}, {64, 192}, {0, 300}};

static uint64_t n_compared;

typedef enum mood {
    MOOD_ORDINARY,
    MOOD_WIDE,  /* scores over 300 apart, huge values: exp down to its subnormals shows */
    MOOD_EQUAL, /* all scores zero */
    MOOD_BITS,  /* infinities and NaNs in q, K and V */
    MOOD_COUNT
} mood;

typedef struct cache {
    bool is_f16;
    size_t head_dim;
    size_t first;
    size_t end;
    size_t n_pages;
    float *q;       /* [head_dim] */
    float *k;       /* [end, head_dim], what was stored */
    float *v;       /* [end, head_dim] */
    void **k_pages; /* [n_pages] */
    void **v_pages; /* [n_pages] */
} cache;

static float as_stored(float x, bool is_f16)
{
    return is_f16 ? qsf_half_to_float(qsf_half_from_float(x)) : x;
}

static void fill_cache(cache *c, mood how)
{
    const fill plain = how == MOOD_BITS ? FILL_BITS : FILL_RANDOM;
    fill_floats(c->q, c->head_dim, plain);
    if (how == MOOD_EQUAL)
        fill_floats(c->q, c->head_dim, FILL_ZEROS);
    fill_floats(c->k, c->end * c->head_dim, plain);
    fill_floats(c->v, c->end * c->head_dim, plain);
    if (how == MOOD_WIDE) {
        for (size_t i = 0; i < c->end * c->head_dim; i++)
            c->v[i] *= c->is_f16 ? 20000.0F : 1e37F;
        /* One key direction decides, over -90 .. 90 for unit scale. */
        for (size_t p = c->first; p < c->end; p++)
            c->k[p * c->head_dim] = random_unit() * 90.0F;
        fill_floats(c->q, c->head_dim, FILL_ZEROS);
        c->q[0] = 1.0F;
    }
    for (size_t i = 0; i < c->end * c->head_dim; i++) {
        c->k[i] = as_stored(c->k[i], c->is_f16);
        c->v[i] = as_stored(c->v[i], c->is_f16);
    }
}

static cache cache_make(bool is_f16, size_t head_dim, size_t first, size_t end, mood how)
{
    cache c = {.is_f16 = is_f16, .head_dim = head_dim, .first = first, .end = end};
    const size_t page_bytes = head_dim * QSF_KV_PAGE_TOKENS * (is_f16 ? 2 : 4);
    c.n_pages = (end + QSF_KV_PAGE_TOKENS - 1) / QSF_KV_PAGE_TOKENS;
    c.q = exact_floats(head_dim);
    c.k = exact_floats(end * head_dim);
    c.v = exact_floats(end * head_dim);
    c.k_pages = exact_alloc(c.n_pages * sizeof(void *));
    c.v_pages = exact_alloc(c.n_pages * sizeof(void *));
    fill_cache(&c, how);
    for (size_t i = 0; i < c.n_pages; i++) {
        const bool is_used = (i + 1) * QSF_KV_PAGE_TOKENS > first;
        c.k_pages[i] = is_used ? exact_alloc(page_bytes) : NULL;
        c.v_pages[i] = is_used ? exact_alloc(page_bytes) : NULL;
        if (is_used) {
            memset(c.k_pages[i], 0xFF, page_bytes); /* NaN, as f16 and as f32 */
            memset(c.v_pages[i], 0xFF, page_bytes);
        }
    }
    for (size_t p = first; p < end; p++) {
        const size_t page = p / QSF_KV_PAGE_TOKENS;
        const size_t slot = p % QSF_KV_PAGE_TOKENS;
        (is_f16 ? scalar.k_store_f16 : scalar.k_store_f32)(c.k + p * head_dim, head_dim, slot,
                                                           c.k_pages[page]);
        (is_f16 ? scalar.v_store_f16 : scalar.v_store_f32)(c.v + p * head_dim, head_dim, slot,
                                                           c.v_pages[page]);
    }
    return c;
}

static void cache_free(cache *c)
{
    for (size_t i = 0; i < c->n_pages; i++) {
        free(c->k_pages[i]);
        free(c->v_pages[i]);
    }
    free(c->q);
    free(c->k);
    free(c->v);
    free(c->k_pages);
    free(c->v_pages);
}

static output run(const qsf_kernels *k, const cache *c, float scale)
{
    const output out = output_make(c->head_dim * sizeof(float));
    const size_t n_scores = 32 * (c->end / 32 + 1);
    const output scores = output_make(n_scores * sizeof(float));
    memset(scores.at, 0xFF, scores.n_bytes);
    (c->is_f16 ? k->attend_f16 : k->attend_f32)(c->q, (const void *const *)c->k_pages,
                                                (const void *const *)c->v_pages, c->head_dim,
                                                c->first, c->end, scale, scores.at, out.at);
    CHECK(output_guards_intact(&scores));
    free(scores.block);
    return out;
}

/* A score is off by (head_dim + 1) roundings of its absolute terms; the largest one too, and
 * their difference rounds once. e is off by as much, relatively, and by exp's 2 ulp. The sums
 * over positions round n (values) and n / 16 + 5 (total) times, the quotient and the last
 * product twice; with positive e, a relative error of e is one of the sums of |e v|. */
static void check_values(const cache *c, float scale, const float *have)
{
    const size_t n = c->end - c->first;
    double *const score = exact_alloc(n * sizeof *score);
    double largest = -HUGE_VAL;
    double score_abs = 0.0;
    double spread = 0.0;
    for (size_t i = 0; i < n; i++) {
        const float *const key = c->k + (c->first + i) * c->head_dim;
        double sum_abs = 0.0;
        score[i] = 0.0;
        for (size_t d = 0; d < c->head_dim; d++) {
            score[i] += (double)c->q[d] * (double)key[d] * (double)scale;
            sum_abs += fabs((double)c->q[d] * (double)key[d] * (double)scale);
        }
        largest = fmax(largest, score[i]);
        score_abs = fmax(score_abs, sum_abs);
    }
    double total = 0.0;
    for (size_t i = 0; i < n; i++) {
        spread = fmax(spread, largest - score[i]);
        score[i] = exp(score[i] - largest);
        total += score[i];
    }
    const double u = (double)FLT_EPSILON / 2.0;
    const double e_error = (2.0 * (double)(c->head_dim + 1) * score_abs + spread + 4.0) * u;
    const double relative = 2.0 * e_error + ((double)n * 17.0 / 16.0 + 7.0) * u;
    for (size_t d = 0; d < c->head_dim; d++) {
        double want = 0.0;
        double sum_abs = 0.0;
        for (size_t i = 0; i < n; i++) {
            const double v = (double)c->v[(c->first + i) * c->head_dim + d];
            want += score[i] / total * v;
            sum_abs += score[i] / total * fabs(v);
        }
        if (!CHECK(fabs((double)have[d] - want) <= 1.01 * relative * sum_abs))
            printf("  scalar attend: f16 %d, head_dim %zu, positions %zu..%zu: [%zu] is %.9g, not "
                   "%.9g\n",
                   (int)c->is_f16, c->head_dim, c->first, c->end - 1, d, (double)have[d], want);
    }
    free(score);
}

static void check_range(bool is_f16, size_t head_dim, size_t first, size_t end, mood how)
{
    cache c = cache_make(is_f16, head_dim, first, end, how);
    const float scale = how == MOOD_WIDE ? 1.0F : 1.0F / sqrtf((float)head_dim);
    char what[128];
    snprintf(what, sizeof what, "attend f16 %d, head_dim %zu, positions %zu..%zu, mood %d",
             (int)is_f16, head_dim, first, end - 1, (int)how);
    const output want = run(&scalar, &c, scale);
    for (size_t i = 0; i < n_levels; i++) {
        const output have = run(&levels[i], &c, scale);
        check_outputs(&want, &have, levels[i].isa_name, what);
        free(have.block);
        n_compared++;
    }
    if (how == MOOD_ORDINARY || how == MOOD_EQUAL)
        check_values(&c, scale, want.at);
    if (how == MOOD_WIDE) /* NaN from an unused slot would show */
        for (size_t d = 0; d < head_dim; d++)
            CHECK(isfinite(((const float *)want.at)[d]));
    free(want.block);
    cache_free(&c);
}

/* Only one position counts, the others are e^-x below: its value comes out scaled by e^-x
 * exactly as the levels' exp gives it, down to subnormals of e. */
static void check_exp_bits(void)
{
    for (int step = 0; step < 2200; step++) {
        cache c = cache_make(false, 1, 0, 2, MOOD_EQUAL);
        float *const keys = c.k_pages[0];
        float *const values = c.v_pages[0];
        c.q[0] = 1.0F;
        keys[0] = 0.0F;
        keys[1] = -0.05F * (float)step;
        values[0] = 0.0F;
        values[1] = 0x1p120F;
        const output want = run(&scalar, &c, 1.0F);
        const double e = exp((double)keys[1]);
        const double exact = e / (1.0 + e) * 0x1p120;
        CHECK(fabs((double)*(const float *)want.at - exact) <=
              exact * 4.0 * (double)FLT_EPSILON + 0x1p-30);
        for (size_t i = 0; i < n_levels; i++) {
            const output have = run(&levels[i], &c, 1.0F);
            check_outputs(&want, &have, levels[i].isa_name, "attend of two positions");
            free(have.block);
        }
        free(want.block);
        cache_free(&c);
    }
}

int check_attend(void)
{
    random_restart(1);
    for (size_t d = 0; d < COUNT_OF(head_dims); d++)
        for (size_t r = 0; r < COUNT_OF(ranges); r++)
            for (mood how = MOOD_ORDINARY; how < MOOD_COUNT; how++) {
                check_range(true, head_dims[d], ranges[r][0], ranges[r][1], how);
                check_range(false, head_dims[d], ranges[r][0], ranges[r][1], how);
            }
    check_exp_bits();
    CHECK(n_compared >= n_levels * COUNT_OF(head_dims) * COUNT_OF(ranges) * MOOD_COUNT);
    return check_report("attend");
}

static void run_attend(const qsf_kernels *k, const void *args)
{
    const cache *const c = args;
    static float scores[32 * (512 / 32 + 1)];
    static float out[64];
    (c->is_f16 ? k->attend_f16 : k->attend_f32)(c->q, (const void *const *)c->k_pages,
                                                (const void *const *)c->v_pages, c->head_dim,
                                                c->first, c->end, 0.125F, scores, out);
}

/* An element is one of K or V. */
void bench_attend(void)
{
    for (int is_f16 = 1; is_f16 >= 0; is_f16--) {
        cache c = cache_make(is_f16, 64, 0, 512, MOOD_ORDINARY);
        bench_line(is_f16 ? "attend_f16, 512 positions" : "attend_f32, 512 positions",
                   2.0 * 512 * 64, run_attend, &c);
        cache_free(&c);
    }
}
