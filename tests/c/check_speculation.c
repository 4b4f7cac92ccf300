/* check_speculation.c - guesses are found, and drafts lose no time: never where it was measured
 * that they lose, and on average less than 2 % where passes are noisy and the text is hard to
 * guess. Time is simulated.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "check.h"
#include "engine/model.h"
#include "speculate/ngrams.h"
#include "speculate/speculation_budget.h"

#define N_TOKENS 400
#define N_SEEDS 12
#define PASS_NS 1e7

/* What passes of 1, 2, 4, 8 and 16 rows take, and the share of it that waits for the disk. */
typedef struct machine {
    double costs[5];
    double wait;
    double least_gain; /* beside one token a pass, that the mean of all seeds must reach */
} machine;

static const machine machines[] = {
    {{1, 1.1, 1.31, 1.7, 2.67}, 0.0, 0.98},      /* memory binds */
    {{1, 1.5, 2.4, 4.4, 8}, 0.0, 0.97},          /* arithmetic binds, which nobody has foreseen */
    {{1, 1.001, 1.002, 1.003, 1.005}, 0.9, 1.0}, /* a slow disk */
    {{1, 1.02, 1.08, 1.25, 1.7}, 0.3, 0.98},     /* part of the model is streamed */
};

static double cost_of(const machine *m, uint32_t n_rows)
{
    uint32_t i = 0;
    while (i < 3 && UINT32_C(2) << i < n_rows)
        i++;
    const double least = (double)(UINT32_C(1) << i);
    return m->costs[i] + (m->costs[i + 1] - m->costs[i]) * ((double)n_rows - least) / least;
}

/* Appends guesses of random kinds to the chain, until no more are worth looking for, and writes
 * their kinds. */
static uint32_t guess(qsf_speculation_chain *c, const qsf_chances *chances, uint64_t *random,
                      uint32_t *kinds)
{
    uint32_t n = 0;
    while (n < QSF_MAX_DRAFT_ROWS) {
        kinds[n] = (uint32_t)(qsf_random_uniform(random) * QSF_KIND_MODEL);
        if (!qsf_speculation_append(c, qsf_speculation_chance(chances, kinds[n++])))
            break;
    }
    return n;
}

/* Returns the tokens in the time of a pass of one row, for a text whose guesses are right `ease`
 * times as often as the first opinion of them is. */
static double gain_of(const machine *m, double ease, double noise, uint64_t random)
{
    const qsf_chances none = {0};
    qsf_chances chances = {0};
    qsf_costs costs = {0};
    double time = 0.0;
    uint32_t n_tokens = 0;
    while (n_tokens < N_TOKENS) {
        qsf_speculation_chain c;
        uint32_t kinds[QSF_MAX_DRAFT_ROWS];
        qsf_speculation_begin(&c, 1, QSF_MAX_DRAFT_ROWS);
        const uint32_t n_guesses = guess(&c, &chances, &random, kinds);
        qsf_speculation_choose(&costs, &c, QSF_MAX_DRAFT_ROWS);
        const uint32_t n_drafts = c.n_chosen;
        const double cost = cost_of(m, 1 + n_drafts);
        const double ns = PASS_NS * cost * exp(noise * 4.0 * (qsf_random_uniform(&random) - 0.5));
        time += cost;
        n_tokens++;
        qsf_speculation_learn(&costs, 1 + n_drafts, n_drafts, (uint64_t)ns,
                              (uint64_t)(ns * m->wait));
        for (uint32_t i = 0; i < n_guesses; i++) {
            const double chance = fmin(0.95, ease * qsf_speculation_chance(&none, kinds[i]));
            const bool is_right = qsf_random_uniform(&random) < chance;
            qsf_speculation_count(&chances, kinds[i], is_right);
            if (!is_right || i >= n_drafts)
                break;
            n_tokens++;
        }
    }
    return n_tokens / time;
}

static void check_gains(void)
{
    static const double eases[] = {0.1, 0.3, 0.6, 1.0, 1.6};
    static const double noises[] = {0.01, 0.1, 0.3};
    for (size_t m = 0; m < COUNT_OF(machines); m++)
        for (size_t e = 0; e < COUNT_OF(eases); e++)
            for (size_t n = 0; n < COUNT_OF(noises); n++) {
                double sum = 0.0;
                for (uint64_t seed = 0; seed < N_SEEDS; seed++)
                    sum += gain_of(&machines[m], eases[e], noises[n], seed);
                CHECK(sum / N_SEEDS > machines[m].least_gain);
                CHECK(m != 2 || eases[e] < 1.6 || sum / N_SEEDS > 1.4);
            }
}

/* How many of n_drafts are chosen, each right with this chance. */
static uint32_t chosen(const qsf_costs *t, uint32_t n_drafts, double chance)
{
    qsf_speculation_chain c;
    qsf_speculation_begin(&c, 1, QSF_MAX_DRAFT_ROWS);
    for (uint32_t i = 0; i < n_drafts; i++)
        (void)qsf_speculation_append(&c, chance);
    qsf_speculation_choose(t, &c, n_drafts);
    return c.n_chosen;
}

/* Passes of 1 and of 2 rows were measured often: a draft is chosen if it gains, and only then. */
static void check_measured_loss(void)
{
    for (double cost = 1.0; cost < 2.0; cost += 0.05)
        for (double chance = 0.05; chance < 1.0; chance += 0.05) {
            qsf_costs costs = {0};
            for (int i = 0; i < 60; i++) {
                qsf_speculation_learn(&costs, 1, 0, (uint64_t)PASS_NS, 0);
                qsf_speculation_learn(&costs, 2, 1, (uint64_t)(PASS_NS * cost), 0);
            }
            const uint32_t n_chosen = chosen(&costs, 1, chance);
            CHECK(n_chosen == 0 || 1.0 + chance > cost);
            CHECK(n_chosen == 1 || 1.0 + chance < cost * 1.06);
        }
}

/* ---- by hand ---- */

static const uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};

static void check_matches(void)
{
    static const uint32_t text[] = {7, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3};
    qsf_match m = qsf_match_find(text, 12);
    CHECK_EQ(m.n_tokens, 3);
    CHECK_EQ(m.next, 4);
    m = qsf_match_find(text, 11); /* both are of two tokens: the later one */
    CHECK_EQ(m.n_tokens, 2);
    CHECK_EQ(m.next, 7);
    m = qsf_match_extend(m, text, 12); /* 4 was foretold, and 3 came */
    CHECK_EQ(m.n_tokens, 3);
    CHECK_EQ(m.next, 4);
    m = qsf_match_extend(qsf_match_find(text, 2), text, 3);
    CHECK_EQ(m.n_tokens, 0);
    CHECK_EQ(qsf_match_find(text, 1).n_tokens, 0);
    CHECK_EQ(qsf_match_find(text, 0).n_tokens, 0);
    uint32_t ones[100];
    for (size_t i = 0; i < 100; i++)
        ones[i] = 1;
    m = qsf_match_find(ones, 100);
    CHECK_EQ(m.n_tokens, QSF_MATCH_MOST);
    CHECK_EQ(m.next, 99);
}

static void check_ngrams(void)
{
    static qsf_ngram_entry entries[1 << 15];
    static const double chances[QSF_NGRAM_CLASSES] = {0.8, 0.79, 0.49, 0.24, 0.1, 0.04, 0.0};
    for (uint32_t i = 0; i < QSF_NGRAM_CLASSES; i++) {
        CHECK_EQ(qsf_ngram_token_of(70 + i, chances[i]).token, 70 + i);
        CHECK_EQ(qsf_ngram_token_of(70 + i, chances[i]).class, i);
    }
    qsf_ngrams f = {entries};
    CHECK(qsf_ngrams_find(&f, tokens, 2, 2) == NULL);
    CHECK(qsf_ngrams_find(&f, tokens, 0, 1) == NULL);
    qsf_ngrams_learn(&f, tokens, 2, qsf_ngram_token_of(70, 0.9));
    qsf_ngrams_learn(&f, tokens + 4, 1, qsf_ngram_token_of(71, 0.6));
    const qsf_ngram_token *const found[] = {
        qsf_ngrams_find(&f, tokens, 2, 2),
        qsf_ngrams_find(&f, tokens + 1, 1, 1),
        qsf_ngrams_find(&f, tokens + 3, 2, 1),
    };
    for (size_t i = 0; i < COUNT_OF(found); i++)
        if (CHECK(found[i] != NULL)) {
            CHECK_EQ(found[i]->token, i == 2 ? 71 : 70);
            CHECK_EQ(found[i]->class, i == 2 ? 1 : 0);
        }
    CHECK(qsf_ngrams_find(&f, tokens + 1, 1, 2) == NULL);
    CHECK(qsf_ngrams_find(&f, tokens + 3, 2, 2) == NULL);
}

/* Guesses that are never right are not drafted; those that are always right are, as far as the
 * passes are cheap. */
static void check_budget(void)
{
    qsf_costs t = {0};
    qsf_chances chances = {0};
    CHECK_EQ(chosen(&t, 8, 1.0), 0); /* nothing was measured */
    for (int i = 0; i < 50; i++)
        qsf_speculation_learn(&t, 1, 0, 1000, 900); /* behind a disk */
    CHECK_EQ(chosen(&t, 8, 1.0), 8);
    CHECK_EQ(chosen(&t, 1, 0.01), 0);
    for (int i = 0; i < 50; i++)
        qsf_speculation_learn(&t, 4, 3, 5000, 0); /* passes of four cost more than four */
    CHECK(chosen(&t, 3, 1.0) < 3);
    for (int i = 0; i < 1500; i++)
        qsf_speculation_learn(&t, 1, 0, 1000, 900); /* what was measured long ago is forgotten */
    CHECK_EQ(chosen(&t, 3, 1.0), 3);
    const uint32_t kind = qsf_speculation_kind_of_match(40);
    CHECK_EQ(kind, qsf_speculation_kind_of_match(17));
    CHECK_EQ(qsf_speculation_kind_of_match(1), QSF_KIND_MATCH);
    CHECK(qsf_speculation_chance(&chances, kind) > 0.9);
    for (int i = 0; i < 200; i++)
        qsf_speculation_count(&chances, kind, false);
    CHECK(qsf_speculation_chance(&chances, kind) < 0.1);
    for (int i = 0; i < 500; i++)
        qsf_speculation_count(&chances, kind, true);
    CHECK(qsf_speculation_chance(&chances, kind) > 0.9);
}

/* Of two sessions the one whose guesses are likelier has more of the drafts, and with more sessions
 * in a pass each draft must gain more. */
static void check_budget_of_many(void)
{
    qsf_costs t = {0};
    qsf_speculation_chain chains[2];
    for (uint32_t i = 0; i < 2; i++) {
        qsf_speculation_begin(&chains[i], 2, QSF_MAX_DRAFT_ROWS);
        for (uint32_t j = 0; j < 6; j++)
            (void)qsf_speculation_append(&chains[i], i == 0 ? 0.9 : 0.4);
    }
    chains[0].next = &chains[1];
    qsf_speculation_choose(&t, chains, 12); /* nothing was measured */
    CHECK_EQ(chains[0].n_chosen + chains[1].n_chosen, 0);
    for (int i = 0; i < 50; i++)
        qsf_speculation_learn(&t, 2, 0, 1000, 900); /* behind a disk, never with one row */
    CHECK(qsf_speculation_cost_ns(&t, 1) > 900.0);
    qsf_speculation_choose(&t, chains, 4); /* 0.9, 0.81, 0.73, 0.66 before 0.4 */
    CHECK_EQ(chains[0].n_chosen, 4);
    CHECK_EQ(chains[1].n_chosen, 0);
    qsf_speculation_choose(&t, chains, 8); /* 0.59, 0.53, 0.4, 0.16 */
    CHECK_EQ(chains[0].n_chosen, 6);
    CHECK_EQ(chains[1].n_chosen, 2);
    for (int i = 0; i < 50; i++) {
        qsf_speculation_learn(&t, 2, 0, 1000, 900);
        qsf_speculation_learn(&t, 3, 1, 1500, 0); /* each row takes as much as the others */
    }
    qsf_speculation_choose(&t, chains, 1);
    CHECK_EQ(chains[0].n_chosen + chains[1].n_chosen, 0);
}

/* A draft model that is right takes steps as long as they save more than they take; one that is
 * wrong takes a hundredth of the time. */
static void check_budget_of_models(void)
{
    qsf_costs t = {0};
    qsf_chances chances = {0};
    qsf_speculation_chain c;
    qsf_speculation_begin(&c, 1, QSF_MAX_DRAFT_ROWS);
    CHECK(!qsf_speculation_wants_model(&t, &chances, &c, 0.0)); /* no pass was measured */
    qsf_speculation_learn(&t, 1, 0, 1000000, 900000);
    CHECK(qsf_speculation_wants_model(&t, &chances, &c, 0.0));
    CHECK(!qsf_speculation_wants_model(&t, &chances, &c, 0.9) || t.credit_ns > 0.0);
    CHECK_EQ(qsf_speculation_guesser_of(qsf_speculation_kind_of_model(1.0)), QSF_GUESSER_MODEL);
    CHECK_EQ(qsf_speculation_kind_of_model(1.0), QSF_KIND_MODEL + 7);
    CHECK_EQ(qsf_speculation_kind_of_model(0.0), QSF_KIND_MODEL);
    uint32_t n_steps = 0;
    for (; n_steps < 20 && qsf_speculation_wants_model(&t, &chances, &c, 0.0); n_steps++) {
        qsf_speculation_spend(&t, &c, 50000, 1);
        CHECK(qsf_speculation_append(&c, 0.9));
    }
    CHECK(n_steps > 3 && n_steps < 20);
    qsf_speculation_begin(&c, 1, QSF_MAX_DRAFT_ROWS);
    t.credit_ns = 0.0;
    CHECK(qsf_speculation_wants_model(&t, &chances, &c, 0.0));
    for (int i = 0; i < 600; i++)
        qsf_speculation_count(&chances, QSF_KIND_MODEL + 3, false);
    double model_ns = 0.0;
    for (int i = 0; i < 1000; i++) {
        qsf_speculation_begin(&c, 1, QSF_MAX_DRAFT_ROWS);
        if (qsf_speculation_wants_model(&t, &chances, &c, 0.0))
            qsf_speculation_spend(&t, &c, 50000, 1);
        model_ns += c.model_ns;
        qsf_speculation_learn(&t, 1, 0, 1000000, 900000);
    }
    CHECK(model_ns > 0.0 && model_ns <= 0.011 * 1000 * 1e6);
}

int main(void)
{
    check_gains();
    check_measured_loss();
    check_matches();
    check_ngrams();
    check_budget();
    check_budget_of_many();
    check_budget_of_models();
    return check_report("check_speculation");
}
