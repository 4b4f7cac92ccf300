/* drafter.c - the draft model follows the text and chooses as the session's model will. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/drafter.h"

#include <math.h>

#include "engine/model.h"
#include "model/mtp.h"
#include "platform/clock.h"

/* Advances the draft model's session to tokens [n_tokens]; false if that is impossible or not
 * worth it. */
static bool follow(const qsf_session *s, uint32_t n_tokens)
{
    size_t n_done = 0;
    while (n_done < n_tokens)
        if (atomic_load(&s->cancelled) ||
            qsf_session_sync(s->drafter, s->buffers.tokens, n_tokens, &n_done) != QSF_OK)
            return false;
    return true;
}

/* Guesses with the MTP head, whose logits are then the first of the shared ones; false: the hidden
 * state of the token before the last of n_tokens is not known, or it is impossible. */
static bool run_head(qsf_session *s, uint32_t n_tokens)
{
    qsf_model *const m = s->model;
    qsf_sequence *const q = &s->buffers.sequence;
    const uint32_t position = n_tokens - 1;
    const float *hidden = NULL;
    if (position > 0 && position <= s->n_tokens && position >= q->mtp_begin)
        hidden = qsf_mtp_hidden(q, position - 1, m->scratch.dim_stride);
    else if (s->mtp_position != 0 && position == s->mtp_position + 1)
        hidden = m->forward.hidden;
    if (hidden == NULL || atomic_load(&s->cancelled))
        return false;
    qsf_mutex_lock(&m->kv_lock);
    const qsf_status status = qsf_kvcache_reserve(&q->kv, s->n_tokens, n_tokens);
    qsf_mutex_unlock(&m->kv_lock);
    const qsf_segment segment = {q, 0, 1, position};
    m->shared.logits_pass++;
    if (status != QSF_OK || qsf_forward_guess(&m->forward, &segment, s->buffers.tokens[position],
                                              hidden, m->shared.logits) != QSF_OK)
        return false;
    s->mtp_position = position;
    return true;
}

/* Chooses the token after the first n_tokens by the draft model's logits, or those of the MTP head,
 * n_draws choices after the session's next one. Ignores masks and biases. */
static bool choose(const qsf_session *s, uint32_t n_tokens, uint32_t n_draws, uint32_t *token,
                   float *logprob)
{
    const qsf_last_choice *const c = &s->last_choice;
    const uint32_t n_new = n_tokens > c->n_tokens ? n_tokens - c->n_tokens : 0;
    const uint32_t n_recent = n_new + c->n_recent < n_tokens ? n_new + c->n_recent : n_tokens;
    const uint32_t n_counted = n_new + c->n_counted < n_recent ? n_new + c->n_counted : n_recent;
    qsf_choose_item item = {
        .session = s->drafter,
        .logits = s->drafter == NULL ? s->model->shared.logits : NULL,
        .how = &c->how,
        .recent = s->buffers.tokens + n_tokens - n_recent,
        .n_recent = n_recent,
        .n_counted = n_counted,
        .random_state = qsf_random_after(c->random_state, n_draws),
        .logprob_tokens = token,
        .logprobs = logprob,
        .n_logprobs = 1,
    };
    return qsf_model_choose(s->drafter != NULL ? s->drafter->model : s->model, &item, 1) == QSF_OK;
}

bool qsf_drafter_guess(qsf_session *s, uint32_t n_tokens, qsf_speculation_chain *chain,
                       qsf_guess *out)
{
    const uint64_t start_ns = qsf_clock_ns();
    const uint64_t n_before = s->drafter != NULL ? s->drafter->prompt_tokens : 0;
    float logprob;
    const bool has_guess = (s->drafter != NULL ? follow(s, n_tokens) : run_head(s, n_tokens)) &&
                           choose(s, n_tokens, chain->n_drafts, &out->token, &logprob);
    const uint64_t n_evaluated = s->drafter != NULL ? s->drafter->prompt_tokens - n_before : 1;
    qsf_speculation_spend(&s->model->shared.costs, chain, qsf_clock_ns() - start_ns,
                          (uint32_t)n_evaluated);
    if (!has_guess || out->token >= s->model->config.n_vocab)
        return false;
    out->kind = qsf_speculation_kind_of_model(exp((double)logprob));
    return true;
}
