/* check_model.c - whole models: budgets that hold, failures on demand that leave everything as it
 * was, models at the edges of what the engine runs, and sessions that share one.
 *
 * Uses tests/golden/tiny-*.qsf, made by tools/make_golden_files.py, and small models that are built
 * in memory and bent. NaN in weights: tests/fuzz. One answer whatever the settings, scores:
 * tests/python/api/test_same_bits.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "check.h"
#include "engine_rig.h"
#include "platform/thread.h"

#define GOLDEN_TOKENS 75                   /* more than two KV pages and one prompt chunk */
#define PROCESS_BYTES (UINT64_C(10) << 20) /* whatever this process uses */

static const char *const paths[] = {QSF_GOLDEN_DIR "/tiny-llama-4bit.qsf",
                                    QSF_GOLDEN_DIR "/tiny-gpt2-8bit.qsf"};

static char path[64]; /* a scratch file of this process */
static tiny_file file;
static uint32_t tokens[GOLDEN_TOKENS];

static qsf_options golden_options(uint32_t n_threads, uint64_t budget_bytes)
{
    qsf_options opt = rig_options(n_threads, 0);
    opt.budget_bytes = budget_bytes;
    opt.ctx_tokens = 96;
    opt.kv_k_type = opt.kv_v_type = QSF_KV_4BIT; /* by name, so that no budget makes it 2 bits */
    return opt;
}

/* Logits after all tokens. */
static bool logits_of(qsf_model *m, float *logits)
{
    qsf_session *s;
    if (!CHECK_OK(qsf_session_create(m, &s)))
        return false;
    rig_sync(s, tokens, GOLDEN_TOKENS);
    const bool ok = CHECK_OK(qsf_session_logits(s, logits, RIG_MAX_VOCAB));
    qsf_session_destroy(s);
    return ok;
}

static bool reference_logits(const char *from, float *logits)
{
    const qsf_options opt = golden_options(1, 0);
    qsf_model *const m = rig_open(from, &opt);
    uint64_t state = 3;
    for (int i = 0; m != NULL && i < GOLDEN_TOKENS; i++)
        tokens[i] = (uint32_t)(qsf_random_uniform(&state) * m->config.n_vocab);
    const bool ok = m != NULL && CHECK(m->config.n_vocab <= RIG_MAX_VOCAB) && logits_of(m, logits);
    qsf_model_close(m);
    return ok;
}

/* ---- budgets and faults ---- */

/* The least budget of a process with PROCESS_BYTES, as the plan names it when it refuses. */
static uint64_t least_budget_bytes(const char *from)
{
    qsf_options opt = golden_options(2, 1);
    qsf_model *none = NULL;
    CHECK_STATUS(qsf_model_open(from, &opt, &none), QSF_ERR_NOMEM);
    CHECK(none == NULL);
    const qsf_faults known = rig_least_budget(from, &opt);
    return opt.budget_bytes - known.process_bytes + PROCESS_BYTES;
}

static qsf_model *open_in_budget(const char *from, uint64_t budget_bytes)
{
    const qsf_faults known = {-1, -1, PROCESS_BYTES};
    const qsf_options opt = golden_options(2, budget_bytes);
    qsf_model *m = NULL;
    CHECK_OK(qsf_model_create(from, &opt, &known, &m));
    return m;
}

/* Every budget from the least on works, holds, and gives the same logits. */
static void check_budgets(const char *from, const float *want)
{
    uint32_t n_streamed = 0;
    for (uint32_t i = 0; i < 6; i++) {
        const uint64_t budget_bytes = least_budget_bytes(from) + i * 262144;
        float got[RIG_MAX_VOCAB];
        qsf_model *const m = open_in_budget(from, budget_bytes);
        if (m == NULL)
            return;
        CHECK(m->plan.engine_bytes + m->plan.process_bytes + m->plan.reserve_bytes <= budget_bytes);
        n_streamed += m->plan.n_units_resident < m->plan.n_units;
        if (logits_of(m, got))
            CHECK_BYTES(got, want, m->config.n_vocab * sizeof *got);
        CHECK(m->ledger.peak_bytes + m->plan.stacks_bytes <= m->plan.engine_bytes);
        qsf_model_close(m);
    }
    CHECK(n_streamed > 0 && n_streamed < 6);
}

static void check_failing_session(const char *from)
{
    const qsf_options opt = golden_options(1, 0);
    qsf_model *const m = rig_open(from, &opt);
    if (m == NULL)
        return;
    const uint64_t held_bytes = m->ledger.held_bytes;
    for (int64_t n = 0; n < 2; n++) {
        qsf_session *s;
        m->ledger.grants_until_fault = n;
        CHECK_STATUS(qsf_session_create(m, &s), QSF_ERR_NOMEM);
        CHECK(s == NULL);
        CHECK_EQ(m->ledger.held_bytes, held_bytes);
    }
    m->ledger.grants_until_fault = -1;
    float logits[RIG_MAX_VOCAB];
    CHECK(logits_of(m, logits));
    qsf_model_close(m);
}

/* A read that fails in the middle of a pass: a status, the session as before the call, no time in
 * its figures, and the right answer once the disk is well again. */
static void check_failing_steps(const char *from, const float *want)
{
    const uint32_t last = GOLDEN_TOKENS - 1;
    qsf_model *const m = open_in_budget(from, least_budget_bytes(from));
    qsf_session *s = NULL;
    float unused[RIG_MAX_VOCAB];
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    CHECK(m->plan.n_units_resident < m->plan.n_units);
    rig_sync(s, tokens, last);
    /* Reading runs ahead: a step may go well, and the next one meet what went wrong in it. */
    uint32_t n_failed = 0;
    for (int64_t n = 0; n < 60; n++) {
        qsf_stats before;
        qsf_stats after;
        qsf_session_stats(s, &before);
        m->reader.file.reads_until_fault = n % 20;
        const qsf_status status = qsf_session_step(s, tokens[last]);
        if (status == QSF_OK) {
            rig_check_logits(s, want);
            CHECK_OK(qsf_session_rewind(s, last));
            continue;
        }
        n_failed++;
        CHECK_EQ(status, QSF_ERR_IO);
        CHECK_EQ(qsf_session_position(s), last);
        CHECK_STATUS(qsf_session_logits(s, unused, RIG_MAX_VOCAB), QSF_ERR_ARG);
        qsf_session_stats(s, &after);
        CHECK_BYTES(after.phase_ns, before.phase_ns, sizeof after.phase_ns);
    }
    m->reader.file.reads_until_fault = -1;
    CHECK(n_failed > 5);
    if (qsf_session_step(s, tokens[last]) != QSF_OK) /* the last fault, met late */
        CHECK_OK(qsf_session_step(s, tokens[last]));
    rig_check_logits(s, want);
    qsf_model_close(m); /* before its session */
    qsf_session_destroy(s);
}

/* ---- what is refused ---- */

static const tiny_model llama = {.n_layers = 2, .dtype = QSF_DTYPE_4BIT};
static const tiny_model gpt2 = {.n_layers = 2, .dtype = QSF_DTYPE_8BIT, .is_gpt2 = true};

/* The entry of a tensor in TENS. */
static unsigned char *entry_of(uint32_t unit_idx, uint32_t type)
{
    unsigned char *const table = rig_section(&file, "TENS");
    for (uint32_t i = 0; i < file.n_tensors; i++) {
        unsigned char *const entry = table + (size_t)i * QSF_TENSOR_ENTRY_BYTES;
        if (qsf_load_u32(entry) == unit_idx && qsf_load_u32(entry + 4) == type)
            return entry;
    }
    CHECK(false);
    return table;
}

static void refuse(qsf_status want, const char *text)
{
    qsf_model *m = NULL;
    const qsf_options opt = rig_options(1, 0);
    if (!rig_write(path, &file))
        return;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), want);
    CHECK_CONTAINS(qsf_error_detail(), text);
    CHECK(m == NULL);
    qsf_plan plan;
    CHECK_STATUS(qsf_model_plan(path, &opt, &plan), want);
    CHECK_EQ_U64(plan.min_budget_bytes, 0);
}

/* Models that a reader takes and the engine does not run: one number is another. */
static void check_refused(void)
{
    enum { TYPE = 4, INDEX = 18 }; /* in an entry of TENS; an index that no layer has */
    static const struct {
        const tiny_model *model;
        uint32_t unit_idx; /* of a tensor; 0: in the header */
        uint32_t type;
        size_t off;
        size_t n_bytes;
        uint32_t value;
        qsf_status want;
        const char *text;
    } cases[] = {
        {&llama, 1, QSF_TENSOR_FFN_UP, TYPE, 4, QSF_TENSOR_EXPERT_ROUTER, QSF_ERR_FORMAT,
         "unit 1 has router, which layers of its kind do not have"},
        {&llama, 1, QSF_TENSOR_FFN_UP, INDEX, 2, 1, QSF_ERR_FORMAT, "unit 1 has no up"},
        {&llama, 2, QSF_TENSOR_FFN_GATE, INDEX, 2, 1, QSF_ERR_FORMAT, "unit 2 has no gate"},
        {&llama, 1, QSF_TENSOR_FFN_GATE, INDEX, 2, 1, QSF_ERR_UNSUPPORTED,
         "unit 1 has 9 tensors, but this build can run only 8 of them"}, /* no layer has one */
        {&llama, 1, QSF_TENSOR_Q, INDEX, 2, 1, QSF_ERR_FORMAT, "unit 1 has no q"},
        {&gpt2, 1, QSF_TENSOR_FFN_UP_BIAS, TYPE, 4, QSF_TENSOR_FFN_GATE_BIAS, QSF_ERR_FORMAT,
         "unit 1 has gate_bias, which layers of its kind do not have"},
        {&gpt2, 2, QSF_TENSOR_FFN_UP_BIAS, INDEX, 2, 1, QSF_ERR_UNSUPPORTED,
         "tensors, but this build can run only"},
        {&llama, 0, 0, 24, 4, 4, QSF_ERR_FORMAT, "q is 32 x 32, expected 64 x 32"},
        {&llama, 0, 0, 28, 4, 2, QSF_ERR_FORMAT, "k is 16 x 32, expected 32 x 32"},
        {&llama, 0, 0, 28, 4, 0, QSF_ERR_FORMAT, "k is 16 x 32, expected 32 x 32"},
        {&llama, 0, 0, 44, 4, 15, QSF_ERR_FORMAT, "15 rotary dimensions"},
        {&llama, 0, 0, 44, 4, 4096, QSF_ERR_FORMAT, "expected 8192 x 32"},
        {&llama, 0, 0, 40, 4, 1U << 22, QSF_ERR_FORMAT, "expected 4194304 x 32"},
        {&gpt2, 0, 0, 51, 1, QSF_POSITIONS_ALIBI, QSF_ERR_UNSUPPORTED, "ALiBi"},
        {&gpt2, 0, 0, 40, 4, 41, QSF_ERR_FORMAT, "up_bias is 1 x 40, expected 1 x 41"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        tiny_model_build(&file, cases[i].model);
        unsigned char *const base =
            cases[i].unit_idx == 0 ? file.bytes : entry_of(cases[i].unit_idx, cases[i].type);
        for (size_t b = 0; b < cases[i].n_bytes; b++)
            base[cases[i].off + b] = (unsigned char)(cases[i].value >> 8 * b);
        refuse(cases[i].want, cases[i].text);
    }
    for (size_t i = 0; i < 2; i++) {
        tiny_model swapped = i == 0 ? llama : gpt2;
        swapped.is_k_before_q = true;
        tiny_model_build(&file, &swapped);
        refuse(QSF_ERR_FORMAT, "unit 1: k is not in the order of the pass");
    }
}

/* Options that no model can be opened with. */
static void check_options(void)
{
    const qsf_options good = rig_options(1, 0);
    qsf_options cases[] = {good, good, good, good, good, good, good};
    qsf_model *m = NULL;
    if (!rig_build(path, &file, &gpt2))
        return;
    cases[0].ctx_tokens = TINY_MODEL_TOKENS + 1; /* there is no position for it */
    cases[1].n_threads = 100000;
    cases[2].kv_k_type = 3;
    cases[3].kv_k_type = QSF_KV_8BIT;
    cases[3].exact = 1;
    cases[4].kv_rotation = 3;
    cases[5].max_sessions = 0;
    cases[6].budget_bytes = UINT64_C(1) << 40;
    cases[6].reserve_bytes = UINT64_MAX;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        CHECK_STATUS(qsf_model_open(path, &cases[i], &m), i == 6 ? QSF_ERR_NOMEM : QSF_ERR_ARG);
        CHECK(m == NULL);
    }
    CHECK_STATUS(qsf_model_open(NULL, &good, &m), QSF_ERR_ARG);
    CHECK_STATUS(qsf_model_open("no such file.qsf", &good, &m), QSF_ERR_IO);
}

/* The key that says that the head is tied, which it is not, becomes the rotary dimensions. */
static void check_rope_dims(void)
{
    static const uint32_t wrong[] = {0, 3, TINY_MODEL_HEAD_DIM + 2};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        char text[32];
        tiny_model_build(&file, &llama);
        qsf_store_u16(rig_section(&file, "ARCH") + 8, 7);
        qsf_store_u32(rig_section(&file, "ARCH") + 12, wrong[i]);
        snprintf(text, sizeof text, "%u rotary dimensions", wrong[i]);
        refuse(QSF_ERR_FORMAT, text);
    }
}

/* ---- handles ---- */

/* Tags of any length; in exact memory, so that a sanitizer sees a byte too many. */
static void check_sections(void)
{
    static const char *const tags[] = {"", "A", "ARC", "ARCHI", "TOKN", "ARCH"};
    const qsf_options opt = rig_options(1, 0);
    qsf_model *const m = rig_build(path, &file, &llama) ? rig_open(path, &opt) : NULL;
    unsigned char bytes[64];
    for (size_t i = 0; m != NULL && i < COUNT_OF(tags); i++) {
        const size_t n_chars = strlen(tags[i]) + 1;
        char *const exact = malloc(n_chars);
        memcpy(exact, tags[i], n_chars);
        const size_t n_bytes = i == 5 ? 24 : 0;
        CHECK_EQ(qsf_model_section_bytes(m, exact), n_bytes);
        CHECK_STATUS(qsf_model_section(m, exact, bytes, 23), QSF_ERR_ARG);
        CHECK_STATUS(qsf_model_section(m, exact, bytes, 64), i == 5 ? QSF_OK : QSF_ERR_ARG);
        free(exact);
    }
    CHECK_BYTES(bytes, rig_section(&file, "ARCH"), 24);
    qsf_model_close(m);
}

#define USER_TOKENS TINY_MODEL_TOKENS /* a quarter is synced, the others are steps of their own */

typedef struct user {
    qsf_thread thread;
    qsf_model *model;
    _Atomic(qsf_session *) session; /* for the thread that cancels */
    uint32_t first_token;
    float logits[TINY_MODEL_VOCAB];
    qsf_status status;
} user;

/* Evaluates its tokens in chunks and steps, in spite of being cancelled, and chooses after steps:
 * a choice does not wait for the pass of another thread. */
static void *use_model(void *arg)
{
    user *const u = arg;
    qsf_sampling how;
    uint64_t random_state = 1;
    uint32_t choice = 0;
    uint32_t own[USER_TOKENS];
    qsf_session *s = NULL;
    qsf_sampling_default(&how);
    for (size_t i = 0; i < USER_TOKENS; i++)
        own[i] = (u->first_token + (uint32_t)(i * 7)) % TINY_MODEL_VOCAB;
    u->status = qsf_session_create(u->model, &s);
    if (u->status != QSF_OK)
        return NULL;
    atomic_store(&u->session, s);
    for (size_t n_done = 0; u->status == QSF_OK && n_done < USER_TOKENS;) {
        const bool is_prompt = n_done < USER_TOKENS / 4;
        u->status = is_prompt ? qsf_session_sync(s, own, USER_TOKENS / 4, &n_done)
                              : qsf_session_step(s, own[n_done]);
        if (u->status == QSF_ERR_CANCELLED) {
            u->status = QSF_OK;
        } else if (u->status == QSF_OK && !is_prompt) {
            n_done++;
            u->status = qsf_session_sample(s, &how, NULL, 0, &random_state, &choice);
        }
    }
    if (u->status == QSF_OK)
        u->status = qsf_session_logits(s, u->logits, TINY_MODEL_VOCAB);
    qsf_stats stats;
    qsf_session_stats(s, &stats);
    return NULL;
}

static void run_users(qsf_model *m, user *users, uint32_t n_users, uint32_t n_cancels)
{
    for (uint32_t i = 0; i < n_users; i++) {
        users[i].model = m;
        atomic_init(&users[i].session, NULL);
        CHECK_OK(qsf_thread_start(&users[i].thread, 1 << 18, use_model, &users[i]));
    }
    for (uint32_t i = 0; i < n_cancels; i++)
        qsf_session_cancel(atomic_load(&users[i % n_users].session));
    for (uint32_t i = 0; i < n_users; i++) {
        qsf_thread_join(&users[i].thread);
        CHECK_EQ(users[i].status, QSF_OK);
    }
    for (uint32_t i = 0; i < n_users; i++)
        qsf_session_destroy(atomic_load(&users[i].session));
}

/* Sessions of two threads take turns, are cancelled from a third, and compute what each
 * computes alone. */
static void check_threads(void)
{
    static user alone[2];
    static user together[2];
    qsf_options opt = rig_options(2, 3);
    opt.max_sessions = 2;
    opt.draft_rows = 4;
    qsf_model *const m = rig_build(path, &file, &llama) ? rig_open(path, &opt) : NULL;
    if (m == NULL)
        return;
    CHECK_EQ(m->plan.draft_rows, 4);
    for (uint32_t i = 0; i < 2; i++) {
        alone[i].first_token = together[i].first_token = i;
        run_users(m, &alone[i], 1, 0);
    }
    for (int round = 0; round < 5; round++) {
        run_users(m, together, 2, 40);
        for (int i = 0; i < 2; i++)
            CHECK_BYTES(together[i].logits, alone[i].logits, sizeof alone[i].logits);
    }
    CHECK(memcmp(alone[0].logits, alone[1].logits, sizeof alone[0].logits) != 0);
    CHECK_EQ(m->n_sessions, 0);
    qsf_model_close(m);
}

int main(void)
{
    check_path(path, sizeof path, "check_model");
    for (size_t i = 0; i < COUNT_OF(paths); i++) {
        float want[RIG_MAX_VOCAB];
        if (!reference_logits(paths[i], want))
            continue;
        check_budgets(paths[i], want);
        const qsf_options opt = golden_options(2, 0);
        rig_fail_open(paths[i], &opt, false);
        rig_fail_open(paths[i], &opt, true);
        check_failing_session(paths[i]);
        check_failing_steps(paths[i], want);
    }
    check_refused();
    check_options();
    check_rope_dims();
    check_sections();
    check_threads();
    remove(path);
    return check_report("check_model");
}
