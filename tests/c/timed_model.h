/* timed_model.h - a small model of a given kind, in memory or all of it streamed, for tests of
 * where the time goes. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_TIMED_MODEL_H
#define QSF_TESTS_TIMED_MODEL_H

#define TINY_CAP_BYTES (4 << 20)
#define TINY_MODEL_DIM 128
#define TINY_MODEL_FFN 512

#include "check.h"
#include "engine/model.h"
#include "engine/model_open.h"
#include "system.h"
#include "tiny_model.h"

typedef struct timed_kind {
    const char *name;
    tiny_model model;
    bool is_streamed;
} timed_kind;

static const timed_kind timed_kinds[] = {
    {"resident", {.n_layers = 2, .dtype = QSF_DTYPE_4BIT}, false},
    {"streamed", {.n_layers = 2, .dtype = QSF_DTYPE_4BIT}, true},
    {"tied", {.n_layers = 2, .dtype = QSF_DTYPE_8BIT, .is_tied = true}, false},
    {"without gate, streamed", {.n_layers = 2, .dtype = QSF_DTYPE_F16, .is_gpt2 = true}, true},
    {"compressed",
     {.n_layers = 2, .dtype = QSF_DTYPE_F16, .compression = QSF_COMPRESSION_ZSTD},
     true},
};
#define N_TIMED_KINDS (sizeof timed_kinds / sizeof timed_kinds[0])

static char timed_path[64];
static tiny_file timed_file;

/* NULL after a failed check. Units leave memory as under pressure, whatever that takes: so small a
 * model would never be streamed by a plan. */
static inline qsf_model *timed_open(const timed_kind *kind, uint32_t n_threads)
{
    qsf_options opt;
    qsf_model *m = NULL;
    qsf_options_default(&opt);
    opt.budget_bytes = 0;
    opt.n_threads = n_threads;
    opt.max_sessions = 2;
    opt.chunk_tokens = 4;
    check_path(timed_path, sizeof timed_path, "timed_model");
    tiny_model_build(&timed_file, &kind->model);
    if (!CHECK(tiny_write(timed_path, timed_file.bytes, timed_file.n_bytes)))
        return NULL;
    const bool is_open = CHECK_OK(qsf_model_open(timed_path, &opt, &m));
    remove(timed_path);
    if (!is_open)
        return NULL;
    m->pressure.look = NULL; /* this machine's memory is not the subject */
    m->ledger.ceiling_bytes = UINT64_MAX;
    for (uint32_t i = 0; kind->is_streamed && i < m->reader.n_units; i++)
        CHECK_OK(qsf_stream_drop(&m->stream, i, 0));
    return m;
}

/* A prompt of 9 tokens, in chunks of 4, and n_steps steps. */
static inline void timed_run(qsf_session *s, uint32_t n_steps)
{
    static const uint32_t prompt[] = {3, 1, 20, 5, 9, 2, 6, 5, 13};
    const size_t n_tokens = sizeof prompt / sizeof prompt[0];
    size_t n_done = 0;
    CHECK_OK(qsf_session_rewind(s, 0));
    while (n_done < n_tokens)
        if (!CHECK_OK(qsf_session_sync(s, prompt, n_tokens, &n_done)))
            return;
    for (uint32_t i = 0; i < n_steps; i++)
        CHECK_OK(qsf_session_step(s, (i * 7 + 1) % TINY_MODEL_VOCAB));
}

#endif
