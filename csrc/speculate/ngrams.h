/* ngrams.h - a table of n-grams: the likeliest next tokens when the model last evaluated the same
 * one or two tokens ("token recycling"). Rows of rejected drafts update it too. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "memory/arena.h"

/* Classes of probability: from 0.8, from 0.5, then each half of the class before. */
#define QSF_NGRAM_CLASSES 7U

typedef struct qsf_ngram_token {
    uint32_t token : 24; /* ids are below QSF_MAX_VOCAB */
    uint32_t class : 8;  /* below QSF_NGRAM_CLASSES */
} qsf_ngram_token;

typedef struct qsf_ngram_entry {
    uint32_t tag; /* identifies the preceding tokens, from 1 on; 0: empty */
    qsf_ngram_token next;
} qsf_ngram_entry;

typedef struct qsf_ngrams {
    qsf_ngram_entry *entries; /* by hash; a new entry replaces the old one */
} qsf_ngrams;

void qsf_ngrams_layout(qsf_ngrams *f, qsf_arena *a);

qsf_ngram_token qsf_ngram_token_of(uint32_t token, double probability);

/* Records the likeliest next token after tokens [n_tokens]. */
void qsf_ngrams_learn(qsf_ngrams *f, const uint32_t *tokens, uint32_t n_tokens,
                      qsf_ngram_token likeliest);

/* Returns the next token after the last n_before, 1 or 2, of tokens [n_tokens]; NULL if the table
 * has no entry. */
const qsf_ngram_token *qsf_ngrams_find(const qsf_ngrams *f, const uint32_t *tokens,
                                       uint32_t n_tokens, uint32_t n_before);
