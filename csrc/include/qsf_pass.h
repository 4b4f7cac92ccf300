/* qsf_pass.h - part of qsf.h: many sessions in one pass over the weights, choosing for many. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PASS_H
#define QSF_PASS_H

#include "qsf_session.h"

QSF_C_BEGIN

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

/* Which tokens of an item get logits. */
#define QSF_WANTS_NONE 0
#define QSF_WANTS_LAST 1
#define QSF_WANTS_ALL 2
#define QSF_WANTS_AHEAD 3 /* the last, and the pass may evaluate drafts of the next tokens */

/* One session's part of a pass. */
typedef struct qsf_pass_item {
    qsf_session *session;   /* each session at most once in a pass */
    const uint32_t *tokens; /* [n_tokens] follow the tokens that the session holds */
    uint32_t n_tokens;      /* at least 1: a part of a prompt, or one more token */
    uint32_t wants;         /* QSF_WANTS_* */
    float *logits;          /* [n_tokens, n_vocab] receives them for QSF_WANTS_ALL; else unused */
    qsf_status status;      /* the result; QSF_OK: the session holds the tokens */
    /* The hidden states of the last n_hidden tokens, of an encoder the first ones, after the last
     * norm, where the head would read them, are added to hidden [vector_dim] one after the other;
     * 0: none. For QSF_WANTS_NONE only. */
    uint32_t n_hidden;
    double *hidden;
    float *residual; /* [n_tokens, dim] receives the rows after the last layer of a stage without a
                      * head; NULL: they are not needed. NULL for other models */
} qsf_pass_item;

/* Rows that a stage needs of the layers before its first one. */
typedef struct qsf_rows_wanted {
    qsf_session *session;
    const uint32_t *held; /* [n_held] the tokens before the new ones */
    uint32_t n_held;
    const uint32_t *tokens; /* [n_tokens] */
    uint32_t n_tokens;
} qsf_rows_wanted;

/* Fills rows [sum of n_tokens, stride], of which dim columns are used, with the residual after the
 * layer before the stage. Another value than 0 ends the pass with QSF_ERR_CANCELLED if all of its
 * sessions are cancelled, else with QSF_ERR_IO. Runs in the thread of the call that evaluates, and
 * must not call the model or its sessions, but for qsf_session_is_cancelled(). */
typedef int (*qsf_rows_source)(void *arg, const qsf_rows_wanted *wanted, uint32_t n_wanted,
                               float *rows, size_t stride);

/* Says where a stage that is not the first gets its rows; call before the first pass. `source` and
 * `arg` must outlive the model. QSF_ERR_ARG: the model has its first layer. */
QSF_API qsf_status qsf_model_set_source(qsf_model *m, qsf_rows_source source, void *arg);

/* Returns 1 if qsf_session_cancel() was called and no pass has ended since; from any thread. */
QSF_API uint32_t qsf_session_is_cancelled(const qsf_session *s);

typedef struct qsf_pass_report {
    uint64_t ns;         /* duration of the pass, without waiting for its turn */
    uint64_t wait_ns;    /* part of it spent waiting for streamed weights */
    uint64_t read_bytes; /* weights read meanwhile, partly ahead for the next pass */
    uint32_t n_tokens;   /* of all items */
    uint32_t n_rows;     /* tokens with logits */
    uint32_t n_drafts;   /* drafts evaluated in addition */
} qsf_pass_report;

/* Evaluates the tokens of all items in one pass over the weights: at most chunk_tokens of the plan,
 * and logits for at most logits_rows of them, or for any number if only one item wants some.
 * The results are the same bits as in passes of one session each. The logits of an item's last
 * token become its session's, if it wants any. *report, unless NULL, is filled. Allocates no
 * memory. A session that is cancelled meanwhile does not change, and its item has
 * QSF_ERR_CANCELLED; when all are, the pass ends early. Returns QSF_OK if an item succeeded.
 * QSF_ERR_ARG: nothing was evaluated. After other errors all items have that status, and no
 * session holds other tokens. */
QSF_API qsf_status qsf_model_pass(qsf_model *m, qsf_pass_item *items, uint32_t n_items,
                                  qsf_pass_report *report);

/* Returns 1 if a pass with QSF_WANTS_AHEAD has already evaluated this token as the session's
 * next one; else 0. If this is true for the single tokens of all items, and all want
 * QSF_WANTS_AHEAD, the next qsf_model_pass() evaluates nothing. Run such items first: a pass
 * that evaluates discards the drafts of all sessions. */
QSF_API uint32_t qsf_session_is_ahead(qsf_session *s, uint32_t token);

/* The choice of one token. Unused pointers are NULL, unused numbers 0. */
typedef struct qsf_choose_item {
    qsf_session *session;    /* its logits are used; NULL if logits are given */
    const float *logits;     /* [n_vocab] instead of the session's, such as a row of a pass */
    const qsf_sampling *how; /* NULL: chooses nothing, `token` is the caller's */
    const uint32_t *recent;  /* [n_recent] the repetition penalty applies to these tokens, */
    size_t n_recent;         /* presence and frequency penalty to the last n_counted of them */
    size_t n_counted;        /* at most n_recent */
    const uint32_t *mask;   /* [ceil(n_vocab / 32)] token i is allowed: bit i % 32 of word i / 32 */
    const uint32_t *biased; /* [n_biased] tokens that `biases` are added to the logits of */
    const float *biases;    /* [n_biased] -1e6 .. 1e6 */
    size_t n_biased;
    uint64_t random_state;    /* as in qsf_session_sample(); nothing is drawn if only one token is
                                 allowed */
    uint32_t token;           /* the result */
    uint32_t *logprob_tokens; /* [n_logprobs] receives the token, then the most probable ones, */
    float *logprobs;          /* [n_logprobs] and these their log-probabilities, as those of */
    size_t n_logprobs;        /* qsf_session_logprobs() */
    qsf_status status;
} qsf_choose_item;

/* Chooses a token for each item: masks, adds biases, then as qsf_session_sample(). Sessions and
 * their logits do not change. QSF_ERR_ARG: nothing was chosen. Otherwise every item has a status,
 * and the function returns the first that is not QSF_OK. */
QSF_API qsf_status qsf_model_choose(qsf_model *m, qsf_choose_item *items, uint32_t n_items);

/* ---- cdef end ---- */

QSF_C_END

#endif
