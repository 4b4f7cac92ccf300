/* pass.c - gathers the tokens of sessions, runs them, hands the results out. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/pass.h"

#include <string.h>

#include "base/status.h"
#include "engine/pressure_watch.h"
#include "engine/session.h"
#include "platform/clock.h"

qsf_status qsf_pass_check_tokens(const qsf_model *m, const uint32_t *tokens, size_t n_tokens)
{
    if (n_tokens > m->plan.ctx_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "%zu tokens do not fit in a context of %u", n_tokens,
                        m->plan.ctx_tokens);
    for (size_t i = 0; i < n_tokens; i++)
        if (tokens[i] >= m->config.n_vocab)
            return QSF_FAIL(QSF_ERR_ARG, "token %u at index %zu is outside the vocabulary of %u",
                            tokens[i], i, m->config.n_vocab);
    return QSF_OK;
}

void qsf_pass_count_phases(qsf_session *s, qsf_stopwatch *w, uint64_t n, uint64_t n_all)
{
    w->unit_idx = QSF_UNIT_NONE;
    qsf_stopwatch_lap(w, QSF_PHASE_OTHER);
    for (uint32_t i = 0; i < QSF_N_PHASES; i++)
        s->phase_ns[i] += w->phase_ns[i] * n / n_all;
}

/* The argument of watch_memory */
typedef struct watching {
    qsf_model *model;
    qsf_stopwatch *stopwatch;
} watching;

/* Does nothing if no measurement is due; the last lap's clock reading is precise enough for
 * that. */
static bool watch_memory(void *arg)
{
    const watching *const w = arg;
    if (!qsf_pressure_is_due(&w->model->pressure, w->stopwatch->last_ns))
        return false;
    const bool has_moved = qsf_pressure_watch(w->model);
    qsf_stopwatch_lap(w->stopwatch, QSF_PHASE_OTHER);
    return has_moved;
}

/* Takes the KV blocks that the parts will write. */
static qsf_status reserve(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts)
{
    qsf_status status = QSF_OK;
    qsf_mutex_lock(&m->kv_lock);
    for (uint32_t i = 0; i < n_parts && status == QSF_OK; i++) {
        qsf_session *const s = parts[i].session;
        s->n_ahead = s->n_likeliest = 0;
        status = qsf_kvcache_reserve(&s->buffers.kv, s->n_tokens, s->n_tokens + parts[i].n_tokens);
    }
    qsf_mutex_unlock(&m->kv_lock);
    for (uint32_t i = 0; i < n_parts; i++)
        parts[i].status = status;
    return status;
}

/* Makes segments of the parts. */
static void gather(const qsf_shared_buffers *b, const qsf_pass_part *parts, uint32_t n_parts,
                   qsf_chunk *chunk)
{
    uint32_t n_tokens = 0;
    uint32_t n_rows = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        const qsf_pass_part *const p = &parts[i];
        qsf_session *const s = p->session;
        b->segments[i] = (qsf_segment){&s->buffers.kv, n_tokens, p->n_tokens, s->n_tokens};
        b->cancelled[i] = &s->cancelled;
        s->n_incoming_bytes = 0; /* pages are overwritten */
        memcpy(b->tokens + n_tokens, p->tokens, p->n_tokens * sizeof *p->tokens);
        n_tokens += p->n_tokens;
        for (uint32_t row = 0; row < p->n_rows; row++)
            b->logits_rows[n_rows++] = n_tokens - p->n_rows + row;
        if (p->n_rows > 0) /* for all rows if no other part has some */
            chunk->logits = p->n_rows == n_rows ? p->rows : b->logits;
    }
    chunk->n_tokens = n_tokens;
    chunk->n_logits_rows = n_rows;
}

/* Runs the chunk and traces it. */
static qsf_status run_chunk(qsf_model *m, const qsf_chunk *chunk)
{
    qsf_stopwatch *const w = chunk->stopwatch;
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
    return status;
}

/* Appends the tokens of a part to its session; rows [n_rows, n_vocab] are its logits. */
static void append(const qsf_model *m, const qsf_pass_part *p, const float *rows)
{
    const size_t n_vocab = m->config.n_vocab;
    qsf_session *const s = p->session;
    memmove(s->buffers.tokens + s->n_tokens, p->tokens, p->n_tokens * sizeof *p->tokens);
    s->n_tokens += p->n_tokens;
    s->has_logits = p->n_rows > 0;
    if (p->n_rows == 0)
        return;
    const float *const last = rows + (p->n_rows - 1) * n_vocab;
    if (rows != p->rows)
        memcpy(p->rows, rows, p->n_rows * n_vocab * sizeof *rows);
    if (p->rows != s->buffers.logits)
        memcpy(s->buffers.logits, last, n_vocab * sizeof *last);
}

/* After a pass: gives each part its status, and its session what it has evaluated. */
static qsf_status hand_out(const qsf_model *m, qsf_pass_part *parts, uint32_t n_parts,
                           const float *rows, qsf_status status)
{
    const bool is_over = status == QSF_OK || status == QSF_ERR_CANCELLED;
    uint32_t n_appended = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        qsf_pass_part *const p = &parts[i];
        if (p->n_rows > 0 && rows == p->session->buffers.logits)
            p->session->has_logits = false; /* they were overwritten */
        const bool is_cancelled = is_over && atomic_exchange(&p->session->cancelled, false);
        p->status = is_cancelled ? QSF_ERR_CANCELLED : status;
        if (p->status == QSF_OK) {
            append(m, p, rows);
            n_appended++;
        }
        if (p->n_rows > 0)
            rows += p->n_rows * (size_t)m->config.n_vocab;
    }
    return status == QSF_OK && n_appended == 0
               ? QSF_FAIL(QSF_ERR_CANCELLED, "cancelled at the end of the pass")
               : status;
}

qsf_status qsf_pass_run(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, qsf_stopwatch *w)
{
    const qsf_shared_buffers *const b = &m->shared;
    const qsf_cancel cancel = {b->cancelled, n_parts};
    watching watched = {m, w};
    qsf_chunk chunk = {
        .tokens = b->tokens,
        .segments = b->segments,
        .n_segments = n_parts,
        .logits_rows = b->logits_rows,
        .cancel = &cancel,
        .stopwatch = w,
        .before_layer = watch_memory,
        .before_layer_arg = &watched,
    };
    QSF_TRY(reserve(m, parts, n_parts));
    gather(b, parts, n_parts, &chunk);
    w->n_tokens = chunk.n_tokens;
    const qsf_status status = run_chunk(m, &chunk);
    return hand_out(m, parts, n_parts, chunk.logits, status);
}

/* Checks one item alone. */
static qsf_status check_item(const qsf_model *m, const qsf_pass_item *item, uint32_t idx)
{
    const qsf_session *const s = item->session;
    if (s == NULL || item->tokens == NULL)
        return QSF_FAIL(QSF_ERR_ARG, "item %u has no %s", idx, s == NULL ? "session" : "tokens");
    if (s->model != m)
        return QSF_FAIL(QSF_ERR_ARG, "the session of item %u belongs to another model", idx);
    if (item->n_tokens == 0)
        return QSF_FAIL(QSF_ERR_ARG, "item %u has 0 tokens; it must have at least 1", idx);
    if (item->n_tokens > m->plan.ctx_tokens - s->n_tokens)
        return QSF_FAIL(QSF_ERR_ARG,
                        "item %u has %u tokens after %u, which do not fit in a context of %u", idx,
                        item->n_tokens, s->n_tokens, m->plan.ctx_tokens);
    if (item->wants > QSF_WANTS_ALL)
        return QSF_FAIL(QSF_ERR_ARG, "item %u wants %u; it must be 0, 1 or 2", idx, item->wants);
    if (item->wants == QSF_WANTS_ALL && item->logits == NULL)
        return QSF_FAIL(QSF_ERR_ARG, "item %u wants all logits, but has no room for them", idx);
    return qsf_pass_check_tokens(m, item->tokens, item->n_tokens);
}

/* Checks all items and makes their parts. */
static qsf_status take_items(qsf_model *m, const qsf_pass_item *items, uint32_t n_items,
                             qsf_pass_report *report)
{
    uint32_t n_wanting = 0;
    *report = (qsf_pass_report){0};
    if (n_items == 0 || n_items > m->plan.max_sessions)
        return QSF_FAIL(QSF_ERR_ARG, "n_items is %u; it must be 1 to %u, the sessions of the model",
                        n_items, m->plan.max_sessions);
    for (uint32_t i = 0; i < n_items; i++) {
        const qsf_pass_item *const item = &items[i];
        QSF_TRY(check_item(m, item, i));
        for (uint32_t j = 0; j < i; j++)
            if (items[j].session == item->session)
                return QSF_FAIL(QSF_ERR_ARG, "items %u and %u have the same session", j, i);
        const bool wants_all = item->wants == QSF_WANTS_ALL;
        m->shared.parts[i] = (qsf_pass_part){
            .session = item->session,
            .tokens = item->tokens,
            .n_tokens = item->n_tokens,
            .n_rows = wants_all ? item->n_tokens : item->wants,
            .rows = wants_all ? item->logits : item->session->buffers.logits,
        };
        if (item->n_tokens > m->plan.chunk_tokens - report->n_tokens)
            return QSF_FAIL(QSF_ERR_ARG, "the pass has more than %u tokens, the chunk of the plan",
                            m->plan.chunk_tokens);
        report->n_tokens += item->n_tokens;
        report->n_rows += m->shared.parts[i].n_rows;
        n_wanting += item->wants != QSF_WANTS_NONE;
    }
    if (n_wanting > 1 && report->n_rows > m->plan.logits_rows)
        return QSF_FAIL(QSF_ERR_ARG,
                        "%u tokens want logits, but the model was opened for %u (logits_rows)",
                        report->n_rows, m->plan.logits_rows);
    return QSF_OK;
}

/* Counts for a session its share of a pass. */
static void count_share(const qsf_pass_part *p, qsf_stopwatch *w, const qsf_pass_report *report)
{
    qsf_session *const s = p->session;
    const uint64_t ns = report->ns * p->n_tokens / report->n_tokens;
    const bool is_step = p->n_tokens == 1 && s->n_tokens > 1;
    *(is_step ? &s->step_tokens : &s->prompt_tokens) += p->n_tokens;
    *(is_step ? &s->step_ns : &s->prompt_ns) += ns;
    qsf_pass_count_phases(s, w, p->n_tokens, report->n_tokens);
}

static qsf_status run_items(qsf_model *m, qsf_pass_item *items, uint32_t n_items,
                            qsf_pass_report *report)
{
    QSF_TRY(take_items(m, items, n_items, report));
    qsf_pass_part *const parts = m->shared.parts;
    qsf_stopwatch w;
    qsf_stats before;
    qsf_stats after;
    const uint64_t start_ns = qsf_clock_ns();
    qsf_stopwatch_start(&w, &m->trace, start_ns);
    qsf_stream_report(&m->stream, &before);
    const qsf_status status = qsf_pass_run(m, parts, n_items, &w);
    qsf_stream_report(&m->stream, &after);
    report->ns = qsf_clock_ns() - start_ns;
    report->wait_ns = w.phase_ns[QSF_PHASE_WAIT];
    report->read_bytes = after.read_bytes - before.read_bytes;
    for (uint32_t i = 0; i < n_items; i++) {
        items[i].status = parts[i].status;
        if (parts[i].status == QSF_OK)
            count_share(&parts[i], &w, report);
    }
    return status;
}

qsf_status qsf_model_pass(qsf_model *m, qsf_pass_item *items, uint32_t n_items,
                          qsf_pass_report *report)
{
    QSF_REQUIRE(m);
    QSF_REQUIRE(items);
    qsf_pass_report unused;
    qsf_mutex_lock(&m->lock);
    const qsf_status status = run_items(m, items, n_items, report != NULL ? report : &unused);
    qsf_mutex_unlock(&m->lock);
    return status;
}
