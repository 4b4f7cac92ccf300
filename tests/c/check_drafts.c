/* check_drafts.c - a pass with drafts that fails or is cancelled leaves the session as it was,
 * wherever it fails; guesses and what they cost. Bits: tests/python/api/test_drafts.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20) /* a model larger than the buffers of streaming */
#define TINY_MODEL_DIM 256
#define TINY_MODEL_FFN 2048
#include <unistd.h>

#include "check.h"
#include "engine/model.h"
#include "engine/model_open.h"
#include "engine/session.h"
#include "guess/followers.h"
#include "guess/matches.h"
#include "guess/thrift.h"
#include "tiny_model.h"

static char path[64];
static tiny_file file;

static const uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};

typedef struct opened {
    qsf_model *m;
    qsf_session *s;
} opened;

/* Opens the streamed model and evaluates two tokens. */
static bool open_one(opened *o, uint32_t draft_rows)
{
    qsf_options opt;
    qsf_plan plan;
    qsf_options_default(&opt);
    opt.n_threads = 2;
    opt.chunk_tokens = 8;
    opt.draft_rows = draft_rows;
    opt.budget_bytes = 1;
    CHECK_STATUS(qsf_model_plan(path, &opt, &plan), QSF_ERR_NOMEM);
    const qsf_faults known = {-1, -1, plan.process_bytes};
    opt.budget_bytes = plan.min_budget_bytes;
    while (CHECK_OK(qsf_model_create(path, &opt, &known, &o->m)) &&
           o->m->plan.draft_rows < draft_rows) {
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

/* The N-th read of a pass with drafts fails, for every N that there is; then it succeeds. */
static void check_failures(qsf_fault_kind kind)
{
    opened o;
    opened plain;
    if (!open_one(&o, 4) || !open_one(&plain, 0))
        return;
    uint32_t n_failed = 0;
    for (int64_t n = 0; n < 1000; n++) {
        CHECK_OK(qsf_session_draft(o.s, tokens + 3, 3));
        o.m->reader.file.fault_kind = kind;
        o.m->reader.file.reads_until_fault = n;
        const qsf_status status = qsf_session_step(o.s, tokens[2]);
        o.m->reader.file.reads_until_fault = -1;
        if (status == QSF_OK)
            break;
        n_failed++;
        CHECK_EQ(qsf_session_position(o.s), 2);
        CHECK_EQ(o.s->n_ahead, 0);
    }
    CHECK(n_failed > 0);
    CHECK_EQ(o.s->n_ahead, 3);
    CHECK_OK(qsf_session_step(plain.s, tokens[2]));
    check_same(&o, &plain);
    CHECK_OK(qsf_session_step(o.s, tokens[3]));
    CHECK_OK(qsf_session_step(plain.s, tokens[3]));
    check_same(&o, &plain);
    qsf_session_cancel(o.s); /* in the middle of what is accepted */
    CHECK_STATUS(qsf_session_step(o.s, tokens[4]), QSF_ERR_CANCELLED);
    CHECK_EQ(qsf_session_position(o.s), 4);
    CHECK_OK(qsf_session_step(o.s, tokens[4]));
    CHECK_OK(qsf_session_step(plain.s, tokens[4]));
    check_same(&o, &plain);
    CHECK_EQ(o.s->n_accepted[QSF_GUESSER_CALLER], 2);
    CHECK_EQ(o.s->n_step_passes, 1);
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

static void check_followers(void)
{
    static qsf_follower entries[1 << 16];
    qsf_followers f = {entries};
    uint32_t token = 0;
    CHECK(!qsf_followers_find(&f, tokens, 2, 2, &token));
    CHECK(!qsf_followers_find(&f, tokens, 0, 1, &token));
    qsf_followers_learn(&f, tokens, 2, 77);
    qsf_followers_learn(&f, tokens + 4, 1, 78);
    CHECK(qsf_followers_find(&f, tokens, 2, 2, &token));
    CHECK_EQ(token, 77);
    CHECK(qsf_followers_find(&f, tokens + 1, 1, 1, &token));
    CHECK_EQ(token, 77);
    CHECK(!qsf_followers_find(&f, tokens + 1, 1, 2, &token));
    CHECK(qsf_followers_find(&f, tokens + 3, 2, 1, &token));
    CHECK_EQ(token, 78);
    CHECK(!qsf_followers_find(&f, tokens + 3, 2, 2, &token));
}

/* Guesses that are never right are not drafted; those that are always right are, as far as the
 * passes are cheap. */
static void check_thrift(void)
{
    qsf_thrift t = {0};
    double paths[8];
    for (size_t i = 0; i < 8; i++)
        paths[i] = 1.0;
    CHECK_EQ(qsf_thrift_choose(&t, paths, 8), 0); /* nothing was measured */
    for (int i = 0; i < 50; i++)
        qsf_thrift_learn(&t, 1, 1000, 900); /* behind a disk */
    CHECK_EQ(qsf_thrift_choose(&t, paths, 8), 8);
    for (size_t i = 0; i < 8; i++)
        paths[i] = 0.01;
    CHECK_EQ(qsf_thrift_choose(&t, paths, 1), 0);
    for (int i = 0; i < 50; i++)
        qsf_thrift_learn(&t, 4, 5000, 0); /* passes of four cost more than four */
    for (size_t i = 0; i < 8; i++)
        paths[i] = 1.0;
    CHECK(qsf_thrift_choose(&t, paths, 3) < 3);
    for (int i = 0; i < 300; i++)
        qsf_thrift_learn(&t, 1, 1000, 900); /* what was measured long ago is forgotten */
    CHECK_EQ(qsf_thrift_choose(&t, paths, 3), 3);
    const uint32_t kind = qsf_thrift_kind_of_match(40);
    CHECK_EQ(kind, qsf_thrift_kind_of_match(17));
    CHECK_EQ(qsf_thrift_kind_of_match(1), QSF_KIND_MATCH);
    CHECK(qsf_thrift_chance(&t, kind) > 0.9);
    for (int i = 0; i < 200; i++)
        qsf_thrift_count(&t, kind, false);
    CHECK(qsf_thrift_chance(&t, kind) < 0.1);
    for (int i = 0; i < 500; i++)
        qsf_thrift_count(&t, kind, true);
    CHECK(qsf_thrift_chance(&t, kind) > 0.9);
}

int main(void)
{
    snprintf(path, sizeof path, "/tmp/check_drafts_%ld.qsf", (long)getpid());
    tiny_model_build(&file, &(tiny_model){.n_layers = 2, .dtype = QSF_DTYPE_4BIT});
    if (!CHECK(tiny_write(path, file.bytes, file.n_bytes)))
        return check_report("check_drafts");
    check_failures(QSF_FAULT_FAIL);
    check_failures(QSF_FAULT_SHORT);
    check_failures(QSF_FAULT_CORRUPT);
    check_matches();
    check_followers();
    check_thrift();
    unlink(path);
    return check_report("check_drafts");
}
