/* followers.h - guesses the next token from what the model found likeliest after the same two
 * tokens, the same one, or any, when it last evaluated them ("token recycling"). Rows of wrong
 * drafts teach it too. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_SPECULATE_FOLLOWERS_H
#define QSF_SPECULATE_FOLLOWERS_H

#include <stdint.h>

#include "memory/arena.h"

/* How likely the model found a follower: 0.8 and more, 0.5, then half of the one before. */
#define QSF_FOLLOWER_CLASSES 7U

typedef struct qsf_follower {
    uint32_t token : 24; /* ids are below QSF_MAX_VOCAB */
    uint32_t class : 8;  /* below QSF_FOLLOWER_CLASSES */
} qsf_follower;

typedef struct qsf_follower_entry {
    uint32_t tag; /* of the tokens before, from 1 on; 0: empty */
    qsf_follower follower;
} qsf_follower_entry;

typedef struct qsf_followers {
    qsf_follower_entry *entries; /* a table by hash; a new entry takes the place of the old one */
} qsf_followers;

void qsf_followers_layout(qsf_followers *f, qsf_arena *a);

qsf_follower qsf_follower_of(uint32_t token, double probability);

/* Notes that this was the likeliest after tokens [n_tokens]. */
void qsf_followers_learn(qsf_followers *f, const uint32_t *tokens, uint32_t n_tokens,
                         qsf_follower likeliest);

/* Returns the follower of the last n_before, 1 or 2, of tokens [n_tokens]; NULL if there is none.
 */
const qsf_follower *qsf_followers_find(const qsf_followers *f, const uint32_t *tokens,
                                       uint32_t n_tokens, uint32_t n_before);

#endif
