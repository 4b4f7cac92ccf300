/* check_drafts.c - a pass that fails changes none of its sessions, wherever it fails: steps with
 * drafts of the caller and of a draft model, passes of many sessions with and without drafts. Draft
 * models in the plan. Bits, what is accepted, forgotten or cancelled: tests/python/api/
 * test_same_bits.py; wrong items: test_passes.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20) /* a model larger than the buffers of streaming */
#define TINY_MODEL_DIM 256
#define TINY_LAYERS 6
#define TINY_MODEL_FFN 2048

#include "engine_rig.h"

#define N_SESSIONS 3

static char path[64];
static char draft_path[64]; /* of two layers: also the model of passes */
static tiny_file file;
static size_t stride;

static const uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};

typedef struct rig {
    qsf_model *m;
    qsf_session *sessions[N_SESSIONS];
    uint32_t n_sessions;
    double hidden[TINY_MODEL_DIM]; /* of the second session */
} rig;

/* What may fail, and what comes before it. */
typedef struct operation {
    const char *name;
    uint32_t n_sessions;
    uint32_t draft_rows;
    bool has_drafter;
    void (*prepare)(rig *g);
    qsf_status (*run)(rig *g);
} operation;

static bool rig_start(rig *g, const operation *op)
{
    qsf_options opt = rig_options(2, 8 + 2 * op->draft_rows * (op->n_sessions > 1));
    *g = (rig){.n_sessions = op->n_sessions};
    opt.draft_rows = op->draft_rows;
    opt.max_sessions = op->n_sessions;
    opt.draft_path = op->has_drafter ? draft_path : NULL;
    g->m = rig_open_streamed(op->n_sessions > 1 ? draft_path : path, opt);
    if (g->m == NULL)
        return false;
    CHECK_EQ(g->m->plan.draft_rows, op->draft_rows);
    CHECK_EQ(g->m->plan.logits_rows, op->n_sessions > 1 ? op->n_sessions : 0);
    for (uint32_t i = 0; i < op->n_sessions; i++)
        if (!CHECK_OK(qsf_session_create(g->m, &g->sessions[i])))
            return false;
    op->prepare(g);
    return true;
}

static void rig_end(rig *g)
{
    for (uint32_t i = 0; i < g->n_sessions; i++)
        qsf_session_destroy(g->sessions[i]);
    qsf_model_close(g->m);
}

/* Makes passes so slow that each guess of the draft model is worth its time. */
static void slow_down(qsf_costs *t)
{
    t->least_ns = 1e12;
    t->compute_ns = 1.0;
}

/* ---- operations ---- */

static void prepare_step(rig *g)
{
    rig_sync(g->sessions[0], tokens, 2);
}

static qsf_status step_with_drafts(rig *g)
{
    CHECK_OK(qsf_session_draft(g->sessions[0], tokens + 3, 3));
    return qsf_session_step(g->sessions[0], tokens[2]);
}

static qsf_status step_with_model(rig *g)
{
    CHECK_OK(qsf_session_draft(g->sessions[0], tokens + 3, 0));
    slow_down(&g->m->shared.costs);
    return qsf_session_step(g->sessions[0], tokens[2]);
}

static qsf_pass_item item_of(rig *g, uint32_t i, const uint32_t *from, uint32_t n, uint32_t wants)
{
    return (qsf_pass_item){
        .session = g->sessions[i], .tokens = from, .n_tokens = n, .wants = wants};
}

static qsf_status run_pass(rig *g, qsf_pass_item *items)
{
    const qsf_status status = qsf_model_pass(g->m, items, N_SESSIONS, NULL);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        CHECK_EQ(items[i].status, status);
    return status;
}

static void prepare_pass(rig *g)
{
    qsf_pass_item items[N_SESSIONS];
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        items[i] = item_of(g, i, tokens, 3 - i, QSF_WANTS_LAST);
    CHECK_OK(run_pass(g, items));
}

/* A token, a piece of a prompt, a token. */
static qsf_status pass_of_many(rig *g)
{
    qsf_pass_item items[] = {item_of(g, 0, tokens + 3, 1, QSF_WANTS_LAST),
                             item_of(g, 1, tokens + 2, 4, QSF_WANTS_NONE),
                             item_of(g, 2, tokens + 1, 1, QSF_WANTS_LAST)};
    items[1].n_hidden = 3;
    items[1].hidden = g->hidden;
    return run_pass(g, items);
}

static void prepare_nothing(rig *g)
{
    (void)g;
}

static qsf_status pass_with_drafts(rig *g)
{
    qsf_pass_item items[N_SESSIONS];
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        items[i] = item_of(g, i, tokens, 1 + i, QSF_WANTS_AHEAD);
        CHECK_OK(qsf_session_draft(g->sessions[i], tokens + 1 + i, 2));
    }
    return run_pass(g, items);
}

static const operation operations[] = {
    {"step, drafts of the caller", 1, 4, false, prepare_step, step_with_drafts},
    {"step, draft model", 1, 4, true, prepare_step, step_with_model},
    {"pass", N_SESSIONS, 0, false, prepare_pass, pass_of_many},
    {"pass with drafts", N_SESSIONS, 6, false, prepare_nothing, pass_with_drafts},
};

/* ---- faults ---- */

/* The tokens that are ahead of a session, a bit for each. */
static uint32_t ahead_of(qsf_session *s)
{
    uint32_t bits = 0;
    for (uint32_t t = 0; t < TINY_MODEL_VOCAB; t++)
        bits |= (uint32_t)qsf_session_is_ahead(s, t) << t;
    return bits;
}

/* Both hold as many tokens and have the same logits, or neither has any. A step that failed forgets
 * those before it. */
static void check_same_session(const qsf_session *a, const qsf_session *b, bool may_forget)
{
    float want[TINY_MODEL_VOCAB];
    float have[TINY_MODEL_VOCAB];
    const qsf_status status = qsf_session_logits(a, have, TINY_MODEL_VOCAB);
    CHECK_EQ(qsf_session_position(a), qsf_session_position(b));
    if (may_forget && status == QSF_ERR_ARG)
        return;
    CHECK_EQ(qsf_session_logits(b, want, TINY_MODEL_VOCAB), status);
    if (status == QSF_OK)
        CHECK_BYTES(have, want, sizeof want);
}

/* The N-th read of an operation fails, for small Ns and some larger ones: all sessions are as
 * before it, like those of `before`. Then it succeeds. */
static void check_faults(const operation *op, qsf_fault_kind kind)
{
    rig o;
    rig before;
    if (!rig_start(&o, op) || !rig_start(&before, op))
        return;
    int64_t n = 0;
    for (; n < 1000; n += (int64_t)stride * (1 + n / 8)) {
        o.m->reader.file.fault_kind = kind;
        o.m->reader.file.reads_until_fault = n;
        const qsf_status status = op->run(&o);
        o.m->reader.file.reads_until_fault = -1;
        if (status == QSF_OK)
            break;
        for (uint32_t i = 0; i < op->n_sessions; i++) {
            check_same_session(o.sessions[i], before.sessions[i], op->n_sessions == 1);
            CHECK_EQ(ahead_of(o.sessions[i]), 0);
        }
        CHECK_BYTES(o.hidden, before.hidden, sizeof o.hidden);
    }
    if (!CHECK(n > 0 && n < 1000))
        printf("%s: nothing failed, or all did: %s\n", op->name, qsf_error_detail());
    CHECK_OK(op->run(&before));
    CHECK(o.hidden[0] != 0.0 || op->run != pass_of_many);
    CHECK_BYTES(o.hidden, before.hidden, sizeof o.hidden);
    for (uint32_t i = 0; i < op->n_sessions; i++) {
        check_same_session(o.sessions[i], before.sessions[i], false);
        CHECK_EQ(ahead_of(o.sessions[i]), ahead_of(before.sessions[i]));
        CHECK((ahead_of(o.sessions[i]) != 0) == (op->draft_rows > 0));
    }
    CHECK((o.sessions[0]->stats.n_drafted[QSF_GUESSER_MODEL] > 0) == op->has_drafter);
    rig_end(&o);
    rig_end(&before);
}

/* One wrong item, and nothing is evaluated. Those that Python makes: test_passes.py. */
static void check_refused(void)
{
    rig o;
    rig other;
    static float room[2 * TINY_MODEL_VOCAB];
    static const float bias = 2e6F;
    if (!rig_start(&o, &operations[2]) || !rig_start(&other, &operations[0]))
        return;
    qsf_session *const s = o.sessions[1];
    const qsf_pass_item wrong[] = {
        {.tokens = tokens, .n_tokens = 1},
        {.session = s, .n_tokens = 1},
        {.session = s, .tokens = tokens, .n_tokens = 8}, /* 9 in all */
        {.session = s, .tokens = tokens, .n_tokens = UINT32_MAX},
        {.session = s, .tokens = tokens, .n_tokens = 1, .wants = 4},
        {.session = s, .tokens = tokens, .n_tokens = 1, .wants = QSF_WANTS_ALL},
        {.session = s, .tokens = tokens, .n_tokens = 3, .wants = QSF_WANTS_ALL, .logits = room},
        {.session = other.sessions[0], .tokens = tokens, .n_tokens = 1},
    };
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        qsf_pass_item items[] = {item_of(&o, 0, tokens, 1, QSF_WANTS_LAST), wrong[i]};
        CHECK_STATUS(qsf_model_pass(o.m, items, 2, NULL), QSF_ERR_ARG);
        CHECK_EQ(qsf_session_position(o.sessions[0]), 3);
    }
    qsf_pass_item items[4] = {item_of(&o, 0, tokens, 1, QSF_WANTS_LAST)};
    for (uint32_t n = 0; n <= 4; n += 4)
        CHECK_STATUS(qsf_model_pass(o.m, items, n, NULL), QSF_ERR_ARG);
    const qsf_choose_item choices[] = {
        {.session = o.sessions[0], .n_logprobs = 1}, /* no room for them */
        {.session = other.sessions[0]},
        {.session = o.sessions[0], .n_counted = 1},
        {.session = o.sessions[0], .biased = tokens, .biases = &bias, .n_biased = 1},
    };
    for (size_t i = 0; i < COUNT_OF(choices); i++) {
        qsf_choose_item choice = choices[i];
        CHECK_STATUS(qsf_model_choose(o.m, &choice, 1), QSF_ERR_ARG);
    }
    CHECK_EQ(qsf_session_is_ahead(NULL, 0), 0);
    rig_end(&o);
    rig_end(&other);
}

/* ---- draft models ---- */

/* Options with a draft model, and the memory that the process is taken to have. */
static qsf_options with_drafter(uint64_t *process_bytes)
{
    qsf_options opt = rig_options(2, 8);
    opt.ctx_tokens = TINY_MODEL_TOKENS;
    opt.draft_rows = 4;
    *process_bytes = rig_least_budget(path, &opt).process_bytes;
    opt.draft_path = draft_path;
    return opt;
}

/* The least budget has no room for a draft model, more has, and what is held is in the plan. As
 * long as something is streamed, the draft model's embedding table takes no memory that its rows
 * need not. What is said: tests/python/api/test_drafts.py. */
static void check_plan(void)
{
    qsf_model *m;
    qsf_faults faults = {-1, -1, 0};
    qsf_options opt = with_drafter(&faults.process_bytes);
    const uint64_t least_bytes = opt.budget_bytes;
    uint32_t n_of_state[QSF_DRAFTER_NOT_WORTH + 1] = {0};
    bool is_streamed = true;
    for (; is_streamed; opt.budget_bytes += 1 << 17) {
        if (!CHECK_OK(qsf_model_create(path, &opt, &faults, &m)))
            return;
        const qsf_plan *const p = &m->plan;
        const bool is_held = p->drafter_state == QSF_DRAFTER_HELD;
        is_streamed = !is_held || p->streamed_bytes > 0;
        n_of_state[p->drafter_state] += is_streamed;
        CHECK_EQ(m->drafter != NULL, is_held);
        CHECK_EQ_U64(p->min_budget_bytes, least_bytes);
        CHECK(p->process_bytes + p->engine_bytes <= opt.budget_bytes);
        CHECK_EQ_U64(m->ledger.ceiling_bytes + p->stacks_bytes + p->drafter_bytes, p->engine_bytes);
        CHECK(p->drafter_wanted_bytes > 0 &&
              p->drafter_bytes == (is_held ? p->drafter_wanted_bytes : 0));
        CHECK(!is_held || m->drafter->ledger.ceiling_bytes <= p->drafter_bytes);
        CHECK(!is_held || !is_streamed || m->drafter->has_table_on_disk);
        qsf_model_close(m);
    }
    for (size_t i = 0; i < COUNT_OF(n_of_state); i++) /* each of them was met while streaming */
        CHECK(i < QSF_DRAFTER_HELD || n_of_state[i] > 0);
    opt.draft_rows = 0;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
}

/* The N-th allocation of a session with a draft model fails: nothing is left behind. A draft model
 * that fails guesses nothing. */
static void check_failing_drafter(void)
{
    qsf_session *s = NULL;
    qsf_options opt = with_drafter(&(uint64_t){0});
    opt.budget_bytes = 0;
    qsf_model *const m = rig_open(path, &opt);
    if (m == NULL)
        return;
    for (int64_t n = 0; n < 2; n++) {
        m->drafter->ledger.grants_until_fault = n;
        CHECK_STATUS(qsf_session_create(m, &s), QSF_ERR_NOMEM);
        CHECK(s == NULL);
        CHECK_EQ(m->n_sessions + m->drafter->n_sessions, 0);
    }
    m->drafter->ledger.grants_until_fault = -1;
    CHECK_OK(qsf_session_create(m, &s));
    rig_sync(s, tokens, 2);
    slow_down(&m->shared.costs);
    qsf_session_cancel(s->drafter);
    CHECK_OK(qsf_session_step(s, tokens[2]));
    CHECK_EQ(s->stats.n_drafted[QSF_GUESSER_MODEL], 0);
    slow_down(&m->shared.costs);
    CHECK_OK(qsf_session_step(s, tokens[3]));
    qsf_session_cancel(s);
    CHECK_STATUS(qsf_session_step(s, tokens[4]), QSF_ERR_CANCELLED);
    CHECK_OK(qsf_session_step(s, tokens[4]));
    qsf_session_destroy(s);
    qsf_model_close(m);
}

int main(void)
{
    static const qsf_fault_kind kinds[] = {QSF_FAULT_FAIL, QSF_FAULT_SHORT, QSF_FAULT_CORRUPT};
    stride = check_stride();
    check_path(path, sizeof path, "check_drafts");
    check_path(draft_path, sizeof draft_path, "check_drafts_small");
    if (!rig_build(path, &file, &(tiny_model){.n_layers = 6, .dtype = QSF_DTYPE_4BIT}) ||
        !rig_build(draft_path, &file, &(tiny_model){.n_layers = 2, .dtype = QSF_DTYPE_4BIT}))
        return check_report("check_drafts");
    for (size_t i = 0; i < COUNT_OF(operations); i++)
        for (size_t k = 0; k < (i % 2 == 0 ? 3 : 1); k++)
            check_faults(&operations[i], kinds[k]);
    check_refused();
    check_plan();
    qsf_options opt = with_drafter(&(uint64_t){0}); /* reads and memory of both models */
    opt.budget_bytes = 0;
    rig_fail_open(path, &opt, false);
    rig_fail_open(path, &opt, true);
    check_failing_drafter();
    unlink(path);
    unlink(draft_path);
    return check_report("check_drafts");
}
