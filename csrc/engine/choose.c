/* choose.c - chooses tokens, for one session or for many. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"
#include "engine/model.h"
#include "platform/clock.h"

static qsf_status check_ids(const qsf_model *m, const char *list, const uint32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        QSF_FAIL_IF(ids[i] >= m->config.n_vocab, ARG, "%s token %u is outside the vocabulary of %u",
                    list, ids[i], m->config.n_vocab);
    return QSF_OK;
}

static qsf_status check_logprobs(const qsf_model *m, size_t n_tokens)
{
    const uint32_t n_vocab = m->config.n_vocab;
    return n_tokens <= (size_t)n_vocab + 1
               ? QSF_OK
               : QSF_FAIL(ARG, "%zu log-probabilities are asked for; %u are the most", n_tokens,
                          n_vocab + 1);
}

/* Records how the session's next choice will be made, if it is like this one. */
static void note_choice(qsf_session *s, const qsf_sampling *how, const qsf_adjustment *change,
                        uint64_t random_state)
{
    s->last_choice = (qsf_last_choice){
        .how = *how,
        .random_state = random_state,
        .n_tokens = s->n_tokens,
        .n_recent = (uint32_t)change->n_recent,
        .n_counted = (uint32_t)change->n_counted,
    };
}

/* Chooses while holding the sampler's lock, and adds the time to s unless it is NULL. */
static qsf_status choose_locked(qsf_model *m, qsf_session *s, const float *logits,
                                const qsf_sampling *how, const qsf_adjustment *change,
                                uint64_t *random_state, uint32_t *token)
{
    const uint64_t start_ns = qsf_clock_ns();
    QSF_TRY(qsf_sampler_choose(&m->shared.sampler, &m->kernels, logits, how, change, random_state,
                               token));
    const uint64_t end_ns = qsf_clock_ns();
    if (s != NULL) {
        s->stats.sample_ns += end_ns - start_ns;
        s->stats.n_samples++;
        if (logits == s->buffers.logits)
            note_choice(s, how, change, *random_state);
    }
    return QSF_OK;
}

qsf_status qsf_session_sample(qsf_session *s, const qsf_sampling *how, const uint32_t *recent,
                              size_t n_recent, uint64_t *random_state, uint32_t *token)
{
    QSF_REQUIRE(s, how, random_state, token);
    if (n_recent > 0)
        QSF_REQUIRE(recent);
    QSF_TRY(qsf_sampling_check(how));
    qsf_model *const m = s->model;
    QSF_TRY(qsf_session_check_logits(s));
    QSF_TRY(check_ids(m, "recent", recent, n_recent));
    const qsf_adjustment change = {.recent = recent, .n_recent = n_recent, .n_counted = n_recent};
    qsf_mutex_lock(&m->choosing);
    const qsf_status status =
        choose_locked(m, s, s->buffers.logits, how, &change, random_state, token);
    qsf_mutex_unlock(&m->choosing);
    return status;
}

qsf_status qsf_session_logprobs(qsf_session *s, uint32_t *tokens, float *logprobs, size_t n_tokens)
{
    QSF_REQUIRE(s, tokens, logprobs);
    qsf_model *const m = s->model;
    QSF_TRY(qsf_session_check_logits(s));
    QSF_FAIL_IF(n_tokens < 1, ARG, "n_tokens is 0; it must be 1 to %u", m->config.n_vocab + 1);
    QSF_TRY(check_logprobs(m, n_tokens));
    QSF_TRY(check_ids(m, "the", tokens, 1));
    qsf_mutex_lock(&m->choosing);
    const qsf_status status = qsf_sampler_logprobs(&m->shared.sampler, &m->kernels,
                                                   s->buffers.logits, tokens, logprobs, n_tokens);
    qsf_mutex_unlock(&m->choosing);
    return status;
}

static qsf_status check_item(const qsf_model *m, const qsf_choose_item *item, uint32_t idx)
{
    QSF_FAIL_IF(item->session == NULL && item->logits == NULL, ARG,
                "item %u has neither a session nor logits", idx);
    QSF_FAIL_IF(item->session != NULL && item->session->model != m, ARG,
                "the session of item %u belongs to another model", idx);
    if (item->logits == NULL)
        QSF_TRY(qsf_session_check_logits(item->session));
    QSF_FAIL_IF(item->n_counted > item->n_recent, ARG, "item %u counts %zu of %zu recent tokens",
                idx, item->n_counted, item->n_recent);
    QSF_FAIL_IF(
        (item->n_recent > 0 && item->recent == NULL) ||
            (item->n_biased > 0 && (item->biased == NULL || item->biases == NULL)) ||
            (item->n_logprobs > 0 && (item->logprob_tokens == NULL || item->logprobs == NULL)),
        ARG, "item %u has a number of values, but no values", idx);
    QSF_TRY(check_ids(m, "recent", item->recent, item->n_recent));
    QSF_TRY(check_ids(m, "biased", item->biased, item->n_biased));
    for (size_t i = 0; i < item->n_biased; i++)
        QSF_TRY(qsf_sampling_check_shift("a bias", item->biases[i]));
    QSF_TRY(check_logprobs(m, item->n_logprobs));
    return item->how != NULL ? qsf_sampling_check(item->how) : check_ids(m, "the", &item->token, 1);
}

static qsf_status choose_item(qsf_model *m, qsf_choose_item *item)
{
    const float *const logits = item->logits != NULL ? item->logits : item->session->buffers.logits;
    const qsf_adjustment change = {
        .recent = item->recent,
        .n_recent = item->n_recent,
        .n_counted = item->n_counted,
        .mask = item->mask,
        .biased = item->biased,
        .biases = item->biases,
        .n_biased = item->n_biased,
    };
    if (item->how != NULL)
        QSF_TRY(choose_locked(m, item->session, logits, item->how, &change, &item->random_state,
                              &item->token));
    if (item->n_logprobs == 0)
        return QSF_OK;
    item->logprob_tokens[0] = item->token;
    return qsf_sampler_logprobs(&m->shared.sampler, &m->kernels, logits, item->logprob_tokens,
                                item->logprobs, item->n_logprobs);
}

qsf_status qsf_model_choose(qsf_model *m, qsf_choose_item *items, uint32_t n_items)
{
    QSF_REQUIRE(m, items);
    for (uint32_t i = 0; i < n_items; i++)
        QSF_TRY(check_item(m, &items[i], i));
    qsf_status first = QSF_OK;
    qsf_mutex_lock(&m->choosing);
    for (uint32_t i = 0; i < n_items; i++) {
        items[i].status = choose_item(m, &items[i]);
        first = first == QSF_OK ? items[i].status : first;
    }
    qsf_mutex_unlock(&m->choosing);
    return first;
}
