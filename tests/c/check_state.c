/* check_state.c - the state of a session as bytes: what is damaged, incomplete or of another form
 * is refused, and the session holds nothing. That what is read and written again goes on with the
 * same bits, and copies: tests/python/api/test_same_bits.py; files: test_kept_sessions.py.
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

static bool open_pair(pair *o)
{
    qsf_options opt = rig_options(2, 8);
    opt.max_sessions = 2;
    opt.kv_k_type = opt.kv_v_type = QSF_KV_8BIT;
    opt.ctx_tokens = TINY_MODEL_TOKENS;
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

/* After a move nobody goes back to where a window began before what was moved, nor copies it. */
static void check_moved(pair *o, const qsf_state *state, bool has_window)
{
    uint32_t crc32;
    const qsf_status lost = has_window ? QSF_ERR_ARG : QSF_OK;
    for (size_t at = 0; at < state->n_bytes; at += 7) { /* in pieces of any size */
        const size_t n = state->n_bytes - at < 7 ? (size_t)state->n_bytes - at : 7;
        CHECK_OK(qsf_session_read_state(o->a, at, bytes, n, &crc32));
        CHECK_OK(qsf_session_write_state(o->b, state, at, bytes, n, crc32));
        CHECK_EQ(qsf_session_position(o->b), 0);
    }
    CHECK_OK(qsf_session_adopt_state(o->b, tokens));
    rig_check_same(o->a, o->b);
    CHECK_STATUS(qsf_session_rewind(o->b, 40), lost);
    rig_sync(o->b, tokens, 41); /* evaluates everything again where it must */
    CHECK_OK(qsf_session_copy(o->b, o->a, N_TOKENS));
    rig_check_same(o->a, o->b);
    CHECK_STATUS(qsf_session_copy(o->b, o->a, 33), lost);
    CHECK_EQ(qsf_session_position(o->b), has_window ? N_TOKENS : 33);
    CHECK_OK(qsf_session_copy(o->b, o->a, N_TOKENS - 1));
    CHECK_STATUS(qsf_session_logits(o->b, (float[RIG_MAX_VOCAB]){0}, RIG_MAX_VOCAB), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_copy(o->b, o->a, N_TOKENS + 1), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_copy(o->b, o->b, 1), QSF_ERR_ARG);
}

static void check_refused(uint32_t window_tokens, size_t stride)
{
    pair o;
    const tiny_model model = {
        .n_layers = 2, .dtype = QSF_DTYPE_4BIT, .window_tokens = window_tokens};
    if (!rig_build(path, &file, &model) || !open_pair(&o))
        return;
    qsf_state state;
    uint32_t crc32;
    uint32_t crc32_of_half;
    rig_sync(o.a, tokens, N_TOKENS);
    rig_sync(o.b, tokens, 3);
    CHECK_OK(qsf_session_describe_state(o.a, &state));
    CHECK(state.n_bytes < MOST_BYTES && state.has_logits == 1);
    const size_t n = (size_t)state.n_bytes;
    CHECK_OK(qsf_session_read_state(o.a, 0, bytes, n, &crc32));
    CHECK_STATUS(qsf_session_read_state(o.a, 1, bytes, n, &crc32), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_read_state(o.a, UINT64_MAX, bytes, 1, &crc32), QSF_ERR_ARG);
    CHECK_OK(qsf_session_read_state(o.a, 0, bytes, n / 2, &crc32_of_half));
    CHECK_OK(qsf_session_read_state(o.a, 0, bytes, n, &crc32));

    const struct {
        int64_t more_bytes;
        uint32_t n_tokens;
        uint32_t has_logits;
    } forms[] = {{-1, N_TOKENS, 1}, {0, 1000, 1}, {0, N_TOKENS, 2}};
    for (size_t i = 0; i < COUNT_OF(forms); i++) { /* refused before anything is dropped */
        qsf_state wrong = state;
        wrong.n_bytes += (uint64_t)forms[i].more_bytes;
        wrong.n_tokens = forms[i].n_tokens;
        wrong.has_logits = forms[i].has_logits;
        CHECK_STATUS(qsf_session_write_state(o.b, &wrong, 0, bytes, n, crc32), QSF_ERR_ARG);
    }
    CHECK_STATUS(qsf_session_write_state(o.b, &state, 8, bytes, n - 8, crc32), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_adopt_state(o.b, tokens), QSF_ERR_ARG);
    CHECK_EQ(qsf_session_position(o.b), 3);

    for (size_t i = 0; i < n; i += 11 * stride) {
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
    CHECK_OK(qsf_session_write_state(o.b, &state, 0, bytes, n / 2, crc32_of_half));
    CHECK_STATUS(qsf_session_adopt_state(o.b, tokens), QSF_ERR_ARG); /* half of it */
    check_moved(&o, &state, window_tokens != 0);
    close_pair(&o);
}

int main(void)
{
    const size_t stride = check_stride();
    for (uint32_t i = 0; i < TINY_MODEL_TOKENS; i++)
        tokens[i] = (i * 7 + 1) % TINY_MODEL_VOCAB;
    check_path(path, sizeof path, "check_state");
    check_refused(0, stride);
    check_refused(5, stride);
    unlink(path);
    return check_report("check_state");
}
