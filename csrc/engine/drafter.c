/* drafter.c - the draft model follows the text and chooses as the session's model will. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/drafter.h"

#include <math.h>

#include "engine/model.h"
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

/* Chooses the token after the first n_tokens by the draft model's logits, n_draws choices after
 * the session's next one. Ignores masks and biases. */
static bool choose(const qsf_session *s, uint32_t n_tokens, uint32_t n_draws, uint32_t *token,
                   float *logprob)
{
    const qsf_last_choice *const c = &s->last_choice;
    const uint32_t n_new = n_tokens > c->n_tokens ? n_tokens - c->n_tokens : 0;
    const uint32_t n_recent = n_new + c->n_recent < n_tokens ? n_new + c->n_recent : n_tokens;
    const uint32_t n_counted = n_new + c->n_counted < n_recent ? n_new + c->n_counted : n_recent;
    qsf_choose_item item = {
        .session = s->drafter,
        .how = &c->how,
        .recent = s->buffers.tokens + n_tokens - n_recent,
        .n_recent = n_recent,
        .n_counted = n_counted,
        .random_state = qsf_random_after(c->random_state, n_draws),
        .logprob_tokens = token,
        .logprobs = logprob,
        .n_logprobs = 1,
    };
    return qsf_model_choose(s->drafter->model, &item, 1) == QSF_OK;
}

bool qsf_drafter_guess(qsf_session *s, uint32_t n_tokens, qsf_speculation_chain *chain,
                       qsf_guess *out)
{
    const uint64_t start_ns = qsf_clock_ns();
    const uint64_t n_before = s->drafter->prompt_tokens;
    float logprob;
    const bool has_guess =
        follow(s, n_tokens) && choose(s, n_tokens, chain->n_drafts, &out->token, &logprob);
    const uint64_t n_evaluated = s->drafter->prompt_tokens - n_before;
    qsf_speculation_spend(&s->model->shared.costs, chain, qsf_clock_ns() - start_ns,
                          (uint32_t)n_evaluated);
    if (!has_guess || out->token >= s->model->config.n_vocab)
        return false;
    out->kind = qsf_speculation_kind_of_model(exp((double)logprob));
    return true;
}
