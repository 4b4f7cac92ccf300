/* thrift.c - running means and a rule. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "guess/thrift.h"

#include <math.h>

/* As many tries as the first opinion of a kind weighs. */
#define PRIOR_TRIES 6.0F
/* Then old tries count half. */
#define MOST_TRIES 96.0F
/* The same of all guesses of a draft model: so many that the first opinion hardly counts. */
#define MOST_MODEL_TRIES 512.0F
/* Of a new measurement, and of what is reckoned where none was made for long. */
#define NEW_SHARE 0.2
#define RECKONED_SHARE 0.02
/* One slow pass says little of the next. */
#define MOST_RATIO 3.0
/* A pass with drafts must promise so much more than one without. */
#define LEAST_GAIN 1.02
/* A draft that is less likely to be reached is not worth looking for. */
#define LEAST_PATH 0.02
/* Of the time of passes, for trying the draft model. */
#define CREDIT_SHARE 0.01
/* How often a draft model is right, until it is known. */
#define FIRST_MODEL_CHANCE 0.6

/* How often guesses are right in ordinary text, until it is known of this one. */
static const float first_chances[QSF_N_KINDS] = {
    0.15F, 0.3F,  0.5F, 0.7F, 0.85F, 0.95F,               /* by length of the match */
    0.25F, 0.4F,                                          /* followers of one token, of two */
    0.2F,  0.35F, 0.5F, 0.6F, 0.7F,  0.8F,  0.88F, 0.95F, /* by probability */
};

/* What passes of 1, 2, 4 .. rows cost where they only compute (docs/benchmarks.md). */
static const double compute_shares[QSF_THRIFT_SIZES] = {1, 1.1, 1.31, 1.96, 2.67, 4.2, 5.2, 10};

uint32_t qsf_thrift_kind_of_match(uint32_t n_tokens)
{
    uint32_t kind = QSF_KIND_MATCH;
    for (uint32_t most = 1; n_tokens > most && kind < QSF_KIND_FOLLOWER - 1; most *= 2)
        kind++;
    return kind;
}

uint32_t qsf_thrift_kind_of_model(double probability)
{
    const uint32_t eighth = probability > 0.0 ? (uint32_t)(fmin(probability, 1.0) * 8.0) : 0;
    return QSF_KIND_MODEL + (eighth < 8 ? eighth : 7);
}

qsf_guesser qsf_thrift_guesser_of(uint32_t kind)
{
    return kind < QSF_KIND_FOLLOWER ? QSF_GUESSER_MATCH
           : kind < QSF_KIND_MODEL  ? QSF_GUESSER_FOLLOWER
           : kind < QSF_N_KINDS     ? QSF_GUESSER_MODEL
                                    : QSF_GUESSER_CALLER;
}

double qsf_thrift_chance(const qsf_thrift *t, uint32_t kind)
{
    const float n_hits = t->n_hits[kind] + PRIOR_TRIES * first_chances[kind];
    return (double)(n_hits / (t->n_tries[kind] + PRIOR_TRIES));
}

static void count(float *n_hits, float *n_tries, float most_tries, bool is_right)
{
    *n_hits += is_right ? 1.0F : 0.0F;
    *n_tries += 1.0F;
    if (*n_tries < most_tries)
        return;
    *n_hits /= 2.0F;
    *n_tries /= 2.0F;
}

void qsf_thrift_count(qsf_thrift *t, uint32_t kind, bool is_right)
{
    count(&t->n_hits[kind], &t->n_tries[kind], MOST_TRIES, is_right);
    if (qsf_thrift_guesser_of(kind) == QSF_GUESSER_MODEL)
        count(&t->n_model_hits, &t->n_model_tries, MOST_MODEL_TRIES, is_right);
}

/* What a pass of 2^size rows takes if only one of a row was measured. */
static double reckoned_ns(const qsf_thrift *t, uint32_t size)
{
    return fmax(t->pass_ns[0], t->compute_ns * compute_shares[size]);
}

static void move(double *mean, double value, double share)
{
    *mean += (value - *mean) * (*mean == 0.0 ? 1.0 : share);
}

/* Finds the sizes that n_rows lie between; returns how close to the larger one, 0 to 1. */
static double place_of(uint32_t n_rows, uint32_t *size)
{
    *size = 0;
    while (*size + 2 < QSF_THRIFT_SIZES && UINT32_C(2) << *size < n_rows)
        (*size)++;
    const double n_least = (double)(UINT32_C(1) << *size);
    return ((double)n_rows - n_least) / n_least;
}

double qsf_thrift_cost_ns(const qsf_thrift *t, uint32_t n_rows)
{
    uint32_t size;
    const double share = place_of(n_rows, &size);
    return t->pass_ns[size] + (t->pass_ns[size + 1] - t->pass_ns[size]) * share;
}

void qsf_thrift_learn(qsf_thrift *t, uint32_t n_rows, uint64_t ns, uint64_t wait_ns)
{
    uint32_t size;
    const double share = place_of(n_rows, &size);
    t->credit_ns += (double)ns * CREDIT_SHARE;
    if (n_rows == 1) {
        move(&t->compute_ns, (double)(ns - (wait_ns < ns ? wait_ns : ns)), NEW_SHARE);
        move(&t->pass_ns[0], (double)ns, NEW_SHARE);
    } else if (t->pass_ns[0] > 0.0) {
        const double ratio = fmin((double)ns / qsf_thrift_cost_ns(t, n_rows), MOST_RATIO);
        t->pass_ns[size] *= 1.0 + (ratio - 1.0) * NEW_SHARE * (1.0 - share);
        t->pass_ns[size + 1] *= 1.0 + (ratio - 1.0) * NEW_SHARE * share;
    }
    for (uint32_t i = 1; i < QSF_THRIFT_SIZES; i++)
        if (n_rows == 1 || (i != size && i != size + 1))
            move(&t->pass_ns[i], reckoned_ns(t, i), RECKONED_SHARE);
}

void qsf_thrift_begin(qsf_thrift_chain *c)
{
    c->n_drafts = 0;
    c->n_tokens = 1.0;
    c->model_ns = 0.0;
}

/* The chance that all drafts are right. */
static double last_path(const qsf_thrift_chain *c)
{
    return c->n_drafts > 0 ? c->paths[c->n_drafts - 1] : 1.0;
}

bool qsf_thrift_append(qsf_thrift_chain *c, double chance)
{
    const double path = last_path(c) * chance;
    if (path < LEAST_PATH)
        return false;
    c->paths[c->n_drafts++] = path;
    c->n_tokens += path;
    return true;
}

/* The chance that the draft model's next guess is right, whatever its probability. */
static double model_chance(const qsf_thrift *t)
{
    const double n_hits = (double)t->n_model_hits + (double)PRIOR_TRIES * FIRST_MODEL_CHANCE;
    return n_hits / (double)(t->n_model_tries + PRIOR_TRIES);
}

bool qsf_thrift_wants_model(const qsf_thrift *t, const qsf_thrift_chain *c, double best_chance)
{
    if (t->pass_ns[0] == 0.0)
        return false;
    const double pass_ns = qsf_thrift_cost_ns(t, 1 + c->n_drafts);
    const double row_ns = fmax(0.0, qsf_thrift_cost_ns(t, 2 + c->n_drafts) - pass_ns);
    const double token_ns = (pass_ns + c->model_ns) / c->n_tokens;
    const double gain_ns = last_path(c) * (model_chance(t) - best_chance) * token_ns;
    return gain_ns > t->model_ns + row_ns || (c->n_drafts == 0 && t->credit_ns > 0.0);
}

void qsf_thrift_spend(qsf_thrift *t, qsf_thrift_chain *c, uint64_t ns, uint32_t n_tokens)
{
    c->model_ns += (double)ns;
    t->credit_ns = fmax(t->credit_ns - (double)ns, -t->pass_ns[0]);
    if (n_tokens <= 2) /* no prompt */
        move(&t->model_ns, (double)ns, NEW_SHARE);
}

uint32_t qsf_thrift_choose(const qsf_thrift *t, const qsf_thrift_chain *c)
{
    uint32_t n_best = 0;
    double best = LEAST_GAIN / (c->model_ns + qsf_thrift_cost_ns(t, 1));
    double n_tokens = 1.0;
    for (uint32_t i = 0; i < c->n_drafts && t->pass_ns[0] > 0.0; i++) {
        n_tokens += c->paths[i];
        const double rate = n_tokens / (c->model_ns + qsf_thrift_cost_ns(t, i + 2));
        if (rate > best) {
            best = rate;
            n_best = i + 1;
        }
    }
    return n_best;
}
