/* expert_policy.h - which experts stay in memory: counts of uses, decaying with every token.
 *
 * Pure arithmetic: the same uses give the same decisions, independent of clock and disk. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Factor of all counts with each token. */
#define QSF_EXPERT_DECAY 0.97F

typedef struct qsf_expert_policy {
    float *counts; /* [n] in a growing unit, instead of multiplying all counts with each token */
    uint32_t n;
    float unit; /* one use in the counts */
} qsf_expert_policy;

/* counts [n] begin as the share of tokens that chose each expert, in [0, 1). */
void qsf_expert_policy_init(qsf_expert_policy *p, float *counts, uint32_t n);

/* Call it before n_tokens more tokens. */
void qsf_expert_policy_advance(qsf_expert_policy *p, uint32_t n_tokens);

/* Counts n_tokens uses of the expert. */
void qsf_expert_policy_use(qsf_expert_policy *p, uint32_t expert, uint32_t n_tokens);

/* True if `a` should be evicted before `b`: its count is smaller, or equal and it is needed
 * later. Distances are layers until the next use. */
bool qsf_expert_policy_is_worse(const qsf_expert_policy *p, uint32_t a, uint32_t a_distance,
                                uint32_t b, uint32_t b_distance);

/* True if a missing expert, whose use is already counted, should replace `victim`. */
bool qsf_expert_policy_admits(const qsf_expert_policy *p, uint32_t missing, uint32_t victim);
