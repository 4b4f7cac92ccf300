/* check_step_heap.c - a decode step asks the C library for no memory at all, on any thread.
 *
 * The program replaces the allocator's entry points by ones that count. Only with glibc, and
 * not under a sanitizer, which has an allocator of its own; elsewhere it checks the ledger's
 * count alone.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20) /* models larger than the buffers of streaming */
#define TINY_MODEL_DIM 256
#define TINY_MODEL_FFN 2048
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine_rig.h"
#include "format/records.h"
#include "sanitized.h"
#include "unit_pass.h"

#if defined(__GLIBC__) && !IS_SANITIZED
#define COUNTS 1
#else
#define COUNTS 0
#endif

static _Atomic uint64_t n_calls;

#if COUNTS
void *__libc_malloc(size_t n_bytes);
void *__libc_calloc(size_t n, size_t n_bytes);
void *__libc_realloc(void *p, size_t n_bytes);
void *__libc_memalign(size_t align, size_t n_bytes);

void *malloc(size_t n_bytes)
{
    n_calls++;
    return __libc_malloc(n_bytes);
}

void *calloc(size_t n, size_t n_bytes)
{
    n_calls++;
    return __libc_calloc(n, n_bytes);
}

void *realloc(void *p, size_t n_bytes)
{
    n_calls++;
    return __libc_realloc(p, n_bytes);
}

void *aligned_alloc(size_t align, size_t n_bytes)
{
    n_calls++;
    return __libc_memalign(align, n_bytes);
}
#endif

static char path[64];
static tiny_file file;

/* Prompt, steps, rewind, sampling: nothing after the session's creation allocates. */
static void check_steps(qsf_model *m, const char *what)
{
    qsf_session *s;
    if (!CHECK_OK(qsf_session_create(m, &s)))
        return;
    static const uint32_t prompt[3] = {1, 2, 3};
    qsf_stats before;
    qsf_stats after;
    qsf_sampling how;
    size_t n_done = 0;
    uint64_t random_state = 1;
    uint32_t token = 0;
    qsf_sampling_default(&how);
    qsf_session_stats(s, &before);
    const uint64_t n_calls_before = n_calls;
    qsf_status status = QSF_OK;
    while (status == QSF_OK && n_done < 3)
        status = qsf_session_sync(s, prompt, 3, &n_done);
    for (int i = 0; status == QSF_OK && i < 30; i++) {
        status = qsf_session_sample(s, &how, prompt, 3, &random_state, &token);
        if (status == QSF_OK)
            status = qsf_session_step(s, token);
    }
    if (status == QSF_OK)
        status = qsf_session_rewind(s, 5);
    const uint64_t n_new_calls = n_calls - n_calls_before;
    CHECK_OK(status);
    if (!CHECK_EQ_U64(n_new_calls, 0))
        printf("%s\n", what);
    qsf_session_stats(s, &after);
    CHECK_EQ_U64(after.n_allocations, before.n_allocations);
    CHECK_EQ(after.step_tokens, 30);
    qsf_session_destroy(s);
}

/* Passes of two sessions, and choosing for both */
static void check_passes(qsf_model *m, const char *what)
{
    static const uint32_t tokens[2] = {1, 2};
    static const uint32_t mask = 0x00fff0;
    qsf_session *s[2];
    if (!CHECK_OK(qsf_session_create(m, &s[0])) || !CHECK_OK(qsf_session_create(m, &s[1])))
        return;
    float logprobs[2][3];
    uint32_t best[2][3];
    const float bias = 1.0f;
    qsf_sampling how;
    qsf_sampling_default(&how);
    how.frequency_penalty = 0.5f;
    qsf_status status = QSF_OK;
    const uint64_t n_calls_before = n_calls;
    for (int i = 0; status == QSF_OK && i < 20; i++) {
        qsf_pass_item items[2];
        qsf_choose_item choices[2];
        qsf_pass_report report;
        for (int k = 0; k < 2; k++) {
            items[k] = (qsf_pass_item){
                .session = s[k], .tokens = tokens, .n_tokens = 1, .wants = QSF_WANTS_LAST};
            choices[k] = (qsf_choose_item){
                .session = s[k],
                .how = &how,
                .recent = tokens,
                .n_recent = 2,
                .n_counted = 1,
                .mask = &mask,
                .biased = tokens,
                .biases = &bias,
                .n_biased = 1,
                .logprob_tokens = best[k],
                .logprobs = logprobs[k],
                .n_logprobs = 3,
            };
        }
        status = qsf_model_pass(m, items, 2, &report);
        if (status == QSF_OK)
            status = qsf_model_choose(m, choices, 2);
    }
    const uint64_t n_new_calls = n_calls - n_calls_before;
    CHECK_OK(status);
    if (!CHECK_EQ_U64(n_new_calls, 0))
        printf("passes, %s\n", what);
    qsf_session_destroy(s[0]);
    qsf_session_destroy(s[1]);
}

/* With everything in memory, and with as little as will do. */
static void check_model(const tiny_model *model, const char *what)
{
    if (!rig_build(path, &file, model))
        return;
    for (int is_streamed = 0; is_streamed < 2; is_streamed++) {
        qsf_options opt = rig_options(2, 0);
        opt.max_sessions = 2;
        opt.chunk_tokens = opt.draft_rows = 4;
        qsf_model *const m = is_streamed ? rig_open_streamed(path, opt) : rig_open(path, &opt);
        if (m == NULL)
            return;
        CHECK((m->plan.n_units_resident == m->plan.n_units) == (is_streamed == 0));
        check_steps(m, what);
        check_passes(m, what);
        qsf_model_close(m);
    }
}

/* Compressed units that pass through the window, which so small a model is never made to do. */
static void check_packed_stream(uint8_t compression)
{
    const tiny_model model = {.n_layers = 2, .dtype = QSF_DTYPE_4BIT, .compression = compression};
    pass_file f;
    uint32_t digest = 0;
    if (!rig_build(path, &file, &model) || !CHECK_OK(pass_open_file(&f, path, 0, 0)))
        return;
    CHECK(f.pass.stream.decode_buffer != NULL);
    const uint64_t n_calls_before = n_calls;
    const qsf_status status = pass_all(&f.pass.stream, 1, &digest);
    const uint64_t n_new_calls = n_calls - n_calls_before;
    CHECK_OK(status);
    CHECK_EQ_U64(n_new_calls, 0);
    (void)pass_close_file(&f);
}

int main(void)
{
    check_path(path, sizeof path, "check_step_heap");
#if COUNTS
    const uint64_t n_calls_before = n_calls;
    void *volatile kept = malloc(1); /* else a compiler leaves both calls out */
    free(kept);
    CHECK(n_calls > n_calls_before); /* the counting counts */
#endif
    check_model(&(tiny_model){.n_layers = 2, .dtype = QSF_DTYPE_4BIT}, "4bit");
    check_model(&(tiny_model){.n_layers = 1, .dtype = QSF_DTYPE_F16, .is_gpt2 = true}, "f16");
    check_model(&(tiny_model){.n_layers = 2,
                              .dtype = QSF_DTYPE_8BIT,
                              .is_tied = true,
                              .compression = QSF_COMPRESSION_ZSTD},
                "8bit, packed");
    check_packed_stream(QSF_COMPRESSION_LZ4);
    check_packed_stream(QSF_COMPRESSION_ZSTD);
    remove(path);
    return check_report("check_step_heap");
}
