/* step.c - one token further, and guesses of the tokens after it in the same pass.
 *
 * The tokens that were guessed stay behind those of the session, evaluated, until the next steps
 * ask for them or for others. So a step has the same effect with and without guesses, and only its
 * time differs.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/status.h"
#include "engine/drafter.h"
#include "engine/model.h"
#include "engine/options.h"
#include "engine/pass.h"
#include "engine/session.h"
#include "guess/matches.h"
#include "platform/clock.h"

typedef struct guess {
    uint32_t token;
    uint32_t kind;
} guess;

#define N_GUESSES 4

/* Lists what may follow tokens [n_tokens], of which `match` is the match. */
static uint32_t list_guesses(const qsf_followers *followers, const uint32_t *tokens,
                             uint32_t n_tokens, qsf_match match, guess *out)
{
    uint32_t n = 0;
    if (match.n_tokens > 0)
        out[n++] = (guess){tokens[match.next], qsf_thrift_kind_of_match(match.n_tokens)};
    for (uint32_t n_before = 1; n_before <= 2; n_before++)
        if (qsf_followers_find(followers, tokens, n_tokens, n_before, &out[n].token))
            out[n++].kind = QSF_KIND_FOLLOWER + n_before - 1;
    return n;
}

/* Counts which guesses of the session's next token were right, also where it was not drafted. */
static void count_guesses(qsf_session *s, uint32_t token)
{
    guess guesses[N_GUESSES];
    const uint32_t *const tokens = s->buffers.tokens;
    const qsf_match match = qsf_match_find(tokens, s->n_tokens);
    const uint32_t n =
        list_guesses(&s->model->shared.followers, tokens, s->n_tokens, match, guesses);
    for (uint32_t i = 0; i < n; i++)
        qsf_thrift_count(&s->thrift, guesses[i].kind, guesses[i].token == token);
    const uint32_t row = 1 + s->n_drafts - s->n_likeliest;
    if (s->n_likeliest > 0 && row < s->n_model_guesses &&
        s->buffers.model_kinds[row] != QSF_KIND_CALLER)
        qsf_thrift_count(&s->thrift, s->buffers.model_kinds[row],
                         s->buffers.model_guesses[row] == token);
}

/* The guess that is right most often; *chance is 0 if there is none. */
static guess best_guess(const qsf_thrift *t, const guess *guesses, uint32_t n, double *chance)
{
    guess best = {0};
    *chance = 0.0;
    for (uint32_t i = 0; i < n; i++)
        if (qsf_thrift_chance(t, guesses[i].kind) > *chance) {
            *chance = qsf_thrift_chance(t, guesses[i].kind);
            best = guesses[i];
        }
    return best;
}

/* Asks the draft model what follows the first n_tokens, if that promises to gain. */
static uint32_t ask_model(qsf_session *s, uint32_t n_tokens, qsf_thrift_chain *chain,
                          double best_chance, guess *out)
{
    const uint32_t row = chain->n_drafts;
    s->buffers.model_kinds[row] = QSF_KIND_CALLER;
    s->n_model_guesses = row + 1;
    if (s->drafter == NULL || !qsf_thrift_wants_model(&s->thrift, chain, best_chance) ||
        !qsf_drafter_guess(s, n_tokens, chain, &out->token, &out->kind))
        return 0;
    s->buffers.model_guesses[row] = out->token;
    s->buffers.model_kinds[row] = (uint8_t)out->kind;
    return 1;
}

/* Writes guesses after tokens [n_tokens] and their kinds to the session. Returns how many are worth
 * evaluating. */
static uint32_t guess_tokens(qsf_session *s, uint32_t n_tokens, uint32_t n_most)
{
    uint32_t *const tokens = s->buffers.tokens;
    qsf_match match = qsf_match_find(tokens, n_tokens);
    qsf_thrift_chain chain;
    qsf_thrift_begin(&chain);
    while (chain.n_drafts < n_most) {
        guess guesses[N_GUESSES];
        double chance;
        const uint32_t end = n_tokens + chain.n_drafts;
        uint32_t n = list_guesses(&s->model->shared.followers, tokens, end, match, guesses);
        (void)best_guess(&s->thrift, guesses, n, &chance);
        n += ask_model(s, end, &chain, chance, &guesses[n]);
        const guess best = best_guess(&s->thrift, guesses, n, &chance);
        s->buffers.draft_kinds[chain.n_drafts] = (uint8_t)best.kind;
        if (!qsf_thrift_append(&chain, chance))
            break;
        tokens[end] = best.token;
        match = qsf_match_extend(match, tokens, end + 1);
    }
    return qsf_thrift_choose(&s->thrift, &chain);
}

/* Writes drafts behind `token`, which is the session's next. Returns their number. */
static uint32_t draft(qsf_session *s, uint32_t token)
{
    const qsf_plan *const plan = &s->model->plan;
    uint32_t *const end = s->buffers.tokens + s->n_tokens;
    const uint32_t n_left = plan->ctx_tokens - s->n_tokens - 1;
    const uint32_t n_chunk = plan->chunk_tokens - 1;
    uint32_t n_most = plan->draft_rows < n_chunk ? plan->draft_rows : n_chunk;
    n_most = n_most < n_left ? n_most : n_left;
    end[0] = token;
    s->n_model_guesses = 0;
    if (n_most == 0)
        return 0;
    const bool is_offered = s->n_offered > 0;
    uint32_t n = is_offered ? s->n_offered : 0;
    n = n < n_most ? n : n_most;
    if (is_offered) {
        memcpy(end + 1, s->buffers.offered, n * sizeof *end);
        memset(s->buffers.draft_kinds, QSF_KIND_CALLER, n);
    } else {
        n = guess_tokens(s, s->n_tokens + 1, n_most);
    }
    s->n_offered = 0;
    return n;
}

/* The first of the largest logits. Sixteen maxima at a time, which compilers make vectors of. */
static uint32_t likeliest(const float *logits, uint32_t n_vocab)
{
    float most[16];
    for (uint32_t j = 0; j < 16; j++)
        most[j] = logits[0];
    for (uint32_t i = 0; i + 16 <= n_vocab; i += 16)
        for (uint32_t j = 0; j < 16; j++)
            most[j] = logits[i + j] > most[j] ? logits[i + j] : most[j];
    float best = most[0];
    for (uint32_t j = 1; j < 16; j++)
        best = most[j] > best ? most[j] : best;
    for (uint32_t i = n_vocab & ~15U; i < n_vocab; i++)
        best = logits[i] > best ? logits[i] : best;
    uint32_t token = 0;
    while (token + 1 < n_vocab && logits[token] < best)
        token++;
    return token;
}

/* Notes for each of the pass's tokens what the model finds likeliest after it. */
static void find_likeliest(qsf_session *s, const float *rows, uint32_t n_rows)
{
    const uint32_t n_vocab = s->model->config.n_vocab;
    s->n_likeliest = n_rows;
    for (uint32_t i = 0; i < n_rows; i++)
        s->buffers.likeliest[i] = likeliest(rows + i * (size_t)n_vocab, n_vocab);
}

/* Learns from the session's next token, and from the latest pass what was likeliest there: after
 * the guesses of it were counted. If the token is not the one ahead, also from what is dropped. */
static void learn(qsf_session *s, uint32_t token, bool is_ahead)
{
    qsf_followers *const followers = &s->model->shared.followers;
    const uint32_t n_rows = 1 + s->n_drafts;
    count_guesses(s, token);
    for (uint32_t i = 0; s->n_likeliest > 0 && (i == 0 || !is_ahead); i++, s->n_likeliest--)
        qsf_followers_learn(followers, s->buffers.tokens, s->n_tokens + i,
                            s->buffers.likeliest[n_rows - s->n_likeliest]);
}

/* Evaluates in one pass the token and the drafts that stand behind those of the session. */
static qsf_status evaluate(qsf_session *s, uint32_t n_drafts)
{
    qsf_model *const m = s->model;
    const bool drafts = m->plan.draft_rows > 0;
    float *const rows = n_drafts > 0 ? m->shared.draft_logits : s->buffers.logits;
    qsf_pass_part part = {s,     s->buffers.tokens + s->n_tokens, 1 + n_drafts, 1 + n_drafts, rows,
                          QSF_OK};
    s->has_logits = false;
    const uint64_t start_ns = qsf_clock_ns();
    const qsf_status status = qsf_pass_run(m, &part, 1, &s->stopwatch);
    QSF_TRY(status == QSF_OK ? part.status : status);
    s->n_tokens -= 1 + n_drafts;
    if (drafts) {
        qsf_thrift_learn(&s->thrift, 1 + n_drafts, qsf_clock_ns() - start_ns,
                         s->stopwatch.phase_ns[QSF_PHASE_WAIT]);
        find_likeliest(s, rows, 1 + n_drafts);
    }
    s->n_tokens++;
    if (n_drafts > 0)
        memcpy(s->buffers.logits, rows, m->config.n_vocab * sizeof *rows);
    m->shared.draft_owner = n_drafts > 0 ? s : m->shared.draft_owner;
    s->n_ahead = s->n_drafts = n_drafts;
    for (uint32_t i = 0; i < n_drafts; i++)
        s->n_drafted[qsf_thrift_guesser_of(s->buffers.draft_kinds[i])]++;
    s->n_step_passes++;
    s->n_step_rows += 1 + n_drafts;
    return QSF_OK;
}

/* Evaluates a token, with drafts if there is room for them. */
static qsf_status evaluate_ahead(qsf_session *s, uint32_t token)
{
    const uint32_t n_drafts = draft(s, token);
    const qsf_status status = evaluate(s, n_drafts);
    return status == QSF_ERR_NOMEM && n_drafts > 0 ? evaluate(s, 0) : status;
}

/* True if the token is evaluated already. */
static bool is_ahead(const qsf_session *s, uint32_t token)
{
    return s->n_ahead > 0 && s->model->shared.draft_owner == s &&
           s->buffers.tokens[s->n_tokens] == token;
}

/* Makes the first token that was evaluated ahead the session's. */
static qsf_status take(qsf_session *s)
{
    const size_t n_vocab = s->model->config.n_vocab;
    s->has_logits = false;
    if (atomic_exchange(&s->cancelled, false))
        return QSF_FAIL(QSF_ERR_CANCELLED, "cancelled before a token");
    const uint32_t draft_idx = s->n_drafts - s->n_ahead;
    memcpy(s->buffers.logits, s->model->shared.draft_logits + (1 + draft_idx) * n_vocab,
           n_vocab * sizeof(float));
    s->has_logits = true;
    s->n_accepted[qsf_thrift_guesser_of(s->buffers.draft_kinds[draft_idx])]++;
    s->n_tokens++;
    s->n_ahead--;
    return QSF_OK;
}

qsf_status qsf_session_step(qsf_session *s, uint32_t token)
{
    QSF_REQUIRE(s);
    qsf_model *const m = s->model;
    const uint64_t start_ns = qsf_clock_ns();
    qsf_stopwatch_start(&s->stopwatch, &m->trace, start_ns);
    QSF_TRY(qsf_pass_check_tokens(m, &token, 1));
    if (s->n_tokens == m->plan.ctx_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "the context of %u tokens is full", s->n_tokens);
    qsf_mutex_lock(&m->lock);
    const bool is_there = is_ahead(s, token);
    if (m->plan.draft_rows > 0)
        learn(s, token, is_there);
    const qsf_status status = is_there ? take(s) : evaluate_ahead(s, token);
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
