/* pass.c - collects the tokens of sessions, runs them, and distributes the results; brings one
 * session to a token list, chunk by chunk.
 *
 * Sessions take turns: a call holds the model's lock while it evaluates one chunk.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/status.h"
#include "engine/model.h"
#include "platform/clock.h"

qsf_status qsf_pass_check_tokens(const qsf_model *m, const uint32_t *tokens, size_t n_tokens)
{
    QSF_FAIL_IF(n_tokens > m->plan.ctx_tokens, ARG, "%zu tokens do not fit in a context of %u",
                n_tokens, m->plan.ctx_tokens);
    for (size_t i = 0; i < n_tokens; i++)
        QSF_FAIL_IF(tokens[i] >= m->config.n_vocab, ARG,
                    "token %u at index %zu is outside the vocabulary of %u", tokens[i], i,
                    m->config.n_vocab);
    return QSF_OK;
}

void qsf_pass_count_phases(qsf_session *s, qsf_stopwatch *w, uint64_t n, uint64_t n_all)
{
    qsf_stopwatch_lap(w, QSF_PHASE_OTHER);
    for (uint32_t i = 0; i < QSF_N_PHASES; i++)
        s->stats.phase_ns[i] += w->phase_ns[i] * n / n_all;
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
        qsf_session_keep(s, s->n_tokens);
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
    b->segments[segment_idx] = (qsf_segment){
        .sequence = &s->buffers.sequence,
        .first_row = chunk->n_tokens,
        .n_tokens = p->n_tokens,
        .first_position = s->n_tokens,
        .adapter_scales = s->adapter_scales,
    };
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

/* Adds the hidden states of a part, rows [n_hidden, vector_dim padded], one after the other. */
static void add_hidden(const qsf_model *m, const qsf_pass_part *p, const float *rows)
{
    for (uint32_t row = 0; row < p->n_hidden; row++)
        for (uint32_t i = 0; i < m->config.vector_dim; i++)
            p->hidden[i] += rows[row * qsf_stride(m->config.vector_dim) + i];
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
    s->has_logits = p->n_rows > 0;
    if (p->n_rows == 0)
        return;
    s->ahead = (qsf_ahead){
        .n_drafts = p->n_drafts,
        .n_left = p->n_drafts,
        .logits = rows + (p->n_rows - p->n_drafts) * n_vocab,
        .pass = m->shared.logits_pass,
    };
    const float *const last = s->ahead.logits - n_vocab;
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
    const float *normed = m->scratch.normed; /* of the rows with logits */
    for (uint32_t i = 0; i < n_parts; i++) {
        qsf_pass_part *const p = &parts[i];
        if (p->n_rows > 0 && rows == p->session->buffers.logits)
            p->session->has_logits = false; /* the logits were overwritten */
        const bool is_cancelled = is_over && atomic_exchange(&p->session->cancelled, false);
        p->status = is_cancelled ? QSF_ERR_CANCELLED : status;
        end_part(m, p->session, p->status == QSF_OK);
        if (p->status == QSF_OK) {
            append(m, p, rows);
            if (m->config.keeps_hidden)
                qsf_sequence_keep_hidden(&p->session->buffers.sequence,
                                         p->session->n_tokens + p->n_drafts, normed, p->n_rows,
                                         m->scratch.dim_stride);
            add_hidden(m, p, hidden);
            n_appended++;
        }
        if (p->n_hidden > 0)
            hidden += p->n_hidden * qsf_stride(m->config.vector_dim);
        normed += p->n_rows * m->scratch.dim_stride;
        if (p->n_rows > 0)
            rows += p->n_rows * (size_t)m->config.n_vocab;
    }
    return status == QSF_OK && n_appended == 0
               ? QSF_FAIL(CANCELLED, "cancelled at the end of the pass")
               : status;
}

/* ---- stages: rows from the layers before, and for those after ---- */

/* The argument of read_rows */
typedef struct reading {
    qsf_model *model;
    const qsf_pass_part *parts;
    uint32_t n_parts;
    const qsf_cancel *cancel;
} reading;

/* Fills x [tokens of the parts, stride] from the model's source, in the order of `gather`. */
static qsf_status read_rows(void *arg, float *x, size_t stride)
{
    const reading *const r = arg;
    qsf_model *const m = r->model;
    qsf_rows_wanted *const wanted = m->shared.wanted;
    uint32_t n_wanted = 0;
    size_t n_rows = 0;
    for (uint32_t i = 0; i < 2 * r->n_parts; i++) {
        const qsf_pass_part *const p = &r->parts[i % r->n_parts];
        if ((p->n_hidden > 0) != (i >= r->n_parts))
            continue;
        wanted[n_wanted++] = (qsf_rows_wanted){
            .session = p->session,
            .held = p->session->buffers.tokens,
            .n_held = p->session->n_tokens,
            .tokens = p->tokens,
            .n_tokens = p->n_tokens,
        };
        n_rows += p->n_tokens;
    }
    atomic_store(&m->is_deaf, r->cancel == NULL);
    const int fault = m->source(m->source_arg, wanted, n_wanted, x, stride);
    atomic_store(&m->is_deaf, false);
    if (fault != 0)
        return qsf_cancel_is_set(r->cancel)
                   ? QSF_FAIL(CANCELLED, "cancelled while waiting for rows")
                   : QSF_FAIL(IO, "no rows came from the layers before layer %u",
                              m->options.first_layer);
    for (size_t t = 0; t < n_rows; t++) /* kernels read the padding */
        memset(x + t * stride + m->config.dim, 0, (stride - m->config.dim) * sizeof *x);
    return QSF_OK;
}

/* Copies the rows that a stage without a head hands on. */
static void copy_residual(const qsf_model *m, const qsf_pass_part *parts, uint32_t n_parts)
{
    const float *x = m->scratch.x;
    for (uint32_t i = 0; i < n_parts; i++)
        for (uint32_t t = 0; t < parts[i].n_tokens; t++, x += m->scratch.dim_stride)
            if (parts[i].residual != NULL)
                memcpy(parts[i].residual + (size_t)t * m->config.dim, x, m->config.dim * sizeof *x);
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
    reading source = {m, parts, n_parts, cancel};
    if (m->options.first_layer != 0) {
        chunk.read_rows = read_rows;
        chunk.read_rows_arg = &source;
    }
    gather(b, parts, n_parts, &chunk);
    *logits = chunk.logits;
    m->shared.logits_pass += chunk.logits == b->logits;
    QSF_TRY(qsf_forward_run(&m->forward, &chunk));
    if (m->reader.is_without_head)
        copy_residual(m, parts, n_parts);
    return QSF_OK;
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
        s->stats.n_again += status == QSF_OK ? part.n_tokens : 0;
    }
    s->n_tokens = n_tokens;
    return status;
}

qsf_status qsf_pass_run(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, qsf_stopwatch *w)
{
    const qsf_cancel cancel = {.flags = m->shared.cancelled, .n = n_parts};
    qsf_status status = QSF_OK;
    const float *logits;
    for (uint32_t i = 0; i < n_parts; i++)
        parts[i].status = QSF_ERR_ARG; /* until it has run */
    for (uint32_t i = 0; i < n_parts && m->config.is_encoder; i++)
        QSF_FAIL_IF(parts[i].n_rows != 0 || parts[i].session->n_tokens != 0, ARG,
                    "this model is an encoder: it makes vectors of whole texts (qsf embed, "
                    "/v1/embeddings), and no text");
    QSF_FAIL_IF(m->options.first_layer != 0 && m->source == NULL, ARG,
                "a stage from layer %u on needs a source of rows", m->options.first_layer);
    for (uint32_t i = 0; i < n_parts && m->reader.is_without_head; i++)
        QSF_FAIL_IF(parts[i].n_rows != 0 || parts[i].n_hidden != 0, ARG,
                    "a stage without the last layer gives the residual, and no logits");
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

/* ---- a token list ---- */

/* Evaluates tokens [n_tokens] after those held, with logits of the last n_rows in rows. Appends
 * them only if the pass succeeded. */
static qsf_status evaluate(qsf_session *s, const uint32_t *tokens, uint32_t n_tokens,
                           uint32_t n_rows, float *rows)
{
    qsf_pass_part part = {
        .session = s, .tokens = tokens, .n_tokens = n_tokens, .n_rows = n_rows, .rows = rows};
    qsf_model *const m = s->model;
    s->has_logits = false;
    qsf_mutex_lock(&m->lock);
    const qsf_status status = qsf_pass_run(m, &part, 1, &s->stopwatch);
    qsf_mutex_unlock(&m->lock);
    return status == QSF_OK ? part.status : status;
}

/* Evaluates a chunk after the tokens held, with logits from position first_row on: position p has
 * row p - first_row of scores. */
static qsf_status score_chunk(qsf_session *s, const uint32_t *tokens, uint32_t n_tokens,
                              size_t first_row, float *scores)
{
    const size_t position = s->n_tokens;
    const size_t n_skipped = first_row > position ? first_row - position : 0;
    const uint32_t n_rows = n_skipped < n_tokens ? n_tokens - (uint32_t)n_skipped : 0;
    float *const rows = scores + (position + n_skipped - first_row) * s->model->config.n_vocab;
    return evaluate(s, tokens, n_tokens, n_rows, n_rows > 0 ? rows : NULL);
}

/* Brings the session closer to tokens [n_tokens] by one chunk. scores [n_tokens - first_row,
 * n_vocab], or NULL: only the last token needs logits. */
static qsf_status advance(qsf_session *s, const uint32_t *tokens, size_t n_tokens, size_t first_row,
                          float *scores, size_t *n_done)
{
    qsf_model *const m = s->model;
    const uint64_t start_ns = qsf_clock_ns();
    qsf_stopwatch_start(&s->stopwatch, start_ns);
    QSF_TRY(qsf_pass_check_tokens(m, tokens, n_tokens));
    /* Scoring evaluates from its first row on. Otherwise all held tokens may be kept, the last
     * one only if its logits are available. */
    uint32_t n_kept = (uint32_t)qsf_session_common(s, tokens, n_tokens);
    const size_t n_wanted = *n_done < first_row ? first_row : *n_done; /* keep these if held */
    if (scores != NULL)
        n_kept = n_wanted < n_kept ? (uint32_t)n_wanted : n_kept;
    else if (n_kept == n_tokens && !(s->has_logits && s->n_tokens == n_kept))
        n_kept--;
    /* If the windows before that position are lost, everything is evaluated again; states return
     * to a snapshot. */
    const uint32_t n_same = n_kept;
    n_kept = qsf_sequence_nearest(&s->buffers.sequence, n_kept);
    qsf_session_keep(s, n_kept);
    *n_done = n_kept;
    if (n_kept == n_tokens)
        return QSF_OK;

    const size_t left = n_tokens - n_kept;
    const uint32_t n = left < m->plan.chunk_tokens ? (uint32_t)left : m->plan.chunk_tokens;
    const bool is_last = n == left;
    if (scores != NULL)
        QSF_TRY(score_chunk(s, tokens + n_kept, n, first_row, scores));
    else
        QSF_TRY(evaluate(s, tokens + n_kept, n, is_last ? 1 : 0, s->buffers.logits));
    *n_done = s->n_tokens;
    s->stats.n_again += n_same - n_kept < n ? n_same - n_kept : n;
    s->stats.prompt_tokens += n;
    qsf_pass_count_phases(s, &s->stopwatch, 1, 1);
    s->stats.prompt_ns += qsf_clock_ns() - start_ns;
    return QSF_OK;
}

qsf_status qsf_session_sync(qsf_session *s, const uint32_t *tokens, size_t n_tokens, size_t *n_done)
{
    QSF_REQUIRE(s, tokens, n_done);
    QSF_FAIL_IF(n_tokens == 0, ARG, "a session is synchronised to at least one token");
    return advance(s, tokens, n_tokens, n_tokens, NULL, n_done);
}

qsf_status qsf_session_score(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                             size_t first_row, float *logits, size_t cap_floats, size_t *n_done)
{
    QSF_REQUIRE(s, tokens, logits, n_done);
    QSF_FAIL_IF(n_tokens == 0, ARG, "a session is synchronised to at least one token");
    QSF_FAIL_IF(first_row >= n_tokens, ARG, "first_row is %zu; it must be below n_tokens, %zu",
                first_row, n_tokens);
    const uint32_t n_vocab = s->model->config.n_vocab;
    QSF_FAIL_IF(cap_floats / n_vocab < n_tokens - first_row, ARG,
                "the buffer holds %zu floats, but %zu rows of %u are needed", cap_floats,
                n_tokens - first_row, n_vocab);
    QSF_FAIL_IF(*n_done > n_tokens, ARG, "n_done is %zu; it must be at most n_tokens, %zu", *n_done,
                n_tokens);
    return advance(s, tokens, n_tokens, first_row, logits, n_done);
}
