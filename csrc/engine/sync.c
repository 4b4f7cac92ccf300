/* sync.c - brings one session to a token list, chunk by chunk.
 *
 * Sessions take turns: a call holds the model's lock while it evaluates one chunk.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"
#include "engine/model.h"
#include "engine/pass.h"
#include "engine/session.h"
#include "platform/clock.h"

/* Evaluates tokens [n_tokens] after those held, with logits of the last n_rows in rows. Appends
 * them only if the pass succeeded. */
static qsf_status evaluate(qsf_session *s, const uint32_t *tokens, uint32_t n_tokens,
                           uint32_t n_rows, float *rows)
{
    qsf_pass_part part = {s, tokens, n_tokens, n_rows, rows, QSF_OK, false, 0, 0, NULL};
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
    if (n_kept < s->n_tokens)
        s->has_logits = false;
    s->n_ahead = 0;
    s->has_likeliest = false;
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
        QSF_TRY(evaluate(s, tokens + n_kept, n, is_last ? 1 : 0, s->buffers.logits));
    *n_done = s->n_tokens;
    s->n_again += n_same - n_kept < n ? n_same - n_kept : n;
    s->prompt_tokens += n;
    qsf_pass_count_phases(s, &s->stopwatch, 1, 1);
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
