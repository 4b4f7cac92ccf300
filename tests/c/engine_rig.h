/* engine_rig.h - whole models for tests: written, opened in memory or within the least budget, and
 * sessions that go through tokens. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_ENGINE_RIG_H
#define QSF_TESTS_ENGINE_RIG_H

#include "check.h"
#include "engine/model.h"
#include "system.h"
#include "tiny_model.h"

#define RIG_MAX_VOCAB 512

/* Without a ceiling: a sanitizer or an emulator may take more than any. */
static inline qsf_options rig_options(uint32_t n_threads, uint32_t chunk_tokens)
{
    qsf_options opt;
    qsf_options_default(&opt);
    opt.budget_bytes = 0;
    opt.n_threads = n_threads;
    opt.chunk_tokens = chunk_tokens;
    return opt;
}

/* Writes the file, with the checksums that it should have. */
static inline bool rig_write(const char *path, tiny_file *file)
{
    repair_checksums(file->bytes, file->n_bytes);
    return CHECK(tiny_write(path, file->bytes, file->n_bytes));
}

static inline bool rig_build(const char *path, tiny_file *file, const tiny_model *model)
{
    tiny_model_build(file, model);
    return rig_write(path, file);
}

/* The bytes of a section, which is there. */
static inline unsigned char *rig_section(tiny_file *file, const char *tag)
{
    return file->bytes + qsf_load_u64(repair_find(file->bytes, file->n_bytes, tag) + 8);
}

/* The entry of UNIT that a layer has: behind the embedding. */
static inline unsigned char *rig_layer(tiny_file *file, uint32_t layer)
{
    return repair_unit(file->bytes, file->n_bytes, layer + 1);
}

/* NULL after a failed check. */
static inline qsf_model *rig_open(const char *path, const qsf_options *opt)
{
    qsf_model *m = NULL;
    CHECK_OK(qsf_model_open(path, opt, &m));
    return m;
}

/* Sets the budget of `opt` to the least for a file. Returns the memory that the process is taken to
 * have from then on, so that the budget stays the least. */
static inline qsf_faults rig_least_budget(const char *path, qsf_options *opt)
{
    qsf_plan plan;
    opt->budget_bytes = 1;
    CHECK_STATUS(qsf_model_plan(path, opt, &plan), QSF_ERR_NOMEM);
    opt->budget_bytes = plan.min_budget_bytes;
    return (qsf_faults){-1, -1, plan.process_bytes};
}

/* Opens with the least budget that has room for the drafts, the chunk and the draft model that
 * `opt` asks for, so that layers are streamed. */
static inline qsf_model *rig_open_streamed(const char *path, qsf_options opt)
{
    qsf_model *m = NULL;
    const char *const draft_path = opt.draft_path;
    opt.draft_path = NULL;
    const qsf_faults known = rig_least_budget(path, &opt);
    opt.draft_path = draft_path;
    while (CHECK_OK(qsf_model_create(path, &opt, &known, &m)) &&
           (m->plan.draft_rows < opt.draft_rows || m->plan.chunk_tokens < opt.chunk_tokens ||
            (draft_path != NULL && m->drafter == NULL))) {
        qsf_model_close(m);
        opt.budget_bytes += 1 << 18;
    }
    CHECK(m == NULL || m->plan.streamed_bytes > 0);
    return m;
}

/* The N-th allocation or read of opening fails, for every N that there is. */
static inline void rig_fail_open(const char *path, const qsf_options *opt, bool is_read)
{
    int64_t n = 0;
    for (; n < 1000; n++) {
        const qsf_faults faults = {is_read ? -1 : n, is_read ? n : -1, 0};
        qsf_model *m;
        const qsf_status status = qsf_model_create(path, opt, &faults, &m);
        CHECK((m != NULL) == (status == QSF_OK));
        qsf_model_close(m);
        if (status == QSF_OK)
            break;
        CHECK_EQ(status, is_read ? QSF_ERR_IO : QSF_ERR_NOMEM);
    }
    CHECK(n > 5 && n < 1000);
}

static inline void rig_sync(qsf_session *s, const uint32_t *tokens, size_t n_tokens)
{
    size_t n_done = 0;
    while (n_done < n_tokens)
        if (!CHECK_OK(qsf_session_sync(s, tokens, n_tokens, &n_done)))
            return;
}

static inline void rig_check_logits(const qsf_session *s, const float *want)
{
    float have[RIG_MAX_VOCAB];
    CHECK_OK(qsf_session_logits(s, have, RIG_MAX_VOCAB));
    CHECK_BYTES(have, want, s->model->config.n_vocab * sizeof *want);
}

static inline void rig_check_same(const qsf_session *a, const qsf_session *b)
{
    float want[RIG_MAX_VOCAB];
    CHECK_EQ(qsf_session_position(a), qsf_session_position(b));
    CHECK_OK(qsf_session_logits(a, want, RIG_MAX_VOCAB));
    rig_check_logits(b, want);
}

#endif
