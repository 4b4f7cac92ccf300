/* fuzz_model.c - hostile models through open, sync, step and sample.
 *
 * An input is four bytes of options, then a file whose checksums are repaired. It is opened
 * twice: with all units in memory, and with the least memory that the plan says will do, on
 * other threads and chunks. Where both succeed they agree on every bit, and a logit that is
 * not finite is an error of the sampler, never a token.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"
#include <math.h>

#include "engine/model.h"
#include "repair.h"

#define N_OPTION_BYTES 4
#define MAX_MODEL_BYTES (UINT64_C(8) << 20) /* a few KB of ZSTD may stand for gigabytes */
#define MAX_ENGINE_BYTES (UINT64_C(48) << 20)
#define N_TOKENS 3

static void sample(qsf_session *s, const float *logits, uint32_t n_vocab, float temperature)
{
    bool all_finite = true;
    for (uint32_t i = 0; i < n_vocab; i++)
        all_finite = all_finite && isfinite(logits[i]);
    qsf_sampling how;
    qsf_sampling_default(&how);
    how.temperature = temperature;
    how.repetition_penalty = 1.1F;
    const uint32_t recent[2] = {0, n_vocab - 1};
    uint64_t random_state = 7;
    uint32_t token = QSF_TOKEN_NONE;
    const qsf_status status = qsf_session_sample(s, &how, recent, 2, &random_state, &token);
    require(status == (all_finite ? QSF_OK : QSF_ERR_NUMERIC), "sample");
    require(!all_finite || token < n_vocab, "a token of the vocabulary");
}

/* Logits [n_vocab] after some tokens, or NULL. */
static float *run(qsf_model *m, uint32_t *n_vocab)
{
    qsf_model_facts facts;
    qsf_model_info(m, &facts);
    *n_vocab = facts.n_vocab;
    qsf_session *s;
    require(qsf_session_create(m, &s) == QSF_OK, "a session that is in the plan");
    uint32_t tokens[N_TOKENS];
    for (uint32_t i = 0; i < N_TOKENS; i++)
        tokens[i] = i * 7919U % facts.n_vocab;
    const uint32_t n = facts.plan.ctx_tokens < N_TOKENS ? facts.plan.ctx_tokens : N_TOKENS;
    qsf_status status = QSF_OK;
    for (size_t n_done = 0; status == QSF_OK && n_done < n;)
        status = qsf_session_sync(s, tokens, n, &n_done);
    if (status == QSF_OK && facts.plan.ctx_tokens > n)
        status = qsf_session_step(s, facts.n_vocab - 1);
    require(status == QSF_OK || status == QSF_ERR_FORMAT || status == QSF_ERR_DAMAGED,
            "evaluation broke a rule");
    float *logits = NULL;
    if (status == QSF_OK) {
        logits = malloc(facts.n_vocab * sizeof *logits);
        require(logits != NULL, "memory");
        require(qsf_session_logits(s, logits, facts.n_vocab) == QSF_OK, "logits");
        sample(s, logits, facts.n_vocab, 0.0F);
        sample(s, logits, facts.n_vocab, 0.8F);
    }
    qsf_session_destroy(s);
    return logits;
}

/* In the process of the plan, so that its least budget is enough. */
static float *open_and_run(const char *path, const qsf_options *opt, const qsf_plan *plan,
                           uint32_t *n_vocab)
{
    const qsf_faults known = {-1, -1, plan->process_bytes};
    qsf_model *m;
    const qsf_status status = qsf_model_create(path, opt, &known, &m);
    require(status == QSF_OK || is_about_the_file(status), "open within the plan");
    require((m != NULL) == (status == QSF_OK), "a model and an error");
    float *const logits = m != NULL ? run(m, n_vocab) : NULL;
    qsf_model_close(m);
    return logits;
}

static bool agree(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

static void try_model(const char *path, const uint8_t *choices)
{
    qsf_options opt;
    qsf_options_default(&opt);
    opt.exact = choices[0] & 1U;
    opt.n_threads = 1;
    opt.ctx_tokens = 1 + choices[1] % 40U;
    /* By name, so that no budget makes it another. */
    static const uint32_t kv_types[] = {QSF_KV_2BIT, QSF_KV_4BIT, QSF_KV_8BIT, QSF_KV_F16};
    opt.kv_k_type = opt.exact != 0 ? QSF_KV_F32 : kv_types[choices[1] >> 6];
    opt.kv_v_type = opt.exact != 0 ? QSF_KV_F32 : kv_types[choices[2] >> 6];
    opt.budget_bytes = 1;
    qsf_plan plan;
    const qsf_status status = qsf_model_plan(path, &opt, &plan);
    require(status == QSF_ERR_NOMEM || status == QSF_ERR_ARG || is_about_the_file(status), "plan");
    if (status != QSF_ERR_NOMEM || plan.min_budget_bytes == 0 ||
        plan.model_bytes > MAX_MODEL_BYTES || plan.engine_bytes > MAX_ENGINE_BYTES)
        return;
    uint32_t n_vocab = 0;
    opt.budget_bytes = plan.min_budget_bytes + MAX_MODEL_BYTES + MAX_ENGINE_BYTES;
    float *const resident = open_and_run(path, &opt, &plan, &n_vocab);

    opt.n_threads = 1 + (choices[0] >> 1 & 1U);
    opt.chunk_tokens = choices[2] % 5U;
    opt.budget_bytes = 1;
    require(qsf_model_plan(path, &opt, &plan) == QSF_ERR_NOMEM, "plan again");
    opt.budget_bytes = plan.min_budget_bytes + choices[3] * UINT64_C(256);
    float *const streamed = open_and_run(path, &opt, &plan, &n_vocab);
    for (uint32_t i = 0; resident != NULL && streamed != NULL && i < n_vocab; i++)
        require(agree(resident[i], streamed[i]), "two ways, two answers");
    free(resident);
    free(streamed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static unsigned char file[FUZZ_FILE_BYTES];
    if (n_bytes < N_OPTION_BYTES || n_bytes - N_OPTION_BYTES > sizeof file)
        return -1;
    const size_t n_file_bytes = n_bytes - N_OPTION_BYTES;
    memcpy(file, data + N_OPTION_BYTES, n_file_bytes);
    repair_checksums(file, n_file_bytes);
    try_model(store(file, n_file_bytes), data);
    return 0;
}
