/* check_state.c - the state of a session as bytes: what is read and written again goes on with the
 * same bits, in pieces of any size; what is damaged, incomplete or of another form is refused, and
 * the session holds nothing. Copies. Files, key: tests/python/api/test_kept_sessions.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_MODEL_TOKENS 200 /* more pages than the ring of a window has */

#include "engine_rig.h"

#define N_TOKENS 150
#define MOST_BYTES (1 << 16)

static char path[64];
static tiny_file file;
static uint32_t tokens[TINY_MODEL_TOKENS];
static unsigned char bytes[MOST_BYTES];

typedef struct pair {
    qsf_model *m;
    qsf_session *a;
    qsf_session *b;
} pair;

static bool open_pair(pair *o, uint32_t kv_type, uint32_t ctx_tokens, uint32_t chunk_tokens)
{
    qsf_options opt = rig_options(2, chunk_tokens);
    opt.max_sessions = 2;
    opt.kv_k_type = opt.kv_v_type = kv_type;
    opt.ctx_tokens = ctx_tokens;
    o->m = rig_open(path, &opt);
    return o->m != NULL && CHECK_OK(qsf_session_create(o->m, &o->a)) &&
           CHECK_OK(qsf_session_create(o->m, &o->b));
}

static void close_pair(pair *o)
{
    qsf_session_destroy(o->a);
    qsf_session_destroy(o->b);
    qsf_model_close(o->m);
}

/* Moves the state of one session to another, n bytes at a time. */
static qsf_status move(const qsf_session *from, qsf_session *to, size_t n)
{
    qsf_state state;
    uint32_t crc32;
    CHECK_OK(qsf_session_describe_state(from, &state));
    for (uint64_t at = 0; at < state.n_bytes; at += n) {
        const size_t n_now = n < state.n_bytes - at ? n : (size_t)(state.n_bytes - at);
        CHECK_OK(qsf_session_read_state(from, at, bytes, n_now, &crc32));
        const qsf_status status = qsf_session_write_state(to, &state, at, bytes, n_now, crc32);
        if (status != QSF_OK)
            return status;
        CHECK_EQ(qsf_session_position(to), 0);
    }
    return qsf_session_adopt_state(to, tokens);
}

/* What was moved has its logits at once, and goes on with the same bits. */
static void check_moves(uint32_t kv_type, uint32_t n_tokens)
{
    static const size_t sizes[] = {1, 7, 96, 4096, MOST_BYTES};
    pair o;
    if (!open_pair(&o, kv_type, TINY_MODEL_TOKENS, 8))
        return;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        rig_sync(o.a, tokens, n_tokens);
        rig_sync(o.b, tokens, 5);
        CHECK_OK(move(o.a, o.b, sizes[i]));
        CHECK_EQ(qsf_session_position(o.b), n_tokens);
        rig_check_same(o.a, o.b);
        for (uint32_t t = n_tokens; t < TINY_MODEL_TOKENS; t++) {
            CHECK_OK(qsf_session_step(o.a, tokens[t]));
            CHECK_OK(qsf_session_step(o.b, tokens[t]));
            rig_check_same(o.a, o.b);
        }
        qsf_stats stats;
        qsf_session_stats(o.b, &stats);
        CHECK_EQ(stats.prompt_tokens, 5 * (i + 1)); /* nothing of the state was evaluated again */
        if (qsf_session_rewind(o.a, 0) != QSF_OK || qsf_session_rewind(o.b, 0) != QSF_OK)
            CHECK(false);
    }
    close_pair(&o);
}

/* To a model with another context and chunk, whose rings have other sizes, and back. */
static void check_other_plan(void)
{
    pair o;
    pair other;
    if (!open_pair(&o, QSF_KV_4BIT, TINY_MODEL_TOKENS, 8) ||
        !open_pair(&other, QSF_KV_4BIT, N_TOKENS + 8, 96))
        return;
    rig_sync(o.a, tokens, N_TOKENS);
    CHECK_OK(move(o.a, other.a, 100));
    rig_check_same(o.a, other.a);
    CHECK_OK(qsf_session_step(o.a, tokens[N_TOKENS]));
    CHECK_OK(qsf_session_step(other.a, tokens[N_TOKENS]));
    CHECK_OK(move(other.a, o.b, 4096));
    rig_check_same(o.a, o.b);
    CHECK_OK(qsf_session_step(o.a, tokens[N_TOKENS + 1]));
    CHECK_OK(qsf_session_step(o.b, tokens[N_TOKENS + 1]));
    rig_check_same(o.a, o.b);
    close_pair(&o);
    close_pair(&other);
}

/* After a move nobody goes back to where a window began before what was moved. */
static void check_rewinds(uint32_t window_tokens)
{
    pair o;
    if (!open_pair(&o, QSF_KV_4BIT, TINY_MODEL_TOKENS, TINY_MODEL_TOKENS))
        return;
    rig_sync(o.a, tokens, N_TOKENS);
    CHECK_OK(move(o.a, o.b, 1000));
    CHECK_STATUS(qsf_session_rewind(o.b, 40), window_tokens != 0 ? QSF_ERR_ARG : QSF_OK);
    rig_sync(o.b, tokens, 41); /* evaluates everything again where it must */
    CHECK_OK(qsf_session_rewind(o.a, 0));
    rig_sync(o.a, tokens, 41);
    rig_check_same(o.a, o.b);
    CHECK_OK(qsf_session_rewind(o.b, 30)); /* as what was moved is forgotten */
    close_pair(&o);
}

/* A copy goes on as if it had been evaluated; with a window, only of all or all but one. */
static void check_copies(uint32_t window_tokens)
{
    pair o;
    if (!open_pair(&o, QSF_KV_4BIT, TINY_MODEL_TOKENS, 8))
        return;
    rig_sync(o.a, tokens, N_TOKENS);
    CHECK_OK(qsf_session_copy(o.b, o.a, N_TOKENS));
    rig_check_same(o.a, o.b);
    CHECK_STATUS(qsf_session_copy(o.b, o.a, 33), window_tokens != 0 ? QSF_ERR_ARG : QSF_OK);
    CHECK_EQ(qsf_session_position(o.b), window_tokens != 0 ? N_TOKENS : 33);
    CHECK_OK(qsf_session_copy(o.b, o.a, N_TOKENS - 1));
    CHECK_OK(qsf_session_step(o.b, tokens[N_TOKENS - 1]));
    rig_check_same(o.a, o.b);
    CHECK_STATUS(qsf_session_copy(o.b, o.a, N_TOKENS + 1), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_copy(o.b, o.b, 1), QSF_ERR_ARG);
    CHECK_EQ(qsf_session_position(o.b), N_TOKENS);
    close_pair(&o);
}

static void check_refused(void)
{
    pair o;
    if (!open_pair(&o, QSF_KV_8BIT, TINY_MODEL_TOKENS, 8))
        return;
    qsf_state state;
    uint32_t crc32;
    rig_sync(o.a, tokens, N_TOKENS);
    rig_sync(o.b, tokens, 3);
    CHECK_OK(qsf_session_describe_state(o.a, &state));
    CHECK(state.n_bytes < MOST_BYTES && state.has_logits == 1);
    const size_t n = (size_t)state.n_bytes;
    CHECK_OK(qsf_session_read_state(o.a, 0, bytes, n, &crc32));
    CHECK_STATUS(qsf_session_read_state(o.a, 1, bytes, n, &crc32), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_read_state(o.a, UINT64_MAX, bytes, 1, &crc32), QSF_ERR_ARG);
    CHECK_OK(qsf_session_read_state(o.a, 0, bytes, n, &crc32));

    qsf_state wrong = state; /* of another size: refused before anything is dropped */
    wrong.n_bytes--;
    CHECK_STATUS(qsf_session_write_state(o.b, &wrong, 0, bytes, n, crc32), QSF_ERR_ARG);
    wrong = state;
    wrong.n_tokens = 1000;
    CHECK_STATUS(qsf_session_write_state(o.b, &wrong, 0, bytes, n, crc32), QSF_ERR_ARG);
    wrong = state;
    wrong.has_logits = 2;
    CHECK_STATUS(qsf_session_write_state(o.b, &wrong, 0, bytes, n, crc32), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_write_state(o.b, &state, 8, bytes, n - 8, crc32), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_adopt_state(o.b, tokens), QSF_ERR_ARG);
    CHECK_EQ(qsf_session_position(o.b), 3);

    const size_t stride = check_stride();
    for (size_t i = 0; i < n; i += stride) {
        bytes[i] ^= 0x10;
        CHECK_STATUS(qsf_session_write_state(o.b, &state, 0, bytes, n, crc32), QSF_ERR_DAMAGED);
        CHECK_EQ(qsf_session_position(o.b), 0);
        CHECK_STATUS(qsf_session_adopt_state(o.b, tokens), QSF_ERR_ARG);
        bytes[i] ^= 0x10;
    }

    CHECK_OK(qsf_session_write_state(o.b, &state, 0, bytes, n, crc32));
    CHECK_OK(qsf_session_rewind(o.b, 0)); /* gives the pages back */
    CHECK_STATUS(qsf_session_adopt_state(o.b, tokens), QSF_ERR_ARG);
    CHECK_OK(qsf_session_write_state(o.b, &state, 0, bytes, n, crc32));
    const uint32_t unknown[N_TOKENS] = {TINY_MODEL_VOCAB};
    CHECK_STATUS(qsf_session_adopt_state(o.b, unknown), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_write_state(o.b, &state, n, bytes, 1, crc32), QSF_ERR_ARG);
    rig_sync(o.b, tokens, 2); /* which overwrites pages */
    CHECK_OK(qsf_session_rewind(o.b, 0));
    CHECK_STATUS(qsf_session_adopt_state(o.b, tokens), QSF_ERR_ARG);
    close_pair(&o);
}

static void run_all(uint32_t window_tokens)
{
    static const struct {
        uint32_t kv_type;
        uint32_t n_tokens; /* less than a page, its end and the ones beside it, whole pages, ... */
    } cases[] = {
        {QSF_KV_F16, 1},   {QSF_KV_F16, 33},
        {QSF_KV_8BIT, 31}, {QSF_KV_8BIT, 32},
        {QSF_KV_4BIT, 96}, {QSF_KV_4BIT, 150},
        {QSF_KV_2BIT, 33}, {QSF_KV_2BIT, TINY_MODEL_TOKENS - 1},
    };
    const tiny_model model = {
        .n_layers = 2, .dtype = QSF_DTYPE_4BIT, .window_tokens = window_tokens};
    if (!rig_build(path, &file, &model))
        return;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_moves(cases[i].kv_type, cases[i].n_tokens);
    check_copies(window_tokens);
    check_other_plan();
    check_rewinds(window_tokens);
    check_refused();
}

int main(void)
{
    for (uint32_t i = 0; i < TINY_MODEL_TOKENS; i++)
        tokens[i] = (i * 7 + 1) % TINY_MODEL_VOCAB;
    check_path(path, sizeof path, "check_state");
    run_all(0);
    run_all(5);
    unlink(path);
    return check_report("check_state");
}
