/* drafting.c - guesses of the next tokens in the pass of the token before them.
 *
 * The tokens that were guessed stay behind those of the session, evaluated, until it is asked for
 * them or for others. So a step has the same effect with and without guesses, and only its time
 * differs.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/drafting.h"

#include <math.h>
#include <string.h>

#include "base/status.h"
#include "engine/drafter.h"
#include "engine/model.h"
#include "engine/session.h"
#include "speculate/matches.h"
#include "platform/clock.h"

#define N_GUESSES (1 + 2 * QSF_FOLLOWERS + QSF_MODEL_GUESSES)

/* Lists what may follow tokens [n_tokens], of which `match` is the match. */
static uint32_t list_guesses(const qsf_followers *followers, const uint32_t *tokens,
                             uint32_t n_tokens, qsf_match match, qsf_guess *out)
{
    uint32_t n = 0;
    if (match.n_tokens > 0)
        out[n++] = (qsf_guess){tokens[match.next], qsf_thrift_kind_of_match(match.n_tokens)};
    for (uint32_t n_before = 1; n_before <= 2; n_before++) {
        const qsf_follower *const f = qsf_followers_find(followers, tokens, n_tokens, n_before);
        const uint32_t kind = QSF_KIND_FOLLOWER + (n_before - 1) * QSF_FOLLOWER_CLASSES;
        for (uint32_t i = 0; f != NULL && i < QSF_FOLLOWERS; i++)
            out[n++] = (qsf_guess){f[i].token, kind + f[i].class};
    }
    return n;
}

/* Counts which guesses of the session's next token were right, also where it was not drafted. */
static void count_guesses(qsf_session *s, uint32_t token)
{
    qsf_guess guesses[N_GUESSES];
    const uint32_t *const tokens = s->buffers.tokens;
    const qsf_match match = qsf_match_find(tokens, s->n_tokens);
    const uint32_t n =
        list_guesses(&s->model->shared.followers, tokens, s->n_tokens, match, guesses);
    for (uint32_t i = 0; i < n; i++)
        qsf_thrift_count(&s->chances, guesses[i].kind, guesses[i].token == token);
    const uint32_t row = s->n_drafts - s->n_ahead;
    if (!s->has_likeliest || row >= s->n_model_guesses || row > s->chain.chosen.n_drafts)
        return; /* or a branch was taken */
    for (uint32_t i = 0; i < QSF_MODEL_GUESSES; i++) {
        const qsf_guess *const g = &s->buffers.model_guesses[row * QSF_MODEL_GUESSES + i];
        if (g->kind != QSF_KIND_CALLER)
            qsf_thrift_count(&s->chances, g->kind, g->token == token);
    }
}

/* The chance of the guess that is right most often; 0 if there is none. */
static double most_chance(const qsf_chances *t, const qsf_guess *guesses, uint32_t n)
{
    double best = 0.0;
    for (uint32_t i = 0; i < n; i++)
        best = fmax(best, qsf_thrift_chance(t, guesses[i].kind));
    return best;
}

/* Takes the guess that is right most often out of the list; *chance is 0 if it is empty. Others of
 * the same token go, too. */
static qsf_guess take_best(const qsf_chances *t, qsf_guess *guesses, uint32_t *n, double *chance)
{
    qsf_guess best = {0};
    *chance = 0.0;
    for (uint32_t i = 0; i < *n; i++)
        if (qsf_thrift_chance(t, guesses[i].kind) > *chance) {
            *chance = qsf_thrift_chance(t, guesses[i].kind);
            best = guesses[i];
        }
    uint32_t n_left = 0;
    for (uint32_t i = 0; i < *n; i++)
        if (guesses[i].token != best.token)
            guesses[n_left++] = guesses[i];
    *n = n_left;
    return best;
}

/* Asks the draft model what follows the first n_tokens, if that promises to gain. */
static uint32_t ask_model(qsf_session *s, uint32_t n_tokens, double best_chance, qsf_guess *out)
{
    qsf_thrift_chain *const chain = &s->chain;
    qsf_guess *const noted = s->buffers.model_guesses + chain->n_drafts * QSF_MODEL_GUESSES;
    s->n_model_guesses = chain->n_drafts + 1;
    for (uint32_t i = 0; i < QSF_MODEL_GUESSES; i++)
        noted[i].kind = QSF_KIND_CALLER;
    if (s->drafter == NULL ||
        !qsf_thrift_wants_model(&s->model->shared.costs, &s->chances, chain, best_chance))
        return 0;
    const uint32_t n = qsf_drafter_guess(s, n_tokens, chain, out);
    memcpy(noted, out, n * sizeof *out);
    return n;
}

/* Adds the guesses as branches: no two are right at once. */
static void branch_off(qsf_session *s, qsf_guess *guesses, uint32_t n, double best_chance)
{
    double left = 1.0 - best_chance;
    while (n > 0) {
        double chance;
        const qsf_guess g = take_best(&s->chances, guesses, &n, &chance);
        chance = chance < left ? chance : left;
        left -= chance;
        qsf_thrift_branch_off(&s->chain, chance, g.token, g.kind);
    }
}

/* Writes guesses after tokens [n_tokens], and their kinds, to the session, for its chain. */
static void guess_tokens(qsf_session *s, uint32_t n_tokens, uint32_t n_most)
{
    uint32_t *const tokens = s->buffers.tokens;
    qsf_thrift_chain *const chain = &s->chain;
    qsf_match match = qsf_match_find(tokens, n_tokens);
    while (chain->n_drafts < n_most) {
        qsf_guess guesses[N_GUESSES];
        double chance;
        const uint32_t end = n_tokens + chain->n_drafts;
        uint32_t n = list_guesses(&s->model->shared.followers, tokens, end, match, guesses);
        n += ask_model(s, end, most_chance(&s->chances, guesses, n), &guesses[n]);
        const qsf_guess best = take_best(&s->chances, guesses, &n, &chance);
        branch_off(s, guesses, n, chance);
        s->buffers.draft_kinds[chain->n_drafts] = (uint8_t)best.kind;
        if (!qsf_thrift_append(chain, chance))
            break;
        tokens[end] = best.token;
        match = qsf_match_extend(match, tokens, end + 1);
    }
}

/* How many drafts a session has room for after n_tokens. They take no KV blocks that others may
 * need. */
static uint32_t room_for_drafts(const qsf_plan *plan, uint32_t n_tokens)
{
    const uint32_t n_used = n_tokens % QSF_KV_PAGE_TOKENS;
    const uint32_t n_left = plan->ctx_tokens - n_tokens;
    const uint32_t n_page = n_used == 0 ? 0 : QSF_KV_PAGE_TOKENS - n_used;
    return plan->kv_contexts == plan->max_sessions || n_left < n_page ? n_left : n_page;
}

/* Takes the session's guesses, or those of its caller, which are taken first. Returns the number of
 * the caller's. */
static uint32_t guess_part(const qsf_pass_part *p, uint32_t n_rows, uint32_t n_most)
{
    qsf_session *const s = p->session;
    const uint32_t end = s->n_tokens + p->n_tokens;
    const uint32_t n_left = room_for_drafts(&s->model->plan, end);
    n_most = n_most < n_left ? n_most : n_left;
    memcpy(s->buffers.tokens + s->n_tokens, p->tokens, p->n_tokens * sizeof *p->tokens);
    qsf_thrift_begin(&s->chain, n_rows, n_most);
    s->n_model_guesses = 0;
    const uint32_t n_offered = s->n_offered < n_most ? s->n_offered : n_most;
    if (s->n_offered == 0)
        guess_tokens(s, end, n_most);
    memcpy(s->buffers.tokens + end, s->buffers.offered, n_offered * sizeof *p->tokens);
    memset(s->buffers.draft_kinds, QSF_KIND_CALLER, n_offered);
    s->n_offered = 0;
    return n_offered;
}

/* Appends to the part's drafts those that were chosen, the chain before its branches. */
static void append_chosen(qsf_pass_part *p)
{
    const qsf_thrift_chain *const chain = &p->session->chain;
    const qsf_session_buffers *const b = &p->session->buffers;
    const uint32_t end = p->session->n_tokens + p->n_tokens;
    p->n_drafts += chain->chosen.n_drafts;
    for (uint32_t i = 0; i < p->n_drafts; i++)
        b->draft_parents[i] = (uint8_t)i;
    for (uint32_t i = 0; i < chain->chosen.n_branches; i++) {
        const qsf_thrift_branch *const branch = &chain->branches[i];
        b->tokens[end + p->n_drafts] = branch->token;
        b->draft_kinds[p->n_drafts] = branch->kind;
        b->draft_parents[p->n_drafts++] = branch->parent;
    }
}

/* Appends drafts to the parts that may have some. */
static void add_drafts(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, uint32_t n_rows)
{
    const uint32_t n_chunk = m->plan.chunk_tokens - n_rows;
    uint32_t n_most = m->plan.draft_rows < n_chunk ? m->plan.draft_rows : n_chunk;
    qsf_thrift_chain *first = NULL;
    for (uint32_t i = 0; i < n_parts; i++) {
        qsf_pass_part *const p = &parts[i];
        if (!p->may_draft)
            continue;
        p->n_drafts = guess_part(p, n_rows, n_most);
        n_most -= p->n_drafts;
        p->session->chain.next = first;
        first = &p->session->chain;
    }
    qsf_thrift_choose(&m->shared.costs, first, n_most);
    for (uint32_t i = 0; i < n_parts; i++) {
        qsf_pass_part *const p = &parts[i];
        if (!p->may_draft)
            continue;
        append_chosen(p);
        p->tokens = p->session->buffers.tokens + p->session->n_tokens;
        p->n_tokens += p->n_drafts;
        p->n_rows += p->n_drafts;
        p->rows = p->n_drafts > 0 ? NULL : p->rows;
    }
}

/* Finds the likeliest tokens [QSF_FOLLOWERS] by the logits of a row; of a smaller vocabulary the
 * last one several times. False: a logit is not finite. */
static bool find_likeliest(qsf_model *m, const float *logits, qsf_follower *out)
{
    const uint32_t n_vocab = m->config.n_vocab;
    const uint32_t n = n_vocab < QSF_FOLLOWERS ? n_vocab : QSF_FOLLOWERS;
    uint32_t tokens[1 + QSF_FOLLOWERS] = {0};
    float logprobs[1 + QSF_FOLLOWERS];
    /* Another session may choose meanwhile: choices do not wait for passes. */
    qsf_mutex_lock(&m->choosing);
    const qsf_status status = qsf_sampler_logprobs(&m->shared.sampler, &m->kernels, logits, tokens,
                                                   logprobs, (size_t)n + 1);
    qsf_mutex_unlock(&m->choosing);
    if (status != QSF_OK)
        return false;
    for (uint32_t i = 0; i < QSF_FOLLOWERS; i++) {
        const uint32_t rank = i < n ? i + 1 : n;
        out[i] = qsf_follower_of(tokens[rank], exp((double)logprobs[rank]));
    }
    return true;
}

/* Notes after each row of a part's logits what the model finds likeliest, and counts its drafts. */
static void note_drafts(const qsf_pass_part *p)
{
    qsf_session *const s = p->session;
    const uint32_t n_vocab = s->model->config.n_vocab;
    qsf_follower *const found = s->buffers.likeliest;
    s->has_likeliest = find_likeliest(s->model, s->buffers.logits, found);
    for (uint32_t i = 0; i < p->n_drafts; i++) {
        s->has_likeliest =
            s->has_likeliest && find_likeliest(s->model, s->draft_logits + i * (size_t)n_vocab,
                                               found + (1 + i) * QSF_FOLLOWERS);
        s->n_drafted[qsf_thrift_guesser_of(s->buffers.draft_kinds[i])]++;
    }
}

/* Learns what the pass took, if each of its parts was one token with drafts: rows without logits
 * and prompts cost something else. */
static void learn_costs(qsf_model *m, const qsf_pass_part *parts, uint32_t n_parts,
                        const qsf_stopwatch *w, uint64_t start_ns)
{
    uint32_t n_drafts = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        if (!parts[i].may_draft || parts[i].n_tokens - parts[i].n_drafts > 1)
            return;
        n_drafts += parts[i].n_drafts;
    }
    qsf_thrift_learn(&m->shared.costs, n_parts + n_drafts, n_drafts, qsf_clock_ns() - start_ns,
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
    learn_costs(m, parts, n_parts, w, start_ns);
    for (uint32_t i = 0; i < n_parts; i++)
        if (parts[i].may_draft && parts[i].status == QSF_OK)
            note_drafts(&parts[i]);
    return QSF_OK;
}

/* Learns what the model finds likeliest after draft i, if that follows a draft from `first` on, or
 * the token before them: the tokens of others may be gone. */
static void learn_draft(const qsf_session *s, uint32_t first, uint32_t i)
{
    const qsf_session_buffers *const b = &s->buffers;
    const uint32_t parent = b->draft_parents[i];
    const uint32_t before = parent == first ? s->n_tokens : s->first_draft + parent;
    const uint32_t tokens[] = {b->tokens[before - 1], b->tokens[s->first_draft + i]};
    if (parent >= first)
        qsf_followers_learn(&s->model->shared.followers, tokens, 2,
                            b->likeliest + (i + 1) * QSF_FOLLOWERS);
}

void qsf_drafting_learn(qsf_session *s, uint32_t token)
{
    const qsf_session_buffers *const b = &s->buffers;
    const uint32_t first = s->n_drafts - s->n_ahead;
    if (s->model->plan.draft_rows == 0)
        return;
    count_guesses(s, token);
    if (!s->has_likeliest)
        return;
    qsf_followers_learn(&s->model->shared.followers, b->tokens, s->n_tokens,
                        b->likeliest + first * QSF_FOLLOWERS);
    s->has_likeliest = qsf_drafting_has(s, token);
    for (uint32_t i = first; !s->has_likeliest && i < s->n_drafts; i++)
        learn_draft(s, first, i);
}

/* Returns the draft that is the token and follows the one that was taken last; n_drafts: none. */
static uint32_t find_draft(const qsf_session *s, uint32_t token)
{
    const uint32_t first = s->n_drafts - s->n_ahead;
    uint32_t i = first;
    while (i < s->n_drafts &&
           (s->buffers.draft_parents[i] != first || s->buffers.tokens[s->first_draft + i] != token))
        i++;
    return i;
}

/* True if nobody but this session would see its next position change. */
static bool owns_next(const qsf_session *s)
{
    qsf_mutex_lock(&s->model->kv_lock);
    const bool is_own = qsf_sequence_owns(&s->buffers.sequence, s->n_tokens);
    qsf_mutex_unlock(&s->model->kv_lock);
    return is_own;
}

bool qsf_drafting_has(const qsf_session *s, uint32_t token)
{
    if (s->n_ahead == 0 || s->draft_pass != s->model->shared.logits_pass)
        return false;
    const uint32_t i = find_draft(s, token);
    return i < s->n_drafts && (s->first_draft + i == s->n_tokens || owns_next(s));
}

qsf_status qsf_drafting_take(qsf_session *s, uint32_t token)
{
    const size_t n_vocab = s->model->config.n_vocab;
    s->has_logits = false;
    if (atomic_exchange(&s->cancelled, false))
        return QSF_FAIL(QSF_ERR_CANCELLED, "cancelled before a token");
    const uint32_t draft_idx = find_draft(s, token);
    const uint32_t place = s->first_draft + draft_idx;
    if (place != s->n_tokens) { /* of a branch: onto a draft that was not taken */
        qsf_sequence_move(&s->buffers.sequence, place, s->n_tokens);
        s->buffers.tokens[s->n_tokens] = token;
    }
    memcpy(s->buffers.logits, s->draft_logits + draft_idx * n_vocab, n_vocab * sizeof(float));
    s->has_logits = true;
    s->n_accepted[qsf_thrift_guesser_of(s->buffers.draft_kinds[draft_idx])]++;
    s->n_tokens++;
    s->n_ahead = s->n_drafts - (draft_idx + 1);
    return QSF_OK;
}
