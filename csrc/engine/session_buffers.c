/* session_buffers.c - lays out the memory of sessions. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/session_buffers.h"

qsf_kv_sizes qsf_plan_kv_sizes(const qsf_plan *plan)
{
    return (qsf_kv_sizes){
        .ctx_tokens = plan->ctx_tokens,
        /* Windows lose as many positions more as are stored ahead. */
        .chunk_tokens = plan->chunk_tokens + plan->draft_rows,
        .n_sessions = plan->max_sessions,
        .n_contexts = plan->kv_contexts,
        .resident_tokens =
            plan->kv_resident_tokens < plan->ctx_tokens ? plan->kv_resident_tokens : 0,
    };
}

void qsf_session_layout(qsf_session_buffers *b, qsf_arena *a, const qsf_config *c,
                        const qsf_plan *plan, qsf_kv_pool *pool, uint32_t home)
{
    qsf_sequence_layout(&b->sequence, a, pool, home);
    b->tokens = qsf_arena_push(a, plan->ctx_tokens, sizeof *b->tokens);
    b->logits = qsf_arena_push(a, c->n_vocab, sizeof *b->logits);
    b->offered = qsf_arena_push(a, plan->draft_rows, sizeof *b->offered);
    b->draft_kinds = qsf_arena_push(a, plan->draft_rows, sizeof *b->draft_kinds);
    b->draft_parents = qsf_arena_push(a, plan->draft_rows, sizeof *b->draft_parents);
    if (plan->draft_rows > 0) {
        b->likeliest = qsf_arena_push(a, (plan->draft_rows + 1) * (uint64_t)QSF_FOLLOWERS,
                                      sizeof *b->likeliest);
        b->model_guesses = qsf_arena_push(a, (plan->draft_rows + 1) * (uint64_t)QSF_MODEL_GUESSES,
                                          sizeof *b->model_guesses);
    }
}

void qsf_shared_layout(qsf_shared_buffers *b, qsf_arena *a, const qsf_config *c,
                       const qsf_plan *plan)
{
    const uint64_t n_rows = plan->draft_rows > 0 && plan->logits_rows == 0 ? 1 : plan->logits_rows;
    const uint64_t n_logits = (n_rows + plan->draft_rows) * c->n_vocab;
    b->parts = qsf_arena_push(a, plan->max_sessions, sizeof *b->parts);
    b->segments =
        qsf_arena_push(a, (uint64_t)plan->max_sessions + plan->draft_rows, sizeof *b->segments);
    b->cancelled = qsf_arena_push(a, plan->max_sessions, sizeof *b->cancelled);
    b->tokens = qsf_arena_push(a, plan->chunk_tokens, sizeof *b->tokens);
    b->logits_rows = qsf_arena_push(a, plan->chunk_tokens, sizeof *b->logits_rows);
    b->logits = qsf_arena_push(a, n_logits, sizeof *b->logits);
    qsf_sampler_layout(&b->sampler, a, c->n_vocab);
    if (plan->draft_rows > 0)
        qsf_followers_layout(&b->followers, a);
}
