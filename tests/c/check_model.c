/* check_model.c - a whole small model: one answer whatever the settings, and failures
 * on demand that leave everything as it was.
 *
 * Uses tests/golden/tiny-*.qsf, made by tools/make_golden_files.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "check.h"
#include "engine/model.h"
#include "engine/model_open.h"
#include "system.h"

#define GOLDEN_DIR "tests/golden" /* tests run in the project's root */

#define N_TOKENS 75 /* more than two KV pages and one prompt chunk */
#define MAX_VOCAB 512

static const char *const paths[] = {GOLDEN_DIR "/tiny-llama-4bit.qsf",
                                    GOLDEN_DIR "/tiny-gpt2-8bit.qsf"};
#define N_PATHS (sizeof paths / sizeof paths[0])

static char copy_path[64]; /* a scratch file of this process */

static uint32_t tokens[N_TOKENS];

static qsf_options options_of(uint32_t n_threads, uint64_t budget_bytes)
{
    qsf_options opt;
    qsf_options_default(&opt);
    opt.budget_bytes = budget_bytes;
    opt.n_threads = n_threads;
    opt.ctx_tokens = 96;
    opt.kv_k_type = QSF_KV_4BIT; /* by name, so that no budget makes it 2 bits */
    opt.kv_v_type = QSF_KV_4BIT;
    return opt;
}

static void choose_tokens(uint32_t n_vocab)
{
    uint64_t state = 3;
    for (int i = 0; i < N_TOKENS; i++)
        tokens[i] = (uint32_t)(qsf_random_uniform(&state) * n_vocab);
    tokens[0] = 0; /* in the first band of the embedding, which check_damage damages */
}

/* Logits after all tokens, given to the session in pieces of `piece`; 0: step by step. */
static bool logits_of(qsf_model *m, size_t piece, float *logits)
{
    qsf_session *s;
    if (!CHECK_OK(qsf_session_create(m, &s)))
        return false;
    bool ok = true;
    if (piece == 0) {
        for (size_t i = 0; ok && i < N_TOKENS; i++)
            ok = CHECK_OK(qsf_session_step(s, tokens[i]));
    } else {
        for (size_t end = piece; ok; end += piece) {
            size_t n_done = 0;
            const size_t n = end < N_TOKENS ? end : N_TOKENS;
            while (ok && n_done < n)
                ok = CHECK_OK(qsf_session_sync(s, tokens, n, &n_done));
            if (n == N_TOKENS)
                break;
        }
    }
    ok = ok && CHECK_OK(qsf_session_logits(s, logits, MAX_VOCAB));
    qsf_session_destroy(s);
    return ok;
}

static qsf_model *open_or_fail(const char *path, const qsf_options *opt)
{
    qsf_model *m = NULL;
    CHECK_OK(qsf_model_open(path, opt, &m));
    return m;
}

static bool reference_logits(const char *path, float *logits)
{
    const qsf_options opt = options_of(1, 0);
    qsf_model *const m = open_or_fail(path, &opt);
    if (m == NULL)
        return false;
    choose_tokens(m->config.n_vocab);
    const bool ok = CHECK(m->config.n_vocab <= MAX_VOCAB) && logits_of(m, N_TOKENS, logits);
    qsf_model_close(m);
    return ok;
}

static void check_same(const float *want, const float *got, uint32_t n_vocab)
{
    CHECK(memcmp(want, got, n_vocab * sizeof *want) == 0);
}

/* Threads, chunk sizes and how the tokens were split do not change a bit. */
static void check_splits(const char *path, const float *want)
{
    static const size_t pieces[] = {0, 1, 7, 32, 33, N_TOKENS};
    static const uint32_t chunks[] = {1, 5, 64};
    float got[MAX_VOCAB];
    for (uint32_t n_threads = 1; n_threads <= 3; n_threads++) {
        for (size_t c = 0; c < 3; c++) {
            qsf_options opt = options_of(n_threads, 0);
            opt.chunk_tokens = chunks[c];
            qsf_model *const m = open_or_fail(path, &opt);
            for (size_t i = 0; m != NULL && i < sizeof pieces / sizeof pieces[0]; i++)
                if (logits_of(m, pieces[i], got))
                    check_same(want, got, m->config.n_vocab);
            qsf_model_close(m);
        }
    }
}

/* Opens as if this process had used so much before, whatever it uses now. */
#define PROCESS_BYTES (UINT64_C(10) << 20)

static qsf_model *open_in_budget(const char *path, const qsf_options *opt)
{
    const qsf_faults known = {-1, -1, PROCESS_BYTES};
    qsf_model *m = NULL;
    CHECK_OK(qsf_model_create(path, opt, &known, &m));
    return m;
}

/* The least budget for open_in_budget, as the plan names it when it refuses. */
static uint64_t least_budget_bytes(const char *path)
{
    const qsf_options opt = options_of(2, 1);
    qsf_plan plan;
    qsf_model *none = NULL;
    CHECK_STATUS(qsf_model_open(path, &opt, &none), QSF_ERR_NOMEM);
    CHECK(none == NULL);
    CHECK_STATUS(qsf_model_plan(path, &opt, &plan), QSF_ERR_NOMEM);
    CHECK(plan.min_budget_bytes > opt.budget_bytes);
    return plan.min_budget_bytes - plan.process_bytes + PROCESS_BYTES;
}

/* Every budget from the least on works, holds, and gives the same logits. */
static void check_budgets(const char *path, const float *want)
{
    float got[MAX_VOCAB];
    uint32_t n_streamed = 0;
    for (uint32_t i = 0; i < 12; i++) {
        const qsf_options opt = options_of(2, least_budget_bytes(path) + i * 131072);
        qsf_model *const m = open_in_budget(path, &opt);
        if (m == NULL)
            return;
        CHECK(m->plan.engine_bytes + m->plan.process_bytes + m->plan.reserve_bytes <=
              opt.budget_bytes);
        n_streamed += m->plan.n_units_resident < m->plan.n_units;
        if (logits_of(m, N_TOKENS, got))
            check_same(want, got, m->config.n_vocab);
        CHECK(m->ledger.peak_bytes + m->plan.stacks_bytes <= m->plan.engine_bytes);
        qsf_model_close(m);
    }
    printf("%s: %u of 12 budgets streamed\n", path, n_streamed);
    CHECK(n_streamed > 0 && n_streamed < 12);
}

/* A model whose units pass through the window, as many as the least budget makes. */
static qsf_model *open_streamed(const char *path)
{
    const qsf_options opt = options_of(2, least_budget_bytes(path));
    qsf_model *const m = open_in_budget(path, &opt);
    CHECK(m != NULL && m->plan.n_units_resident < m->plan.n_units);
    return m;
}

static void check_nth_allocation(const char *path)
{
    const qsf_options opt = options_of(2, 0);
    qsf_faults faults = {.grants_until_fault = 0, .reads_until_fault = -1};
    for (; faults.grants_until_fault < 1000; faults.grants_until_fault++) {
        qsf_model *m;
        const qsf_status status = qsf_model_create(path, &opt, &faults, &m);
        if (status == QSF_OK) {
            qsf_model_close(m);
            break;
        }
        CHECK_EQ(status, QSF_ERR_NOMEM);
        CHECK(m == NULL);
    }
    CHECK(faults.grants_until_fault > 5 && faults.grants_until_fault < 1000);
}

static void check_nth_allocation_of_session(const char *path)
{
    const qsf_options opt = options_of(1, 0);
    qsf_model *const m = open_or_fail(path, &opt);
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
    float logits[MAX_VOCAB];
    CHECK(logits_of(m, N_TOKENS, logits));
    qsf_model_close(m);
}

static void check_nth_read_of_open(const char *path)
{
    const qsf_options opt = options_of(2, 0);
    qsf_faults faults = {.grants_until_fault = -1, .reads_until_fault = 0};
    for (; faults.reads_until_fault < 1000; faults.reads_until_fault++) {
        qsf_model *m;
        const qsf_status status = qsf_model_create(path, &opt, &faults, &m);
        if (status == QSF_OK) {
            qsf_model_close(m);
            break;
        }
        CHECK_EQ(status, QSF_ERR_IO);
        CHECK(m == NULL);
    }
    CHECK(faults.reads_until_fault > 5 && faults.reads_until_fault < 1000);
}

/* A read that fails in the middle of a pass: a status, the session as before the call,
 * and the right answer once the disk is well again. */
static void check_nth_read_of_step(const char *path, const float *want)
{
    qsf_model *const m = open_streamed(path);
    qsf_session *s = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    size_t n_done = 0;
    while (n_done < N_TOKENS - 1)
        if (!CHECK_OK(qsf_session_sync(s, tokens, N_TOKENS - 1, &n_done)))
            break;
    /* Reading runs ahead: a step may go well, and the next one meet what went wrong in it. */
    uint32_t n_failed = 0;
    float got[MAX_VOCAB];
    for (int64_t n = 0; n < 60; n++) {
        m->reader.file.reads_until_fault = n % 20;
        const qsf_status status = qsf_session_step(s, tokens[N_TOKENS - 1]);
        if (status == QSF_OK) {
            CHECK_OK(qsf_session_logits(s, got, MAX_VOCAB));
            check_same(want, got, m->config.n_vocab);
            CHECK_OK(qsf_session_rewind(s, N_TOKENS - 1));
            continue;
        }
        n_failed++;
        CHECK_EQ(status, QSF_ERR_IO);
        CHECK_EQ(qsf_session_position(s), N_TOKENS - 1);
        CHECK_STATUS(qsf_session_logits(s, got, MAX_VOCAB), QSF_ERR_ARG);
    }
    m->reader.file.reads_until_fault = -1;
    CHECK(n_failed > 5);
    if (qsf_session_step(s, tokens[N_TOKENS - 1]) != QSF_OK) /* the last fault, met late */
        CHECK_OK(qsf_session_step(s, tokens[N_TOKENS - 1]));
    CHECK_OK(qsf_session_logits(s, got, MAX_VOCAB));
    check_same(want, got, m->config.n_vocab);
    qsf_model_close(m);
    qsf_session_destroy(s);
}

static void check_steps_allocate_nothing(const char *path)
{
    qsf_model *const m = open_streamed(path);
    qsf_session *s = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    qsf_stats before;
    qsf_stats after;
    qsf_session_stats(s, &before);
    for (int i = 0; i < N_TOKENS; i++)
        CHECK_OK(qsf_session_step(s, tokens[i]));
    qsf_session_stats(s, &after);
    CHECK_EQ(after.n_allocations, before.n_allocations);
    CHECK_EQ(after.allocated_bytes, before.allocated_bytes);
    CHECK_EQ(after.step_tokens, N_TOKENS);
    CHECK(after.read_bytes > before.read_bytes);
    qsf_session_destroy(s);
    qsf_model_close(m);
}

static void check_cancel_and_rewind(const char *path, const float *want)
{
    const qsf_options opt = options_of(2, 0);
    qsf_model *const m = open_or_fail(path, &opt);
    qsf_session *s = NULL;
    float got[MAX_VOCAB];
    size_t n_done = 0;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    qsf_session_cancel(s);
    CHECK_STATUS(qsf_session_sync(s, tokens, N_TOKENS, &n_done), QSF_ERR_CANCELLED);
    CHECK_EQ(qsf_session_position(s), 0);
    do
        CHECK_OK(qsf_session_sync(s, tokens, N_TOKENS, &n_done));
    while (n_done > 0 && n_done < N_TOKENS);
    CHECK_OK(qsf_session_logits(s, got, MAX_VOCAB));
    check_same(want, got, m->config.n_vocab);

    /* Off on another path and back again. */
    CHECK_OK(qsf_session_step(s, tokens[0]));
    CHECK_OK(qsf_session_rewind(s, 20));
    CHECK_EQ(qsf_session_position(s), 20);
    CHECK_EQ(qsf_session_common(s, tokens, N_TOKENS), 20);
    CHECK_EQ(qsf_session_common(s, tokens, 19), 19);
    CHECK_EQ(qsf_session_common(s, tokens + 1, N_TOKENS - 1), tokens[0] == tokens[1]);
    uint32_t held[N_TOKENS] = {0};
    qsf_session_tokens(s, held, N_TOKENS);
    CHECK(memcmp(held, tokens, 20 * sizeof *held) == 0 && held[20] == 0);
    CHECK_STATUS(qsf_session_logits(s, got, MAX_VOCAB), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_rewind(s, 21), QSF_ERR_ARG);
    CHECK_OK(qsf_session_step(s, (tokens[20] + 1) % m->config.n_vocab));
    while (n_done = 0, qsf_session_position(s) < N_TOKENS)
        if (!CHECK_OK(qsf_session_sync(s, tokens, N_TOKENS, &n_done)))
            break;
    CHECK_OK(qsf_session_logits(s, got, MAX_VOCAB));
    check_same(want, got, m->config.n_vocab);
    qsf_session_destroy(s);
    qsf_model_close(m);
}

/* Scoring from a later row on gives the same rows, whatever the session holds before it: the row
 * may lie in the first chunk of 16, begin one, or lie in a later one. */
static void check_later_rows(qsf_session *s, const float *want)
{
    static const size_t first_rows[] = {0, 1, 15, 16, 17, 33, N_TOKENS - 1};
    const size_t n_vocab = s->model->config.n_vocab;
    float *const rows = malloc(N_TOKENS * n_vocab * sizeof *rows);
    if (!CHECK(rows != NULL))
        return;
    for (size_t f = 0; f < 2 * sizeof first_rows / sizeof first_rows[0]; f++) {
        const size_t first_row = first_rows[f / 2];
        const size_t n_rows = N_TOKENS - first_row;
        if (f % 2 == 0) /* nothing is held, else all is */
            CHECK_OK(qsf_session_rewind(s, 0));
        size_t n_done = 0;
        while (n_done < N_TOKENS)
            if (!CHECK_OK(qsf_session_score(s, tokens, N_TOKENS, first_row, rows, n_rows * n_vocab,
                                            &n_done)))
                break;
        for (size_t i = 0; i < n_rows; i++)
            check_same(want + (first_row + i) * n_vocab, rows + i * n_vocab, (uint32_t)n_vocab);
        float last[MAX_VOCAB];
        CHECK_OK(qsf_session_logits(s, last, MAX_VOCAB));
        check_same(rows + (n_rows - 1) * n_vocab, last, (uint32_t)n_vocab);
    }
    free(rows);
}

/* Scoring gives, row by row, what evaluating one token at a time gives. */
static void check_score(const char *path)
{
    qsf_options opt = options_of(2, 0);
    opt.max_sessions = 2;
    opt.chunk_tokens = 16;
    qsf_model *const m = open_or_fail(path, &opt);
    if (m == NULL)
        return;
    const size_t n_vocab = m->config.n_vocab;
    float *const rows = malloc(N_TOKENS * n_vocab * sizeof *rows);
    qsf_session *scored = NULL;
    qsf_session *stepped = NULL;
    if (!CHECK(rows != NULL) || !CHECK_OK(qsf_session_create(m, &scored)) ||
        !CHECK_OK(qsf_session_create(m, &stepped)))
        return;
    size_t n_done = 0;
    CHECK_STATUS(
        qsf_session_score(scored, tokens, N_TOKENS, 0, rows, N_TOKENS * n_vocab - 1, &n_done),
        QSF_ERR_ARG);
    CHECK_STATUS(
        qsf_session_score(scored, tokens, N_TOKENS, N_TOKENS, rows, N_TOKENS * n_vocab, &n_done),
        QSF_ERR_ARG);
    while (n_done < N_TOKENS)
        if (!CHECK_OK(
                qsf_session_score(scored, tokens, N_TOKENS, 0, rows, N_TOKENS * n_vocab, &n_done)))
            break;
    check_later_rows(scored, rows);
    for (size_t i = 0; i < N_TOKENS; i++) {
        float got[MAX_VOCAB];
        CHECK_OK(qsf_session_step(stepped, tokens[i]));
        CHECK_OK(qsf_session_logits(stepped, got, MAX_VOCAB));
        check_same(rows + i * n_vocab, got, (uint32_t)n_vocab);
    }
    qsf_model_close(m); /* before its sessions */
    qsf_session_destroy(stepped);
    qsf_session_destroy(scored);
    free(rows);
}

static void check_arguments(const char *path)
{
    qsf_options opt = options_of(1, 0);
    qsf_model *m = NULL;
    qsf_session *s = NULL;
    qsf_session *second = NULL;
    size_t n_done = 0;
    qsf_model_facts facts = {.n_layers = 77};
    qsf_model_info(NULL, &facts);
    CHECK_EQ(facts.n_layers, 77);
    qsf_stats stats = {.step_tokens = 77};
    qsf_session_stats(NULL, &stats);
    CHECK_EQ(stats.step_tokens, 77);
    CHECK_STATUS(qsf_model_open(NULL, &opt, &m), QSF_ERR_ARG);
    CHECK_STATUS(qsf_model_open("no such file.qsf", &opt, &m), QSF_ERR_IO);
    opt.ctx_tokens = 1 << 20;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
    opt.ctx_tokens = 40;
    opt.n_threads = 100000;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
    opt.n_threads = 1;
    opt.kv_k_type = 3;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
    opt.kv_k_type = QSF_KV_8BIT;
    opt.exact = 1;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
    opt.exact = 0;
    opt.kv_rotation = 3;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
    opt.kv_rotation = QSF_KV_ROTATION_OFF;
    opt.max_sessions = 0;
    CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
    opt.max_sessions = 1;
    if (!CHECK_OK(qsf_model_open(path, &opt, &m)) || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    CHECK_STATUS(qsf_session_create(m, &second), QSF_ERR_NOMEM);
    CHECK_STATUS(qsf_session_sync(s, tokens, 0, &n_done), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_sync(s, tokens, 41, &n_done), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_step(s, m->config.n_vocab), QSF_ERR_ARG);
    for (int i = 0; i < 40; i++)
        CHECK_OK(qsf_session_step(s, tokens[i]));
    CHECK_STATUS(qsf_session_step(s, 0), QSF_ERR_ARG);
    CHECK_EQ(qsf_session_position(s), 40);
    qsf_session_destroy(s);
    qsf_model_close(m);
}

/* Copies the file with one byte changed; offset ULONG_MAX: none. */
static void copy_file(const char *path, unsigned long changed_off)
{
    FILE *const from = fopen(path, "rb");
    FILE *const to = fopen(copy_path, "wb");
    if (!CHECK(from != NULL && to != NULL))
        return;
    int c;
    for (unsigned long off = 0; (c = fgetc(from)) != EOF; off++)
        fputc(off == changed_off ? c ^ 0x10 : c, to);
    fclose(from);
    CHECK_EQ(fclose(to), 0);
}

/* A damaged layer is found when it is loaded, and when it is streamed. */
static void check_damage(const char *path)
{
    qsf_options opt = options_of(1, 0);
    qsf_model *m = open_or_fail(path, &opt);
    if (m == NULL)
        return;
    uint32_t n_streamed = 0;
    for (uint32_t unit = 0; unit < m->reader.n_stream_units; unit++) {
        qsf_model *const whole = open_streamed(path);
        if (whole == NULL)
            break;
        const bool is_streamed = !whole->is_resident[unit];
        qsf_model_close(whole);
        n_streamed += is_streamed;
        copy_file(path, (unsigned long)(m->reader.units[unit].off + 100));
        qsf_model *damaged = NULL;
        CHECK_STATUS(qsf_model_open(copy_path, &opt, &damaged), QSF_ERR_DAMAGED);
        const qsf_options least = options_of(2, least_budget_bytes(copy_path));
        const qsf_faults none = {-1, -1, PROCESS_BYTES};
        qsf_status status = qsf_model_create(copy_path, &least, &none, &damaged);
        if (!CHECK_EQ(status, is_streamed ? QSF_OK : QSF_ERR_DAMAGED) || !is_streamed)
            continue;
        float logits[MAX_VOCAB];
        qsf_session *s;
        size_t n_done = 0;
        CHECK_OK(qsf_session_create(damaged, &s));
        while (status == QSF_OK && n_done < 3)
            status = qsf_session_sync(s, tokens, 3, &n_done);
        CHECK_EQ(status, QSF_ERR_DAMAGED);
        CHECK_STATUS(qsf_session_logits(s, logits, MAX_VOCAB), QSF_ERR_ARG);
        qsf_session_destroy(s);
        qsf_model_close(damaged);
    }
    CHECK(n_streamed >= m->config.n_layers);
    remove(copy_path);
    qsf_model_close(m);
}

int main(void)
{
    check_path(copy_path, sizeof copy_path, "check_model");
    for (size_t i = 0; i < N_PATHS; i++) {
        float want[MAX_VOCAB];
        if (!reference_logits(paths[i], want))
            continue;
        check_splits(paths[i], want);
        check_budgets(paths[i], want);
        check_nth_allocation(paths[i]);
        check_nth_allocation_of_session(paths[i]);
        check_nth_read_of_open(paths[i]);
        check_nth_read_of_step(paths[i], want);
        check_steps_allocate_nothing(paths[i]);
        check_cancel_and_rewind(paths[i], want);
        check_score(paths[i]);
        check_arguments(paths[i]);
        check_damage(paths[i]);
    }
    return check_report("check_model");
}
