/* check_verify.c - drafts in a pass: the logits after each, those after the ones that are taken and
 * all that follows are those of plain steps, for any number of drafts, KV type, window, number of
 * threads, streamed or resident, with older pages in a file or without. The instruction set is that
 * of the run. */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20) /* a model larger than the buffers of streaming */
#define TINY_MODEL_DIM 256
#define TINY_MODEL_TOKENS 384 /* more than a span of the KV cache */
#define TINY_LAYERS 4
#define TINY_MODEL_FFN 2048
#include <inttypes.h>
#include <stdlib.h>

#include "check.h"
#include "engine/model.h"
#include "engine/model_open.h"
#include "least_budget.h"
#include "system.h"
#include "tiny_model.h"

#define MOST_DRAFTS 127

static char path[64];
static tiny_file file;
static uint64_t random_state = 20260;

static uint32_t random_below(uint32_t n)
{
    return (uint32_t)(qsf_random_uniform(&random_state) * n);
}

/* How the model is opened. */
typedef struct setup {
    uint32_t kv_k_type;
    uint32_t kv_v_type;
    uint32_t n_threads;
    uint32_t window_tokens;
    bool is_gpt2; /* one KV head for each head */
    bool is_streamed;
    uint32_t resident_tokens; /* 0: all */
} setup;

typedef struct rig {
    qsf_model *m;
    qsf_session *drafted;
    qsf_session *plain;
    uint32_t n_held; /* tokens before the drafts */
    uint32_t n_drafts;
    uint32_t tokens[TINY_MODEL_TOKENS]; /* held, then drafts */
} rig;

static bool rig_make(rig *g, const setup *s)
{
    tiny_model_build(&file, &(tiny_model){
                                .n_layers = s->is_streamed ? TINY_LAYERS : 1,
                                .dtype = QSF_DTYPE_4BIT,
                                .is_gpt2 = s->is_gpt2,
                            });
    qsf_options opt;
    qsf_options_default(&opt);
    opt.n_threads = s->n_threads;
    opt.ctx_tokens = TINY_MODEL_TOKENS;
    opt.chunk_tokens = 1 + MOST_DRAFTS;
    opt.max_sessions = 2;
    opt.draft_rows = MOST_DRAFTS;
    opt.kv_k_type = s->kv_k_type;
    opt.kv_v_type = s->kv_v_type;
    opt.kv_window_tokens = s->window_tokens;
    opt.kv_pinned_tokens = s->window_tokens / 8;
    opt.kv_folder = s->resident_tokens != 0 ? "." : NULL;
    opt.kv_resident_tokens = s->resident_tokens;
    *g = (rig){0};
    if (!CHECK(tiny_write(path, file.bytes, file.n_bytes)))
        return false;
    qsf_faults known = {-1, -1, 0};
    if (s->is_streamed)
        known = least_budget(path, &opt);
    else
        opt.budget_bytes = 0;
    while (CHECK_OK(qsf_model_create(path, &opt, &known, &g->m)) &&
           (g->m->plan.draft_rows < MOST_DRAFTS || g->m->plan.chunk_tokens < opt.chunk_tokens)) {
        qsf_model_close(g->m);
        opt.budget_bytes += 1 << 14;
    }
    CHECK_EQ(g->m->plan.streamed_bytes > 0, s->is_streamed);
    return CHECK_OK(qsf_session_create(g->m, &g->drafted)) &&
           CHECK_OK(qsf_session_create(g->m, &g->plain));
}

static void rig_free(rig *g)
{
    qsf_session_destroy(g->drafted);
    qsf_session_destroy(g->plain);
    qsf_model_close(g->m);
}

static void sync_to(qsf_session *s, const uint32_t *tokens, uint32_t n_tokens)
{
    size_t n_done = 0;
    while (n_done < n_tokens)
        if (!CHECK_OK(qsf_session_sync(s, tokens, n_tokens, &n_done)))
            return;
}

static void choose_tokens(rig *g, uint32_t n_held, uint32_t n_drafts)
{
    g->n_held = n_held;
    g->n_drafts = n_drafts;
    for (uint32_t i = 0; i < n_held + n_drafts; i++)
        g->tokens[i] = i < n_held ? i * i % TINY_MODEL_VOCAB : random_below(TINY_MODEL_VOCAB);
}

/* Evaluates the last held token and the drafts behind those before it. */
static qsf_status run_drafts(rig *g)
{
    qsf_session *const s = g->drafted;
    qsf_pass_part part = {
        .session = s,
        .tokens = g->tokens + g->n_held - 1,
        .n_tokens = 1 + g->n_drafts,
        .n_rows = 1 + g->n_drafts,
        .n_drafts = g->n_drafts,
    };
    if (g->n_held > 1)
        sync_to(s, g->tokens, g->n_held - 1);
    else
        CHECK_OK(qsf_session_rewind(s, 0));
    qsf_stopwatch w;
    qsf_stopwatch_start(&w, 0);
    return qsf_pass_run(g->m, &part, 1, &w);
}

/* The logits after every draft are those of plain steps. */
static void check_rows(rig *g)
{
    float want[TINY_MODEL_VOCAB];
    float *const have = malloc((1 + MOST_DRAFTS) * sizeof want);
    memcpy(have, g->drafted->ahead.logits - TINY_MODEL_VOCAB, (1 + g->n_drafts) * sizeof want);
    for (uint32_t i = 0; i <= g->n_drafts; i++) {
        sync_to(g->plain, g->tokens, g->n_held + i);
        CHECK_OK(qsf_session_logits(g->plain, want, TINY_MODEL_VOCAB));
        CHECK_BYTES(have + i * (size_t)TINY_MODEL_VOCAB, want, sizeof want);
    }
    free(have);
}

/* After the same tokens both sessions have the same logits: what the caches hold is the same. */
static void check_next(rig *g, const uint32_t *tokens, uint32_t n)
{
    float have[TINY_MODEL_VOCAB];
    float want[TINY_MODEL_VOCAB];
    sync_to(g->drafted, tokens, n);
    sync_to(g->plain, tokens, n);
    CHECK_OK(qsf_session_logits(g->drafted, have, TINY_MODEL_VOCAB));
    CHECK_OK(qsf_session_logits(g->plain, want, TINY_MODEL_VOCAB));
    CHECK_BYTES(have, want, sizeof want);
}

/* Takes some of the drafts, or all; then a plain step. */
static void check_walk(rig *g)
{
    qsf_session *const s = g->drafted;
    uint32_t tokens[TINY_MODEL_TOKENS];
    uint32_t n = g->n_held;
    memcpy(tokens, g->tokens, (n + g->n_drafts) * sizeof *tokens);
    for (;;) {
        const bool has_draft = n < g->n_held + g->n_drafts;
        for (uint32_t token = 0; token < TINY_MODEL_VOCAB; token++)
            CHECK_EQ(qsf_drafting_has(s, token), has_draft && token == tokens[n]);
        if (!has_draft || random_below(8) == 0)
            break;
        n++;
        CHECK_OK(qsf_drafting_take(s));
        CHECK_EQ(s->n_tokens, n);
        CHECK_BYTES(s->buffers.tokens, tokens, n * sizeof *tokens);
    }
    if (n == TINY_MODEL_TOKENS)
        return;
    tokens[n] = random_below(TINY_MODEL_VOCAB);
    check_next(g, tokens, n + 1);
}

static void check_setup(const setup *s)
{
    static const uint32_t held[] = {31, 1, 33, 250, 256, 340};
    rig g;
    if (!rig_make(&g, s))
        return;
    for (size_t i = 0; i < (s->is_streamed ? 2 : sizeof held / sizeof *held); i++) {
        const uint32_t n_drafts = i == 2 ? MOST_DRAFTS : 1 + random_below(40);
        for (uint32_t wants_rows = 0; wants_rows < 2; wants_rows++) {
            choose_tokens(&g, held[i], n_drafts);
            if (!CHECK_OK(run_drafts(&g)))
                continue;
            if (wants_rows == 1)
                check_rows(&g);
            else
                check_walk(&g);
        }
    }
    CHECK_EQ(g.drafted->buffers.sequence.kv.cold.read_bytes > 0, s->resident_tokens != 0);
    rig_free(&g);
}

/* Reads that fail in a pass with drafts, and a cancelled one, leave the session as before it. */
static void check_failures(void)
{
    rig g;
    if (!rig_make(&g, &(setup){QSF_KV_8BIT, QSF_KV_4BIT, 2, 0, false, true, 0}))
        return;
    choose_tokens(&g, 5, 8);
    int64_t n = 0;
    for (; n < 1000; n++) {
        sync_to(g.drafted, g.tokens, 4);
        g.m->reader.file.fault_kind = n % 2 == 0 ? QSF_FAULT_FAIL : QSF_FAULT_CORRUPT;
        g.m->reader.file.reads_until_fault = n;
        const qsf_status status = run_drafts(&g);
        g.m->reader.file.reads_until_fault = -1;
        if (status == QSF_OK)
            break;
        CHECK_EQ(g.drafted->n_tokens, 4);
        CHECK_EQ(g.drafted->ahead.n_left, 0);
    }
    CHECK(n > 0 && n < 1000);
    size_t n_done = 0; /* the fault may have met what is read ahead */
    (void)qsf_session_sync(g.plain, g.tokens, 3, &n_done);
    check_walk(&g);
    sync_to(g.drafted, g.tokens, 4);
    qsf_session_cancel(g.drafted);
    CHECK_STATUS(run_drafts(&g), QSF_ERR_CANCELLED);
    CHECK_EQ(g.drafted->n_tokens, 4);
    CHECK_OK(run_drafts(&g));
    check_walk(&g);
    rig_free(&g);
}

int main(int argc, char **argv)
{
    static const setup setups[] = {
        {QSF_KV_DEFAULT, QSF_KV_DEFAULT, 2, 0, false, true, 0},
        {QSF_KV_F32, QSF_KV_F32, 1, 0, true, false, 0},
        {QSF_KV_F16, QSF_KV_2BIT, 3, 0, false, false, 0},
        {QSF_KV_4BIT, QSF_KV_8BIT, 2, 40, false, false, 0},
        {QSF_KV_2BIT, QSF_KV_F16, 1, 64, true, true, 0},
        {QSF_KV_8BIT, QSF_KV_F16, 3, 0, true, false, 1},
    };
    if (argc > 1)
        random_state = strtoull(argv[1], NULL, 10);
    printf("check_verify: seed %" PRIu64 "\n", random_state);
    check_path(path, sizeof path, "check_verify");
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++)
        check_setup(&setups[i]);
    check_failures();
    unlink(path);
    return check_report("check_verify");
}
