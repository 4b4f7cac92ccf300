/* thrift.h - how many drafts a pass should have: what passes cost, and how often guesses are
 * right, both as measured. No text depends on it. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_GUESS_THRIFT_H
#define QSF_GUESS_THRIFT_H

#include <stdbool.h>
#include <stdint.h>

/* Who guessed; QSF_N_GUESSERS of them. */
typedef enum qsf_guesser {
    QSF_GUESSER_MATCH = 0,    /* an earlier place in the text */
    QSF_GUESSER_FOLLOWER = 1, /* what the model found likeliest there before */
    QSF_GUESSER_CALLER = 2    /* qsf_session_draft() */
} qsf_guesser;

/* Guesses of one kind, which are right equally often: a match of about this length, one token
 * before or two. */
#define QSF_KIND_MATCH 0U    /* 6 kinds */
#define QSF_KIND_FOLLOWER 6U /* + n_before - 1 */
#define QSF_N_KINDS 8U
#define QSF_KIND_CALLER 8U /* of which nothing is learned */

#define QSF_THRIFT_SIZES 8U /* passes of 1, 2, 4 .. 128 rows */

/* All zero at first */
typedef struct qsf_thrift {
    float n_hits[QSF_N_KINDS];
    float n_tries[QSF_N_KINDS];
    double pass_ns[QSF_THRIFT_SIZES];
    double compute_ns; /* of a pass of one row, without waiting for the disk */
} qsf_thrift;

uint32_t qsf_thrift_kind_of_match(uint32_t n_tokens);
qsf_guesser qsf_thrift_guesser_of(uint32_t kind);

/* The chance that a guess of this kind is right. */
double qsf_thrift_chance(const qsf_thrift *t, uint32_t kind);
void qsf_thrift_count(qsf_thrift *t, uint32_t kind, bool is_right);

/* Notes that a pass of n_rows took `ns`, of them wait_ns waiting for the disk. */
void qsf_thrift_learn(qsf_thrift *t, uint32_t n_rows, uint64_t ns, uint64_t wait_ns);

/* What a pass of n_rows takes; 0 before the first one was measured. */
double qsf_thrift_cost_ns(const qsf_thrift *t, uint32_t n_rows);

/* Returns how many of n_drafts should be in the next pass: paths [n_drafts] are the chances that a
 * draft and all before it are right. */
uint32_t qsf_thrift_choose(const qsf_thrift *t, const double *paths, uint32_t n_drafts);

#endif
