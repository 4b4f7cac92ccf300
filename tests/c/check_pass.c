/* check_pass.c - a pass of many sessions that fails changes none of them, wherever it fails; wrong
 * items and choices are refused before anything happens. Bits: tests/python/api/test_passes.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20) /* a model larger than the buffers of streaming */
#define TINY_MODEL_DIM 256
#define TINY_MODEL_FFN 2048

#include "check.h"
#include "engine/model.h"
#include "engine/model_open.h"
#include "least_budget.h"
#include "system.h"
#include "tiny_model.h"

#define N_SESSIONS 3

static char path[64];
static tiny_file file;

static const uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};

typedef struct many {
    qsf_model *m;
    qsf_session *sessions[N_SESSIONS];
    float logits[N_SESSIONS][TINY_MODEL_VOCAB];
    double hidden[TINY_MODEL_DIM]; /* of the second round */
} many;

/* Opens the model with as little memory as will do, so that its layers are streamed. */
static bool open_drafting(many *o, uint32_t max_sessions, uint32_t draft_rows)
{
    qsf_options opt;
    qsf_options_default(&opt);
    opt.n_threads = 2;
    opt.chunk_tokens = 8 + 2 * draft_rows;
    opt.draft_rows = draft_rows;
    opt.max_sessions = max_sessions;
    const qsf_faults known = least_budget(path, &opt);
    while (CHECK_OK(qsf_model_create(path, &opt, &known, &o->m)) &&
           (o->m->plan.draft_rows < draft_rows || o->m->plan.chunk_tokens < opt.chunk_tokens)) {
        qsf_model_close(o->m);
        opt.budget_bytes += 1 << 16;
    }
    CHECK(o->m->plan.streamed_bytes > 0);
    CHECK_EQ(o->m->plan.logits_rows, max_sessions > 1 ? max_sessions : 0);
    for (uint32_t i = 0; i < max_sessions; i++)
        if (!CHECK_OK(qsf_session_create(o->m, &o->sessions[i])))
            return false;
    return true;
}

static bool open_many(many *o, uint32_t max_sessions)
{
    return open_drafting(o, max_sessions, 0);
}

static void close_many(many *o, uint32_t n_sessions)
{
    for (uint32_t i = 0; i < n_sessions; i++)
        qsf_session_destroy(o->sessions[i]);
    qsf_model_close(o->m);
}

/* The second round: a token, a piece of a prompt, a token. */
static qsf_status second_pass(many *o, qsf_pass_item *items)
{
    items[0] =
        (qsf_pass_item){o->sessions[0], tokens + 3, 1, QSF_WANTS_LAST, NULL, QSF_OK, 0, NULL};
    items[1] =
        (qsf_pass_item){o->sessions[1], tokens + 2, 4, QSF_WANTS_NONE, NULL, QSF_OK, 3, o->hidden};
    items[2] =
        (qsf_pass_item){o->sessions[2], tokens + 1, 1, QSF_WANTS_LAST, NULL, QSF_OK, 0, NULL};
    return qsf_model_pass(o->m, items, N_SESSIONS, NULL);
}

static void check_unchanged(const many *o)
{
    float now[TINY_MODEL_VOCAB];
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        CHECK_EQ(qsf_session_position(o->sessions[i]), 3 - i);
        CHECK_OK(qsf_session_logits(o->sessions[i], now, TINY_MODEL_VOCAB));
        CHECK_BYTES(now, o->logits[i], sizeof now);
    }
    for (uint32_t i = 0; i < TINY_MODEL_DIM; i++)
        CHECK(o->hidden[i] == 0.0);
}

/* The N-th read of the pass fails, for every N that there is; then it succeeds. */
static void check_failures(qsf_fault_kind kind)
{
    static many o;
    static many undisturbed;
    qsf_pass_item items[N_SESSIONS];
    if (!open_many(&o, N_SESSIONS) || !open_many(&undisturbed, N_SESSIONS))
        return;
    many *const both[] = {&o, &undisturbed};
    for (size_t k = 0; k < 2; k++) {
        for (uint32_t i = 0; i < N_SESSIONS; i++)
            items[i] = (qsf_pass_item){
                both[k]->sessions[i], tokens, 3 - i, QSF_WANTS_LAST, NULL, QSF_OK, 0, NULL};
        CHECK_OK(qsf_model_pass(both[k]->m, items, N_SESSIONS, NULL));
        for (uint32_t i = 0; i < N_SESSIONS; i++)
            CHECK_OK(
                qsf_session_logits(both[k]->sessions[i], both[k]->logits[i], TINY_MODEL_VOCAB));
    }
    memset(o.hidden, 0, sizeof o.hidden);
    memset(undisturbed.hidden, 0, sizeof undisturbed.hidden);
    CHECK_OK(second_pass(&undisturbed, items));
    uint32_t n_failed = 0;
    for (int64_t n = 0; n < 1000; n++) {
        o.m->reader.file.fault_kind = kind;
        o.m->reader.file.reads_until_fault = n;
        const qsf_status status = second_pass(&o, items);
        o.m->reader.file.reads_until_fault = -1;
        for (uint32_t i = 0; i < N_SESSIONS; i++)
            CHECK_EQ(items[i].status, status);
        if (status == QSF_OK)
            break;
        n_failed++;
        check_unchanged(&o);
    }
    CHECK(n_failed > 0);
    CHECK(o.hidden[0] != 0.0);
    CHECK_BYTES(o.hidden, undisturbed.hidden, sizeof o.hidden);
    for (uint32_t i = 0; i < N_SESSIONS; i += 2) {
        float want[TINY_MODEL_VOCAB];
        float have[TINY_MODEL_VOCAB];
        CHECK_OK(qsf_session_logits(o.sessions[i], have, TINY_MODEL_VOCAB));
        CHECK_OK(qsf_session_logits(undisturbed.sessions[i], want, TINY_MODEL_VOCAB));
        CHECK_BYTES(have, want, sizeof want);
    }
    CHECK_EQ(qsf_session_position(o.sessions[1]), 6);
    close_many(&o, N_SESSIONS);
    close_many(&undisturbed, N_SESSIONS);
}

/* The N-th read of a pass with guesses fails, for every N that there is: none is ahead then. */
static void check_failing_guesses(void)
{
    static many o;
    qsf_pass_item items[N_SESSIONS];
    if (!open_drafting(&o, N_SESSIONS, 6))
        return;
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        items[i] =
            (qsf_pass_item){o.sessions[i], tokens, 1 + i, QSF_WANTS_AHEAD, NULL, QSF_OK, 0, NULL};
        CHECK_OK(qsf_session_draft(o.sessions[i], tokens + 1 + i, 2));
    }
    int64_t n = 0;
    for (; n < 1000; n++) {
        o.m->reader.file.reads_until_fault = n;
        const qsf_status status = qsf_model_pass(o.m, items, N_SESSIONS, NULL);
        o.m->reader.file.reads_until_fault = -1;
        if (status == QSF_OK)
            break;
        for (uint32_t i = 0; i < N_SESSIONS; i++) {
            CHECK_EQ(qsf_session_position(o.sessions[i]), 0);
            CHECK_EQ(qsf_session_is_ahead(o.sessions[i], tokens[1 + i]), 0);
            CHECK_OK(qsf_session_draft(o.sessions[i], tokens + 1 + i, 2));
        }
    }
    CHECK(n > 0);
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        CHECK_EQ(qsf_session_position(o.sessions[i]), 1 + i);
        CHECK_EQ(qsf_session_is_ahead(o.sessions[i], tokens[1 + i]), 1);
        CHECK_EQ(qsf_session_is_ahead(o.sessions[i], tokens[7]), 0);
    }
    qsf_pass_report report;
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        items[i] = (qsf_pass_item){o.sessions[i], tokens + 1 + i, 1, QSF_WANTS_AHEAD,
                                   NULL,          QSF_OK,         0, NULL};
    qsf_session_cancel(o.sessions[1]);
    CHECK_OK(qsf_model_pass(o.m, items, N_SESSIONS, &report));
    CHECK_EQ(report.ns + report.read_bytes, 0); /* no pass */
    CHECK_EQ(items[1].status, QSF_ERR_CANCELLED);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        CHECK_EQ(qsf_session_position(o.sessions[i]), 1 + i + (i != 1));
    CHECK_EQ(qsf_session_is_ahead(NULL, 0), 0);
    close_many(&o, N_SESSIONS);
}

/* All sessions cancelled: the pass ends; one of them: only its own item. */
static void check_cancelled(void)
{
    static many o;
    qsf_pass_item items[N_SESSIONS];
    if (!open_many(&o, N_SESSIONS))
        return;
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        qsf_session_cancel(o.sessions[i]);
        items[i] = (qsf_pass_item){o.sessions[i], tokens, 2, QSF_WANTS_LAST, NULL, QSF_OK, 0, NULL};
    }
    CHECK_STATUS(qsf_model_pass(o.m, items, N_SESSIONS, NULL), QSF_ERR_CANCELLED);
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        CHECK_EQ(items[i].status, QSF_ERR_CANCELLED);
        CHECK_EQ(qsf_session_position(o.sessions[i]), 0);
    }
    qsf_session_cancel(o.sessions[1]);
    CHECK_OK(qsf_model_pass(o.m, items, N_SESSIONS, NULL));
    for (uint32_t i = 0; i < N_SESSIONS; i++) {
        CHECK_EQ(items[i].status, i == 1 ? QSF_ERR_CANCELLED : QSF_OK);
        CHECK_EQ(qsf_session_position(o.sessions[i]), i == 1 ? 0 : 2);
    }
    close_many(&o, N_SESSIONS);
}

/* One wrong item, and nothing is evaluated. */
static void check_refused(void)
{
    static many o;
    static many other;
    float room[2 * TINY_MODEL_VOCAB];
    if (!open_many(&o, N_SESSIONS) || !open_many(&other, 1))
        return;
    qsf_session *const s = o.sessions[1];
    static const uint32_t outside = TINY_MODEL_VOCAB;
    const qsf_pass_item wrong[] = {
        {NULL, tokens, 1, QSF_WANTS_NONE, NULL, QSF_OK, 0, NULL},
        {s, NULL, 1, QSF_WANTS_NONE, NULL, QSF_OK, 0, NULL},
        {s, tokens, 0, QSF_WANTS_NONE, NULL, QSF_OK, 0, NULL},
        {s, tokens, 8, QSF_WANTS_NONE, NULL, QSF_OK, 0, NULL}, /* 9 in all */
        {s, tokens, UINT32_MAX, QSF_WANTS_NONE, NULL, QSF_OK, 0, NULL},
        {s, &outside, 1, QSF_WANTS_NONE, NULL, QSF_OK, 0, NULL},
        {s, tokens, 1, 4, NULL, QSF_OK, 0, NULL},
        {s, tokens, 1, QSF_WANTS_ALL, NULL, QSF_OK, 0, NULL},
        {s, tokens, 3, QSF_WANTS_ALL, room, QSF_OK, 0, NULL}, /* 4 rows for 3 sessions */
        {o.sessions[0], tokens, 1, QSF_WANTS_NONE, NULL, QSF_OK, 0, NULL},
        {other.sessions[0], tokens, 1, QSF_WANTS_NONE, NULL, QSF_OK, 0, NULL},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        qsf_pass_item items[] = {{o.sessions[0], tokens, 1, QSF_WANTS_LAST, NULL, QSF_OK, 0, NULL},
                                 wrong[i]};
        CHECK_STATUS(qsf_model_pass(o.m, items, 2, NULL), QSF_ERR_ARG);
        CHECK_EQ(qsf_session_position(o.sessions[0]), 0);
    }
    qsf_pass_item items[4] = {{o.sessions[0], tokens, 2, QSF_WANTS_ALL, room, QSF_OK, 0, NULL}};
    CHECK_STATUS(qsf_model_pass(o.m, items, 0, NULL), QSF_ERR_ARG);
    CHECK_STATUS(qsf_model_pass(o.m, items, 4, NULL), QSF_ERR_ARG);
    CHECK_STATUS(qsf_model_pass(NULL, items, 1, NULL), QSF_ERR_ARG);
    qsf_choose_item choice = {.session = o.sessions[0], .n_logprobs = 1};
    CHECK_STATUS(qsf_model_choose(o.m, &choice, 1), QSF_ERR_ARG); /* no logits yet */
    CHECK_OK(qsf_model_pass(o.m, items, 1, NULL));
    CHECK_STATUS(qsf_model_choose(o.m, &choice, 1), QSF_ERR_ARG); /* no room for them */
    uint32_t token;
    float logprob;
    choice.logprob_tokens = &token;
    choice.logprobs = &logprob;
    CHECK_OK(qsf_model_choose(o.m, &choice, 1));
    choice.session = other.sessions[0];
    CHECK_STATUS(qsf_model_choose(o.m, &choice, 1), QSF_ERR_ARG);
    choice = (qsf_choose_item){.session = o.sessions[0], .n_counted = 1};
    CHECK_STATUS(qsf_model_choose(o.m, &choice, 1), QSF_ERR_ARG);
    const float bias = 2e6f;
    choice = (qsf_choose_item){
        .session = o.sessions[0], .biased = tokens, .biases = &bias, .n_biased = 1};
    CHECK_STATUS(qsf_model_choose(o.m, &choice, 1), QSF_ERR_ARG);
    close_many(&o, N_SESSIONS);
    close_many(&other, 1);
}

int main(void)
{
    check_path(path, sizeof path, "check_pass");
    tiny_model_build(&file, &(tiny_model){.n_layers = 2, .dtype = QSF_DTYPE_4BIT});
    if (!CHECK(tiny_write(path, file.bytes, file.n_bytes)))
        return check_report("check_pass");
    check_failures(QSF_FAULT_FAIL);
    check_failures(QSF_FAULT_SHORT);
    check_failures(QSF_FAULT_CORRUPT);
    check_failing_guesses();
    check_cancelled();
    check_refused();
    unlink(path);
    return check_report("check_pass");
}
