/* sample.h - from logits to a token: mask, biases, penalties, temperature, top-k, top-p, min-p.
 *
 * Deterministic: it has its own random generator and exponentials, and of equal logits prefers the
 * lower id. Allocates nothing.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "include/qsf.h"
#include "kernels/kernels.h"
#include "memory/arena.h"

typedef struct qsf_sampler {
    uint32_t n_vocab;
    float *adjusted;  /* [n_vocab] logits after mask, biases and penalties */
    uint32_t *heap;   /* [n_vocab] ids of candidates; those taken off are at the end */
    double *weights;  /* [n_vocab] exp((score - largest) / temperature) by rank */
    float *odds;      /* [n_vocab] the same by id, rounded; shares the memory of weights */
    float *tops;      /* [buckets] largest score of each; see kernels.h */
    float *sums;      /* [strips] of the odds */
    uint8_t *is_seen; /* [n_vocab] marks, all zero between calls */
} qsf_sampler;

/* Changes of the logits for one choice. */
typedef struct qsf_adjustment {
    const uint32_t *recent; /* [n_recent] ids below n_vocab, see qsf_choose_item */
    size_t n_recent;
    size_t n_counted;
    const uint32_t *mask;   /* [ceil(n_vocab / 32)], or NULL */
    const uint32_t *biased; /* [n_biased] ids below n_vocab */
    const float *biases;
    size_t n_biased;
} qsf_adjustment;

void qsf_sampler_layout(qsf_sampler *s, qsf_arena *a, uint32_t n_vocab);

/* QSF_ERR_ARG names the parameter that is out of range. _shift: checks a number that is added to
 * logits. */
qsf_status qsf_sampling_check_shift(const char *name, float shift);
qsf_status qsf_sampling_check(const qsf_sampling *how);

/* logits [n_vocab]. The parameters have been checked. QSF_ERR_NUMERIC: a logit is not finite.
 * QSF_ERR_ARG: the mask allows no token. */
qsf_status qsf_sampler_choose(qsf_sampler *s, const qsf_kernels *k, const float *logits,
                              const qsf_sampling *how, const qsf_adjustment *change,
                              uint64_t *random_state, uint32_t *token);

/* logits [n_vocab]; tokens [n_tokens], 1 <= n_tokens <= n_vocab + 1, tokens[0] below n_vocab: see
 * qsf_session_logprobs(). QSF_ERR_NUMERIC: a logit is not finite. */
qsf_status qsf_sampler_logprobs(qsf_sampler *s, const qsf_kernels *k, const float *logits,
                                uint32_t *tokens, float *logprobs, size_t n_tokens);

/* Returns the next number of a splitmix64 sequence (Steele, Lea, Flood 2014); _uniform: in [0, 1).
 */
uint64_t qsf_random_next(uint64_t *state);
double qsf_random_uniform(uint64_t *state);

/* Returns the state after n_draws more. */
uint64_t qsf_random_after(uint64_t state, uint32_t n_draws);
