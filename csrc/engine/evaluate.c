/* evaluate.c - the calls that evaluate tokens: one token of a session, tokens of many sessions in
 * one pass, and a whole token list, chunk by chunk.
 *
 * Sessions take turns: a call holds the model's lock while it evaluates one chunk.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/status.h"
#include "engine/model.h"
#include "platform/clock.h"

/* Evaluates the token in a pass, unless it is an evaluated draft. */
static qsf_status step(qsf_session *s, uint32_t token)
{
    qsf_drafting_learn(s, token);
    if (qsf_drafting_has(s, token))
        return qsf_drafting_take(s);
    qsf_pass_part part = {
        .session = s,
        .tokens = &token,
        .n_tokens = 1,
        .n_rows = 1,
        .rows = s->buffers.logits,
        .may_draft = true,
    };
    s->has_logits = false;
    const qsf_status status = qsf_drafting_run(s->model, &part, 1, &s->stopwatch);
    QSF_TRY(status == QSF_OK ? part.status : status);
    s->stats.n_step_passes++;
    s->stats.n_step_rows += part.n_tokens;
    return QSF_OK;
}

qsf_status qsf_session_step(qsf_session *s, uint32_t token)
{
    QSF_REQUIRE(s);
    qsf_model *const m = s->model;
    const uint64_t start_ns = qsf_clock_ns();
    qsf_stopwatch_start(&s->stopwatch, start_ns);
    QSF_TRY(qsf_pass_check_tokens(m, &token, 1));
    QSF_FAIL_IF(s->n_tokens == m->plan.ctx_tokens, ARG, "the context of %u tokens is full",
                s->n_tokens);
    qsf_mutex_lock(&m->lock);
    const qsf_status status = step(s, token);
    qsf_mutex_unlock(&m->lock);
    QSF_TRY(status);
    s->stats.step_tokens++;
    qsf_pass_count_phases(s, &s->stopwatch, 1, 1);
    s->stats.step_ns += qsf_clock_ns() - start_ns;
    return QSF_OK;
}

qsf_status qsf_session_draft(qsf_session *s, const uint32_t *tokens, size_t n_tokens)
{
    QSF_REQUIRE(s);
    const uint32_t n_most = s->model->plan.draft_rows;
    QSF_FAIL_IF(n_tokens > n_most, ARG, "%zu drafts are too many: the plan has room for %u",
                n_tokens, n_most);
    if (n_tokens > 0)
        QSF_REQUIRE(tokens);
    QSF_TRY(qsf_pass_check_tokens(s->model, tokens, n_tokens));
    memcpy(s->buffers.offered, tokens, n_tokens * sizeof *tokens);
    s->n_offered = (uint32_t)n_tokens;
    return QSF_OK;
}

/* ---- many sessions ---- */

/* Checks one item alone. */
static qsf_status check_item(const qsf_model *m, const qsf_pass_item *item, uint32_t idx)
{
    const qsf_session *const s = item->session;
    QSF_FAIL_IF(s == NULL || item->tokens == NULL, ARG, "item %u has no %s", idx,
                s == NULL ? "session" : "tokens");
    QSF_FAIL_IF(s->model != m, ARG, "the session of item %u belongs to another model", idx);
    QSF_FAIL_IF(item->n_tokens == 0, ARG, "item %u has 0 tokens; it must have at least 1", idx);
    QSF_FAIL_IF(item->n_tokens > m->plan.ctx_tokens - s->n_tokens, ARG,
                "item %u has %u tokens after %u, which do not fit in a context of %u", idx,
                item->n_tokens, s->n_tokens, m->plan.ctx_tokens);
    QSF_FAIL_IF(item->wants > QSF_WANTS_AHEAD, ARG, "item %u wants %u; it must be 0, 1, 2 or 3",
                idx, item->wants);
    QSF_FAIL_IF(item->wants == QSF_WANTS_ALL && item->logits == NULL, ARG,
                "item %u wants all logits, but has no room for them", idx);
    QSF_FAIL_IF(item->n_hidden > item->n_tokens, ARG, "item %u wants %u hidden states of %u tokens",
                idx, item->n_hidden, item->n_tokens);
    QSF_FAIL_IF(item->n_hidden > 0 && (item->hidden == NULL || item->wants != QSF_WANTS_NONE), ARG,
                "item %u wants hidden states, but %s", idx,
                item->hidden == NULL ? "has no room for them" : "logits too");
    QSF_FAIL_IF(item->residual != NULL && !m->reader.is_without_head, ARG,
                "item %u wants the residual, which only a stage without a head gives", idx);
    return qsf_pass_check_tokens(m, item->tokens, item->n_tokens);
}

static qsf_pass_part part_of(const qsf_pass_item *item)
{
    const bool wants_all = item->wants == QSF_WANTS_ALL;
    return (qsf_pass_part){
        .session = item->session,
        .tokens = item->tokens,
        .n_tokens = item->n_tokens,
        .n_rows = wants_all ? item->n_tokens : item->wants != QSF_WANTS_NONE,
        .rows = wants_all ? item->logits : item->session->buffers.logits,
        .may_draft = item->wants == QSF_WANTS_AHEAD,
        .n_hidden = item->n_hidden,
        .hidden = item->hidden,
        .residual = item->residual,
    };
}

/* Checks all items and counts their tokens and rows. */
static qsf_status check_items(const qsf_model *m, const qsf_pass_item *items, uint32_t n_items,
                              qsf_pass_report *report)
{
    uint32_t n_wanting = 0;
    *report = (qsf_pass_report){0};
    QSF_FAIL_IF(n_items == 0 || n_items > m->plan.max_sessions, ARG,
                "n_items is %u; it must be 1 to %u, the sessions of the model", n_items,
                m->plan.max_sessions);
    for (uint32_t i = 0; i < n_items; i++) {
        const qsf_pass_item *const item = &items[i];
        QSF_TRY(check_item(m, item, i));
        for (uint32_t j = 0; j < i; j++)
            QSF_FAIL_IF(items[j].session == item->session, ARG,
                        "items %u and %u have the same session", j, i);
        QSF_FAIL_IF(item->n_tokens > m->plan.chunk_tokens - report->n_tokens, ARG,
                    "the pass has more than %u tokens, the chunk of the plan",
                    m->plan.chunk_tokens);
        report->n_tokens += item->n_tokens;
        report->n_rows += part_of(item).n_rows;
        n_wanting += item->wants != QSF_WANTS_NONE;
    }
    QSF_FAIL_IF(n_wanting > 1 && report->n_rows > m->plan.logits_rows, ARG,
                "%u tokens want logits, but the model was opened for %u (logits_rows)",
                report->n_rows, m->plan.logits_rows);
    return QSF_OK;
}

/* Takes the items' tokens if all are evaluated drafts; else makes parts of all. Returns true if
 * it took them. */
static bool take_items(qsf_model *m, qsf_pass_item *items, uint32_t n_items)
{
    bool is_ahead = true;
    for (uint32_t i = 0; i < n_items; i++) {
        const qsf_pass_item *const item = &items[i];
        const bool may_draft = item->wants == QSF_WANTS_AHEAD;
        if (may_draft)
            qsf_drafting_learn(item->session, item->tokens[0]);
        is_ahead &=
            may_draft && item->n_tokens == 1 && qsf_drafting_has(item->session, item->tokens[0]);
        m->shared.parts[i] = part_of(item);
    }
    for (uint32_t i = 0; is_ahead && i < n_items; i++) {
        items[i].status = qsf_drafting_take(items[i].session);
        items[i].session->stats.step_tokens += items[i].status == QSF_OK;
    }
    return is_ahead;
}

/* Counts for a session its share of a pass of n_all tokens. */
static void count_share(const qsf_pass_part *p, qsf_stopwatch *w, uint64_t ns, uint32_t n_all)
{
    qsf_session *const s = p->session;
    const uint32_t n_tokens = p->n_tokens - p->n_drafts;
    const bool is_step = n_tokens == 1 && s->n_tokens > 1;
    *(is_step ? &s->stats.step_tokens : &s->stats.prompt_tokens) += n_tokens;
    *(is_step ? &s->stats.step_ns : &s->stats.prompt_ns) += ns * p->n_tokens / n_all;
    s->stats.n_step_passes += is_step;
    s->stats.n_step_rows += is_step ? p->n_tokens : 0;
    qsf_pass_count_phases(s, w, p->n_tokens, n_all);
}

/* Evaluates the parts of the items. */
static qsf_status run_parts(qsf_model *m, qsf_pass_item *items, uint32_t n_items, qsf_stopwatch *w,
                            qsf_pass_report *report)
{
    const qsf_pass_part *const parts = m->shared.parts;
    const uint64_t start_ns = w->last_ns;
    qsf_stats before;
    qsf_stats after;
    qsf_stream_report(&m->stream, &before);
    const qsf_status status = qsf_drafting_run(m, m->shared.parts, n_items, w);
    qsf_stream_report(&m->stream, &after);
    report->ns = qsf_clock_ns() - start_ns;
    report->wait_ns = w->phase_ns[QSF_PHASE_WAIT];
    report->read_bytes = after.read_bytes - before.read_bytes;
    for (uint32_t i = 0; i < n_items; i++)
        report->n_drafts += parts[i].n_drafts;
    for (uint32_t i = 0; i < n_items; i++) {
        items[i].status = parts[i].status;
        if (parts[i].status == QSF_OK)
            count_share(&parts[i], w, report->ns, report->n_tokens + report->n_drafts);
    }
    return status;
}

static qsf_status run_items(qsf_model *m, qsf_pass_item *items, uint32_t n_items,
                            qsf_pass_report *report)
{
    qsf_stopwatch w;
    QSF_TRY(check_items(m, items, n_items, report));
    qsf_stopwatch_start(&w, qsf_clock_ns());
    if (!take_items(m, items, n_items))
        return run_parts(m, items, n_items, &w, report);
    qsf_status status = QSF_ERR_CANCELLED;
    for (uint32_t i = 0; i < n_items; i++)
        status = items[i].status == QSF_OK ? QSF_OK : status;
    return status;
}

qsf_status qsf_model_pass(qsf_model *m, qsf_pass_item *items, uint32_t n_items,
                          qsf_pass_report *report)
{
    QSF_REQUIRE(m, items);
    qsf_pass_report unused;
    qsf_mutex_lock(&m->lock);
    const qsf_status status = run_items(m, items, n_items, report != NULL ? report : &unused);
    qsf_mutex_unlock(&m->lock);
    return status;
}

qsf_status qsf_model_set_source(qsf_model *m, qsf_rows_source source, void *arg)
{
    QSF_REQUIRE(m, source);
    QSF_FAIL_IF(m->options.first_layer == 0, ARG,
                "the model has its first layer: no rows are read");
    qsf_mutex_lock(&m->lock);
    m->source = source;
    m->source_arg = arg;
    qsf_mutex_unlock(&m->lock);
    return QSF_OK;
}

uint32_t qsf_session_is_ahead(qsf_session *s, uint32_t token)
{
    if (s == NULL)
        return 0;
    qsf_mutex_lock(&s->model->lock);
    const bool is_ahead = qsf_drafting_has(s, token);
    qsf_mutex_unlock(&s->model->lock);
    return is_ahead;
}
