/* session.h - one token sequence and its KV cache.
 *
 * Evaluating tokens (pass.h) changes a session only on success. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/session_buffers.h"
#include "speculate/speculation_budget.h"
#include "include/qsf.h"
#include "platform/stopwatch.h"

/* How the latest token was chosen from a session's logits. */
typedef struct qsf_last_choice {
    qsf_sampling how;
    uint64_t random_state; /* after it */
    uint32_t n_tokens;     /* that the session held */
    uint32_t n_recent;
    uint32_t n_counted;
} qsf_last_choice;

struct qsf_session {
    qsf_model *model;
    qsf_session_buffers buffers;
    uint32_t n_tokens; /* evaluated */
    bool has_logits;
    uint32_t n_drafts; /* of the latest step's pass */
    uint32_t n_ahead;  /* the last of the tokens are guesses: evaluated, but not yet confirmed by a
                          step */
    const float *draft_logits; /* [n_drafts, n_vocab] logits of the latest step's pass, valid */
    uint64_t draft_pass;       /* while the model's logits_pass has this number */
    bool
        has_likeliest; /* likeliest holds predictions of the latest pass that are not learned yet */
    uint32_t n_offered;          /* drafts of the caller for the next pass of a step */
    uint32_t n_model_guesses;    /* guesses of the latest pass, evaluated or not */
    uint32_t mtp_position;       /* of the chain's latest guess by the MTP head; 0: none */
    qsf_session *drafter;        /* of the draft model, or NULL */
    qsf_last_choice last_choice; /* the draft model imitates it */
    qsf_chances chances;
    qsf_speculation_chain chain;
    qsf_state incoming;        /* the state being restored */
    uint64_t n_incoming_bytes; /* its bytes so far; 0: none, or the restoring failed */
    atomic_bool cancelled;     /* set by any thread */
    uint64_t prompt_tokens;
    uint64_t prompt_ns;
    uint64_t step_tokens;
    uint64_t step_ns;
    qsf_stopwatch stopwatch;         /* of the running call, or of the latest */
    uint64_t phase_ns[QSF_N_PHASES]; /* of the calls that succeeded */
    uint64_t n_again; /* tokens evaluated again, because recurrent states cannot be cut */
    uint64_t n_step_passes;
    uint64_t n_step_rows;
    uint64_t n_drafted[QSF_N_GUESSERS];
    uint64_t n_accepted[QSF_N_GUESSERS];
    uint64_t sample_ns;
    uint64_t n_samples;
    void *memory; /* of the buffers */
    size_t memory_bytes;
};

/* Releases KV blocks without a position below n_tokens. */
void qsf_session_trim(qsf_session *s, uint32_t n_tokens);

/* QSF_ERR_ARG: nothing was evaluated yet, or the session was rewound. */
qsf_status qsf_session_check_logits(const qsf_session *s);
