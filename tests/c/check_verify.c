/* check_verify.c - trees of drafts in a pass: the logits of every node, what is kept of a path and
 * all that follows it are those of plain steps, for any tree, KV type, window, number of threads,
 * streamed or resident, with older pages in a file or without. The instruction set is that of the
 * run. */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20) /* a model larger than the buffers of streaming */
#define TINY_MODEL_DIM 256
#define TINY_MODEL_TOKENS 384 /* more than a span of the KV cache */
#define TINY_LAYERS 4
#define TINY_MODEL_FFN 2048
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "engine/drafting.h"
#include "engine/model.h"
#include "engine/model_open.h"
#include "engine/session.h"
#include "least_budget.h"
#include "tiny_model.h"

#define MOST_DRAFTS 127

static char path[64];
static tiny_file file;
static uint64_t random_state = 20260;

static uint32_t random_below(uint32_t n)
{
    return (uint32_t)(qsf_random_uniform(&random_state) * n);
}

/* How the model is opened, and the tree that is tried. */
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
    qsf_session *tree;
    qsf_session *plain;
    uint32_t n_held; /* tokens before the tree, the first of them not a draft */
    uint32_t n_drafts;
    uint32_t tokens[TINY_MODEL_TOKENS]; /* held, then drafts */
    uint32_t depths[1 + MOST_DRAFTS];
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
    return CHECK_OK(qsf_session_create(g->m, &g->tree)) &&
           CHECK_OK(qsf_session_create(g->m, &g->plain));
}

static void rig_free(rig *g)
{
    qsf_session_destroy(g->tree);
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

/* What draft i, counted from 1, follows. */
static uint32_t parent_of(const rig *g, uint32_t i)
{
    return g->tree->buffers.draft_parents[i - 1];
}

/* Chooses tokens and a tree. A chain first, as the engine has it, or not. */
static void choose_tree(rig *g, uint32_t n_held, uint32_t n_drafts)
{
    const uint32_t n_chain = random_below(n_drafts + 1);
    g->n_held = n_held;
    g->n_drafts = n_drafts;
    for (uint32_t i = 0; i < n_held + n_drafts; i++)
        g->tokens[i] = i < n_held ? i * i % TINY_MODEL_VOCAB : random_below(TINY_MODEL_VOCAB);
    g->depths[0] = 0;
    for (uint32_t i = 1; i <= n_drafts; i++) {
        const bool is_branch = i > n_chain && random_below(3) == 0;
        const uint32_t parent = is_branch ? random_below(i) : i - 1;
        g->depths[i] = g->depths[parent] + 1;
        g->tree->buffers.draft_parents[i - 1] = (uint8_t)parent;
    }
}

/* Evaluates the last held token and the tree behind those before it. */
static qsf_status run_tree(rig *g)
{
    qsf_session *const s = g->tree;
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

/* The logits of every node are those of its path, evaluated plainly. */
static void check_nodes(rig *g)
{
    uint32_t tokens[TINY_MODEL_TOKENS];
    float want[TINY_MODEL_VOCAB];
    float *const have = malloc((1 + MOST_DRAFTS) * sizeof want);
    memcpy(have, g->tree->draft_logits - TINY_MODEL_VOCAB, (1 + g->n_drafts) * sizeof want);
    memcpy(tokens, g->tokens, g->n_held * sizeof *tokens);
    for (uint32_t i = 0; i <= g->n_drafts; i++) {
        uint32_t n = g->n_held + g->depths[i];
        for (uint32_t at = i; at > 0; at = parent_of(g, at))
            tokens[--n] = g->tokens[g->n_held + at - 1];
        sync_to(g->plain, tokens, g->n_held + g->depths[i]);
        CHECK_OK(qsf_session_logits(g->plain, want, TINY_MODEL_VOCAB));
        CHECK_BYTES(have + i * (size_t)TINY_MODEL_VOCAB, want, sizeof want);
    }
    free(have);
}

/* What the caches hold in memory of the tokens before `n` that a token at n sees is the same. */
static void check_kv(const rig *g, uint32_t n)
{
    const qsf_kv_pool *const pool = &g->m->kv_pool;
    for (uint32_t layer = 0; layer < pool->n_layers; layer++) {
        const qsf_kv_layer *const l = &pool->layers[layer];
        const uint32_t window = g->m->config.layers[layer].kind->window_tokens;
        const uint32_t n_cold =
            qsf_kvcache_cold_pages(&g->tree->buffers.sequence.kv, layer) >
                    qsf_kvcache_cold_pages(&g->plain->buffers.sequence.kv, layer)
                ? qsf_kvcache_cold_pages(&g->tree->buffers.sequence.kv, layer)
                : qsf_kvcache_cold_pages(&g->plain->buffers.sequence.kv, layer);
        for (uint32_t p = window != 0 && n > window ? n - window : 32 * n_cold; p < n; p++) {
            unsigned char slots[2][2][2 * 4096] = {{{0}}};
            for (uint32_t i = 0; i < 2; i++) {
                const qsf_session *const s = i == 0 ? g->tree : g->plain;
                const void *k;
                const void *v;
                qsf_kvcache_find_pages(&s->buffers.sequence.kv, layer, 0, p / 32, 0, 1, &k, &v);
                qsf_kv_copy_slot(pool->form.k_type, true, l->head_dim / 64 + 1, p % 32, k, 0,
                                 slots[i][0]);
                qsf_kv_copy_slot(pool->form.v_type, false, l->head_dim / 64 + 1, p % 32, v, 0,
                                 slots[i][1]);
            }
            CHECK_BYTES(slots[0], slots[1], sizeof slots[0]);
        }
    }
}

/* Walks from the root to a leaf, or to a token that no draft is; then a plain step. */
static void check_walk(rig *g)
{
    qsf_session *const s = g->tree;
    uint32_t tokens[TINY_MODEL_TOKENS];
    uint32_t node = 0;
    uint32_t n = g->n_held;
    memcpy(tokens, g->tokens, n * sizeof *tokens);
    for (;;) {
        uint32_t children[MOST_DRAFTS];
        uint32_t n_children = 0;
        bool is_child[TINY_MODEL_VOCAB] = {false};
        for (uint32_t i = node + 1; i <= g->n_drafts; i++)
            if (parent_of(g, i) == node && !is_child[g->tokens[g->n_held + i - 1]]) {
                is_child[g->tokens[g->n_held + i - 1]] = true;
                children[n_children++] = i;
            }
        for (uint32_t token = 0; token < TINY_MODEL_VOCAB; token++)
            CHECK_EQ(qsf_drafting_has(s, token), is_child[token]);
        if (n_children == 0 || random_below(8) == 0)
            break;
        node = children[random_below(n_children)];
        tokens[n] = g->tokens[g->n_held + node - 1];
        CHECK_OK(qsf_drafting_take(s, tokens[n++]));
        CHECK_EQ(s->n_tokens, n);
        CHECK_BYTES(s->buffers.tokens, tokens, n * sizeof *tokens);
    }
    sync_to(g->plain, tokens, n);
    check_kv(g, n);
    float have[TINY_MODEL_VOCAB];
    float want[TINY_MODEL_VOCAB];
    if (n == TINY_MODEL_TOKENS)
        return;
    tokens[n] = random_below(TINY_MODEL_VOCAB);
    sync_to(s, tokens, n + 1);
    sync_to(g->plain, tokens, n + 1);
    CHECK_OK(qsf_session_logits(s, have, TINY_MODEL_VOCAB));
    CHECK_OK(qsf_session_logits(g->plain, want, TINY_MODEL_VOCAB));
    CHECK_BYTES(have, want, sizeof want);
}

static void check_setup(const setup *s)
{
    static const uint32_t held[] = {31, 1, 33, 250, 256, 340};
    rig g;
    if (!rig_make(&g, s))
        return;
    for (size_t i = 0; i < (s->is_streamed ? 2 : sizeof held / sizeof *held); i++) {
        const uint32_t n_drafts = i == 2 ? MOST_DRAFTS : 1 + random_below(40);
        for (uint32_t wants_nodes = 0; wants_nodes < 2; wants_nodes++) {
            choose_tree(&g, held[i], n_drafts);
            if (!CHECK_OK(run_tree(&g)))
                continue;
            if (wants_nodes == 1)
                check_nodes(&g);
            else
                check_walk(&g);
        }
    }
    CHECK_EQ(g.tree->buffers.sequence.kv.cold.read_bytes > 0, s->resident_tokens != 0);
    rig_free(&g);
}

/* A session whose tail somebody else has copied takes no branch's tokens over into it. */
static void check_shared_tail(void)
{
    rig g;
    if (!rig_make(&g, &(setup){QSF_KV_8BIT, QSF_KV_4BIT, 1, 0, false, false, 0}))
        return;
    choose_tree(&g, 10, 2);
    g.tokens[10] = 1;
    g.tokens[11] = 2;
    g.tree->buffers.draft_parents[1] = 0;
    CHECK_OK(run_tree(&g));
    CHECK(qsf_drafting_has(g.tree, 1) && qsf_drafting_has(g.tree, 2));
    CHECK_OK(qsf_session_copy(g.plain, g.tree, 10));
    CHECK(qsf_drafting_has(g.tree, 1) && !qsf_drafting_has(g.tree, 2));
    CHECK_OK(qsf_session_rewind(g.plain, 0));
    CHECK(qsf_drafting_has(g.tree, 2));
    CHECK_OK(qsf_drafting_take(g.tree, 2));
    rig_free(&g);
}

/* Reads that fail in a pass of a tree, and a cancelled one, leave the session as before it. */
static void check_failures(void)
{
    rig g;
    if (!rig_make(&g, &(setup){QSF_KV_8BIT, QSF_KV_4BIT, 2, 0, false, true, 0}))
        return;
    choose_tree(&g, 5, 8);
    int64_t n = 0;
    for (; n < 1000; n++) {
        sync_to(g.tree, g.tokens, 4);
        g.m->reader.file.fault_kind = n % 2 == 0 ? QSF_FAULT_FAIL : QSF_FAULT_CORRUPT;
        g.m->reader.file.reads_until_fault = n;
        const qsf_status status = run_tree(&g);
        g.m->reader.file.reads_until_fault = -1;
        if (status == QSF_OK)
            break;
        CHECK_EQ(g.tree->n_tokens, 4);
        CHECK_EQ(g.tree->n_ahead, 0);
        sync_to(g.plain, g.tokens, 4);
        check_kv(&g, 4);
    }
    CHECK(n > 0 && n < 1000);
    size_t n_done = 0; /* the fault may have met what is read ahead */
    (void)qsf_session_sync(g.plain, g.tokens, 3, &n_done);
    check_walk(&g);
    sync_to(g.tree, g.tokens, 4);
    qsf_session_cancel(g.tree);
    CHECK_STATUS(run_tree(&g), QSF_ERR_CANCELLED);
    CHECK_EQ(g.tree->n_tokens, 4);
    CHECK_OK(run_tree(&g));
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
    snprintf(path, sizeof path, "/tmp/check_verify_%ld.qsf", (long)getpid());
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++)
        check_setup(&setups[i]);
    check_shared_tail();
    check_failures();
    unlink(path);
    return check_report("check_verify");
}
