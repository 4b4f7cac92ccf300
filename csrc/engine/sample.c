/* sample.c - chooses a token. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/fused.h"
#include "base/status.h"

/* With top-p but no top-k the number of candidates is unknown: start with FIRST_CANDIDATES, then
 * multiply by MORE_CANDIDATES. */
#define FIRST_CANDIDATES 256
#define MORE_CANDIDATES 16

/* Fewer strips are not combined: that saves nothing, and a small vocabulary would have too few
 * maxima. */
#define LEAST_FOLD 4

/* The increment of splitmix64 */
#define RANDOM_STEP UINT64_C(0x9E3779B97F4A7C15)

/* Bound of a bias or penalty, so that no sum contains infinities of both signs. */
#define MOST_SHIFT 1e6f

/* Inputs of all steps of a choice. */
typedef struct choosing {
    qsf_sampler *s;
    const qsf_kernels *k;
    const qsf_sampling *how;
    const float *scores; /* [n_vocab] adjusted logits; may be infinite, never NaN */
    float best;          /* the largest of them */
    uint32_t n_allowed;  /* tokens that the mask allows */
} choosing;

void qsf_sampler_layout(qsf_sampler *s, qsf_arena *a, uint32_t n_vocab)
{
    const size_t n_strips = qsf_ceil_div(n_vocab, QSF_STRIP);
    s->n_vocab = n_vocab;
    s->adjusted = qsf_arena_push(a, n_vocab, sizeof *s->adjusted);
    s->heap = qsf_arena_push(a, n_vocab, sizeof *s->heap);
    void *const shared = qsf_arena_push(a, n_vocab, sizeof *s->weights);
    s->weights = shared;
    s->odds = shared;
    s->tops = qsf_arena_push(a, n_strips * QSF_STRIP_BUCKETS, sizeof *s->tops);
    s->sums = qsf_arena_push(a, n_strips, sizeof *s->sums);
    s->is_seen = qsf_arena_push(a, n_vocab, sizeof *s->is_seen);
}

uint64_t qsf_random_next(uint64_t *state)
{
    *state += RANDOM_STEP;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

double qsf_random_uniform(uint64_t *state)
{
    return (double)(qsf_random_next(state) >> 11) * 0x1p-53;
}

uint64_t qsf_random_after(uint64_t state, uint32_t n_draws)
{
    return state + n_draws * RANDOM_STEP;
}

/* exp(x) for x <= 0, with the same bits on every machine (libm differs): x = n ln2 + r, |r| <= ln2
 * / 2, and thirteen terms of the series for exp(r). */
static double exp_of_negative(double x)
{
    if (!(x > -700.0))
        return 0.0;
    const double n = rint(x * 1.4426950408889634);
    const double r = qsf_fma(-n, 1.9082149292705877e-10, qsf_fma(-n, 6.93147180369123816490e-1, x));
    double sum = 1.0;
    for (int i = 13; i >= 1; i--)
        sum = qsf_fma(sum, r / (double)i, 1.0);
    return ldexp(sum, (int)n);
}

/* log(x) for a finite x > 0, with the same bits on every machine: x = m 2^n, sqrt(1/2) <= m <
 * sqrt(2), and the series of 2 atanh(t), t = (m - 1) / (m + 1), |t| < 0.172. */
static double log_of(double x)
{
    int n;
    double m = frexp(x, &n);
    if (m < 0.7071067811865476) {
        m *= 2.0;
        n--;
    }
    const double t = (m - 1.0) / (m + 1.0);
    const double t2 = t * t;
    double sum = 0.0;
    for (int i = 21; i >= 1; i -= 2)
        sum = qsf_fma(sum, t2, 1.0 / (double)i);
    return qsf_fma((double)n, 0.6931471805599453, 2.0 * t * sum);
}

/* True if a has the higher score, or the same score and the lower id. */
static bool comes_first(const float *scores, uint32_t a, uint32_t b)
{
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
}

static void sift_down(const float *scores, uint32_t *heap, size_t n, size_t at)
{
    const uint32_t id = heap[at];
    for (size_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && comes_first(scores, heap[child + 1], heap[child]))
            child++;
        if (!comes_first(scores, heap[child], id))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = id;
}

static qsf_status name_not_finite(const float *logits)
{
    uint32_t i = 0;
    while (isfinite(logits[i]))
        i++;
    return QSF_FAIL(NUMERIC,
                    "the logit of token %u is %g: the weights are damaged or the model overflows",
                    i, (double)logits[i]);
}

/* The repetition penalty (Keskar et al. 2019), for which a token that occurred several times counts
 * once. */
static void penalise_repetition(qsf_sampler *s, float penalty, const uint32_t *recent,
                                size_t n_recent)
{
    for (size_t i = 0; penalty != 1.0f && i < n_recent; i++) {
        float *const score = &s->adjusted[recent[i]];
        if (s->is_seen[recent[i]])
            continue;
        s->is_seen[recent[i]] = 1;
        *score = *score > 0.0f ? *score / penalty : *score * penalty;
    }
    for (size_t i = 0; i < n_recent; i++)
        s->is_seen[recent[i]] = 0;
}

/* The frequency and presence penalties */
static void penalise_count(qsf_sampler *s, const qsf_sampling *how, const uint32_t *counted,
                           size_t n_counted)
{
    if (how->frequency_penalty == 0.0f && how->presence_penalty == 0.0f)
        return;
    for (size_t i = 0; i < n_counted; i++) {
        s->adjusted[counted[i]] -= how->frequency_penalty;
        if (!s->is_seen[counted[i]])
            s->adjusted[counted[i]] -= how->presence_penalty;
        s->is_seen[counted[i]] = 1;
    }
    for (size_t i = 0; i < n_counted; i++)
        s->is_seen[counted[i]] = 0;
}

static bool is_allowed(const uint32_t *mask, uint32_t id)
{
    return mask == NULL || (mask[id / 32] >> id % 32 & 1) != 0;
}

/* Returns the number of tokens that the mask allows; *only becomes the last one. */
static uint32_t count_allowed(const qsf_sampler *s, const uint32_t *mask, uint32_t *only)
{
    uint32_t n = 0;
    for (uint32_t id = 0; id < s->n_vocab; id++) {
        if (id % 32 == 0 && mask[id / 32] == 0) {
            id += 31;
        } else if (is_allowed(mask, id)) {
            *only = id;
            n++;
        }
    }
    return n;
}

/* Tokens that are not allowed get minus infinity, and only they. */
static void apply_mask(qsf_sampler *s, const uint32_t *mask)
{
    for (uint32_t id = 0; id < s->n_vocab; id++) {
        float *const score = &s->adjusted[id];
        *score = !is_allowed(mask, id) ? -INFINITY : fmaxf(*score, -FLT_MAX);
    }
}

/* Returns the logits after biases, penalties and mask. */
static const float *adjust(qsf_sampler *s, const float *logits, const qsf_sampling *how,
                           const qsf_adjustment *change)
{
    const bool has_penalty = how->repetition_penalty != 1.0f || how->frequency_penalty != 0.0f ||
                             how->presence_penalty != 0.0f;
    if (change->mask == NULL && change->n_biased == 0 && (!has_penalty || change->n_recent == 0))
        return logits;
    memcpy(s->adjusted, logits, s->n_vocab * sizeof *s->adjusted);
    for (size_t i = 0; i < change->n_biased; i++)
        s->adjusted[change->biased[i]] += change->biases[i];
    penalise_repetition(s, how->repetition_penalty, change->recent, change->n_recent);
    const size_t n_before = change->n_recent - change->n_counted;
    if (change->n_counted > 0)
        penalise_count(s, how, change->recent + n_before, change->n_counted);
    if (change->mask != NULL)
        apply_mask(s, change->mask);
    return s->adjusted;
}

/* Returns the lowest id that has the largest score. */
static uint32_t find_best(const choosing *c)
{
    size_t bucket = 0;
    while (c->s->tops[bucket] != c->best)
        bucket++;
    size_t id = bucket / QSF_STRIP_BUCKETS * QSF_STRIP;
    while (c->scores[id] != c->best)
        id++;
    return (uint32_t)id;
}

static double weight_of(const choosing *c, uint32_t id)
{
    if (c->scores[id] == c->best) /* also if the penalty made both infinite */
        return 1.0;
    return exp_of_negative(((double)c->scores[id] - (double)c->best) / (double)c->how->temperature);
}

/* Fills odds (0 if below `least`) and the sums of its strips; returns the total. */
static double weigh_all(const choosing *c, float least)
{
    qsf_sampler *const s = c->s;
    c->k->weigh(c->scores, s->n_vocab, c->best, 1.0f / c->how->temperature, least, s->odds,
                s->sums);
    double total = 0.0;
    for (size_t i = 0; i < qsf_ceil_div(s->n_vocab, QSF_STRIP); i++)
        total += (double)s->sums[i];
    return total;
}

/* A race of tokens: each ends after a random time, exponential with its weight as the rate, and the
 * first one wins, so a token wins with a probability in proportion to its weight. A token's random
 * number depends on the draw and its id alone. So two models that find similar weights, and draw
 * with the same state, mostly choose the same token. */
typedef struct race {
    uint64_t draw;
    double best; /* earliest time so far, and its token */
    uint32_t token;
} race;

static race begin_race(uint64_t *random_state)
{
    return (race){qsf_random_next(random_state), INFINITY, UINT32_MAX};
}

/* Of equal times the lower id wins. */
static void let_run(race *r, uint32_t id, double weight)
{
    uint64_t state = qsf_random_after(r->draw, id);
    const double u = qsf_random_uniform(&state);
    if (weight == 0.0 || u > r->best * weight) /* a cheap test first: -log(1 - u) >= u */
        return;
    const double time = -log_of(1.0 - u) / weight;
    if (time > r->best || (time == r->best && id > r->token))
        return;
    r->best = time;
    r->token = id;
}

/* Without top-k and top-p no sorting is needed. */
static uint32_t choose_any(const choosing *c, race r)
{
    (void)weigh_all(c, c->how->min_p);
    for (uint32_t id = 0; id < c->s->n_vocab; id++)
        let_run(&r, id, (double)c->s->odds[id]);
    return r.token;
}

/* Combines maxima of a bucket over several strips, while n_wanted are less than a third of the
 * remaining ones; returns the number of combined maxima in out, or `tops` itself. A search among
 * fewer maxima is faster, and the threshold is hardly lower. */
static const float *fold_tops(const choosing *c, size_t n_wanted, float *out, size_t *n)
{
    const size_t n_strips = qsf_ceil_div(c->s->n_vocab, QSF_STRIP);
    size_t fold = 1;
    while (n_strips / (2 * fold) * QSF_STRIP_BUCKETS >= 3 * n_wanted)
        fold *= 2;
    *n = qsf_ceil_div(n_strips, fold < LEAST_FOLD ? 1 : fold) * QSF_STRIP_BUCKETS;
    if (fold < LEAST_FOLD)
        return c->s->tops;
    for (size_t s = 0; s < n_strips; s++) {
        const float *const tops = c->s->tops + s * QSF_STRIP_BUCKETS;
        float *const most = out + s / fold * QSF_STRIP_BUCKETS;
        for (size_t i = 0; i < QSF_STRIP_BUCKETS; i++)
            most[i] = s % fold == 0 ? tops[i] : QSF_MAX(tops[i], most[i]);
    }
    return out;
}

/* Replaces the least element of a min-heap [n] by `top`, from place `at` down. */
static void replace_least(float *least, size_t n, size_t at, float top)
{
    for (size_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && least[child + 1] < least[child])
            child++;
        if (!(least[child] < top))
            break;
        least[at] = least[child];
        at = child;
    }
    least[at] = top;
}

/* Returns a score that at least n_wanted ids reach: the smallest of the n_wanted largest maxima,
 * collected in a min-heap. */
static float find_floor(const choosing *c, size_t n_wanted)
{
    float *const least =
        c->s->odds; /* [n_wanted] scratch, like the fields below, until weights are needed */
    size_t n;
    const float *const tops = fold_tops(c, n_wanted, least + n_wanted, &n);
    if (n_wanted > n || n_wanted > c->s->n_vocab)
        return -INFINITY;
    memcpy(least, tops, n_wanted * sizeof *least);
    for (size_t i = n_wanted / 2; i-- > 0;)
        replace_least(least, n_wanted, i, least[i]);
    for (size_t i = n_wanted; i < n; i++)
        if (tops[i] > least[0])
            replace_least(least, n_wanted, 0, tops[i]);
    return least[0];
}

/* Builds a max-heap of all ids whose score reaches that of the n_wanted best; returns its size. */
static uint32_t gather(const choosing *c, size_t n_wanted)
{
    qsf_sampler *const s = c->s;
    const float lowest = find_floor(c, n_wanted);
    uint32_t n = 0;
    for (size_t b = 0; b < qsf_ceil_div(s->n_vocab, QSF_STRIP) * QSF_STRIP_BUCKETS; b++) {
        if (s->tops[b] < lowest)
            continue;
        const size_t first = b / QSF_STRIP_BUCKETS * QSF_STRIP + b % QSF_STRIP_BUCKETS;
        for (size_t i = 0; i < QSF_STRIP; i += QSF_STRIP_BUCKETS)
            if (first + i < s->n_vocab && c->scores[first + i] >= lowest)
                s->heap[n++] = (uint32_t)(first + i);
    }
    for (size_t i = n / 2; i-- > 0;)
        sift_down(c->scores, s->heap, n, i);
    return n;
}

/* Takes the best id off the heap of n ids, stores it after the heap, and returns it. */
static uint32_t pop_best(const choosing *c, uint32_t n)
{
    uint32_t *const heap = c->s->heap;
    const uint32_t id = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = id;
    if (n > 1)
        sift_down(c->scores, heap, n - 1, 0);
    return id;
}

/* Chooses among the n_kept best ids, which are at the end of the n ids. */
static uint32_t choose_kept(const qsf_sampler *s, uint32_t n, uint32_t n_kept, race r)
{
    for (uint32_t i = 0; i < n_kept; i++)
        let_run(&r, s->heap[n - 1 - i], s->weights[i]);
    return r.token;
}

/* Chooses among the top_k best, restricted by top-p and min-p. */
static uint32_t choose_top_k(const choosing *c, race r)
{
    qsf_sampler *const s = c->s;
    const uint32_t limit = QSF_MIN(c->how->top_k, c->n_allowed);
    const uint32_t n = gather(c, limit);
    double total = 0.0; /* top_p is a share of this sum */
    for (uint32_t i = 0; i < limit; i++) {
        s->weights[i] = weight_of(c, pop_best(c, n - i));
        total += s->weights[i];
    }
    const double enough = c->how->top_p < 1.0f ? (double)c->how->top_p * total : total;
    double sum = 0.0;
    uint32_t n_kept = 0;
    while (n_kept < limit && (n_kept == 0 || sum < enough)) {
        if (n_kept > 0 && s->weights[n_kept] < (double)c->how->min_p)
            break;
        sum += s->weights[n_kept++];
    }
    return choose_kept(s, n, n_kept, r);
}

/* Chooses among all ids, restricted by top-p and min-p. */
static uint32_t choose_top_p(const choosing *c, race r)
{
    qsf_sampler *const s = c->s;
    const double enough = (double)c->how->top_p * weigh_all(c, 0.0f);
    for (size_t limit = FIRST_CANDIDATES;; limit *= MORE_CANDIDATES) {
        const uint32_t n = gather(c, limit);
        const size_t n_ordered = QSF_MIN(limit, n);
        double sum = 0.0;
        uint32_t n_kept = 0;
        bool is_last = false;
        while (n_kept < n_ordered && (n_kept == 0 || sum < enough) && !is_last) {
            s->weights[n_kept] = weight_of(c, pop_best(c, n - n_kept));
            is_last = n_kept > 0 &&
                      (s->weights[n_kept] == 0.0 || s->weights[n_kept] < (double)c->how->min_p);
            if (!is_last)
                sum += s->weights[n_kept++];
        }
        if (is_last || sum >= enough || n_ordered == s->n_vocab)
            return choose_kept(s, n, n_kept, r);
    }
}

qsf_status qsf_sampler_choose(qsf_sampler *s, const qsf_kernels *k, const float *logits,
                              const qsf_sampling *how, const qsf_adjustment *change,
                              uint64_t *random_state, uint32_t *token)
{
    choosing c = {s, k, how, logits, 0.0f, s->n_vocab};
    if (!k->bucket_max(logits, s->n_vocab, s->tops, &c.best))
        return name_not_finite(logits);
    const uint32_t n_allowed =
        change->mask == NULL ? s->n_vocab : count_allowed(s, change->mask, token);
    QSF_FAIL_IF(n_allowed == 0, ARG, "the mask allows none of %u tokens", s->n_vocab);
    if (n_allowed == 1 && change->mask != NULL)
        return QSF_OK;
    c.n_allowed = n_allowed;
    c.scores = adjust(s, logits, how, change);
    if (c.scores != logits) /* adjusted scores may be infinite */
        (void)k->bucket_max(c.scores, s->n_vocab, s->tops, &c.best);
    if (how->temperature == 0.0f) {
        *token = find_best(&c);
        return QSF_OK;
    }
    const race r = begin_race(random_state);
    if (how->top_k != 0 && how->top_k < s->n_vocab)
        *token = choose_top_k(&c, r);
    else if (how->top_p < 1.0f)
        *token = choose_top_p(&c, r);
    else
        *token = choose_any(&c, r);
    return QSF_OK;
}

qsf_status qsf_sampler_logprobs(qsf_sampler *s, const qsf_kernels *k, const float *logits,
                                uint32_t *tokens, float *logprobs, size_t n_tokens)
{
    const qsf_sampling plain = {.temperature = 1.0f};
    choosing c = {s, k, &plain, logits, 0.0f, s->n_vocab};
    if (!k->bucket_max(logits, s->n_vocab, s->tops, &c.best))
        return name_not_finite(logits);
    const double log_total = log_of(weigh_all(&c, 0.0f));
    const size_t n_top = n_tokens - 1;
    const uint32_t n = n_top > 0 ? gather(&c, n_top) : 0;
    for (size_t i = 0; i < n_top; i++)
        tokens[i + 1] = pop_best(&c, n - (uint32_t)i);
    for (size_t i = 0; i < n_tokens; i++)
        logprobs[i] = (float)((double)logits[tokens[i]] - (double)c.best - log_total);
    return QSF_OK;
}

void qsf_sampling_default(qsf_sampling *out)
{
    *out = (qsf_sampling){
        .repetition_penalty = 1.0f,
        .temperature = 0.7f,
        .top_k = 40,
        .top_p = 0.9f,
        .min_p = 0.0f,
    };
}

/* The conditions are written so that NaN fails. */
qsf_status qsf_sampling_check_shift(const char *name, float shift)
{
    return shift >= -MOST_SHIFT && shift <= MOST_SHIFT
               ? QSF_OK
               : QSF_FAIL(ARG, "%s is %g; it must be -1e6 to 1e6", name, (double)shift);
}

qsf_status qsf_sampling_check(const qsf_sampling *how)
{
    QSF_FAIL_IF(!(how->repetition_penalty > 0.0f) || !isfinite(how->repetition_penalty), ARG,
                "repetition_penalty is %g; it must be above 0", (double)how->repetition_penalty);
    QSF_TRY(qsf_sampling_check_shift("frequency_penalty", how->frequency_penalty));
    QSF_TRY(qsf_sampling_check_shift("presence_penalty", how->presence_penalty));
    QSF_FAIL_IF(!(how->temperature >= 0.0f) || !isfinite(how->temperature), ARG,
                "temperature is %g; it must be 0 or above", (double)how->temperature);
    QSF_FAIL_IF(!(how->top_p > 0.0f && how->top_p <= 1.0f), ARG,
                "top_p is %g; it must be above 0 and at most 1", (double)how->top_p);
    QSF_FAIL_IF(!(how->min_p >= 0.0f && how->min_p <= 1.0f), ARG, "min_p is %g; it must be 0 to 1",
                (double)how->min_p);
    return QSF_OK;
}
