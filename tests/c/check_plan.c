/* check_plan.c - how much of what a machine or a control group has left a plan may use; the plan of
 * small models, whose units all stay: the least memory, the ladder of plan.c, dimensions and sums
 * beyond 2^64. check_plan_streaming.c goes through all budgets.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "check.h"
#include "engine/model.h"
#include "plan/plan.h"
#include "format/records.h"
#include "stream/stream.h"
#include "platform/pool.h"
#include "system.h"
#include "tiny_model.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define PROCESS_BYTES (10 * MIB)
#define FIXED_BYTES 5000U
#define MAX_UNITS (TINY_LAYERS + 2)

typedef struct opened {
    qsf_ledger ledger;
    qsf_reader reader;
    qsf_config config;
    qsf_layer layers[TINY_LAYERS];
    qsf_ends ends;
} opened;

static const tiny_model models[] = {
    {.n_layers = 2, .dtype = QSF_DTYPE_4BIT},
    {.n_layers = 2, .dtype = QSF_DTYPE_8BIT, .is_tied = true},
    {.n_layers = 1, .dtype = QSF_DTYPE_F16, .is_gpt2 = true},
    {.n_layers = 2, .dtype = QSF_DTYPE_4BIT, .compression = QSF_COMPRESSION_LZ4},
    {.n_layers = 1,
     .dtype = QSF_DTYPE_8BIT,
     .compression = QSF_COMPRESSION_ZSTD,
     .is_gpt2 = true,
     .is_tied = true},
};

static char path[64];
static tiny_file file;

/* ---- what may be used ---- */

static void check_no_supply(void)
{
    const qsf_supply s = {.process_bytes = 40 * MIB};
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), 0);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 5 * GIB), 5 * GIB);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 200 * MIB);
}

/* Outside of groups a sixteenth stays free, at most 256 MiB; an automatic budget is half. */
static void check_machine(void)
{
    qsf_supply s = {.process_bytes = 40 * MIB, .available_bytes = 1600 * MIB};
    CHECK_EQ_U64(qsf_ceiling_margin_bytes(&s), 100 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), 1540 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 200 * MIB), 200 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 1540 * MIB + 1), 1540 * MIB);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 820 * MIB);
    s.available_bytes = 64 * GIB;
    CHECK_EQ_U64(qsf_ceiling_margin_bytes(&s), 256 * MIB);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 32 * GIB + 20 * MIB);
    s.available_bytes = 100 * MIB; /* the ceiling bounds the least budget */
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 200 * MIB);
}

/* In a group: a hundredth of the limit, at least 2 MiB, and nothing for others. */
static void check_group(void)
{
    qsf_supply s = {40 * MIB, 250 * MIB, 300 * MIB, 0};
    CHECK_EQ_U64(qsf_ceiling_margin_bytes(&s), 3 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 300 * MIB), 287 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 200 * MIB), 200 * MIB);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 200 * MIB);
    s.locked_bytes = MIB; /* page cache that cannot be reclaimed */
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 300 * MIB), 286 * MIB);
    s.locked_bytes = 0;
    s.limit_bytes = 150 * MIB;
    s.available_bytes = 50 * MIB;
    CHECK_EQ_U64(qsf_ceiling_margin_bytes(&s), 2 * MIB);
    s.available_bytes = 0; /* a full group is known to be full */
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), 40 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, GIB), 40 * MIB);
    s.process_bytes = 0; /* never 0, which would mean no ceiling */
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), 1);
}

static void check_huge_supply(void)
{
    const qsf_supply s = {UINT64_MAX - 5, UINT64_MAX - 5, 0, 0};
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), UINT64_MAX);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, UINT64_MAX - 1), UINT64_MAX - 1);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), UINT64_MAX / 2);
}

/* ---- the plan ---- */

static bool open_model(opened *o, const tiny_model *model)
{
    tiny_model_build(&file, model);
    if (!CHECK(tiny_write(path, file.bytes, file.n_bytes)))
        return false;
    qsf_ledger_init(&o->ledger, UINT64_MAX);
    if (!CHECK_OK(qsf_reader_open(&o->reader, &o->ledger, path, -1)))
        return false;
    return CHECK_OK(qsf_config_init(&o->config, &o->reader, o->layers, &o->ends));
}

static void close_model(opened *o)
{
    qsf_reader_close(&o->reader);
    CHECK_EQ_U64(o->ledger.held_bytes, 0);
}

static qsf_options options_of(uint64_t budget_bytes)
{
    return (qsf_options){.budget_bytes = budget_bytes, .n_threads = 2, .max_sessions = 1};
}

static qsf_status make(const opened *o, const qsf_options *opt, qsf_plan *plan, bool *is_resident)
{
    const qsf_plan_input in = {
        .reader = &o->reader,
        .config = &o->config,
        .options = opt,
        .measure_sessions = qsf_session_measure,
        .process_bytes = PROCESS_BYTES,
        .fixed_bytes = FIXED_BYTES,
    };
    return qsf_plan_make(&in, plan, is_resident);
}

static uint64_t needed_bytes(const qsf_plan *p)
{
    return p->process_bytes + p->reserve_bytes + p->engine_bytes;
}

/* The least memory is that of the best set of units, by trying all of them. */
static void check_least_is_least(const tiny_model *model)
{
    opened o;
    bool is_resident[MAX_UNITS];
    qsf_plan plan;
    if (!open_model(&o, model))
        return;
    qsf_options opt = options_of(1);
    opt.chunk_tokens = 1;
    CHECK_STATUS(make(&o, &opt, &plan, is_resident), QSF_ERR_NOMEM);
    const qsf_plan_input in = {.reader = &o.reader,
                               .config = &o.config,
                               .options = &opt,
                               .fixed_bytes = FIXED_BYTES,
                               .measure_sessions = qsf_session_measure};
    qsf_plan other = plan;
    qsf_candidate d = {
        .in = &in,
        .plan = &other,
        .is_resident = is_resident,
        .how = {.ctx_tokens = plan.ctx_tokens,
                .chunk_tokens = 1,
                .kv_k_bits = plan.kv_k_bits,
                .kv_v_bits = plan.kv_v_bits,
                .io_depth = 1},
    };
    uint64_t least_bytes = UINT64_MAX;
    for (uint32_t set = 0; set < 1U << o.reader.n_stream_units; set++) {
        for (uint32_t i = 0; i < o.reader.n_stream_units; i++)
            is_resident[i] = (set >> i & 1) != 0;
        qsf_candidate_add_up(&d);
        least_bytes = other.engine_bytes < least_bytes ? other.engine_bytes : least_bytes;
    }
    CHECK_EQ_U64(plan.engine_bytes, least_bytes);
    close_model(&o);
}

/* Could the context have been twice as long, by the chunk that the ladder has there? */
static bool is_enough_for_longer(const opened *o, const qsf_options *opt, const qsf_plan *plan)
{
    bool is_resident[MAX_UNITS];
    qsf_plan longer;
    qsf_options wish = *opt;
    wish.ctx_tokens = 2 * plan->ctx_tokens;
    wish.budget_bytes -= 4096; /* the table of this model: the least plan streams it */
    wish.chunk_tokens = plan->ctx_tokens < 512 ? 4 : 16;
    return make(o, &wish, &longer, is_resident) == QSF_OK;
}

/* The rungs of the ladder, seen from outside; what was asked for stays. The file says that the
 * model is long. */
static void check_order(void)
{
    opened o;
    bool is_resident[MAX_UNITS];
    qsf_plan plan;
    if (!open_model(&o, &models[0]))
        return;
    o.config.max_tokens = 100000;
    qsf_options opt = options_of(0);
    opt.max_sessions = 64; /* that take more than loading does */
    CHECK_OK(make(&o, &opt, &plan, is_resident));
    CHECK_EQ(plan.ctx_tokens, QSF_DEFAULT_CTX_TOKENS);
    CHECK_EQ(plan.chunk_tokens, 256);
    opt.budget_bytes = 1;
    CHECK_STATUS(make(&o, &opt, &plan, is_resident), QSF_ERR_NOMEM);
    CHECK_EQ(plan.ctx_tokens, 256);
    CHECK_EQ(plan.chunk_tokens, 1);
    bool saw_middle = false;
    uint32_t sizes_seen = 0; /* of chunks: powers of two */
    for (opt.budget_bytes = plan.min_budget_bytes;; opt.budget_bytes += 16384) {
        if (!CHECK_OK(make(&o, &opt, &plan, is_resident)))
            break;
        CHECK(needed_bytes(&plan) <= opt.budget_bytes);
        if (plan.ctx_tokens < 4096)
            CHECK(!is_enough_for_longer(&o, &opt, &plan));
        saw_middle = saw_middle || plan.ctx_tokens == 1024;
        CHECK(plan.streamed_bytes == 0 && plan.n_units_resident >= plan.n_units - 1);
        sizes_seen |= plan.chunk_tokens;
        if (plan.chunk_tokens == 256 && plan.ctx_tokens == 4096)
            break;
    }
    CHECK(saw_middle);
    CHECK_EQ(sizes_seen & (64 + 128 + 256), 64 + 128 + 256);
    opt.budget_bytes = 1;
    opt.chunk_tokens = 1000; /* asked for: it shrinks with the context only */
    CHECK_STATUS(make(&o, &opt, &plan, is_resident), QSF_ERR_NOMEM);
    CHECK_EQ(plan.chunk_tokens, 256);
    opt.ctx_tokens = 3000;
    CHECK_STATUS(make(&o, &opt, &plan, is_resident), QSF_ERR_NOMEM);
    CHECK_EQ(plan.chunk_tokens, 1000);
    CHECK_EQ(plan.ctx_tokens, 3000);
    opt.ctx_tokens = 100001;
    CHECK_STATUS(make(&o, &opt, &plan, is_resident), QSF_ERR_ARG);
    close_model(&o);
}

/* The largest dimensions that a file may have, and more sessions of them than 2^64 bytes. */
static void check_huge(void)
{
    opened o;
    bool is_resident[MAX_UNITS];
    qsf_plan plan;
    if (!open_model(&o, &models[0]))
        return;
    static qsf_layer layers[QSF_MAX_LAYERS];
    const qsf_layer_kind kind = {
        .n_heads = QSF_MAX_HEADS, .n_kv_heads = QSF_MAX_HEADS, .head_dim = QSF_MAX_HEAD_DIM};
    for (uint32_t i = 0; i < QSF_MAX_LAYERS; i++)
        layers[i] = (qsf_layer){.kind = &kind, .kv_layer = i};
    o.config.layers = layers;
    o.config.n_layers = QSF_MAX_LAYERS;
    o.config.dim = QSF_MAX_DIM;
    o.config.n_heads = o.config.least_kv_heads = QSF_MAX_HEADS;
    o.config.head_dim = QSF_MAX_HEAD_DIM;
    o.config.q_dim = o.config.kv_dim = QSF_MAX_HEADS * QSF_MAX_HEAD_DIM;
    o.config.ffn_dim = QSF_MAX_FFN_DIM;
    o.config.n_vocab = QSF_MAX_VOCAB;
    o.config.max_tokens = QSF_MAX_TOKENS;
    o.config.n_rope_pairs = QSF_MAX_HEAD_DIM / 2;
    const uint64_t budgets[] = {0, 1, UINT64_C(1) << 40, UINT64_MAX - 1};
    for (size_t i = 0; i < 4; i++) {
        qsf_options opt = options_of(budgets[i]);
        opt.ctx_tokens = QSF_MAX_TOKENS;
        opt.chunk_tokens = UINT32_MAX;
        opt.exact = 1;
        opt.n_threads = QSF_POOL_MAX_THREADS;
        opt.max_sessions = 1024;
        CHECK_STATUS(make(&o, &opt, &plan, is_resident), QSF_ERR_NOMEM);
        CHECK_EQ_U64(plan.min_budget_bytes, UINT64_MAX);
        CHECK_EQ_U64(plan.kv_bytes, UINT64_MAX);
        opt.max_sessions = 1;
        const bool is_enough = SIZE_MAX > UINT32_MAX && (i == 0 || i == 3);
        CHECK_STATUS(make(&o, &opt, &plan, is_resident), is_enough ? QSF_OK : QSF_ERR_NOMEM);
        if (SIZE_MAX <= UINT32_MAX) /* more than can be addressed */
            continue;
        CHECK(plan.kv_bytes > UINT64_C(1) << 62 && plan.engine_bytes > plan.kv_bytes);
        CHECK(plan.scratch_bytes > (UINT64_C(1) << 24) * QSF_MAX_FFN_DIM);
    }
    close_model(&o);
}

/* What the caller keeps for itself counts, also where the sum would wrap. */
static void check_reserve(void)
{
    opened o;
    bool is_resident[MAX_UNITS];
    qsf_plan plan;
    qsf_plan bare;
    if (!open_model(&o, &models[2]))
        return;
    qsf_options opt = options_of(1);
    CHECK_STATUS(make(&o, &opt, &bare, is_resident), QSF_ERR_NOMEM);
    opt.reserve_bytes = 12345;
    CHECK_STATUS(make(&o, &opt, &plan, is_resident), QSF_ERR_NOMEM);
    CHECK_EQ_U64(plan.min_budget_bytes, bare.min_budget_bytes + 12345);
    const uint64_t reserves[] = {UINT64_MAX, UINT64_MAX - PROCESS_BYTES,
                                 UINT64_MAX - bare.min_budget_bytes + 1};
    for (size_t i = 0; i < 3; i++) {
        opt.reserve_bytes = reserves[i];
        for (size_t b = 0; b < 3; b++) {
            opt.budget_bytes = (const uint64_t[]){1, UINT64_C(1) << 30, UINT64_MAX - 1}[b];
            CHECK_STATUS(make(&o, &opt, &plan, is_resident), QSF_ERR_NOMEM);
            CHECK_EQ_U64(plan.min_budget_bytes, UINT64_MAX);
        }
    }
    close_model(&o);
}

int main(void)
{
    check_no_supply();
    check_machine();
    check_group();
    check_huge_supply();
    check_path(path, sizeof path, "check_plan");
    for (size_t i = 0; i < COUNT_OF(models); i++)
        check_least_is_least(&models[i]);
    check_order();
    check_huge();
    check_reserve();
    remove(path);
    return check_report("check_plan");
}
