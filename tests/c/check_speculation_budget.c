/* check_speculation_budget.c - drafts lose no time: never where it was measured that they lose, and
 * on average less than 2 % where passes are noisy and the text is hard to guess. Time is simulated.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "check.h"
#include "engine/sample.h"
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
    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++)
        for (size_t e = 0; e < sizeof eases / sizeof eases[0]; e++)
            for (size_t n = 0; n < sizeof noises / sizeof noises[0]; n++) {
                double sum = 0.0;
                for (uint64_t seed = 0; seed < N_SEEDS; seed++)
                    sum += gain_of(&machines[m], eases[e], noises[n], seed);
                CHECK(sum / N_SEEDS > machines[m].least_gain);
                CHECK(m != 2 || eases[e] < 1.6 || sum / N_SEEDS > 1.4);
            }
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
            qsf_speculation_chain c;
            qsf_speculation_begin(&c, 1, 1);
            CHECK(qsf_speculation_append(&c, chance));
            qsf_speculation_choose(&costs, &c, 1);
            CHECK(c.n_chosen == 0 || 1.0 + chance > cost);
            CHECK(c.n_chosen == 1 || 1.0 + chance < cost * 1.06);
        }
}

int main(void)
{
    check_gains();
    check_measured_loss();
    return check_report("check_budget");
}
