/* session.c - evaluates chunks for one token sequence. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/session.h"

#include <string.h>

#include "base/status.h"
#include "engine/model.h"
#include "engine/pressure_watch.h"
#include "platform/clock.h"

static void release_session(qsf_session *s)
{
    qsf_model *const m = s->model;
    qsf_ledger_release(&m->ledger, QSF_USE_KV, s->memory, s->memory_bytes);
    qsf_ledger_release(&m->ledger, QSF_USE_TABLES, s, sizeof *s);
}

static qsf_status begin_locked(qsf_model *m, qsf_session **out)
{
    if (m->is_closed)
        return QSF_FAIL(QSF_ERR_ARG, "the model is closed; only its %u open sessions still work",
                        m->n_sessions);
    if (m->n_sessions == m->options.max_sessions)
        return QSF_FAIL(QSF_ERR_NOMEM, "%u sessions are open, and max_sessions allows no more",
                        m->n_sessions);
    qsf_session *const s = qsf_ledger_acquire(&m->ledger, QSF_USE_TABLES, sizeof *s);
    if (s == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "cannot allocate %zu bytes for a session's record",
                        sizeof *s);
    s->model = m;
    s->memory_bytes = (size_t)m->plan.kv_bytes / m->options.max_sessions;
    s->memory = qsf_ledger_acquire(&m->ledger, QSF_USE_KV, s->memory_bytes);
    if (s->memory == NULL) {
        const size_t memory_bytes = s->memory_bytes;
        release_session(s);
        return QSF_FAIL(QSF_ERR_NOMEM, "cannot allocate %.1f MB for a session's KV cache",
                        qsf_mb(memory_bytes));
    }
    qsf_arena arena;
    qsf_arena_init(&arena, s->memory, s->memory_bytes);
    qsf_session_layout(&s->buffers, &arena, &m->config, m->plan.ctx_tokens, m->plan.chunk_tokens,
                       &m->scratch.kv_form);
    qsf_kvcache_link(&s->buffers.kv, &m->config, m->plan.ctx_tokens, m->plan.chunk_tokens);
    atomic_init(&s->cancelled, false);
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

static qsf_status check_tokens(const qsf_session *s, const uint32_t *tokens, size_t n_tokens)
{
    const qsf_model *const m = s->model;
    if (n_tokens > m->plan.ctx_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "%zu tokens do not fit in a context of %u", n_tokens,
                        m->plan.ctx_tokens);
    for (size_t i = 0; i < n_tokens; i++)
        if (tokens[i] >= m->config.n_vocab)
            return QSF_FAIL(QSF_ERR_ARG, "token %u at index %zu is outside the vocabulary of %u",
                            tokens[i], i, m->config.n_vocab);
    return QSF_OK;
}

/* Does nothing if no measurement is due; the last lap's clock reading is precise enough for
 * that. */
static bool watch_memory(void *arg)
{
    qsf_session *const s = arg;
    if (!qsf_pressure_is_due(&s->model->pressure, s->stopwatch.last_ns))
        return false;
    const bool has_moved = qsf_pressure_watch(s->model);
    qsf_stopwatch_lap(&s->stopwatch, QSF_PHASE_OTHER);
    return has_moved;
}

/* Runs a pass under the model's lock and traces it. */
static qsf_status run_pass(qsf_session *s, const qsf_chunk *chunk)
{
    qsf_model *const m = s->model;
    qsf_stopwatch *const w = &s->stopwatch;
    qsf_mutex_lock(&m->lock);
    qsf_stopwatch_lap(w, QSF_PHASE_OTHER);
    const uint64_t begin_ns = w->last_ns;
    const qsf_status status = qsf_forward_run(&m->forward, chunk);
    if (qsf_trace_is_on(&m->trace)) {
        qsf_stopwatch_lap(w, QSF_PHASE_OTHER); /* a failed pass ends within a lap */
        qsf_trace_record(&m->trace, &(qsf_trace_event){
                                        .begin_ns = begin_ns,
                                        .end_ns = w->last_ns,
                                        .kind = QSF_TRACE_PASS,
                                        .unit_idx = QSF_UNIT_NONE,
                                        .n_tokens = chunk->n_tokens,
                                    });
    }
    qsf_mutex_unlock(&m->lock);
    return status;
}

/* After a call succeeded: ends its last lap and counts its phases. */
static void count_phases(qsf_session *s)
{
    s->stopwatch.unit_idx = QSF_UNIT_NONE;
    qsf_stopwatch_lap(&s->stopwatch, QSF_PHASE_OTHER);
    for (uint32_t i = 0; i < QSF_N_PHASES; i++)
        s->phase_ns[i] += s->stopwatch.phase_ns[i];
}

/* Evaluates tokens [n_tokens] after those held. Appends them only if the pass succeeded. */
static qsf_status evaluate(qsf_session *s, const uint32_t *tokens, uint32_t n_tokens,
                           uint32_t first_logits, float *logits)
{
    const qsf_segment segment = {
        .kv = &s->buffers.kv,
        .n_tokens = n_tokens,
        .first_position = s->n_tokens,
    };
    const qsf_chunk chunk = {
        .tokens = tokens,
        .n_tokens = n_tokens,
        .segments = &segment,
        .n_segments = 1,
        .first_logits = first_logits,
        .logits = logits,
        .cancelled = &s->cancelled,
        .stopwatch = &s->stopwatch,
        .before_layer = watch_memory,
        .before_layer_arg = s,
    };
    s->has_logits = false;
    s->stopwatch.n_tokens = n_tokens;
    qsf_kvcache_begin_chunk(&s->buffers.kv, s->n_tokens, s->n_tokens + n_tokens);
    const qsf_status status = run_pass(s, &chunk);
    if (status == QSF_ERR_CANCELLED)
        atomic_store(&s->cancelled, false);
    QSF_TRY(status);
    memmove(s->buffers.tokens + s->n_tokens, tokens, n_tokens * sizeof *tokens);
    s->n_tokens += n_tokens;
    return QSF_OK;
}

/* Evaluates a chunk after the tokens held, with logits from position first_row on: position p has
 * row p - first_row of scores; the last row is also copied to the session. */
static qsf_status score_chunk(qsf_session *s, const uint32_t *tokens, uint32_t n_tokens,
                              size_t first_row, float *scores)
{
    const size_t n_vocab = s->model->config.n_vocab;
    const size_t position = s->n_tokens;
    const size_t n_skipped = first_row > position ? first_row - position : 0;
    if (n_skipped >= n_tokens)
        return evaluate(s, tokens, n_tokens, n_tokens, s->buffers.logits);
    float *const rows = scores + (position + n_skipped - first_row) * n_vocab;
    QSF_TRY(evaluate(s, tokens, n_tokens, (uint32_t)n_skipped, rows));
    memcpy(s->buffers.logits, rows + (n_tokens - n_skipped - 1) * n_vocab, n_vocab * sizeof *rows);
    return QSF_OK;
}

/* Returns how many leading tokens the session already holds. */
static uint32_t common_prefix(const qsf_session *s, const uint32_t *tokens, size_t n_tokens)
{
    uint32_t n = 0;
    while (n < s->n_tokens && n < n_tokens && s->buffers.tokens[n] == tokens[n])
        n++;
    return n;
}

/* Brings the session closer to tokens [n_tokens] by one chunk. scores [n_tokens - first_row,
 * n_vocab], or NULL: only the last token needs logits. */
static qsf_status advance(qsf_session *s, const uint32_t *tokens, size_t n_tokens, size_t first_row,
                          float *scores, size_t *n_done)
{
    qsf_model *const m = s->model;
    const uint64_t start_ns = qsf_clock_ns();
    qsf_stopwatch_start(&s->stopwatch, &m->trace, start_ns);
    QSF_TRY(check_tokens(s, tokens, n_tokens));
    /* Scoring evaluates from its first row on. Otherwise all held tokens may be kept; the last one
     * only if its logits are available. */
    uint32_t n_kept = common_prefix(s, tokens, n_tokens);
    const size_t n_wanted = *n_done < first_row ? first_row : *n_done; /* keep these if held */
    if (scores != NULL)
        n_kept = n_wanted < n_kept ? (uint32_t)n_wanted : n_kept;
    else if (n_kept == n_tokens && !(s->has_logits && s->n_tokens == n_kept))
        n_kept--;
    if (!qsf_kvcache_holds(&s->buffers.kv, &m->config, n_kept))
        n_kept = 0; /* the windows before that position are gone: everything again */
    if (n_kept < s->n_tokens)
        s->has_logits = false;
    s->n_tokens = n_kept;
    *n_done = n_kept;
    if (n_kept == n_tokens)
        return QSF_OK;

    const size_t left = n_tokens - n_kept;
    const uint32_t n = left < m->plan.chunk_tokens ? (uint32_t)left : m->plan.chunk_tokens;
    const bool is_last = n == left;
    if (scores != NULL)
        QSF_TRY(score_chunk(s, tokens + n_kept, n, first_row, scores));
    else
        QSF_TRY(evaluate(s, tokens + n_kept, n, is_last ? n - 1 : n, s->buffers.logits));
    s->has_logits = is_last || (scores != NULL && n_kept + n > first_row);
    *n_done = s->n_tokens;
    s->prompt_tokens += n;
    count_phases(s);
    s->prompt_ns += qsf_clock_ns() - start_ns;
    return QSF_OK;
}

qsf_status qsf_session_sync(qsf_session *s, const uint32_t *tokens, size_t n_tokens, size_t *n_done)
{
    QSF_REQUIRE(s);
    QSF_REQUIRE(tokens);
    QSF_REQUIRE(n_done);
    if (n_tokens == 0)
        return QSF_FAIL(QSF_ERR_ARG, "a session is synchronised to at least one token");
    return advance(s, tokens, n_tokens, n_tokens, NULL, n_done);
}

qsf_status qsf_session_score(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                             size_t first_row, float *logits, size_t cap_floats, size_t *n_done)
{
    QSF_REQUIRE(s);
    QSF_REQUIRE(tokens);
    QSF_REQUIRE(logits);
    QSF_REQUIRE(n_done);
    if (n_tokens == 0)
        return QSF_FAIL(QSF_ERR_ARG, "a session is synchronised to at least one token");
    if (first_row >= n_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "first_row is %zu; it must be below n_tokens, %zu", first_row,
                        n_tokens);
    const uint32_t n_vocab = s->model->config.n_vocab;
    if (cap_floats / n_vocab < n_tokens - first_row)
        return QSF_FAIL(QSF_ERR_ARG, "the buffer holds %zu floats, but %zu rows of %u are needed",
                        cap_floats, n_tokens - first_row, n_vocab);
    if (*n_done > n_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "n_done is %zu; it must be at most n_tokens, %zu", *n_done,
                        n_tokens);
    return advance(s, tokens, n_tokens, first_row, logits, n_done);
}

qsf_status qsf_session_step(qsf_session *s, uint32_t token)
{
    QSF_REQUIRE(s);
    const uint64_t start_ns = qsf_clock_ns();
    qsf_stopwatch_start(&s->stopwatch, &s->model->trace, start_ns);
    QSF_TRY(check_tokens(s, &token, 1));
    if (s->n_tokens == s->model->plan.ctx_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "the context of %u tokens is full", s->n_tokens);
    QSF_TRY(evaluate(s, &token, 1, 0, s->buffers.logits));
    s->has_logits = true;
    s->step_tokens++;
    count_phases(s);
    s->step_ns += qsf_clock_ns() - start_ns;
    return QSF_OK;
}

size_t qsf_session_position(const qsf_session *s)
{
    return s == NULL ? 0 : s->n_tokens;
}

qsf_status qsf_session_rewind(qsf_session *s, size_t n_tokens)
{
    QSF_REQUIRE(s);
    if (n_tokens > s->n_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "cannot rewind to %zu tokens: only %u are held", n_tokens,
                        s->n_tokens);
    if (!qsf_kvcache_holds(&s->buffers.kv, &s->model->config, (uint32_t)n_tokens))
        return QSF_FAIL(QSF_ERR_ARG,
                        "cannot rewind %u tokens to %zu: layers with a window hold only the last "
                        "ones; synchronise to the tokens, which evaluates them again",
                        s->n_tokens, n_tokens);
    if (n_tokens < s->n_tokens)
        s->has_logits = false;
    s->n_tokens = (uint32_t)n_tokens;
    return QSF_OK;
}

void qsf_session_cancel(qsf_session *s)
{
    if (s != NULL)
        atomic_store(&s->cancelled, true);
}

static qsf_status check_logits(const qsf_session *s)
{
    return s->has_logits ? QSF_OK
                         : QSF_FAIL(QSF_ERR_ARG, "there are no logits: evaluate a token first");
}

qsf_status qsf_session_logits(const qsf_session *s, float *out, size_t cap_floats)
{
    QSF_REQUIRE(s);
    QSF_REQUIRE(out);
    const uint32_t n_vocab = s->model->config.n_vocab;
    QSF_TRY(check_logits(s));
    if (cap_floats < n_vocab)
        return QSF_FAIL(QSF_ERR_ARG, "the buffer holds %zu floats, but %u are needed", cap_floats,
                        n_vocab);
    memcpy(out, s->buffers.logits, n_vocab * sizeof *out);
    return QSF_OK;
}

qsf_status qsf_session_sample(qsf_session *s, const qsf_sampling *how, const uint32_t *recent,
                              size_t n_recent, uint64_t *random_state, uint32_t *token)
{
    QSF_REQUIRE(s);
    QSF_REQUIRE(how);
    QSF_REQUIRE(random_state);
    QSF_REQUIRE(token);
    if (n_recent > 0)
        QSF_REQUIRE(recent);
    QSF_TRY(qsf_sampling_check(how));
    qsf_model *const m = s->model;
    const uint64_t start_ns = qsf_clock_ns();
    QSF_TRY(check_logits(s));
    for (size_t i = 0; i < n_recent; i++)
        if (recent[i] >= m->config.n_vocab)
            return QSF_FAIL(QSF_ERR_ARG, "recent token %u is outside the vocabulary of %u",
                            recent[i], m->config.n_vocab);
    QSF_TRY(qsf_sampler_choose(&s->buffers.sampler, &m->kernels, s->buffers.logits, how, recent,
                               n_recent, random_state, token));
    const uint64_t end_ns = qsf_clock_ns();
    s->sample_ns += end_ns - start_ns;
    s->n_samples++;
    qsf_trace_record(&m->trace, &(qsf_trace_event){.begin_ns = start_ns,
                                                   .end_ns = end_ns,
                                                   .kind = QSF_TRACE_SAMPLE,
                                                   .unit_idx = QSF_UNIT_NONE,
                                                   .n_tokens = 1});
    return QSF_OK;
}

qsf_status qsf_session_logprobs(qsf_session *s, uint32_t *tokens, float *logprobs, size_t n_tokens)
{
    QSF_REQUIRE(s);
    QSF_REQUIRE(tokens);
    QSF_REQUIRE(logprobs);
    const qsf_model *const m = s->model;
    const uint32_t n_vocab = m->config.n_vocab;
    QSF_TRY(check_logits(s));
    if (n_tokens < 1 || n_tokens > (size_t)n_vocab + 1)
        return QSF_FAIL(QSF_ERR_ARG, "n_tokens is %zu; it must be 1 to %u", n_tokens, n_vocab + 1);
    if (tokens[0] >= n_vocab)
        return QSF_FAIL(QSF_ERR_ARG, "token %u is outside the vocabulary of %u", tokens[0],
                        n_vocab);
    return qsf_sampler_logprobs(&s->buffers.sampler, &m->kernels, s->buffers.logits, tokens,
                                logprobs, n_tokens);
}

void qsf_session_stats(const qsf_session *s, qsf_stats *out)
{
    if (s == NULL || out == NULL)
        return;
    qsf_model *const m = s->model;
    qsf_mutex_lock(&m->lock);
    const qsf_pool_counts counts = qsf_pool_count(m->pool);
    *out = (qsf_stats){
        .prompt_tokens = s->prompt_tokens,
        .prompt_ns = s->prompt_ns,
        .step_tokens = s->step_tokens,
        .step_ns = s->step_ns,
        .n_allocations = m->ledger.n_acquired,
        .allocated_bytes = m->ledger.held_bytes,
        .kv_used_bytes = qsf_kvcache_used_bytes(&s->buffers.kv, &m->config, s->n_tokens),
        .n_loops = counts.n_runs,
        .n_parallel_regions = counts.n_shared_runs,
        .parallel_ns = counts.shared_ns,
        .n_embedding_rows = m->forward.embedding.n_requested,
        .n_embedding_hits = m->forward.embedding.n_hits,
        .n_given_back = m->pressure.n_given_back,
        .n_taken_again = m->pressure.n_taken_again,
        .given_back_bytes = m->pressure.given_back_bytes,
        .taken_again_bytes = m->pressure.taken_again_bytes,
        .sample_ns = s->sample_ns,
        .n_samples = s->n_samples,
    };
    memcpy(out->phase_ns, s->phase_ns, sizeof out->phase_ns);
    qsf_stream_report(&m->stream, out);
    qsf_mutex_unlock(&m->lock);
}
