/* speculation_budget.h - chooses the number of drafts of a pass by measured costs of passes and
 * measured acceptance rates of guesses. Generated text does not depend on it. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_SPECULATE_SPECULATION_BUDGET_H
#define QSF_SPECULATE_SPECULATION_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

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
#define QSF_KIND_CALLER 28U /* of which nothing is learned */

#define QSF_SPECULATION_SIZES 8U /* passes of 1, 2, 4 .. 128 rows */

/* How often guesses of a session are right; all zero at first. */
typedef struct qsf_chances {
    float n_hits[QSF_N_KINDS];
    float n_tries[QSF_N_KINDS];
    float n_text_hits; /* of all kinds of guesses from the text, and those that were expected */
    float n_text_expected;
    float n_model_hits; /* of all kinds of a draft model's guesses */
    float n_model_tries;
} qsf_chances;

/* Durations of passes of a model; zero at first. */
typedef struct qsf_costs {
    double least_ns;                      /* of a pass of one row */
    double compute_ns;                    /* of it, without waiting for the disk */
    double excess[QSF_SPECULATION_SIZES]; /* share by which passes with drafts take more than
                                             expected */
    double model_ns;                      /* of a step of the draft model */
    double credit_ns; /* time that the draft model may take although it promises no gain */
} qsf_costs;

/* Drafts of one session that are being chosen, one after the other. */
typedef struct qsf_speculation_chain {
    struct qsf_speculation_chain *next; /* of another session in the same pass, or NULL */
    double
        paths[QSF_MAX_DRAFT_ROWS]; /* probability that a draft and all drafts before it are right */
    uint32_t n_drafts;
    uint32_t n_most;   /* that there is room for */
    uint32_t n_taken;  /* while they are being chosen: the first of them */
    uint32_t n_chosen; /* the first of them that are worth their time */
    uint32_t n_rows;   /* of the pass without drafts, of all sessions */
    double n_tokens;   /* that the pass yields with these drafts alone, on average */
    double model_ns;   /* that the draft model has taken for them */
} qsf_speculation_chain;

uint32_t qsf_speculation_kind_of_match(uint32_t n_tokens);
uint32_t qsf_speculation_kind_of_model(double probability);
qsf_guesser qsf_speculation_guesser_of(uint32_t kind);

/* The chance that a guess of this kind is right. */
double qsf_speculation_chance(const qsf_chances *t, uint32_t kind);
void qsf_speculation_count(qsf_chances *t, uint32_t kind, bool is_right);

/* Notes that a pass of n_rows, n_drafts of them drafts, took `ns`, of them wait_ns waiting for the
 * disk. */
void qsf_speculation_learn(qsf_costs *t, uint32_t n_rows, uint32_t n_drafts, uint64_t ns,
                           uint64_t wait_ns);

/* Duration of a pass of n_rows; 0 before the first measurement. */
double qsf_speculation_cost_ns(const qsf_costs *t, uint32_t n_rows);

/* Begins the drafts of a session, at most n_most, in a pass that has n_rows without any. */
void qsf_speculation_begin(qsf_speculation_chain *c, uint32_t n_rows, uint32_t n_most);

/* Appends a draft; `chance` is its probability to be right if all drafts before it are. False if
 * more drafts would not pay. */
bool qsf_speculation_append(qsf_speculation_chain *c, double chance);

/* True if the draft model should guess the next token of the chain, for which others have a guess
 * that is right with chance best_chance: it promises to save more time than it takes. A hundredth
 * of the time of passes goes to guesses that promise nothing, so that it is known when they do. */
bool qsf_speculation_wants_model(const qsf_costs *t, const qsf_chances *chances,
                                 const qsf_speculation_chain *c, double best_chance);

/* Notes that the draft model took `ns` for n_tokens tokens, of which the last guess is the chain's
 * next. */
void qsf_speculation_spend(qsf_costs *t, qsf_speculation_chain *c, uint64_t ns, uint32_t n_tokens);

/* Sets n_chosen of all chains of a pass: the likeliest of their drafts, at most n_most, and none
 * that is not worth its time. */
void qsf_speculation_choose(const qsf_costs *t, qsf_speculation_chain *first, uint32_t n_most);

#endif
