/* pass.c - collects the tokens of sessions, runs them, and distributes the results. */
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

/* Reserves the memory that the parts will write. */
static qsf_status reserve(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts)
{
    qsf_status status = QSF_OK;
    qsf_mutex_lock(&m->kv_lock);
    for (uint32_t i = 0; i < n_parts && status == QSF_OK; i++) {
        qsf_session *const s = parts[i].session;
        s->n_ahead = 0;
        s->has_likeliest = false;
        status = qsf_sequence_begin(&s->buffers.sequence, s->n_tokens,
                                    s->n_tokens + parts[i].n_tokens, parts[i].n_drafts);
    }
    for (uint32_t i = 0; i < n_parts && status != QSF_OK; i++)
        qsf_sequence_abandon(&parts[i].session->buffers.sequence);
    qsf_mutex_unlock(&m->kv_lock);
    for (uint32_t i = 0; i < n_parts; i++)
        parts[i].status = status;
    return status;
}

/* Makes the segment of a part. */
static void gather_part(const qsf_shared_buffers *b, const qsf_pass_part *p, qsf_chunk *chunk)
{
    qsf_session *const s = p->session;
    const uint32_t segment_idx = chunk->n_segments++;
    const uint32_t n_rows = p->n_rows + p->n_hidden;
    const bool is_first = s->model->config.is_encoder;
    uint32_t *const rows = b->head_rows + chunk->n_logits_rows + chunk->n_hidden_rows;
    b->segments[segment_idx] =
        (qsf_segment){&s->buffers.sequence, chunk->n_tokens, p->n_tokens, s->n_tokens};
    b->cancelled[segment_idx] = &s->cancelled;
    s->n_incoming_bytes = 0; /* the pass overwrites its pages */
    memcpy(b->tokens + chunk->n_tokens, p->tokens, p->n_tokens * sizeof *p->tokens);
    chunk->n_tokens += p->n_tokens;
    for (uint32_t row = 0; row < n_rows; row++)
        rows[row] = chunk->n_tokens - (is_first ? p->n_tokens : n_rows) + row;
    chunk->n_logits_rows += p->n_rows;
    chunk->n_hidden_rows += p->n_hidden;
    if (p->n_rows > 0) /* if no other part has rows, all of them */
        chunk->logits = p->n_rows == chunk->n_logits_rows && p->rows != NULL ? p->rows : b->logits;
}

/* Makes a segment of each part; parts that want hidden states come last. */
static void gather(const qsf_shared_buffers *b, const qsf_pass_part *parts, uint32_t n_parts,
                   qsf_chunk *chunk)
{
    for (uint32_t i = 0; i < n_parts; i++)
        if (parts[i].n_hidden == 0)
            gather_part(b, &parts[i], chunk);
    for (uint32_t i = 0; i < n_parts; i++)
        if (parts[i].n_hidden > 0)
            gather_part(b, &parts[i], chunk);
}

/* Adds the hidden states of a part, rows [n_hidden, dim_stride], one after the other. */
static void add_hidden(const qsf_model *m, const qsf_pass_part *p, const float *rows)
{
    for (uint32_t row = 0; row < p->n_hidden; row++)
        for (uint32_t i = 0; i < m->config.dim; i++)
            p->hidden[i] += rows[row * m->scratch.dim_stride + i];
}

/* Ends a session's part of a pass. */
static void end_part(qsf_model *m, qsf_session *s, bool does_count)
{
    qsf_mutex_lock(&m->kv_lock);
    (does_count ? qsf_sequence_commit : qsf_sequence_abandon)(&s->buffers.sequence);
    qsf_mutex_unlock(&m->kv_lock);
}

/* Appends the tokens of a part to its session; rows [n_rows, n_vocab] are its logits. */
static void append(const qsf_model *m, const qsf_pass_part *p, const float *rows)
{
    const size_t n_vocab = m->config.n_vocab;
    qsf_session *const s = p->session;
    memmove(s->buffers.tokens + s->n_tokens, p->tokens, p->n_tokens * sizeof *p->tokens);
    s->n_tokens += p->n_tokens - p->n_drafts;
    s->n_ahead = s->n_drafts = p->n_drafts;
    s->draft_pass = m->shared.logits_pass;
    s->has_logits = p->n_rows > 0;
    if (p->n_rows == 0)
        return;
    s->draft_logits = rows + (p->n_rows - p->n_drafts) * n_vocab;
    const float *const last = s->draft_logits - n_vocab;
    if (p->rows != NULL && rows != p->rows)
        memcpy(p->rows, rows, p->n_rows * n_vocab * sizeof *rows);
    if (p->rows != s->buffers.logits)
        memcpy(s->buffers.logits, last, n_vocab * sizeof *last);
}

/* After a pass: sets each part's status, and adds its evaluated tokens to its session. */
static qsf_status hand_out(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, const float *rows,
                           qsf_status status)
{
    const bool is_over = status == QSF_OK || status == QSF_ERR_CANCELLED;
    uint32_t n_appended = 0;
    const float *hidden = m->forward.hidden;
    for (uint32_t i = 0; i < n_parts; i++) {
        qsf_pass_part *const p = &parts[i];
        if (p->n_rows > 0 && rows == p->session->buffers.logits)
            p->session->has_logits = false; /* the logits were overwritten */
        const bool is_cancelled = is_over && atomic_exchange(&p->session->cancelled, false);
        p->status = is_cancelled ? QSF_ERR_CANCELLED : status;
        end_part(m, p->session, p->status == QSF_OK);
        if (p->status == QSF_OK) {
            append(m, p, rows);
            add_hidden(m, p, hidden);
            n_appended++;
        }
        if (p->n_hidden > 0)
            hidden += p->n_hidden * m->scratch.dim_stride;
        if (p->n_rows > 0)
            rows += p->n_rows * (size_t)m->config.n_vocab;
    }
    return status == QSF_OK && n_appended == 0
               ? QSF_FAIL(QSF_ERR_CANCELLED, "cancelled at the end of the pass")
               : status;
}

/* Runs the parts, whose memory is reserved. *logits becomes the address of the logits of their
 * rows. */
static qsf_status run_parts(qsf_model *m, const qsf_pass_part *parts, uint32_t n_parts,
                            const qsf_cancel *cancel, qsf_stopwatch *w, const float **logits)
{
    const qsf_shared_buffers *const b = &m->shared;
    watching watched = {m, w};
    qsf_chunk chunk = {
        .tokens = b->tokens,
        .segments = b->segments,
        .head_rows = b->head_rows,
        .cancel = cancel,
        .stopwatch = w,
        .before_layer = watch_memory,
        .before_layer_arg = &watched,
    };
    gather(b, parts, n_parts, &chunk);
    *logits = chunk.logits;
    m->shared.logits_pass += chunk.logits == b->logits;
    return qsf_forward_run(&m->forward, &chunk);
}

/* Evaluates again the tokens after the nearest position of a session's sequence, which was
 * rewound. */
static qsf_status catch_up(qsf_model *m, qsf_session *s, const qsf_cancel *cancel, qsf_stopwatch *w)
{
    const uint32_t n_tokens = s->n_tokens;
    const uint32_t n_most = m->plan.chunk_tokens;
    qsf_status status = QSF_OK;
    for (;;) {
        s->n_tokens = qsf_sequence_nearest(&s->buffers.sequence, n_tokens);
        const uint32_t n_left = n_tokens - s->n_tokens;
        if (n_left == 0 || status != QSF_OK)
            break;
        qsf_pass_part part = {.session = s,
                              .tokens = s->buffers.tokens + s->n_tokens,
                              .n_tokens = n_left < n_most ? n_left : n_most};
        const float *logits;
        status = reserve(m, &part, 1);
        if (status != QSF_OK)
            continue;
        status = run_parts(m, &part, 1, cancel, w, &logits);
        end_part(m, s, status == QSF_OK);
        s->n_again += status == QSF_OK ? part.n_tokens : 0;
    }
    s->n_tokens = n_tokens;
    return status;
}

qsf_status qsf_pass_run(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, qsf_stopwatch *w)
{
    const qsf_cancel cancel = {m->shared.cancelled, n_parts};
    qsf_status status = QSF_OK;
    const float *logits;
    for (uint32_t i = 0; i < n_parts && m->config.is_encoder; i++)
        if (parts[i].n_rows != 0 || parts[i].session->n_tokens != 0)
            return QSF_FAIL(QSF_ERR_ARG, "this model is an encoder: it makes vectors of whole "
                                         "texts (qsf embed, /v1/embeddings), and no text");
    /* A session that is cancelled must not stop the others. */
    for (uint32_t i = 0; i < n_parts && status == QSF_OK; i++)
        status = catch_up(m, parts[i].session, n_parts == 1 ? &cancel : NULL, w);
    for (uint32_t i = 0; i < n_parts && status != QSF_OK; i++)
        parts[i].status = status;
    if (status == QSF_ERR_CANCELLED)
        atomic_store(&parts[0].session->cancelled, false);
    QSF_TRY(status);
    QSF_TRY(reserve(m, parts, n_parts));
    status = run_parts(m, parts, n_parts, &cancel, w, &logits);
    return hand_out(m, parts, n_parts, logits, status);
}
