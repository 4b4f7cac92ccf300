/* drafting.c - evaluates drafts of the next tokens in the pass of the token before them.
 *
 * Evaluated drafts stay after the session's tokens until a step asks for them or for other tokens.
 * So a step has the same effect with and without drafts; only its time differs.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "base/status.h"
#include "engine/model.h"
#include "model/forward.h"
#include "platform/clock.h"
#include "speculate/ngrams.h"

#define N_GUESSES 4 /* n-gram match, n-grams of one and two tokens, draft model */

/* Lists likely next tokens after tokens [n_tokens]; `match` is their n-gram match. */
static uint32_t list_guesses(const qsf_ngrams *ngrams, const uint32_t *tokens, uint32_t n_tokens,
                             qsf_match match, qsf_guess *out)
{
    uint32_t n = 0;
    if (match.n_tokens > 0)
        out[n++] = (qsf_guess){tokens[match.next], qsf_speculation_kind_of_match(match.n_tokens)};
    for (uint32_t n_before = 1; n_before <= 2; n_before++) {
        const qsf_ngram_token *const f = qsf_ngrams_find(ngrams, tokens, n_tokens, n_before);
        const uint32_t kind = QSF_KIND_NGRAM + (n_before - 1) * QSF_NGRAM_CLASSES;
        if (f != NULL)
            out[n++] = (qsf_guess){f->token, kind + f->class};
    }
    return n;
}

/* Counts which guesses of the session's next token were right, even those that were not
 * evaluated. */
static void count_guesses(qsf_session *s, uint32_t token)
{
    qsf_guess guesses[N_GUESSES];
    const uint32_t *const tokens = s->buffers.tokens;
    const qsf_match match = qsf_match_find(tokens, s->n_tokens);
    const uint32_t n = list_guesses(&s->model->shared.ngrams, tokens, s->n_tokens, match, guesses);
    for (uint32_t i = 0; i < n; i++)
        qsf_speculation_count(&s->chances, guesses[i].kind, guesses[i].token == token);
    const uint32_t row = s->ahead.n_drafts - s->ahead.n_left;
    if (!s->ahead.has_likeliest || row >= s->n_model_guesses || row > s->chain.n_chosen)
        return;
    const qsf_guess *const g = &s->buffers.model_guesses[row];
    if (g->kind != QSF_KIND_CALLER)
        qsf_speculation_count(&s->chances, g->kind, g->token == token);
}

/* Returns the guess with the highest chance to be right; *chance is 0 if there is none. */
static qsf_guess best_of(const qsf_chances *t, const qsf_guess *guesses, uint32_t n, double *chance)
{
    qsf_guess best = {0};
    *chance = 0.0;
    for (uint32_t i = 0; i < n; i++)
        if (qsf_speculation_chance(t, guesses[i].kind) > *chance) {
            *chance = qsf_speculation_chance(t, guesses[i].kind);
            best = guesses[i];
        }
    return best;
}

/* ---- the draft model follows the text and chooses as the session's model will ---- */

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
        hidden = qsf_sequence_hidden(q, position - 1, m->scratch.dim_stride);
    else if (s->mtp_position != 0 && position == s->mtp_position + 1)
        hidden = m->forward.hidden;
    if (hidden == NULL || atomic_load(&s->cancelled))
        return false;
    qsf_mutex_lock(&m->kv_lock);
    const qsf_status status = qsf_kvcache_reserve(&q->kv, s->n_tokens, n_tokens);
    qsf_mutex_unlock(&m->kv_lock);
    const qsf_segment segment = {.sequence = q,
                                 .n_tokens = 1,
                                 .first_position = position,
                                 .adapter_scales = s->adapter_scales};
    m->shared.logits_pass++;
    if (status != QSF_OK || qsf_forward_guess(&m->forward, &segment, s->buffers.tokens[position],
                                              hidden, m->shared.logits) != QSF_OK)
        return false;
    s->mtp_position = position;
    return true;
}

/* Guesses with a drafter that reads this session's keys, values and hidden states; its logits are
 * then the first of its shared ones. All guesses of a chain are at the position of the first one.
 * False: the hidden state of the token before it is not known, or it is impossible. */
static bool run_lent(qsf_session *s, uint32_t n_tokens)
{
    qsf_model *const m = s->model;
    qsf_model *const drafter = m->drafter;
    const uint32_t position = n_tokens - 1;
    const uint32_t first = position - s->chain.n_drafts;
    const float *hidden = NULL;
    if (s->chain.n_drafts == 0 && first > 0 && first == s->n_tokens)
        hidden = qsf_sequence_hidden(&s->buffers.sequence, first - 1, m->scratch.dim_stride);
    else if (s->mtp_position != 0 && position == s->mtp_position + 1)
        hidden = drafter->forward.hidden;
    if (hidden == NULL || atomic_load(&s->cancelled) || first >= drafter->plan.ctx_tokens)
        return false;
    float *const joined = qsf_forward_joined(&drafter->forward);
    if (qsf_embedding_row(&m->forward.embedding, &m->stream, &m->kernels, m->ends.embedding,
                          s->buffers.tokens[position], joined) != QSF_OK)
        return false;
    m->kernels.scale(joined, m->config.embedding_factor, m->config.dim);
    memcpy(joined + m->config.dim, hidden, m->config.dim * sizeof *joined);
    const qsf_segment segment = {
        .sequence = &s->buffers.sequence, .n_tokens = 1, .first_position = first};
    drafter->shared.logits_pass++;
    if (qsf_forward_lent(&drafter->forward, &segment, drafter->shared.logits) != QSF_OK)
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
    qsf_model *const guesser = s->model->drafter != NULL ? s->model->drafter : s->model;
    qsf_choose_item item = {
        .session = s->drafter,
        .logits = s->drafter == NULL ? guesser->shared.logits : NULL,
        .how = &c->how,
        .recent = s->buffers.tokens + n_tokens - n_recent,
        .n_recent = n_recent,
        .n_counted = n_counted,
        .random_state = qsf_random_after(c->random_state, n_draws),
        .logprob_tokens = token,
        .logprobs = logprob,
        .n_logprobs = 1,
    };
    return qsf_model_choose(guesser, &item, 1) == QSF_OK;
}

/* Guesses the token after the first n_tokens of the session's buffer. False: the text is too long
 * for the draft model, has tokens outside of its vocabulary, or the session was cancelled. Adds its
 * time to the chain. */
static bool guess_by_model(qsf_session *s, uint32_t n_tokens, qsf_speculation_chain *chain,
                           qsf_guess *out)
{
    const uint64_t start_ns = qsf_clock_ns();
    const uint64_t n_before = s->drafter != NULL ? s->drafter->stats.prompt_tokens : 0;
    float logprob;
    const bool has_guess = (s->drafter != NULL          ? follow(s, n_tokens)
                            : s->model->drafter != NULL ? run_lent(s, n_tokens)
                                                        : run_head(s, n_tokens)) &&
                           choose(s, n_tokens, chain->n_drafts, &out->token, &logprob);
    const uint64_t n_evaluated =
        s->drafter != NULL ? s->drafter->stats.prompt_tokens - n_before : 1;
    qsf_speculation_spend(&s->model->shared.costs, chain, qsf_clock_ns() - start_ns,
                          (uint32_t)n_evaluated);
    if (!has_guess || out->token >= s->model->config.n_vocab)
        return false;
    out->kind = qsf_speculation_kind_of_model(exp((double)logprob));
    return true;
}

/* ---- guesses of all kinds ---- */

/* Asks the draft model for the token after the first n_tokens, if that promises to save time;
 * returns the number of its guesses, 0 or 1. */
static uint32_t ask_model(qsf_session *s, uint32_t n_tokens, double best_chance, qsf_guess *out)
{
    qsf_speculation_chain *const chain = &s->chain;
    qsf_guess *const noted = &s->buffers.model_guesses[chain->n_drafts];
    s->n_model_guesses = chain->n_drafts + 1;
    noted->kind = QSF_KIND_CALLER;
    if ((s->model->drafter == NULL && !s->model->reader.has_mtp) ||
        !qsf_speculation_wants_model(&s->model->shared.costs, &s->chances, chain, best_chance) ||
        !guess_by_model(s, n_tokens, chain, out))
        return 0;
    *noted = *out;
    return 1;
}

/* Writes guesses after tokens [n_tokens], and their kinds, to the session, for its chain. */
static void guess_tokens(qsf_session *s, uint32_t n_tokens, uint32_t n_most)
{
    uint32_t *const tokens = s->buffers.tokens;
    qsf_speculation_chain *const chain = &s->chain;
    qsf_match match = qsf_match_find(tokens, n_tokens);
    while (chain->n_drafts < n_most) {
        qsf_guess guesses[N_GUESSES];
        double chance;
        const uint32_t end = n_tokens + chain->n_drafts;
        uint32_t n = list_guesses(&s->model->shared.ngrams, tokens, end, match, guesses);
        best_of(&s->chances, guesses, n, &chance);
        n += ask_model(s, end, chance, &guesses[n]);
        const qsf_guess best = best_of(&s->chances, guesses, n, &chance);
        s->buffers.draft_kinds[chain->n_drafts] = (uint8_t)best.kind;
        if (!qsf_speculation_append(chain, chance))
            break;
        tokens[end] = best.token;
        match = qsf_match_extend(match, tokens, end + 1);
    }
}

/* The number of drafts for which a session has room after n_tokens. They take no KV blocks that
 * other sessions may need. */
static uint32_t room_for_drafts(const qsf_plan *plan, uint32_t n_tokens)
{
    const uint32_t n_used = n_tokens % QSF_KV_PAGE_TOKENS;
    const uint32_t n_left = plan->ctx_tokens - n_tokens;
    const uint32_t n_page = n_used == 0 ? 0 : QSF_KV_PAGE_TOKENS - n_used;
    return plan->kv_contexts == plan->max_sessions || n_left < n_page ? n_left : n_page;
}

/* Chooses the session's guesses; guesses of its caller come first. Returns the number of the
 * caller's. */
static uint32_t guess_part(const qsf_pass_part *p, uint32_t n_rows, uint32_t n_most)
{
    qsf_session *const s = p->session;
    const uint32_t end = s->n_tokens + p->n_tokens;
    const uint32_t n_left = room_for_drafts(&s->model->plan, end);
    n_most = n_most < n_left ? n_most : n_left;
    memcpy(s->buffers.tokens + s->n_tokens, p->tokens, p->n_tokens * sizeof *p->tokens);
    qsf_speculation_begin(&s->chain, n_rows, n_most);
    s->n_model_guesses = 0;
    s->mtp_position = 0;
    const uint32_t n_offered = s->n_offered < n_most ? s->n_offered : n_most;
    if (s->n_offered == 0)
        guess_tokens(s, end, n_most);
    memcpy(s->buffers.tokens + end, s->buffers.offered, n_offered * sizeof *p->tokens);
    memset(s->buffers.draft_kinds, QSF_KIND_CALLER, n_offered);
    s->n_offered = 0;
    return n_offered;
}

/* Appends drafts to the parts that may have some. */
static void add_drafts(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, uint32_t n_rows)
{
    const uint32_t n_chunk = m->plan.chunk_tokens - n_rows;
    uint32_t n_most = m->plan.draft_rows < n_chunk ? m->plan.draft_rows : n_chunk;
    qsf_speculation_chain *first = NULL;
    for (uint32_t i = 0; i < n_parts; i++) {
        qsf_pass_part *const p = &parts[i];
        if (!p->may_draft)
            continue;
        p->n_drafts = guess_part(p, n_rows, n_most);
        n_most -= p->n_drafts;
        p->session->chain.next = first;
        first = &p->session->chain;
    }
    qsf_speculation_choose(&m->shared.costs, first, n_most);
    for (uint32_t i = 0; i < n_parts; i++) {
        qsf_pass_part *const p = &parts[i];
        if (!p->may_draft)
            continue;
        p->n_drafts += p->session->chain.n_chosen;
        p->tokens = p->session->buffers.tokens + p->session->n_tokens;
        p->n_tokens += p->n_drafts;
        p->n_rows += p->n_drafts;
        p->rows = p->n_drafts > 0 ? NULL : p->rows;
    }
}

/* Finds the likeliest token by the logits of a row. False: a logit is not finite. */
static bool find_likeliest(qsf_model *m, const float *logits, qsf_ngram_token *out)
{
    uint32_t tokens[2] = {0}; /* an arbitrary token, and the most probable one */
    float logprobs[2];
    /* Another session may choose meanwhile: choices do not wait for passes. */
    qsf_mutex_lock(&m->choosing);
    const qsf_status status = qsf_sampler_logprobs(&m->shared.sampler, &m->kernels, logits, tokens,
                                                   logprobs, sizeof tokens / sizeof *tokens);
    qsf_mutex_unlock(&m->choosing);
    if (status == QSF_OK)
        *out = qsf_ngram_token_of(tokens[1], exp((double)logprobs[1]));
    return status == QSF_OK;
}

/* Records the most probable token after each row of a part's logits, and counts its drafts. */
static void note_drafts(const qsf_pass_part *p)
{
    qsf_session *const s = p->session;
    const uint32_t n_vocab = s->model->config.n_vocab;
    qsf_ngram_token *const likeliest = s->buffers.likeliest;
    s->ahead.has_likeliest = find_likeliest(s->model, s->buffers.logits, likeliest);
    for (uint32_t i = 0; i < p->n_drafts; i++) {
        s->ahead.has_likeliest =
            s->ahead.has_likeliest &&
            find_likeliest(s->model, s->ahead.logits + i * (size_t)n_vocab, &likeliest[1 + i]);
        s->stats.n_drafted[qsf_speculation_guesser_of(s->buffers.draft_kinds[i])]++;
    }
}

/* Learns the duration of the pass if each part was one token with drafts: rows without logits
 * and prompts have other costs. */
static void learn_costs(qsf_model *m, const qsf_pass_part *parts, uint32_t n_parts,
                        const qsf_stopwatch *w, uint64_t start_ns)
{
    uint32_t n_drafts = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        if (!parts[i].may_draft || parts[i].n_tokens - parts[i].n_drafts > 1)
            return;
        n_drafts += parts[i].n_drafts;
    }
    qsf_speculation_learn(&m->shared.costs, n_parts + n_drafts, n_drafts, qsf_clock_ns() - start_ns,
                          w->phase_ns[QSF_PHASE_WAIT]);
}

qsf_status qsf_drafting_run(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, qsf_stopwatch *w)
{
    if (m->plan.draft_rows == 0)
        return qsf_pass_run(m, parts, n_parts, w);
    uint32_t n_rows = 0;
    for (uint32_t i = 0; i < n_parts; i++)
        n_rows += parts[i].n_tokens;
    add_drafts(m, parts, n_parts, n_rows);
    const uint64_t start_ns = qsf_clock_ns();
    QSF_TRY(qsf_pass_run(m, parts, n_parts, w));
    for (uint32_t i = 0; i < n_parts; i++)
        if (parts[i].may_draft && parts[i].status == QSF_OK)
            note_drafts(&parts[i]);
    learn_costs(m, parts, n_parts, w, start_ns);
    return QSF_OK;
}

void qsf_drafting_learn(qsf_session *s, uint32_t token)
{
    const qsf_session_buffers *const b = &s->buffers;
    const uint32_t first = s->ahead.n_drafts - s->ahead.n_left;
    if (s->model->plan.draft_rows == 0)
        return;
    count_guesses(s, token);
    if (!s->ahead.has_likeliest)
        return;
    qsf_ngrams_learn(&s->model->shared.ngrams, b->tokens, s->n_tokens, b->likeliest[first]);
    s->ahead.has_likeliest = qsf_drafting_has(s, token);
    for (uint32_t i = 1; !s->ahead.has_likeliest && i <= s->ahead.n_left;
         i++) /* the rows that are dropped */
        qsf_ngrams_learn(&s->model->shared.ngrams, b->tokens, s->n_tokens + i,
                         b->likeliest[first + i]);
}

bool qsf_drafting_has(const qsf_session *s, uint32_t token)
{
    return s->ahead.n_left > 0 && s->ahead.pass == s->model->shared.logits_pass &&
           s->buffers.tokens[s->n_tokens] == token;
}

qsf_status qsf_drafting_take(qsf_session *s)
{
    const size_t n_vocab = s->model->config.n_vocab;
    s->has_logits = false;
    QSF_FAIL_IF(atomic_exchange(&s->cancelled, false), CANCELLED, "cancelled before a token");
    const uint32_t draft_idx = s->ahead.n_drafts - s->ahead.n_left;
    memcpy(s->buffers.logits, s->ahead.logits + draft_idx * n_vocab, n_vocab * sizeof(float));
    s->has_logits = true;
    s->stats.n_accepted[qsf_speculation_guesser_of(s->buffers.draft_kinds[draft_idx])]++;
    s->n_tokens++;
    s->ahead.n_left--;
    return QSF_OK;
}
