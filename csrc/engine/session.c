/* session.c - lays out, creates and closes sessions, and describes their tokens and statistics. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "engine/model.h"
#include "model/mixers/mixers.h"
#include "model/ops.h"

void qsf_session_trim(qsf_session *s, uint32_t n_tokens)
{
    qsf_mutex_lock(&s->model->kv_lock);
    qsf_sequence_trim(&s->buffers.sequence, n_tokens);
    s->n_incoming_bytes = 0; /* its pages may be gone */
    qsf_mutex_unlock(&s->model->kv_lock);
}

void qsf_session_keep(qsf_session *s, uint32_t n_tokens)
{
    s->has_logits = s->has_logits && n_tokens == s->n_tokens;
    s->n_tokens = n_tokens;
    s->ahead = (qsf_ahead){0};
}

static void release_session(qsf_session *s)
{
    qsf_model *const m = s->model;
    qsf_session_destroy(s->drafter);
    if (s->memory != NULL) {
        qsf_mutex_lock(&m->kv_lock);
        qsf_sequence_close(&s->buffers.sequence);
        qsf_mutex_unlock(&m->kv_lock);
    }
    qsf_ledger_release(&m->ledger, QSF_USE_KV, s->memory, s->memory_bytes);
    qsf_ledger_release(&m->ledger, QSF_USE_TABLES, s, sizeof *s);
}

static qsf_status begin_locked(qsf_model *m, qsf_session **out)
{
    QSF_FAIL_IF(m->is_closed, ARG, "the model is closed; only its %u open sessions still work",
                m->n_sessions);
    QSF_FAIL_IF(m->n_sessions == m->options.max_sessions, NOMEM,
                "%u sessions are open, and max_sessions allows no more", m->n_sessions);
    qsf_session *s;
    QSF_TRY(qsf_ledger_take(&m->ledger, QSF_USE_TABLES, sizeof *s, "a session's record", &s));
    s->model = m;
    s->memory_bytes = (size_t)m->plan.session_bytes;
    qsf_status status = qsf_ledger_take(&m->ledger, QSF_USE_KV, s->memory_bytes,
                                        "a session's tokens and logits", &s->memory);
    if (status != QSF_OK) {
        release_session(s);
        return status;
    }
    qsf_arena arena;
    qsf_arena_init(&arena, s->memory, s->memory_bytes);
    qsf_session_layout(&s->buffers, &arena, &m->config, &m->plan, &m->pools,
                       m->n_created++ % m->plan.max_sessions);
    atomic_init(&s->cancelled, false);
    for (uint32_t i = 0; i < m->n_adapters; i++)
        s->adapter_scales[i] = m->adapters[i].scale;
    /* A greedy choice, until there is one. */
    s->last_choice.how = (qsf_sampling){.repetition_penalty = 1.0f, .top_p = 1.0f};
    status = qsf_sequence_open_cold(&s->buffers.sequence, m->options.kv_folder);
    if (status == QSF_OK && m->drafter != NULL && !m->config.keeps_hidden)
        status = qsf_session_create(m->drafter, &s->drafter);
    if (status != QSF_OK) {
        release_session(s);
        return status;
    }
    m->n_sessions++;
    *out = s;
    return QSF_OK;
}

qsf_status qsf_session_create(qsf_model *m, qsf_session **out)
{
    QSF_REQUIRE(out);
    *out = NULL;
    QSF_REQUIRE(m);
    qsf_mutex_lock(&m->lock);
    const qsf_status status = begin_locked(m, out);
    qsf_mutex_unlock(&m->lock);
    return status;
}

void qsf_session_destroy(qsf_session *s)
{
    if (s == NULL)
        return;
    qsf_model *const m = s->model;
    qsf_mutex_lock(&m->lock);
    release_session(s);
    qsf_mutex_unlock(&m->lock);
    qsf_model_forget_session(m);
}

size_t qsf_session_position(const qsf_session *s)
{
    return s == NULL ? 0 : s->n_tokens;
}

void qsf_session_tokens(const qsf_session *s, uint32_t *out, size_t n_tokens)
{
    if (s != NULL && n_tokens > 0)
        memcpy(out, s->buffers.tokens, QSF_MIN(n_tokens, s->n_tokens) * sizeof *out);
}

size_t qsf_session_common(const qsf_session *s, const uint32_t *tokens, size_t n_tokens)
{
    size_t n = 0;
    while (s != NULL && n < s->n_tokens && n < n_tokens && s->buffers.tokens[n] == tokens[n])
        n++;
    return n;
}

qsf_status qsf_session_rewind(qsf_session *s, size_t n_tokens)
{
    QSF_REQUIRE(s);
    QSF_FAIL_IF(n_tokens > s->n_tokens, ARG, "cannot rewind to %zu tokens: only %u are held",
                n_tokens, s->n_tokens);
    QSF_FAIL_IF(!qsf_sequence_can_return(&s->buffers.sequence, (uint32_t)n_tokens), ARG,
                "cannot rewind %u tokens to %zu: layers with a window hold only the last ones; "
                "synchronise to the tokens, which evaluates them again",
                s->n_tokens, n_tokens);
    qsf_session_keep(s, (uint32_t)n_tokens);
    qsf_session_trim(s, s->n_tokens);
    return QSF_OK;
}

qsf_status qsf_session_set_adapters(qsf_session *s, const float *scales, uint32_t n_scales)
{
    QSF_REQUIRE(s, scales);
    const qsf_model *const m = s->model;
    QSF_FAIL_IF(n_scales != m->n_adapters, ARG, "%u scales for %u adapters", n_scales,
                m->n_adapters);
    bool is_same = true;
    for (uint32_t i = 0; i < n_scales; i++) {
        QSF_TRY(qsf_adapter_check_scale(&m->adapters[i], scales[i]));
        is_same = is_same && scales[i] == s->adapter_scales[i];
    }
    if (is_same)
        return QSF_OK;
    QSF_FAIL_IF(m->options.first_layer != 0 || m->reader.is_without_head, ARG,
                "a stage has the adapters of the process that opened it, and no others");
    qsf_session_keep(s, 0);
    qsf_session_trim(s, 0);
    memcpy(s->adapter_scales, scales, n_scales * sizeof *scales);
    return QSF_OK;
}

void qsf_session_cancel(qsf_session *s)
{
    if (s != NULL)
        atomic_store(&s->cancelled, true);
}

uint32_t qsf_session_is_cancelled(const qsf_session *s)
{
    return s != NULL && atomic_load(&s->cancelled) && !atomic_load(&s->model->is_deaf);
}

qsf_status qsf_session_check_logits(const qsf_session *s)
{
    return s->has_logits ? QSF_OK : QSF_FAIL(ARG, "there are no logits: evaluate a token first");
}

qsf_status qsf_session_logits(const qsf_session *s, float *out, size_t cap_floats)
{
    QSF_REQUIRE(s, out);
    const uint32_t n_vocab = s->model->config.n_vocab;
    QSF_TRY(qsf_session_check_logits(s));
    QSF_FAIL_IF(cap_floats < n_vocab, ARG, "the buffer holds %zu floats, but %u are needed",
                cap_floats, n_vocab);
    memcpy(out, s->buffers.logits, n_vocab * sizeof *out);
    return QSF_OK;
}

void qsf_session_stats(const qsf_session *s, qsf_stats *out)
{
    if (s == NULL || out == NULL)
        return;
    qsf_model *const m = s->model;
    qsf_mutex_lock(&m->lock);
    const qsf_pool_counts counts = qsf_pool_count(m->pool);
    *out = s->stats;
    out->n_allocations = m->ledger.n_acquired + (m->drafter ? m->drafter->ledger.n_acquired : 0);
    out->allocated_bytes = m->ledger.held_bytes + (m->drafter ? m->drafter->ledger.held_bytes : 0);
    out->kv_used_bytes = qsf_sequence_used_bytes(&s->buffers.sequence, s->n_tokens);
    out->kv_read_bytes = s->buffers.sequence.kv.cold.read_bytes;
    out->kv_written_bytes = s->buffers.sequence.kv.cold.written_bytes;
    out->n_loops = counts.n_runs;
    out->n_parallel_regions = counts.n_shared_runs;
    out->parallel_ns = counts.shared_ns;
    out->n_embedding_rows = m->forward.embedding.n_requested;
    out->n_embedding_hits = m->forward.embedding.n_hits;
    out->n_given_back = m->pressure.n_given_back;
    out->n_taken_again = m->pressure.n_taken_again;
    out->given_back_bytes = m->pressure.given_back_bytes;
    out->taken_again_bytes = m->pressure.taken_again_bytes;
    qsf_mutex_lock(&m->kv_lock);
    out->kv_free_tokens = (uint64_t)m->pools.kv.groups[0].n_free * QSF_KV_PAGE_TOKENS;
    qsf_mutex_unlock(&m->kv_lock);
    qsf_stream_report(&m->stream, out);
    qsf_experts_report(&m->experts, out);
    qsf_mutex_unlock(&m->lock);
}

/* ---- the memory of sessions ---- */

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
    b->wanted = qsf_arena_push(a, plan->max_sessions, sizeof *b->wanted);
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

qsf_sequence_form qsf_plan_sequence_form(const qsf_config *c, const qsf_plan *plan)
{
    return (qsf_sequence_form){
        .sizes = kv_sizes_of(plan),
        .kv = kv_form_of(plan),
        .n_drafts = plan->draft_rows,
        .keeps_hidden = c->keeps_hidden,
        .describe = qsf_mixers_describe_state,
    };
}

qsf_scratch_sizes qsf_plan_scratch_sizes(const qsf_plan *plan)
{
    return (qsf_scratch_sizes){plan->chunk_tokens, plan->n_threads};
}

void qsf_session_measure(const qsf_config *c, qsf_plan *plan)
{
    const qsf_sequence_form form = qsf_plan_sequence_form(c, plan);
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
