/* drafter.c - the draft model follows the text and says what it finds likeliest. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/drafter.h"

#include <math.h>

#include "engine/model.h"
#include "platform/clock.h"

/* Brings the draft model's session to tokens [n_tokens]; false if it cannot, or is not to. */
static bool follow(const qsf_session *s, uint32_t n_tokens)
{
    size_t n_done = 0;
    while (n_done < n_tokens)
        if (atomic_load(&s->cancelled) ||
            qsf_session_sync(s->drafter, s->buffers.tokens, n_tokens, &n_done) != QSF_OK)
            return false;
    return true;
}

bool qsf_drafter_guess(qsf_session *s, uint32_t n_tokens, qsf_thrift_chain *chain, uint32_t *token,
                       uint32_t *kind)
{
    const uint64_t start_ns = qsf_clock_ns();
    const uint64_t n_before = s->drafter->prompt_tokens;
    uint32_t ids[2] = {0};
    float logprobs[2];
    const bool has_guess = follow(s, n_tokens) &&
                           qsf_session_logprobs(s->drafter, ids, logprobs, 2) == QSF_OK &&
                           ids[1] < s->model->config.n_vocab;
    const uint64_t n_evaluated = s->drafter->prompt_tokens - n_before;
    qsf_thrift_spend(&s->model->shared.costs, chain, qsf_clock_ns() - start_ns,
                     (uint32_t)n_evaluated);
    if (!has_guess)
        return false;
    *token = ids[1];
    *kind = qsf_thrift_kind_of_model(exp((double)logprobs[1]));
    return true;
}
