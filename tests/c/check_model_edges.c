/* check_model_edges.c - models at the edges of what the engine runs, and sessions that share one.
 *
 * Small models are built in memory and bent: shapes, order, kinds, windows, damaged numbers.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "check.h"
#include "engine/model.h"
#include "engine/model_open.h"
#include "platform/thread.h"
#include "system.h"
#include "tiny_model.h"

#define N_TOKENS TINY_MODEL_TOKENS
#define N_SYNCED (N_TOKENS / 4) /* the others are steps of their own */

static char path[64];
static tiny_file file;

static const tiny_model llama = {.n_layers = 2, .dtype = QSF_DTYPE_4BIT};
static const tiny_model gpt2 = {.n_layers = 2, .dtype = QSF_DTYPE_8BIT, .is_gpt2 = true};

static uint32_t token_at(size_t i)
{
    return (uint32_t)(i * 7 % TINY_MODEL_VOCAB);
}

static qsf_options options_of(uint32_t n_threads, uint32_t chunk_tokens)
{
    qsf_options opt;
    qsf_options_default(&opt);
    opt.budget_bytes = 0;
    opt.n_threads = n_threads;
    opt.chunk_tokens = chunk_tokens;
    return opt;
}

static bool write_file(void)
{
    repair_checksums(file.bytes, file.n_bytes);
    return CHECK(tiny_write(path, file.bytes, file.n_bytes));
}

static qsf_model *open_with(const qsf_options *opt)
{
    qsf_model *m = NULL;
    if (write_file())
        CHECK_OK(qsf_model_open(path, opt, &m));
    return m;
}

/* The bytes of a section; it is there. */
static unsigned char *section(const char *tag)
{
    return file.bytes + qsf_load_u64(repair_find(file.bytes, file.n_bytes, tag) + 8);
}

/* The entry of a tensor in TENS. */
static unsigned char *entry_of(uint32_t unit_idx, uint32_t type)
{
    unsigned char *const table = section("TENS");
    for (uint32_t i = 0; i < file.n_tensors; i++) {
        unsigned char *const entry = table + (size_t)i * QSF_TENSOR_ENTRY_BYTES;
        if (qsf_load_u32(entry) == unit_idx && qsf_load_u32(entry + 4) == type)
            return entry;
    }
    CHECK(false);
    return table;
}

/* ---- what is refused ---- */

static void refuse(qsf_status want, const char *text)
{
    qsf_model *m = NULL;
    const qsf_options opt = options_of(1, 0);
    if (!write_file())
        return;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), want);
    CHECK_CONTAINS(qsf_error_detail(), text);
    CHECK(m == NULL);
    qsf_plan plan;
    CHECK_STATUS(qsf_model_plan(path, &opt, &plan), want);
    CHECK_EQ_U64(plan.min_budget_bytes, 0);
}

static void check_refused_order(void)
{
    tiny_model swapped = llama;
    swapped.is_k_before_q = true;
    tiny_model_build(&file, &swapped);
    refuse(QSF_ERR_FORMAT, "unit 1: k is not in the order of the pass");
    swapped = gpt2;
    swapped.is_k_before_q = true;
    tiny_model_build(&file, &swapped);
    refuse(QSF_ERR_FORMAT, "unit 1: k is not in the order of the pass");
}

static void check_refused_tensors(void)
{
    tiny_model_build(&file, &llama);
    qsf_store_u32(entry_of(1, QSF_TENSOR_FFN_UP) + 4, QSF_TENSOR_EXPERT_ROUTER);
    refuse(QSF_ERR_FORMAT, "unit 1 has router, which layers of its kind do not have");
    tiny_model_build(&file, &llama);
    qsf_store_u16(entry_of(1, QSF_TENSOR_FFN_UP) + 18, 1); /* an index that no layer has */
    refuse(QSF_ERR_FORMAT, "unit 1 has no up");
    tiny_model_build(&file, &llama);
    qsf_store_u16(entry_of(2, QSF_TENSOR_FFN_GATE) + 18, 1);
    refuse(QSF_ERR_FORMAT, "unit 2 has no gate");
    tiny_model_build(&file, &llama);
    qsf_store_u16(entry_of(1, QSF_TENSOR_FFN_GATE) + 18, 1);
    /* Without the first layer's gate, no layer has one. */
    refuse(QSF_ERR_UNSUPPORTED, "unit 1 has 9 tensors, but this build can run only 8 of them");
    tiny_model_build(&file, &gpt2);
    qsf_store_u32(entry_of(1, QSF_TENSOR_FFN_UP_BIAS) + 4, QSF_TENSOR_FFN_GATE_BIAS);
    refuse(QSF_ERR_FORMAT, "unit 1 has gate_bias, which layers of its kind do not have");
    tiny_model_build(&file, &gpt2);
    qsf_store_u16(entry_of(2, QSF_TENSOR_FFN_UP_BIAS) + 18, 1);
    refuse(QSF_ERR_UNSUPPORTED, "tensors, but this build can run only");
    tiny_model_build(&file, &llama);
    qsf_store_u16(entry_of(1, QSF_TENSOR_Q) + 18, 1);
    refuse(QSF_ERR_FORMAT, "unit 1 has no q");
}

static void check_refused_kinds(void)
{
    static const struct {
        bool is_gpt2;
        size_t off; /* in the header */
        size_t n_bytes;
        uint32_t value;
        qsf_status want;
        const char *text;
    } changes[] = {
        {false, 24, 4, 4, QSF_ERR_FORMAT, "q is 32 x 32, expected 64 x 32"},
        {false, 28, 4, 2, QSF_ERR_FORMAT, "k is 16 x 32, expected 32 x 32"},
        {false, 28, 4, 0, QSF_ERR_FORMAT, "k is 16 x 32, expected 32 x 32"},
        {false, 44, 4, 15, QSF_ERR_FORMAT, "15 rotary dimensions"},
        {false, 44, 4, 4096, QSF_ERR_FORMAT, "expected 8192 x 32"},
        {false, 40, 4, 1U << 22, QSF_ERR_FORMAT, "expected 4194304 x 32"},
        {true, 51, 1, QSF_POSITIONS_ALIBI, QSF_ERR_UNSUPPORTED, "ALiBi"},
        {true, 40, 4, 41, QSF_ERR_FORMAT, "up_bias is 1 x 40, expected 1 x 41"},
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        tiny_model_build(&file, changes[i].is_gpt2 ? &gpt2 : &llama);
        for (size_t b = 0; b < changes[i].n_bytes; b++)
            file.bytes[changes[i].off + b] = (unsigned char)(changes[i].value >> 8 * b);
        refuse(changes[i].want, changes[i].text);
    }
}

/* The key that says that the head is tied, which it is not, becomes the rotary dimensions. */
static void set_rope_dims(uint32_t n_dims)
{
    tiny_model_build(&file, &llama);
    unsigned char *const arch = section("ARCH") + 8;
    qsf_store_u16(arch, 7);
    qsf_store_u32(arch + 4, n_dims);
}

static void check_rope_dims(void)
{
    const qsf_options opt = options_of(1, 0);
    set_rope_dims(0);
    refuse(QSF_ERR_FORMAT, "0 rotary dimensions");
    set_rope_dims(7);
    refuse(QSF_ERR_FORMAT, "7 rotary dimensions");
    set_rope_dims(TINY_MODEL_HEAD_DIM + 2);
    refuse(QSF_ERR_FORMAT, "18 rotary dimensions");
    for (uint32_t n_dims = 2; n_dims <= TINY_MODEL_HEAD_DIM; n_dims += 2) {
        set_rope_dims(n_dims);
        qsf_model *const m = open_with(&opt);
        qsf_session *s = NULL;
        if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
            return;
        CHECK_EQ(m->config.n_rope_pairs, n_dims / 2);
        CHECK_OK(qsf_session_step(s, 1));
        qsf_session_destroy(s);
        qsf_model_close(m);
    }
}

static void check_options(void)
{
    qsf_model *m = NULL;
    tiny_model_build(&file, &gpt2);
    qsf_options opt = options_of(0, 0);
    m = open_with(&opt);
    if (m == NULL)
        return;
    CHECK(m->plan.n_threads >= 1 && m->plan.n_threads <= QSF_POOL_MAX_THREADS);
    CHECK_EQ(m->plan.ctx_tokens, TINY_MODEL_TOKENS);
    qsf_model_close(m);
    opt.ctx_tokens = TINY_MODEL_TOKENS + 1; /* there is no position for it */
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
    opt = options_of(1, 0);
    opt.reserve_bytes = UINT64_MAX;
    opt.budget_bytes = UINT64_C(1) << 40;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_NOMEM);
    opt.budget_bytes = UINT64_MAX;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_NOMEM);
    opt.reserve_bytes = 0;
    CHECK_OK(qsf_model_open(path, &opt, &m));
    qsf_model_close(m);
}

/* ---- what is computed ---- */

/* Logits [tokens, vocabulary] of the file as it is; a chunk at a time. */
static bool score(const qsf_options *opt, float *rows)
{
    qsf_model *const m = open_with(opt);
    qsf_session *s = NULL;
    uint32_t tokens[N_TOKENS];
    for (size_t i = 0; i < N_TOKENS; i++)
        tokens[i] = token_at(i);
    bool ok = m != NULL && CHECK_OK(qsf_session_create(m, &s));
    for (size_t n_done = 0; ok && n_done < N_TOKENS;)
        ok = CHECK_OK(qsf_session_score(s, tokens, N_TOKENS, 0, rows,
                                        (size_t)N_TOKENS * TINY_MODEL_VOCAB, &n_done));
    qsf_session_destroy(s);
    qsf_model_close(m);
    return ok;
}

static bool rows_differ(const float *a, const float *b, size_t token)
{
    return memcmp(a + token * TINY_MODEL_VOCAB, b + token * TINY_MODEL_VOCAB,
                  TINY_MODEL_VOCAB * sizeof *a) != 0;
}

/* A window of w changes nothing for the first w tokens and something for the next. */
static void check_sliding_window(void)
{
    static const uint32_t windows[] = {1, 2, 31, 32, 33, 39, 40, 41, UINT32_MAX};
    static float whole[N_TOKENS * TINY_MODEL_VOCAB];
    static float got[2][N_TOKENS * TINY_MODEL_VOCAB];
    tiny_model model = llama;
    const qsf_options opt = options_of(1, 0);
    tiny_model_build(&file, &model);
    if (!score(&opt, whole))
        return;
    for (size_t i = 0; i < sizeof windows / sizeof windows[0]; i++) {
        const uint32_t w = windows[i];
        model.window_tokens = w;
        tiny_model_build(&file, &model);
        const qsf_options other = options_of(2, 1 + w % 7);
        if (!score(&opt, got[0]) || !score(&other, got[1]))
            return;
        CHECK_BYTES(got[0], got[1], sizeof got[0]);
        for (size_t t = 0; t < N_TOKENS && t <= w; t++)
            CHECK_EQ(rows_differ(whole, got[0], t), t == w);
    }
}

static void expect_numeric(void)
{
    const qsf_options opt = options_of(2, 0);
    qsf_model *const m = open_with(&opt);
    qsf_session *s = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    qsf_sampling how;
    uint64_t random_state = 1;
    uint32_t token = 12345;
    qsf_sampling_default(&how);
    CHECK_OK(qsf_session_step(s, 1));
    for (int greedy = 0; greedy < 2; greedy++) {
        how.temperature = greedy ? 0.0F : 1.0F;
        CHECK_STATUS(qsf_session_sample(s, &how, NULL, 0, &random_state, &token), QSF_ERR_NUMERIC);
    }
    CHECK_EQ(token, 12345);
    CHECK_EQ_U64(random_state, 1);
    qsf_session_destroy(s);
    qsf_model_close(m);
}

static unsigned char *unit_bytes(uint32_t unit_idx)
{
    return file.bytes + qsf_load_u64(repair_unit(file.bytes, file.n_bytes, unit_idx));
}

/* NaN and infinity anywhere in the weights never become a token. */
static void check_numeric(void)
{
    static const uint16_t bad[] = {0x7E00, 0x7C00, 0xFC00}; /* NaN, +-infinity */
    for (size_t i = 0; i < 3; i++) {
        tiny_model_build(&file, &llama);
        unsigned char *const finl = unit_bytes(llama.n_layers + 1);
        qsf_store_f32(finl + QSF_TENSOR_HEADER_BYTES, i == 0 ? NAN : INFINITY);
        expect_numeric();
        tiny_model_build(&file, &gpt2);
        const uint64_t q_off = qsf_load_u64(entry_of(1, QSF_TENSOR_V) + 24);
        qsf_store_u16(unit_bytes(1) + q_off, bad[i]); /* the scale of row 0 */
        expect_numeric();
        tiny_model_build(&file, &llama);
        qsf_store_u16(unit_bytes(0) + QSF_TENSOR_HEADER_BYTES + 2, bad[i]); /* token 1 */
        expect_numeric();
    }
}

/* ---- handles ---- */

static void check_sections(void)
{
    tiny_model_build(&file, &llama);
    const qsf_options opt = options_of(1, 0);
    qsf_model *const m = open_with(&opt);
    if (m == NULL)
        return;
    unsigned char bytes[64];
    CHECK_EQ(qsf_model_section_bytes(m, "ARCH"), 24);
    CHECK_OK(qsf_model_section(m, "ARCH", bytes, sizeof bytes));
    CHECK_BYTES(bytes, section("ARCH"), 24);
    CHECK_STATUS(qsf_model_section(m, "ARCH", bytes, 23), QSF_ERR_ARG);
    static const char *const none[] = {"", "A", "ARC", "ARCHI", "TOKN"};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
        const size_t n_chars = strlen(none[i]) + 1;
        char *const exact = malloc(n_chars); /* so that a sanitizer sees a byte too many */
        if (!CHECK(exact != NULL))
            break;
        memcpy(exact, none[i], n_chars);
        CHECK_EQ(qsf_model_section_bytes(m, exact), 0);
        CHECK_STATUS(qsf_model_section(m, exact, bytes, sizeof bytes), QSF_ERR_ARG);
        free(exact);
    }
    qsf_model_close(m);
}

static void check_closed_model(void)
{
    tiny_model_build(&file, &llama);
    qsf_options opt = options_of(2, 0);
    opt.max_sessions = 2;
    qsf_model *const m = open_with(&opt);
    qsf_session *s = NULL;
    qsf_session *late = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    qsf_model_close(m); /* lives on */
    CHECK_STATUS(qsf_session_create(m, &late), QSF_ERR_ARG);
    CHECK(late == NULL);
    CHECK_OK(qsf_session_step(s, 1));
    qsf_session_destroy(s);
}

typedef struct user {
    qsf_thread thread;
    qsf_model *model;
    _Atomic(qsf_session *) session; /* for the thread that cancels */
    uint32_t first_token;
    float logits[TINY_MODEL_VOCAB];
    qsf_status status;
    uint32_t n_cancelled;
} user;

static uint32_t user_token(const user *u, size_t i)
{
    return (u->first_token + token_at(i)) % TINY_MODEL_VOCAB;
}

/* Evaluates its tokens in chunks and steps, in spite of being cancelled, and chooses after steps:
 * a choice does not wait for the pass of another thread. */
static void *use_model(void *arg)
{
    user *const u = arg;
    qsf_sampling how;
    uint64_t random_state = 1;
    uint32_t choice = 0;
    qsf_sampling_default(&how);
    uint32_t tokens[N_TOKENS];
    qsf_session *s = NULL;
    for (size_t i = 0; i < N_TOKENS; i++)
        tokens[i] = user_token(u, i);
    u->status = qsf_session_create(u->model, &s);
    if (u->status != QSF_OK)
        return NULL;
    atomic_store(&u->session, s);
    for (size_t n_done = 0; u->status == QSF_OK && n_done < N_SYNCED;) {
        u->status = qsf_session_sync(s, tokens, N_SYNCED, &n_done);
        if (u->status == QSF_ERR_CANCELLED) {
            u->status = QSF_OK;
            u->n_cancelled++;
        }
    }
    for (size_t i = N_SYNCED; u->status == QSF_OK && i < N_TOKENS;) {
        const qsf_status status = qsf_session_step(s, tokens[i]);
        i += status == QSF_OK;
        u->status = status == QSF_ERR_CANCELLED ? QSF_OK : status;
        if (status == QSF_OK)
            u->status = qsf_session_sample(s, &how, NULL, 0, &random_state, &choice);
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
    tiny_model_build(&file, &llama);
    qsf_options opt = options_of(2, 3);
    opt.max_sessions = 2;
    opt.draft_rows = 4;
    qsf_model *const m = open_with(&opt);
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
    check_path(path, sizeof path, "check_model_edges");
    check_refused_order();
    check_refused_tensors();
    check_refused_kinds();
    check_rope_dims();
    check_options();
    check_sliding_window();
    check_numeric();
    check_sections();
    check_closed_model();
    check_threads();
    remove(path);
    return check_report("check_model_edges");
}
