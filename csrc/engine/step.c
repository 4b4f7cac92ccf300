/* step.c - evaluates one token. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/status.h"
#include "engine/drafting.h"
#include "engine/model.h"
#include "engine/pass.h"
#include "engine/session.h"
#include "platform/clock.h"

/* Evaluates the token in a pass, unless it is an evaluated draft. */
static qsf_status step(qsf_session *s, uint32_t token)
{
    qsf_drafting_learn(s, token);
    if (qsf_drafting_has(s, token))
        return qsf_drafting_take(s);
    qsf_pass_part part = {s, &token, 1, 1, s->buffers.logits, QSF_OK, true, 0, 0, NULL};
    s->has_logits = false;
    const qsf_status status = qsf_drafting_run(s->model, &part, 1, &s->stopwatch);
    QSF_TRY(status == QSF_OK ? part.status : status);
    s->n_step_passes++;
    s->n_step_rows += part.n_tokens;
    return QSF_OK;
}

qsf_status qsf_session_step(qsf_session *s, uint32_t token)
{
    QSF_REQUIRE(s);
    qsf_model *const m = s->model;
    const uint64_t start_ns = qsf_clock_ns();
    qsf_stopwatch_start(&s->stopwatch, start_ns);
    QSF_TRY(qsf_pass_check_tokens(m, &token, 1));
    if (s->n_tokens == m->plan.ctx_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "the context of %u tokens is full", s->n_tokens);
    qsf_mutex_lock(&m->lock);
    const qsf_status status = step(s, token);
    qsf_mutex_unlock(&m->lock);
    QSF_TRY(status);
    s->step_tokens++;
    qsf_pass_count_phases(s, &s->stopwatch, 1, 1);
    s->step_ns += qsf_clock_ns() - start_ns;
    return QSF_OK;
}

qsf_status qsf_session_draft(qsf_session *s, const uint32_t *tokens, size_t n_tokens)
{
    QSF_REQUIRE(s);
    const uint32_t n_most = s->model->plan.draft_rows;
    if (n_tokens > n_most)
        return QSF_FAIL(QSF_ERR_ARG, "%zu drafts are too many: the plan has room for %u", n_tokens,
                        n_most);
    if (n_tokens > 0)
        QSF_REQUIRE(tokens);
    QSF_TRY(qsf_pass_check_tokens(s->model, tokens, n_tokens));
    memcpy(s->buffers.offered, tokens, n_tokens * sizeof *tokens);
    s->n_offered = (uint32_t)n_tokens;
    return QSF_OK;
}
