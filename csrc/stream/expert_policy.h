/* expert_policy.h - which experts stay in memory: counts of uses that fade with every token.
 *
 * Pure arithmetic: the same uses give the same decisions, whatever the clock or the disk does.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_STREAM_EXPERT_POLICY_H
#define QSF_STREAM_EXPERT_POLICY_H

#include <stdbool.h>
#include <stdint.h>

/* Each token multiplies all counts by this. */
#define QSF_EXPERT_DECAY 0.97F

typedef struct qsf_expert_policy {
    float *counts; /* [n] multiples of a growing unit: the counts need not all be multiplied */
    uint32_t n;
    float unit; /* what a use adds now */
} qsf_expert_policy;

/* counts [n] begin as the share of tokens that chose each expert, in [0, 1). */
void qsf_expert_policy_init(qsf_expert_policy *p, float *counts, uint32_t n);

/* n_tokens more have begun. */
void qsf_expert_policy_advance(qsf_expert_policy *p, uint32_t n_tokens);

/* n_tokens have chosen the expert. */
void qsf_expert_policy_use(qsf_expert_policy *p, uint32_t expert, uint32_t n_tokens);

/* True if `a` is rather given up than `b`: it has the smaller count, or of equal ones it is needed
 * later, distances being the layers until then. */
bool qsf_expert_policy_is_worse(const qsf_expert_policy *p, uint32_t a, uint32_t a_distance,
                                uint32_t b, uint32_t b_distance);

/* True if a missing expert, whose use is counted, takes the place of `victim`. */
bool qsf_expert_policy_admits(const qsf_expert_policy *p, uint32_t missing, uint32_t victim);

#endif
