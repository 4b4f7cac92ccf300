/* expert_policy.c - counts in a unit that grows with every token. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/expert_policy.h"

/* Counts of an expert that a share s of all tokens chooses approach s / (1 - decay). */
#define STEADY (1.0F / (1.0F - QSF_EXPERT_DECAY))
/* A chunk of 1024 tokens makes the unit 3e13 times larger: far below the largest float. */
#define MAX_UNIT 1e15F

void qsf_expert_policy_init(qsf_expert_policy *p, float *counts, uint32_t n)
{
    *p = (qsf_expert_policy){counts, n, 1.0F};
    for (uint32_t i = 0; i < n; i++)
        counts[i] *= STEADY;
}

void qsf_expert_policy_advance(qsf_expert_policy *p, uint32_t n_tokens)
{
    for (uint32_t t = 0; t < n_tokens; t++) {
        p->unit /= QSF_EXPERT_DECAY;
        if (p->unit <= MAX_UNIT)
            continue;
        for (uint32_t i = 0; i < p->n; i++)
            p->counts[i] /= p->unit;
        p->unit = 1.0F;
    }
}

void qsf_expert_policy_use(qsf_expert_policy *p, uint32_t expert, uint32_t n_tokens)
{
    p->counts[expert] += (float)n_tokens * p->unit;
}

bool qsf_expert_policy_is_worse(const qsf_expert_policy *p, uint32_t a, uint32_t a_distance,
                                uint32_t b, uint32_t b_distance)
{
    if (p->counts[a] != p->counts[b])
        return p->counts[a] < p->counts[b];
    return a_distance > b_distance;
}

bool qsf_expert_policy_admits(const qsf_expert_policy *p, uint32_t missing, uint32_t victim)
{
    return p->counts[missing] > p->counts[victim];
}
