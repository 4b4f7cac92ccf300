/* sample.c - chooses a token. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/sample.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/status.h"

void qsf_sampler_layout(qsf_sampler *s, qsf_arena *a, uint32_t n_vocab)
{
    s->n_vocab = n_vocab;
    s->scores = qsf_arena_push(a, n_vocab, sizeof *s->scores);
    s->heap = qsf_arena_push(a, n_vocab, sizeof *s->heap);
    s->weights = qsf_arena_push(a, n_vocab, sizeof *s->weights);
    s->is_seen = qsf_arena_push(a, n_vocab, sizeof *s->is_seen);
}

double qsf_random_uniform(uint64_t *state)
{
    *state += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

/* exp(x) for x <= 0, the same on every machine, which libm does not promise:
 * x = n ln2 + r, |r| <= ln2 / 2, and thirteen terms of the series for exp(r). */
static double exp_of_negative(double x)
{
    if (!(x > -700.0))
        return 0.0;
    const double n = rint(x * 1.4426950408889634);
    const double r = fma(-n, 1.9082149292705877e-10, fma(-n, 6.93147180369123816490e-1, x));
    double sum = 1.0;
    for (int i = 13; i >= 1; i--)
        sum = fma(sum, r / (double)i, 1.0);
    return ldexp(sum, (int)n);
}

/* Is id a before id b in the order of falling score, lower id first? */
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

/* scores = logits with the repetition penalty (Keskar et al. 2019): every token that
 * occurred counts once. */
static qsf_status penalise(qsf_sampler *s, const float *logits, float penalty,
                           const uint32_t *recent, size_t n_recent)
{
    for (uint32_t i = 0; i < s->n_vocab; i++) {
        if (!isfinite(logits[i]))
            return QSF_FAIL(QSF_ERR_NUMERIC,
                            "the logit of token %u is %g: the weights are damaged "
                            "or the model overflows",
                            i, (double)logits[i]);
    }
    memcpy(s->scores, logits, s->n_vocab * sizeof *s->scores);
    if (penalty == 1.0f)
        return QSF_OK;
    for (size_t i = 0; i < n_recent; i++) {
        const uint32_t id = recent[i];
        if (s->is_seen[id])
            continue;
        s->is_seen[id] = 1;
        s->scores[id] = s->scores[id] > 0.0f ? s->scores[id] / penalty : s->scores[id] * penalty;
    }
    for (size_t i = 0; i < n_recent; i++)
        s->is_seen[recent[i]] = 0;
    return QSF_OK;
}

static uint32_t largest(const qsf_sampler *s)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < s->n_vocab; i++)
        best = s->scores[i] > s->scores[best] ? i : best;
    return best;
}

static double weight_of(const qsf_sampler *s, const qsf_sampling *how, uint32_t id, float best)
{
    if (s->scores[id] == best) /* also when the penalty has made both infinite */
        return 1.0;
    return exp_of_negative(((double)s->scores[id] - (double)best) / (double)how->temperature);
}

/* Without top-k and top-p no order is needed: one pass to weigh, one to find. */
static uint32_t choose_any(qsf_sampler *s, const qsf_sampling *how, double draw)
{
    const float best = s->scores[largest(s)];
    double sum = 0.0;
    for (uint32_t i = 0; i < s->n_vocab; i++) {
        const double weight = weight_of(s, how, i, best);
        s->weights[i] = weight >= (double)how->min_p ? weight : 0.0;
        sum += s->weights[i];
    }
    double left = draw * sum;
    uint32_t chosen = 0;
    for (uint32_t i = 0; i < s->n_vocab; i++) {
        if (s->weights[i] == 0.0)
            continue;
        chosen = i; /* rounding may leave `left` above the last weight */
        if (left < s->weights[i])
            break;
        left -= s->weights[i];
    }
    return chosen;
}

/* Takes the next best id off the heap of n ids and returns it; it then lies behind them. */
static uint32_t pop_best(qsf_sampler *s, uint32_t n)
{
    const uint32_t id = s->heap[0];
    s->heap[0] = s->heap[n - 1];
    s->heap[n - 1] = id;
    if (n > 1)
        sift_down(s->scores, s->heap, n - 1, 0);
    return id;
}

/* Takes ids in falling order, as far as top-k, top-p and min-p let them. */
static uint32_t choose_ordered(qsf_sampler *s, const qsf_sampling *how, double draw)
{
    const uint32_t n = s->n_vocab;
    const uint32_t limit = how->top_k == 0 || how->top_k > n ? n : how->top_k;
    const float best = s->scores[largest(s)];
    for (uint32_t i = 0; i < n; i++)
        s->heap[i] = i;
    for (size_t i = n / 2; i-- > 0;)
        sift_down(s->scores, s->heap, n, i);

    double total = 0.0; /* what top-p is a fraction of: the top-k, or everything */
    for (uint32_t i = 0; limit == n && i < n; i++)
        total += weight_of(s, how, i, best);
    for (uint32_t i = 0; limit < n && i < limit; i++) {
        s->weights[i] = weight_of(s, how, pop_best(s, n - i), best);
        total += s->weights[i];
    }
    const double enough = how->top_p < 1.0f ? (double)how->top_p * total : total;
    double sum = 0.0;
    uint32_t n_kept = 0;
    while (n_kept < limit && (n_kept == 0 || sum < enough)) {
        if (limit == n)
            s->weights[n_kept] = weight_of(s, how, pop_best(s, n - n_kept), best);
        if (n_kept > 0 && s->weights[n_kept] < (double)how->min_p)
            break;
        sum += s->weights[n_kept++];
    }
    double left = draw * sum;
    uint32_t i = 0;
    while (i + 1 < n_kept && left >= s->weights[i])
        left -= s->weights[i++];
    return s->heap[n - 1 - i];
}

qsf_status qsf_sampler_choose(qsf_sampler *s, const float *logits, const qsf_sampling *how,
                              const uint32_t *recent, size_t n_recent, uint64_t *random_state,
                              uint32_t *token)
{
    const qsf_status status = penalise(s, logits, how->repetition_penalty, recent, n_recent);
    if (status != QSF_OK)
        return status;
    if (how->temperature == 0.0f) {
        *token = largest(s);
        return QSF_OK;
    }
    const bool wants_order = (how->top_k != 0 && how->top_k < s->n_vocab) || how->top_p < 1.0f;
    const double draw = qsf_random_uniform(random_state);
    *token = wants_order ? choose_ordered(s, how, draw) : choose_any(s, how, draw);
    return QSF_OK;
}
