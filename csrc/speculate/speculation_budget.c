/* speculation_budget.c - running means of acceptance and cost, and the choice of the number of
 * drafts. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "speculate/speculation_budget.h"

#include <math.h>

/* Weight of the initial estimate of a kind's acceptance rate, in tries. */
#define PRIOR_TRIES 6.0F
/* After so many tries old ones count half. */
#define MOST_TRIES 96.0F
/* Likewise for the guesses of a draft model, which are so many that the initial estimate hardly
 * counts. */
#define MOST_MODEL_TRIES 512.0F
/* Weight of the initial estimate, and where old hits count half, for all guesses from the text. */
#define PRIOR_TEXT_HITS 2.0F
#define MOST_TEXT_HITS 64.0F
/* Weights of a new measurement: of the machine's speed after a pass without drafts, after one
 * with drafts, and of the additional cost of drafts. The last is a mean over many passes, so
 * that chance does not decide. */
#define NEW_SHARE 0.2
#define SPEED_SHARE 0.05
#define EXCESS_SHARE 0.15
/* Each pass reduces the remembered cost of drafts by this share, so that expensive ones are
 * tried again. */
#define FORGOTTEN_SHARE 0.004
/* Limit of one measurement: a single slow pass predicts little. */
#define MOST_RATIO 3.0
/* A pass with drafts must promise this many times the speed of one without. */
#define LEAST_GAIN 1.03
/* A draft less probable than this is not worth searching for. */
#define LEAST_PATH 0.02
/* Share of the time of passes that goes into trials of the draft model. */
#define CREDIT_SHARE 0.01
/* How often a draft model is right, until it is known. */
#define FIRST_MODEL_CHANCE 0.6

/* Assumed acceptance rate of guesses from the text, before measurements. */
static const float first_chances[QSF_N_KINDS] = {
    0.15F, 0.3F,  0.5F,  0.7F,  0.85F, 0.95F,        /* by length of the match */
    0.5F,  0.35F, 0.25F, 0.12F, 0.06F, 0.03F, 0.01F, /* n-grams of one token, by probability */
    0.7F,  0.5F,  0.3F,  0.15F, 0.08F, 0.04F, 0.02F, /* of two */
    0.2F,  0.35F, 0.5F,  0.6F,  0.7F,  0.8F,  0.88F, 0.95F, /* by probability */
};

/* Relative costs of passes of 1, 2, 4 .. rows that only compute (docs/benchmarks.md). */
static const double compute_shares[QSF_SPECULATION_SIZES] = {1,    1.1, 1.31, 1.96,
                                                             2.67, 4.2, 5.2,  10};

uint32_t qsf_speculation_kind_of_match(uint32_t n_tokens)
{
    uint32_t kind = QSF_KIND_MATCH;
    for (uint32_t most = 1; n_tokens > most && kind < QSF_KIND_NGRAM - 1; most *= 2)
        kind++;
    return kind;
}

uint32_t qsf_speculation_kind_of_model(double probability)
{
    const uint32_t eighth = probability > 0.0 ? (uint32_t)(fmin(probability, 1.0) * 8.0) : 0;
    return QSF_KIND_MODEL + (eighth < 8 ? eighth : 7);
}

qsf_guesser qsf_speculation_guesser_of(uint32_t kind)
{
    return kind < QSF_KIND_NGRAM   ? QSF_GUESSER_MATCH
           : kind < QSF_KIND_MODEL ? QSF_GUESSER_NGRAM
           : kind < QSF_N_KINDS    ? QSF_GUESSER_MODEL
                                   : QSF_GUESSER_CALLER;
}

/* Acceptance rate of guesses from the text, relative to the initial estimates. */
static float luck_of(const qsf_chances *t)
{
    const float luck = (t->n_text_hits + PRIOR_TEXT_HITS) / (t->n_text_expected + PRIOR_TEXT_HITS);
    return luck < 1.0F ? luck : 1.0F;
}

double qsf_speculation_chance(const qsf_chances *t, uint32_t kind)
{
    const float luck = kind < QSF_KIND_MODEL ? luck_of(t) : 1.0F;
    const float n_hits = t->n_hits[kind] + PRIOR_TRIES * first_chances[kind] * luck;
    return (double)(n_hits / (t->n_tries[kind] + PRIOR_TRIES));
}

static void count(float *n_hits, float *n_tries, float most_tries, bool is_right, float more)
{
    *n_hits += is_right ? 1.0F : 0.0F;
    *n_tries += more;
    if (*n_tries < most_tries)
        return;
    *n_hits /= 2.0F;
    *n_tries /= 2.0F;
}

void qsf_speculation_count(qsf_chances *t, uint32_t kind, bool is_right)
{
    count(&t->n_hits[kind], &t->n_tries[kind], MOST_TRIES, is_right, 1.0F);
    if (kind >= QSF_KIND_MODEL)
        count(&t->n_model_hits, &t->n_model_tries, MOST_MODEL_TRIES, is_right, 1.0F);
    if (kind < QSF_KIND_MODEL)
        count(&t->n_text_hits, &t->n_text_expected, MOST_TEXT_HITS, is_right, first_chances[kind]);
}

static void move(double *mean, double value, double share)
{
    *mean += (value - *mean) * (*mean == 0.0 ? 1.0 : share);
}

/* Finds the sizes around n_rows; returns the position between them, 0 to 1. */
static double place_of(uint32_t n_rows, uint32_t *size)
{
    *size = 0;
    while (*size + 2 < QSF_SPECULATION_SIZES && UINT32_C(2) << *size < n_rows)
        (*size)++;
    const double n_least = (double)(UINT32_C(1) << *size);
    return ((double)n_rows - n_least) / n_least;
}

/* Reads a table of sizes at n_rows, which may lie beyond the largest. */
static double at_rows(const double *table, uint32_t n_rows)
{
    uint32_t size;
    const double share = place_of(n_rows, &size);
    return table[size] + (table[size + 1] - table[size]) * share;
}

/* Expected duration of a pass. The disk does not hide the computing of more rows, because
 * readers and checksums need the cores too. */
static double reckoned_ns(const qsf_costs *t, double compute_share)
{
    return t->least_ns + t->compute_ns * (compute_share - 1.0);
}

double qsf_speculation_cost_ns(const qsf_costs *t, uint32_t n_rows)
{
    double table[QSF_SPECULATION_SIZES];
    for (uint32_t i = 0; i < QSF_SPECULATION_SIZES; i++)
        table[i] = reckoned_ns(t, compute_shares[i]) * (1.0 + t->excess[i]);
    return at_rows(table, n_rows);
}

/* A pass without drafts shows the current speed of the machine. */
static void learn_speed(qsf_costs *t, uint32_t n_rows, double ns, double wait_ns)
{
    const double share = at_rows(compute_shares, n_rows);
    const double row_ns = (ns - fmin(wait_ns, ns)) / share;
    const double least_ns = ns - row_ns * (share - 1.0);
    const double most_ns = t->least_ns * MOST_RATIO;
    const double scale = t->least_ns > 0.0 && least_ns > most_ns ? most_ns / least_ns : 1.0;
    move(&t->compute_ns, row_ns * scale, NEW_SHARE);
    move(&t->least_ns, least_ns * scale, NEW_SHARE);
}

/* A part of the difference from the expected duration is the machine's speed, the rest is the
 * cost of drafts. */
static void learn_excess(qsf_costs *t, uint32_t n_rows, uint32_t n_drafts, double ns)
{
    uint32_t size;
    const double share = place_of(n_rows, &size);
    const double change = fmin(ns / qsf_speculation_cost_ns(t, n_rows), MOST_RATIO) - 1.0;
    for (uint32_t i = size; i < size + 2; i++)
        if (UINT32_C(1) << i >
            n_rows - n_drafts) /* drafts reveal nothing about the pass without them */
            t->excess[i] += (1.0 + t->excess[i]) * change * EXCESS_SHARE *
                            fmin(1.0, 2.0 * (i == size ? 1.0 - share : share));
    t->least_ns *= 1.0 + change * SPEED_SHARE;
    t->compute_ns *= 1.0 + change * SPEED_SHARE;
}

void qsf_speculation_learn(qsf_costs *t, uint32_t n_rows, uint32_t n_drafts, uint64_t ns,
                           uint64_t wait_ns)
{
    t->credit_ns += (double)ns * CREDIT_SHARE;
    if (n_rows > UINT32_C(1) << (QSF_SPECULATION_SIZES - 1))
        return;
    for (uint32_t i = 0; i < QSF_SPECULATION_SIZES; i++)
        t->excess[i] -= t->excess[i] * FORGOTTEN_SHARE;
    if (n_drafts == 0)
        learn_speed(t, n_rows, (double)ns, (double)wait_ns);
    else if (t->least_ns > 0.0)
        learn_excess(t, n_rows, n_drafts, (double)ns);
}

void qsf_speculation_begin(qsf_speculation_chain *c, uint32_t n_rows, uint32_t n_most)
{
    c->next = NULL;
    c->n_drafts = c->n_chosen = 0;
    c->n_most = n_most;
    c->n_rows = n_rows;
    c->n_tokens = n_rows;
    c->model_ns = 0.0;
}

/* The chance that all drafts are right. */
static double last_path(const qsf_speculation_chain *c)
{
    return c->n_drafts > 0 ? c->paths[c->n_drafts - 1] : 1.0;
}

bool qsf_speculation_append(qsf_speculation_chain *c, double chance)
{
    const double path = last_path(c) * chance;
    if (path < LEAST_PATH)
        return false;
    c->paths[c->n_drafts++] = path;
    c->n_tokens += path;
    return true;
}

/* The chance that the draft model's next guess is right, whatever its probability. */
static double model_chance(const qsf_chances *t)
{
    const double n_hits = (double)t->n_model_hits + (double)PRIOR_TRIES * FIRST_MODEL_CHANCE;
    return n_hits / (double)(t->n_model_tries + PRIOR_TRIES);
}

bool qsf_speculation_wants_model(const qsf_costs *t, const qsf_chances *chances,
                                 const qsf_speculation_chain *c, double best_chance)
{
    if (t->least_ns == 0.0)
        return false;
    const uint32_t n_rows = c->n_rows + c->n_drafts;
    const double pass_ns = qsf_speculation_cost_ns(t, n_rows);
    const double row_ns = fmax(0.0, qsf_speculation_cost_ns(t, n_rows + 1) - pass_ns);
    const double token_ns = (pass_ns + c->model_ns) / c->n_tokens;
    const double gain_ns = last_path(c) * (model_chance(chances) - best_chance) * token_ns;
    return gain_ns > t->model_ns + row_ns || (c->n_drafts == 0 && t->credit_ns > 0.0);
}

void qsf_speculation_spend(qsf_costs *t, qsf_speculation_chain *c, uint64_t ns, uint32_t n_tokens)
{
    c->model_ns += (double)ns;
    t->credit_ns = fmax(t->credit_ns - (double)ns, -t->least_ns);
    if (n_tokens <= 2) /* no prompt */
        move(&t->model_ns, (double)ns, NEW_SHARE);
}

/* Takes the most probable of the drafts not taken whose predecessors are taken; returns its path
 * probability, or 0 if there is none. */
static double take_likeliest(qsf_speculation_chain *first)
{
    qsf_speculation_chain *best = NULL;
    double path = 0.0;
    for (qsf_speculation_chain *c = first; c != NULL; c = c->next)
        if (c->n_taken < c->n_drafts && c->n_taken < c->n_most && c->paths[c->n_taken] > path) {
            path = c->paths[c->n_taken];
            best = c;
        }
    if (best != NULL)
        best->n_taken++;
    return path;
}

void qsf_speculation_choose(const qsf_costs *t, qsf_speculation_chain *first, uint32_t n_most)
{
    double model_ns = 0.0;
    for (qsf_speculation_chain *c = first; c != NULL; c = c->next) {
        c->n_taken = c->n_chosen = 0;
        model_ns += c->model_ns;
    }
    if (first == NULL || t->least_ns == 0.0)
        return;
    double n_tokens = first->n_rows;
    double best = LEAST_GAIN * n_tokens / (model_ns + qsf_speculation_cost_ns(t, first->n_rows));
    for (uint32_t n = 1; n <= n_most; n++) {
        const double path = take_likeliest(first);
        if (path == 0.0)
            return;
        n_tokens += path;
        const double rate = n_tokens / (model_ns + qsf_speculation_cost_ns(t, first->n_rows + n));
        if (rate <= best)
            continue;
        best = rate;
        for (qsf_speculation_chain *c = first; c != NULL; c = c->next)
            c->n_chosen = c->n_taken;
    }
}
