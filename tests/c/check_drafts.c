/* check_drafts.c - a pass with drafts that fails or is cancelled leaves the session as it was,
 * wherever it fails; guesses and what they cost; draft models in the plan. Bits:
 * tests/python/api/test_drafts.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20) /* a model larger than the buffers of streaming */
#define TINY_MODEL_DIM 256
#define TINY_LAYERS 6
#define TINY_MODEL_FFN 2048

#include "check.h"
#include "engine/model.h"
#include "engine/model_open.h"
#include "speculate/ngrams.h"
#include "speculate/speculation_budget.h"
#include "least_budget.h"
#include "system.h"
#include "tiny_model.h"

static char path[64];
static char draft_path[64];
static tiny_file file;

static const uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};

typedef struct opened {
    qsf_model *m;
    qsf_session *s;
} opened;

/* Makes passes so slow that each guess of the draft model is worth its time. */
static void slow_down(qsf_costs *t)
{
    t->least_ns = 1e12;
    t->compute_ns = 1.0;
}

/* Opens the streamed model, with a draft model unless its path is NULL, and evaluates two tokens.
 */
static bool open_one(opened *o, uint32_t draft_rows, const char *drafter_path)
{
    qsf_options opt;
    qsf_options_default(&opt);
    opt.n_threads = 2;
    opt.chunk_tokens = 8;
    opt.draft_rows = draft_rows;
    const qsf_faults known = least_budget(path, &opt);
    opt.draft_path = drafter_path;
    while (
        CHECK_OK(qsf_model_create(path, &opt, &known, &o->m)) &&
        (o->m->plan.draft_rows < draft_rows || (drafter_path != NULL && o->m->drafter == NULL))) {
        qsf_model_close(o->m);
        opt.budget_bytes += 1 << 16;
    }
    CHECK(o->m->plan.streamed_bytes > 0);
    CHECK_EQ(o->m->plan.draft_rows, draft_rows);
    size_t n_done;
    return CHECK_OK(qsf_session_create(o->m, &o->s)) &&
           CHECK_OK(qsf_session_sync(o->s, tokens, 2, &n_done));
}

static void close_one(opened *o)
{
    qsf_session_destroy(o->s);
    qsf_model_close(o->m);
}

static void check_same(const opened *a, const opened *b)
{
    float want[TINY_MODEL_VOCAB];
    float have[TINY_MODEL_VOCAB];
    CHECK_EQ(qsf_session_position(a->s), qsf_session_position(b->s));
    CHECK_OK(qsf_session_logits(a->s, have, TINY_MODEL_VOCAB));
    CHECK_OK(qsf_session_logits(b->s, want, TINY_MODEL_VOCAB));
    CHECK_BYTES(have, want, sizeof want);
}

/* Takes two tokens that are ahead. */
static void check_accepted(const opened *o, const opened *plain)
{
    CHECK_OK(qsf_session_step(o->s, tokens[3]));
    CHECK_OK(qsf_session_step(plain->s, tokens[3]));
    check_same(o, plain);
    qsf_session_cancel(o->s); /* in the middle of what is accepted */
    CHECK_STATUS(qsf_session_step(o->s, tokens[4]), QSF_ERR_CANCELLED);
    CHECK_EQ(qsf_session_position(o->s), 4);
    CHECK_OK(qsf_session_step(o->s, tokens[4]));
    CHECK_OK(qsf_session_step(plain->s, tokens[4]));
    check_same(o, plain);
    CHECK_EQ(o->s->n_accepted[QSF_GUESSER_CALLER], 2);
    CHECK_EQ(o->s->n_step_passes, 1);
}

/* The N-th read of a pass with drafts of the caller, or of a draft model, fails, for every N that
 * there is; then it succeeds. */
static void check_failures(qsf_fault_kind kind, const char *drafter_path)
{
    opened o;
    opened plain;
    if (!open_one(&o, 4, drafter_path) || !open_one(&plain, 0, NULL))
        return;
    uint32_t n_failed = 0;
    for (int64_t n = 0; n < 1000; n++) {
        CHECK_OK(qsf_session_draft(o.s, tokens + 3, drafter_path == NULL ? 3 : 0));
        slow_down(&o.m->shared.costs);
        o.m->reader.file.fault_kind = kind;
        o.m->reader.file.reads_until_fault = n;
        const qsf_status status = qsf_session_step(o.s, tokens[2]);
        o.m->reader.file.reads_until_fault = -1;
        if (status == QSF_OK)
            break;
        n_failed++;
        CHECK_EQ(qsf_session_position(o.s), 2);
        CHECK_EQ(o.s->ahead.n_left, 0);
    }
    CHECK(n_failed > 0);
    CHECK(drafter_path != NULL ? o.s->ahead.n_left > 0 : o.s->ahead.n_left == 3);
    CHECK((drafter_path != NULL) == (o.s->n_drafted[QSF_GUESSER_MODEL] > 0));
    CHECK_OK(qsf_session_step(plain.s, tokens[2]));
    check_same(&o, &plain);
    if (drafter_path == NULL)
        check_accepted(&o, &plain);
    close_one(&o);
    close_one(&plain);
}

static void check_matches(void)
{
    static const uint32_t text[] = {7, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3};
    qsf_match m = qsf_match_find(text, 12);
    CHECK_EQ(m.n_tokens, 3);
    CHECK_EQ(m.next, 4);
    m = qsf_match_find(text, 11); /* both are of two tokens: the later one */
    CHECK_EQ(m.n_tokens, 2);
    CHECK_EQ(m.next, 7);
    m = qsf_match_extend(m, text, 12); /* 4 was foretold, and 3 came */
    CHECK_EQ(m.n_tokens, 3);
    CHECK_EQ(m.next, 4);
    m = qsf_match_extend(qsf_match_find(text, 2), text, 3);
    CHECK_EQ(m.n_tokens, 0);
    CHECK_EQ(qsf_match_find(text, 1).n_tokens, 0);
    CHECK_EQ(qsf_match_find(text, 0).n_tokens, 0);
    uint32_t ones[100];
    for (size_t i = 0; i < 100; i++)
        ones[i] = 1;
    m = qsf_match_find(ones, 100);
    CHECK_EQ(m.n_tokens, QSF_MATCH_MOST);
    CHECK_EQ(m.next, 99);
}

static void check_ngrams(void)
{
    static qsf_ngram_entry entries[1 << 15];
    static const double chances[QSF_NGRAM_CLASSES] = {0.8, 0.79, 0.49, 0.24, 0.1, 0.04, 0.0};
    for (uint32_t i = 0; i < QSF_NGRAM_CLASSES; i++) {
        CHECK_EQ(qsf_ngram_token_of(70 + i, chances[i]).token, 70 + i);
        CHECK_EQ(qsf_ngram_token_of(70 + i, chances[i]).class, i);
    }
    qsf_ngrams f = {entries};
    CHECK(qsf_ngrams_find(&f, tokens, 2, 2) == NULL);
    CHECK(qsf_ngrams_find(&f, tokens, 0, 1) == NULL);
    qsf_ngrams_learn(&f, tokens, 2, qsf_ngram_token_of(70, 0.9));
    qsf_ngrams_learn(&f, tokens + 4, 1, qsf_ngram_token_of(71, 0.6));
    const qsf_ngram_token *const found[] = {
        qsf_ngrams_find(&f, tokens, 2, 2),
        qsf_ngrams_find(&f, tokens + 1, 1, 1),
        qsf_ngrams_find(&f, tokens + 3, 2, 1),
    };
    for (size_t i = 0; i < sizeof found / sizeof found[0]; i++)
        if (CHECK(found[i] != NULL)) {
            CHECK_EQ(found[i]->token, i == 2 ? 71 : 70);
            CHECK_EQ(found[i]->class, i == 2 ? 1 : 0);
        }
    CHECK(qsf_ngrams_find(&f, tokens + 1, 1, 2) == NULL);
    CHECK(qsf_ngrams_find(&f, tokens + 3, 2, 2) == NULL);
}

/* How many of n_drafts are chosen, each right with this chance. */
static uint32_t chosen(const qsf_costs *t, uint32_t n_drafts, double chance)
{
    qsf_speculation_chain c;
    qsf_speculation_begin(&c, 1, QSF_MAX_DRAFT_ROWS);
    for (uint32_t i = 0; i < n_drafts; i++)
        (void)qsf_speculation_append(&c, chance);
    qsf_speculation_choose(t, &c, n_drafts);
    return c.n_chosen;
}

/* Guesses that are never right are not drafted; those that are always right are, as far as the
 * passes are cheap. */
static void check_budget(void)
{
    qsf_costs t = {0};
    qsf_chances chances = {0};
    CHECK_EQ(chosen(&t, 8, 1.0), 0); /* nothing was measured */
    for (int i = 0; i < 50; i++)
        qsf_speculation_learn(&t, 1, 0, 1000, 900); /* behind a disk */
    CHECK_EQ(chosen(&t, 8, 1.0), 8);
    CHECK_EQ(chosen(&t, 1, 0.01), 0);
    for (int i = 0; i < 50; i++)
        qsf_speculation_learn(&t, 4, 3, 5000, 0); /* passes of four cost more than four */
    CHECK(chosen(&t, 3, 1.0) < 3);
    for (int i = 0; i < 1500; i++)
        qsf_speculation_learn(&t, 1, 0, 1000, 900); /* what was measured long ago is forgotten */
    CHECK_EQ(chosen(&t, 3, 1.0), 3);
    const uint32_t kind = qsf_speculation_kind_of_match(40);
    CHECK_EQ(kind, qsf_speculation_kind_of_match(17));
    CHECK_EQ(qsf_speculation_kind_of_match(1), QSF_KIND_MATCH);
    CHECK(qsf_speculation_chance(&chances, kind) > 0.9);
    for (int i = 0; i < 200; i++)
        qsf_speculation_count(&chances, kind, false);
    CHECK(qsf_speculation_chance(&chances, kind) < 0.1);
    for (int i = 0; i < 500; i++)
        qsf_speculation_count(&chances, kind, true);
    CHECK(qsf_speculation_chance(&chances, kind) > 0.9);
}

/* Of two sessions the one whose guesses are likelier has more of the drafts, and with more sessions
 * in a pass each draft must gain more. */
static void check_budget_of_many(void)
{
    qsf_costs t = {0};
    qsf_speculation_chain chains[2];
    for (uint32_t i = 0; i < 2; i++) {
        qsf_speculation_begin(&chains[i], 2, QSF_MAX_DRAFT_ROWS);
        for (uint32_t j = 0; j < 6; j++)
            (void)qsf_speculation_append(&chains[i], i == 0 ? 0.9 : 0.4);
    }
    chains[0].next = &chains[1];
    qsf_speculation_choose(&t, chains, 12); /* nothing was measured */
    CHECK_EQ(chains[0].n_chosen + chains[1].n_chosen, 0);
    for (int i = 0; i < 50; i++)
        qsf_speculation_learn(&t, 2, 0, 1000, 900); /* behind a disk, never with one row */
    CHECK(qsf_speculation_cost_ns(&t, 1) > 900.0);
    qsf_speculation_choose(&t, chains, 4); /* 0.9, 0.81, 0.73, 0.66 before 0.4 */
    CHECK_EQ(chains[0].n_chosen, 4);
    CHECK_EQ(chains[1].n_chosen, 0);
    qsf_speculation_choose(&t, chains, 8); /* 0.59, 0.53, 0.4, 0.16 */
    CHECK_EQ(chains[0].n_chosen, 6);
    CHECK_EQ(chains[1].n_chosen, 2);
    for (int i = 0; i < 50; i++) {
        qsf_speculation_learn(&t, 2, 0, 1000, 900);
        qsf_speculation_learn(&t, 3, 1, 1500, 0); /* each row takes as much as the others */
    }
    qsf_speculation_choose(&t, chains, 1);
    CHECK_EQ(chains[0].n_chosen + chains[1].n_chosen, 0);
}

/* A draft model that is right takes steps as long as they save more than they take; one that is
 * wrong takes a hundredth of the time. */
static void check_budget_of_models(void)
{
    qsf_costs t = {0};
    qsf_chances chances = {0};
    qsf_speculation_chain c;
    qsf_speculation_begin(&c, 1, QSF_MAX_DRAFT_ROWS);
    CHECK(!qsf_speculation_wants_model(&t, &chances, &c, 0.0)); /* no pass was measured */
    qsf_speculation_learn(&t, 1, 0, 1000000, 900000);
    CHECK(qsf_speculation_wants_model(&t, &chances, &c, 0.0));
    CHECK(!qsf_speculation_wants_model(&t, &chances, &c, 0.9) || t.credit_ns > 0.0);
    CHECK_EQ(qsf_speculation_guesser_of(qsf_speculation_kind_of_model(1.0)), QSF_GUESSER_MODEL);
    CHECK_EQ(qsf_speculation_kind_of_model(1.0), QSF_KIND_MODEL + 7);
    CHECK_EQ(qsf_speculation_kind_of_model(0.0), QSF_KIND_MODEL);
    uint32_t n_steps = 0;
    for (; n_steps < 20 && qsf_speculation_wants_model(&t, &chances, &c, 0.0); n_steps++) {
        qsf_speculation_spend(&t, &c, 50000, 1);
        CHECK(qsf_speculation_append(&c, 0.9));
    }
    CHECK(n_steps > 3 && n_steps < 20);
    qsf_speculation_begin(&c, 1, QSF_MAX_DRAFT_ROWS);
    t.credit_ns = 0.0;
    CHECK(qsf_speculation_wants_model(&t, &chances, &c, 0.0));
    for (int i = 0; i < 600; i++)
        qsf_speculation_count(&chances, QSF_KIND_MODEL + 3, false);
    double model_ns = 0.0;
    for (int i = 0; i < 1000; i++) {
        qsf_speculation_begin(&c, 1, QSF_MAX_DRAFT_ROWS);
        if (qsf_speculation_wants_model(&t, &chances, &c, 0.0))
            qsf_speculation_spend(&t, &c, 50000, 1);
        model_ns += c.model_ns;
        qsf_speculation_learn(&t, 1, 0, 1000000, 900000);
    }
    CHECK(model_ns > 0.0 && model_ns <= 0.011 * 1000 * 1e6);
}

/* Options with a draft model, and the memory that the process is taken to have. */
static qsf_options with_drafter(uint64_t *process_bytes)
{
    qsf_options opt;
    qsf_options_default(&opt);
    opt.n_threads = 2;
    opt.chunk_tokens = 8;
    opt.ctx_tokens = TINY_MODEL_TOKENS;
    opt.draft_rows = 4;
    *process_bytes = least_budget(path, &opt).process_bytes;
    opt.draft_path = draft_path;
    return opt;
}

/* The least budget has no room for a draft model; more has; all that there is has, too. As long as
 * something is streamed, the draft model's embedding table takes no memory that its rows need not.
 */
static void check_plan(void)
{
    qsf_model *m;
    qsf_faults faults = {-1, -1, 0};
    qsf_options opt = with_drafter(&faults.process_bytes);
    if (!CHECK_OK(qsf_model_create(path, &opt, &faults, &m)))
        return;
    CHECK_EQ(m->plan.drafter_state, QSF_DRAFTER_NO_ROOM);
    CHECK_EQ(m->plan.drafter_bytes, 0);
    CHECK(m->plan.drafter_wanted_bytes > 0);
    CHECK(m->drafter == NULL);
    CHECK_EQ(m->plan.min_budget_bytes, opt.budget_bytes);
    uint32_t n_of_state[QSF_DRAFTER_NOT_WORTH + 1] = {0};
    while (m->plan.drafter_state != QSF_DRAFTER_HELD || m->plan.streamed_bytes > 0) {
        n_of_state[m->plan.drafter_state]++;
        CHECK(m->plan.ceiling_bytes == opt.budget_bytes);
        CHECK(m->plan.process_bytes + m->plan.engine_bytes <= opt.budget_bytes);
        CHECK((m->drafter != NULL) == (m->plan.drafter_state == QSF_DRAFTER_HELD));
        CHECK(m->ledger.ceiling_bytes + m->plan.stacks_bytes + m->plan.drafter_bytes ==
              m->plan.engine_bytes);
        CHECK(m->drafter == NULL || m->drafter->ledger.ceiling_bytes <= m->plan.drafter_bytes);
        CHECK(m->drafter == NULL || m->drafter->has_table_on_disk);
        qsf_model_close(m);
        opt.budget_bytes += 1 << 16;
        if (!CHECK_OK(qsf_model_create(path, &opt, &faults, &m)))
            return;
    }
    CHECK_EQ(m->plan.drafter_bytes, m->plan.drafter_wanted_bytes);
    CHECK(n_of_state[QSF_DRAFTER_NO_ROOM] > 0);
    CHECK(n_of_state[QSF_DRAFTER_NOT_WORTH] > 0);
    CHECK(n_of_state[QSF_DRAFTER_HELD] > 0); /* streamed */
    qsf_model_close(m);
    opt.draft_rows = 0;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
}

/* The N-th allocation or read of both models fails, for every N that there is. */
static void check_failing_open(bool is_read)
{
    qsf_options opt = with_drafter(&(uint64_t){0});
    opt.budget_bytes = 0;
    int64_t n = 0;
    for (; n < 1000; n++) {
        const qsf_faults faults = {is_read ? -1 : n, is_read ? n : -1, 0};
        qsf_model *m;
        if (qsf_model_create(path, &opt, &faults, &m) == QSF_OK) {
            CHECK_EQ(m->plan.drafter_state, QSF_DRAFTER_HELD);
            qsf_model_close(m);
            break;
        }
        CHECK(m == NULL);
    }
    CHECK(n > 10 && n < 1000);
}

/* The N-th allocation of a session with a draft model fails; then steps are those without, with one
 * that guesses at random, and with one that is always right: the model itself, which chooses with
 * the penalties and random numbers of the session. */
static void check_drafter(const char *drafter_path, bool is_right, const qsf_sampling *how)
{
    opened o = {0};
    opened plain;
    qsf_options opt = with_drafter(&(uint64_t){0});
    opt.budget_bytes = 0;
    opt.draft_path = drafter_path;
    if (!CHECK_OK(qsf_model_open(path, &opt, &o.m)) || !open_one(&plain, 0, NULL))
        return;
    qsf_model *const drafter = o.m->drafter;
    for (int64_t n = 0; n < 2; n++) {
        drafter->ledger.grants_until_fault = n;
        CHECK_STATUS(qsf_session_create(o.m, &o.s), QSF_ERR_NOMEM);
        CHECK(o.s == NULL);
        CHECK_EQ(o.m->n_sessions + drafter->n_sessions, 0);
    }
    drafter->ledger.grants_until_fault = -1;
    size_t n_done;
    CHECK_OK(qsf_session_create(o.m, &o.s));
    CHECK_OK(qsf_session_sync(o.s, tokens, 2, &n_done));
    uint32_t text[TINY_MODEL_TOKENS];
    memcpy(text, tokens, 2 * sizeof *text);
    const uint32_t mask = is_right ? UINT32_MAX : 0x00F0F0FC; /* a draft model does not know it */
    qsf_choose_item item = {.session = o.s, .how = how, .recent = text, .mask = &mask};
    for (uint32_t i = 2; i < TINY_MODEL_TOKENS; i++) {
        item.n_recent = i;
        item.n_counted = i - 2;
        CHECK_OK(qsf_model_choose(o.m, &item, 1));
        text[i] = item.token;
        slow_down(&o.m->shared.costs);
        CHECK_OK(qsf_session_step(o.s, text[i]));
        CHECK_OK(qsf_session_step(plain.s, text[i]));
        check_same(&o, &plain);
    }
    CHECK(o.s->chances.n_model_tries > 0.0F);
    CHECK(!is_right || o.s->n_accepted[QSF_GUESSER_MODEL] > 0);
    CHECK(!is_right || o.s->n_step_passes < plain.s->n_step_passes / 2);
    qsf_session_cancel(o.s->drafter); /* a draft model that fails guesses nothing */
    qsf_session_cancel(o.s);
    CHECK_OK(qsf_session_rewind(o.s, 2));
    CHECK_STATUS(qsf_session_step(o.s, 1), QSF_ERR_CANCELLED);
    CHECK_OK(qsf_session_step(o.s, 1));
    close_one(&o);
    close_one(&plain);
}

int main(void)
{
    check_path(path, sizeof path, "check_drafts");
    tiny_model_build(&file, &(tiny_model){.n_layers = 6, .dtype = QSF_DTYPE_4BIT});
    if (!CHECK(tiny_write(path, file.bytes, file.n_bytes)))
        return check_report("check_drafts");
    check_path(draft_path, sizeof draft_path, "check_drafts_small");
    tiny_model_build(&file, &(tiny_model){.n_layers = 1, .dtype = QSF_DTYPE_4BIT});
    if (!CHECK(tiny_write(draft_path, file.bytes, file.n_bytes)))
        return check_report("check_drafts");
    check_plan();
    check_failing_open(false);
    check_failing_open(true);
    const qsf_sampling greedy = {1.3f, 0.0f, 0, 1.0f, 0.0f, 0.0f, 0.0f};
    const qsf_sampling hot = {1.1f, 1.0f, 20, 0.95f, 0.01f, 0.1f, 0.1f};
    check_drafter(draft_path, false, &greedy);
    check_drafter(draft_path, false, &hot);
    check_drafter(path, true, &greedy);
    check_drafter(path, true, &hot);
    check_budget_of_models();
    check_budget_of_many();
    check_failures(QSF_FAULT_FAIL, NULL);
    check_failures(QSF_FAULT_SHORT, NULL);
    check_failures(QSF_FAULT_CORRUPT, NULL);
    check_failures(QSF_FAULT_FAIL, draft_path);
    check_matches();
    check_ngrams();
    check_budget();
    unlink(path);
    unlink(draft_path);
    return check_report("check_drafts");
}
