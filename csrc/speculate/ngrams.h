/* ngrams.h - a table of n-grams: the likeliest next tokens when the model last evaluated the same
 * one or two tokens ("token recycling"). Rows of rejected drafts update it too. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

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

/* ---- guesses the next token by the longest n-gram match in the context ---- */

/* Longer matches count as equal. */
#define QSF_MATCH_MOST 32U

/* The longest end of a text that occurs earlier in it; of equally long ones the latest. */
typedef struct qsf_match {
    uint32_t next;     /* index of the token that followed then, below n_tokens */
    uint32_t n_tokens; /* length of the match, at most QSF_MATCH_MOST; 0: none */
} qsf_match;

/* Looks for the end of tokens [n_tokens] among the latest 32,768 of them. */
qsf_match qsf_match_find(const uint32_t *tokens, uint32_t n_tokens);

/* Returns the match after the text has grown by its last token, of tokens [n_tokens]: the
 * continued match if it predicted the token, else a new one. */
qsf_match qsf_match_extend(qsf_match before, const uint32_t *tokens, uint32_t n_tokens);
