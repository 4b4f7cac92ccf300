/* session_buffers.h - the memory of a session, and of what all sessions of a model share. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/sample.h"
#include "speculate/ngrams.h"
#include "speculate/speculation_budget.h"
#include "memory/arena.h"
#include "model/chunk.h"
#include "cache/sequence.h"
#include "model/scratch.h"

/* A guess of the next token, and its kind (speculation_budget.h) */
typedef struct qsf_guess {
    uint32_t token;
    uint32_t kind;
} qsf_guess;

typedef struct qsf_session_buffers {
    qsf_sequence sequence;
    uint32_t *tokens;     /* [ctx_tokens] */
    float *logits;        /* [n_vocab] after the last token */
    uint32_t *offered;    /* [draft_rows] */
    uint8_t *draft_kinds; /* [draft_rows] of the drafts of the latest pass */
    qsf_ngram_token
        *likeliest; /* [1 + draft_rows] most probable token after each token of the latest pass */
    /* [1 + draft_rows] the draft model's guesses after the pass's token and after each draft;
     * QSF_KIND_CALLER: no guess */
    qsf_guess *model_guesses;
} qsf_session_buffers;

/* Returns the sizes and forms of the plan's pools. */
qsf_sequence_form qsf_plan_sequence_form(const qsf_plan *plan);

/* Returns the sizes of the plan's scratch. */
qsf_scratch_sizes qsf_plan_scratch_sizes(const qsf_plan *plan);

/* measure_sessions of qsf_plan_input: the pool of KV pages, one session, the scratch of a chunk
 * and the shared buffers. */
void qsf_session_measure(const qsf_config *c, qsf_plan *plan);

/* Call once on a measuring arena and once on the real one, whose memory is zeroed. `home`: of
 * qsf_sequence_layout(). */
void qsf_session_layout(qsf_session_buffers *b, qsf_arena *a, const qsf_config *c,
                        const qsf_plan *plan, qsf_sequence_pools *pools, uint32_t home);

/* One session's part of a pass. */
typedef struct qsf_pass_part {
    qsf_session *session;
    const uint32_t *tokens; /* [n_tokens] */
    uint32_t n_tokens;
    uint32_t n_rows; /* logits of the last n_rows tokens */
    float *rows; /* [n_rows, n_vocab] receives the logits; NULL: they stay in the shared buffer */
    qsf_status status;
    bool may_draft;    /* the pass may also evaluate drafts of the next tokens: see drafting.h */
    uint32_t n_drafts; /* the last tokens are drafts, which the session does not own yet */
    uint32_t n_hidden; /* for parts without rows, as in qsf_pass_item */
    double *hidden;    /* [dim] */
} qsf_pass_part;

/* Buffers of a model that one pass uses at a time, and one choice of a token. */
typedef struct qsf_shared_buffers {
    qsf_pass_part *parts;          /* [max_sessions] */
    qsf_segment *segments;         /* [max_sessions] */
    const atomic_bool **cancelled; /* [max_sessions] */
    uint32_t *tokens;              /* [chunk_tokens] */
    uint32_t *head_rows;           /* [chunk_tokens] */
    float *logits;                 /* [rows of the plan and drafts, n_vocab], of */
    uint64_t logits_pass;          /* the pass with this number */
    qsf_sampler sampler;
    qsf_costs costs;
    qsf_ngrams ngrams; /* empty if the plan has no draft_rows */
} qsf_shared_buffers;

/* As qsf_session_layout(). */
void qsf_shared_layout(qsf_shared_buffers *b, qsf_arena *a, const qsf_config *c,
                       const qsf_plan *plan);
