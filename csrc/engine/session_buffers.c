/* session_buffers.c - lays out the memory of sessions. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/session_buffers.h"

#include "base/checked.h"
#include "model/mixers/mixers.h"
#include "model/scratch.h"

static qsf_kv_sizes kv_sizes_of(const qsf_plan *plan)
{
    return (qsf_kv_sizes){
        .ctx_tokens = plan->ctx_tokens,
        /* A window loses as many more positions as are stored ahead. */
        .chunk_tokens = plan->chunk_tokens + plan->draft_rows,
        .n_sessions = plan->max_sessions,
        .n_contexts = plan->kv_contexts,
        .resident_tokens =
            plan->kv_resident_tokens < plan->ctx_tokens ? plan->kv_resident_tokens : 0,
    };
}

void qsf_session_layout(qsf_session_buffers *b, qsf_arena *a, const qsf_config *c,
                        const qsf_plan *plan, qsf_sequence_pools *pools, uint32_t home)
{
    qsf_sequence_layout(&b->sequence, a, pools, home);
    b->tokens = qsf_arena_push(a, plan->ctx_tokens, sizeof *b->tokens);
    b->logits = qsf_arena_push(a, c->n_vocab, sizeof *b->logits);
    b->offered = qsf_arena_push(a, plan->draft_rows, sizeof *b->offered);
    b->draft_kinds = qsf_arena_push(a, plan->draft_rows, sizeof *b->draft_kinds);
    if (plan->draft_rows > 0) {
        b->likeliest = qsf_arena_push(a, plan->draft_rows + 1, sizeof *b->likeliest);
        b->model_guesses = qsf_arena_push(a, plan->draft_rows + 1, sizeof *b->model_guesses);
    }
}

void qsf_shared_layout(qsf_shared_buffers *b, qsf_arena *a, const qsf_config *c,
                       const qsf_plan *plan)
{
    const uint64_t n_rows = plan->draft_rows > 0 && plan->logits_rows == 0 ? 1 : plan->logits_rows;
    const uint64_t n_logits = (n_rows + plan->draft_rows) * c->n_vocab;
    b->parts = qsf_arena_push(a, plan->max_sessions, sizeof *b->parts);
    b->segments = qsf_arena_push(a, plan->max_sessions, sizeof *b->segments);
    b->cancelled = qsf_arena_push(a, plan->max_sessions, sizeof *b->cancelled);
    b->tokens = qsf_arena_push(a, plan->chunk_tokens, sizeof *b->tokens);
    b->head_rows = qsf_arena_push(a, plan->chunk_tokens, sizeof *b->head_rows);
    b->logits = qsf_arena_push(a, n_logits, sizeof *b->logits);
    qsf_sampler_layout(&b->sampler, a, c->n_vocab);
    if (plan->draft_rows > 0)
        qsf_ngrams_layout(&b->ngrams, a);
}

static qsf_dtype dtype_of_bits(uint32_t bits)
{
    return bits == QSF_KV_2BIT   ? QSF_DTYPE_2BIT
           : bits == QSF_KV_4BIT ? QSF_DTYPE_4BIT
           : bits == QSF_KV_8BIT ? QSF_DTYPE_8BIT
           : bits == QSF_KV_F16  ? QSF_DTYPE_F16
                                 : QSF_DTYPE_F32;
}

static qsf_kv_form kv_form_of(const qsf_plan *plan)
{
    return (qsf_kv_form){
        .k_type = dtype_of_bits(plan->kv_k_bits),
        .v_type = dtype_of_bits(plan->kv_v_bits),
        .is_rotated = plan->kv_is_rotated != 0,
    };
}

qsf_sequence_form qsf_plan_sequence_form(const qsf_plan *plan)
{
    return (qsf_sequence_form){
        .sizes = kv_sizes_of(plan),
        .kv = kv_form_of(plan),
        .n_drafts = plan->draft_rows,
        .describe = qsf_mixers_describe_state,
    };
}

qsf_scratch_sizes qsf_plan_scratch_sizes(const qsf_plan *plan)
{
    return (qsf_scratch_sizes){plan->chunk_tokens, plan->n_threads};
}

void qsf_session_measure(const qsf_config *c, qsf_plan *plan)
{
    const qsf_sequence_form form = qsf_plan_sequence_form(plan);
    qsf_arena pages;
    qsf_arena session;
    qsf_arena measuring;
    qsf_sequence_pools pools;
    qsf_session_buffers buffers;
    qsf_scratch scratch;
    qsf_shared_buffers shared;
    qsf_arena_init_measuring(&pages);
    qsf_sequence_pools_layout(&pools, &pages, c, &form);
    qsf_arena_init_measuring(&session);
    qsf_session_layout(&buffers, &session, c, plan, &pools, 0);
    qsf_arena_init_measuring(&measuring);
    const qsf_scratch_sizes scratch_sizes = qsf_plan_scratch_sizes(plan);
    qsf_scratch_layout(&scratch, &measuring, c, &pools.kv, &scratch_sizes);
    qsf_shared_layout(&shared, &measuring, c, plan);
    plan->kv_pool_bytes = pages.failed ? UINT64_MAX : pages.used_bytes;
    plan->state_bytes = qsf_state_pool_bytes(&pools.states);
    plan->kv_cold_token_bytes = pools.kv.cold_token_bytes;
    if (pools.kv.n_cold_records == 0)
        plan->kv_resident_tokens = plan->ctx_tokens;
    plan->session_bytes = session.failed ? UINT64_MAX : session.used_bytes;
    plan->scratch_bytes = measuring.failed ? UINT64_MAX : measuring.used_bytes;
    uint64_t sessions_bytes = UINT64_MAX;
    (void)qsf_mul_u64(plan->session_bytes, plan->max_sessions, &sessions_bytes);
    plan->kv_bytes = qsf_add_capped(plan->kv_pool_bytes, sessions_bytes);
}
