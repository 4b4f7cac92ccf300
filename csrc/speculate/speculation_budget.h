/* speculation_budget.h - chooses the number of drafts of a pass by measured costs of passes and
 * measured acceptance rates of guesses. Generated text does not depend on it. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "include/qsf.h"

/* The source of a draft; there are QSF_N_GUESSERS. */
typedef enum qsf_guesser {
    QSF_GUESSER_MATCH = 0, /* n-gram match in the context */
    QSF_GUESSER_NGRAM = 1, /* n-gram table of earlier top predictions */
    QSF_GUESSER_MODEL = 2, /* a draft model */
    QSF_GUESSER_CALLER = 3 /* qsf_session_draft() */
} qsf_guesser;

/* Kinds of guesses; guesses of a kind have one acceptance rate. A kind is a range of match lengths,
 * a class of an n-gram of one or two tokens, or a range of the draft model's probability. */
#define QSF_KIND_MATCH 0U  /* 6 kinds */
#define QSF_KIND_NGRAM 6U  /* 7 kinds of one token before, 7 of two */
#define QSF_KIND_MODEL 20U /* 8 kinds */
#define QSF_N_KINDS 28U
#define QSF_KIND_CALLER 28U /* kind from which nothing is learned */

#define QSF_SPECULATION_SIZES 8U /* passes of 1, 2, 4 .. 128 rows */

/* How often guesses of a session are right; all zero at first. */
typedef struct qsf_chances {
    float n_hits[QSF_N_KINDS];
    float n_tries[QSF_N_KINDS];
    float n_text_hits; /* of all kinds of guesses from the text, and the number expected */
    float n_text_expected;
    float n_model_hits; /* of all kinds of a draft model's guesses */
    float n_model_tries;
} qsf_chances;

/* Durations of passes of a model; zero at first. */
typedef struct qsf_costs {
    double least_ns;                      /* shortest, for a pass of one row */
    double compute_ns;                    /* its part without waiting for the disk */
    double excess[QSF_SPECULATION_SIZES]; /* by which passes with drafts exceed the expected
                                             duration */
    double model_ns;                      /* of a step of the draft model */
    double credit_ns; /* time that the draft model may take without promising a gain */
} qsf_costs;

/* Drafts of one session that are being chosen, one after the other. */
typedef struct qsf_speculation_chain {
    struct qsf_speculation_chain *next; /* of another session in the same pass, or NULL */
    double
        paths[QSF_MAX_DRAFT_ROWS]; /* probability that a draft and all drafts before it are right */
    uint32_t n_drafts;
    uint32_t n_most;   /* drafts for which there is room */
    uint32_t n_taken;  /* first drafts that are taken, while choosing */
    uint32_t n_chosen; /* first drafts that are worth their time */
    uint32_t n_rows;   /* rows of the pass without drafts, of all sessions */
    double n_tokens;   /* expected tokens of the pass with these drafts alone */
    double model_ns;   /* time of the draft model for them */
} qsf_speculation_chain;

uint32_t qsf_speculation_kind_of_match(uint32_t n_tokens);
uint32_t qsf_speculation_kind_of_model(double probability);
qsf_guesser qsf_speculation_guesser_of(uint32_t kind);

/* The chance that a guess of this kind is right. */
double qsf_speculation_chance(const qsf_chances *t, uint32_t kind);
void qsf_speculation_count(qsf_chances *t, uint32_t kind, bool is_right);

/* Records the duration `ns` of a pass of n_rows rows, of which n_drafts were drafts; wait_ns of
 * it were spent waiting for the disk. */
void qsf_speculation_learn(qsf_costs *t, uint32_t n_rows, uint32_t n_drafts, uint64_t ns,
                           uint64_t wait_ns);

/* Duration of a pass of n_rows; 0 before the first measurement. */
double qsf_speculation_cost_ns(const qsf_costs *t, uint32_t n_rows);

/* Begins the drafts of a session, at most n_most, in a pass that has n_rows without any. */
void qsf_speculation_begin(qsf_speculation_chain *c, uint32_t n_rows, uint32_t n_most);

/* Appends a draft; `chance` is its probability to be right if all drafts before it are. False if
 * more drafts would not pay. */
bool qsf_speculation_append(qsf_speculation_chain *c, double chance);

/* True if the draft model should guess the next token of the chain, for which other sources have
 * a guess that is right with chance best_chance: it promises to save more time than it takes. A
 * hundredth of the time of passes is spent on guesses that promise nothing, to notice when they
 * would pay. */
bool qsf_speculation_wants_model(const qsf_costs *t, const qsf_chances *chances,
                                 const qsf_speculation_chain *c, double best_chance);

/* Records that the draft model needed `ns` for n_tokens tokens; its last guess is the chain's
 * next draft. */
void qsf_speculation_spend(qsf_costs *t, qsf_speculation_chain *c, uint64_t ns, uint32_t n_tokens);

/* Sets n_chosen of all chains of a pass: the most probable drafts, at most n_most, that are
 * worth their time. */
void qsf_speculation_choose(const qsf_costs *t, qsf_speculation_chain *first, uint32_t n_most);
