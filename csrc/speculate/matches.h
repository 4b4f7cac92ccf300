/* matches.h - guesses the next token by the longest n-gram match in the context. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

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
