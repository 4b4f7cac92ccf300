/* followers.h - guesses the next token from what the model found likeliest after the same two
 * tokens, or the same one, when it last evaluated them ("token recycling"). Rows of wrong drafts
 * teach it too. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_GUESS_FOLLOWERS_H
#define QSF_GUESS_FOLLOWERS_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/arena.h"

typedef struct qsf_follower {
    uint32_t tag; /* of the tokens before, from 1 on; 0: empty */
    uint32_t token;
} qsf_follower;

typedef struct qsf_followers {
    qsf_follower *entries; /* a table by hash; a new entry takes the place of the old one */
} qsf_followers;

void qsf_followers_layout(qsf_followers *f, qsf_arena *a);

/* Notes that `token` was the likeliest after tokens [n_tokens]. */
void qsf_followers_learn(qsf_followers *f, const uint32_t *tokens, uint32_t n_tokens,
                         uint32_t token);

/* Finds what followed the last n_before, 1 or 2, of tokens [n_tokens]. */
bool qsf_followers_find(const qsf_followers *f, const uint32_t *tokens, uint32_t n_tokens,
                        uint32_t n_before, uint32_t *token);

#endif
