/* check_plan_streaming.c - plans of models that do not fit: every budget from the least on gives a
 * plan that adds up and fits, and spends what it has well; which units stay. The units exist only
 * as numbers.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <string.h>

#include "check.h"
#include "types/dtype.h"
#include "format/records.h"
#include "engine/model.h"
#include "io/io.h"
#include "plan/plan.h"
#include "stream/stream.h"
#include "platform/pool.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define PROCESS_BYTES (40 * MIB)

/* ---- the index of a model that exists nowhere: units of any size ---- */

#define SYNTHETIC_MAX_UNITS (4096 + 2)

typedef struct synthetic_units {
    qsf_reader reader;
    qsf_unit units[SYNTHETIC_MAX_UNITS];
    qsf_tensor tensors[SYNTHETIC_MAX_UNITS];
    uint32_t pass_units[SYNTHETIC_MAX_UNITS];
    qsf_layer_kind kind; /* of all layers: without experts */
} synthetic_units;

/* All of unit_bytes, uncompressed, with one matrix of rows of 4096 each. */
static void synthetic_make(synthetic_units *s, uint32_t n_layers, uint64_t unit_bytes, bool is_tied)
{
    assert(n_layers + 2 <= SYNTHETIC_MAX_UNITS);
    const uint32_t n_units = n_layers + 2;
    for (uint32_t i = 0; i < n_units; i++) {
        s->units[i] = (qsf_unit){.role = i == 0              ? QSF_UNIT_EMBEDDING
                                         : i == n_layers + 1 ? QSF_UNIT_FINAL
                                                             : QSF_UNIT_LAYER,
                                 .template_idx = i,
                                 .stored_bytes = unit_bytes,
                                 .raw_bytes = unit_bytes,
                                 .first_tensor = i,
                                 .n_tensors = 1};
        s->pass_units[i] = i;
        s->tensors[i] = (qsf_tensor){.unit_idx = i,
                                     .type = i == 0 ? QSF_TENSOR_EMBEDDING : QSF_TENSOR_Q,
                                     .n_rows = 4096,
                                     .n_cols = 4096,
                                     .dtype = QSF_DTYPE_4BIT,
                                     .layout = QSF_LAYOUT_TILES,
                                     .data_off = 64};
    }
    s->reader = (qsf_reader){.n_units = n_units,
                             .n_stream_units = n_units,
                             .n_pass_units = n_units,
                             .n_pass_layers = n_layers,
                             .final_unit = n_layers + 1,
                             .pass_units = s->pass_units,
                             .layer_units = s->pass_units + 1,
                             .n_tensors = n_units,
                             .units = s->units,
                             .tensors = s->tensors,
                             .kinds = &s->kind,
                             .n_kinds = 1,
                             .arch = {.tied_head = is_tied},
                             .header = {.n_layers = n_layers}};
}

static synthetic_units units;
static qsf_config config;
static const qsf_layer_kind kind = {.n_heads = 32, .n_kv_heads = 32, .head_dim = 128};
static qsf_layer layers[QSF_MAX_LAYERS];
static bool is_resident[SYNTHETIC_MAX_UNITS];
static uint64_t stride;

/* The shape of a model of 7B weights; layers of layer_bytes. */
static void make_model(uint32_t n_layers, uint64_t layer_bytes, bool is_tied)
{
    synthetic_make(&units, n_layers, layer_bytes, is_tied);
    units.units[0].raw_bytes = units.units[0].stored_bytes = 72 * MIB;
    const uint64_t final_bytes = is_tied ? 16 * KIB : 72 * MIB;
    units.units[n_layers + 1].raw_bytes = units.units[n_layers + 1].stored_bytes = final_bytes;
    for (uint32_t i = 0; i < n_layers; i++)
        layers[i] = (qsf_layer){.kind = &kind, .kv_layer = i};
    config = (qsf_config){.n_layers = n_layers,
                          .layers = layers,
                          .dim = 4096,
                          .n_heads = 32,
                          .least_kv_heads = 32,
                          .head_dim = 128,
                          .ffn_dim = 11008,
                          .n_vocab = 32000,
                          .max_tokens = 32768,
                          .q_dim = 4096,
                          .kv_dim = 4096,
                          .n_rope_pairs = 64,
                          .has_gate = true,
                          .is_rms_norm = true,
                          .has_tied_head = is_tied};
}

static void make_7b(bool is_tied)
{
    make_model(32, 112 * MIB, is_tied);
}

static qsf_options options_of(uint64_t budget_bytes)
{
    return (qsf_options){.budget_bytes = budget_bytes, .n_threads = 2, .max_sessions = 1};
}

static qsf_status make_beside(const qsf_options *opt, uint64_t available_bytes,
                              uint64_t limit_bytes, qsf_plan *plan)
{
    const qsf_plan_input in = {
        .reader = &units.reader,
        .config = &config,
        .options = opt,
        .measure_sessions = qsf_session_measure,
        .process_bytes = PROCESS_BYTES,
        .available_bytes = available_bytes,
        .limit_bytes = limit_bytes,
        .fixed_bytes = 100 * KIB,
    };
    return qsf_plan_make(&in, plan, is_resident);
}

static qsf_status make(const qsf_options *opt, qsf_plan *plan)
{
    return make_beside(opt, 0, 0, plan);
}

static uint64_t needed_bytes(const qsf_plan *p)
{
    return p->process_bytes + p->reserve_bytes + p->engine_bytes;
}

static uint64_t least_budget(const qsf_options *opt)
{
    qsf_options none = *opt;
    qsf_plan plan;
    none.budget_bytes = 1;
    CHECK_STATUS(make(&none, &plan), QSF_ERR_NOMEM);
    CHECK_EQ_U64(plan.min_budget_bytes, needed_bytes(&plan));
    none.budget_bytes = plan.min_budget_bytes - 1;
    CHECK_STATUS(make(&none, &plan), QSF_ERR_NOMEM);
    none.budget_bytes = plan.min_budget_bytes;
    CHECK_OK(make(&none, &plan));
    CHECK_EQ_U64(needed_bytes(&plan), plan.min_budget_bytes);
    return plan.min_budget_bytes;
}

static void check_sums(const qsf_plan *p, const qsf_options *opt)
{
    const qsf_reader *const r = &units.reader;
    uint64_t weights_bytes = 0;
    uint64_t streamed_bytes = 0;
    uint32_t n_resident = 0;
    for (uint32_t i = 0; i < r->n_stream_units; i++) {
        weights_bytes += is_resident[i] ? r->units[i].raw_bytes : 0;
        n_resident += is_resident[i];
        if (!is_resident[i] && (i != 0 || r->arch.tied_head))
            streamed_bytes += r->units[i].stored_bytes;
    }
    CHECK_EQ_U64(p->weights_bytes, weights_bytes);
    CHECK_EQ_U64(p->streamed_bytes, streamed_bytes);
    CHECK_EQ(p->n_units_resident, n_resident);
    CHECK_EQ_U64(p->engine_bytes, p->weights_bytes + p->stream_bytes + p->embedding_bytes +
                                      p->kv_bytes + p->scratch_bytes + p->tables_bytes +
                                      p->stacks_bytes);
    CHECK(needed_bytes(p) <= p->ceiling_bytes);
    qsf_stream_sizes sizes;
    qsf_stream_least(r, is_resident, &sizes);
    CHECK_EQ(p->io_depth != 0, streamed_bytes != 0);
    CHECK(p->ring_bytes >= sizes.ring_bytes && p->ring_bytes % QSF_IO_ALIGN == 0);
    if (streamed_bytes != 0)
        CHECK_EQ_U64(p->stream_bytes, qsf_stream_buffer_bytes(r, &sizes, (size_t)p->ring_bytes));
    const qsf_io_setup setup = {.method = opt->io_method, .depth = p->io_depth};
    const uint32_t n_readers = p->io_depth == 0 ? 0 : qsf_io_queue_count(&setup);
    CHECK_EQ_U64(p->stacks_bytes, (opt->n_threads - 1) * (uint64_t)QSF_POOL_STACK_BYTES +
                                      n_readers * (uint64_t)QSF_RING_STACK_BYTES);
    CHECK_EQ(is_resident[0] && p->embedding_rows != 0, false);
    CHECK_EQ(p->embedding_bytes == 0, is_resident[0]);
    CHECK(p->embedding_rows * (config.dim * 4 + 24) <= p->ceiling_bytes / 64);
}

/* No unit that a pass reads would fit into what is left, the ring's widening included. */
static void check_no_waste(const qsf_plan *p)
{
    uint64_t left_bytes = p->ceiling_bytes - needed_bytes(p);
    left_bytes += p->ring_bytes > 16 * MIB ? p->ring_bytes - 16 * MIB : 0;
    for (uint32_t i = 1; p->streamed_bytes != 0 && i < units.reader.n_stream_units; i++)
        CHECK(is_resident[i] || units.units[i].raw_bytes > left_bytes);
}

static bool is_same_choice(const qsf_plan *a, const qsf_plan *b)
{
    return a->ctx_tokens == b->ctx_tokens && a->chunk_tokens == b->chunk_tokens &&
           a->kv_bytes == b->kv_bytes && a->io_depth == b->io_depth &&
           a->embedding_rows == b->embedding_rows;
}

/* From the least on; with layers of one size more budget never keeps less. */
static void check_budgets(qsf_options opt, uint64_t step_bytes, bool is_uniform)
{
    qsf_plan before = {0};
    uint32_t n_steps = 0;
    for (opt.budget_bytes = least_budget(&opt); n_steps < 20000;
         opt.budget_bytes += step_bytes * stride) {
        qsf_plan plan;
        if (!CHECK_OK(make(&opt, &plan)))
            return;
        CHECK_EQ_U64(plan.ceiling_bytes, opt.budget_bytes);
        check_sums(&plan, &opt);
        check_no_waste(&plan);
        CHECK(plan.ctx_tokens >= before.ctx_tokens);
        if (is_uniform && is_same_choice(&plan, &before))
            CHECK(plan.weights_bytes >= before.weights_bytes);
        before = plan;
        n_steps++;
        if (plan.n_units_resident == plan.n_units)
            return;
    }
    CHECK(n_steps < 20000);
}

/* The order in which a plan gives things up, as its result shows it. A rung that freed too much
 * gives some back, so the checks only say what a rung implies about later rungs. */
static void check_ladder(void)
{
    make_7b(false);
    qsf_options opt = options_of(0);
    qsf_plan plan;
    bool saw_ring = false;
    for (opt.budget_bytes = least_budget(&opt); opt.budget_bytes < GIB;
         opt.budget_bytes += 512 * KIB) {
        if (!CHECK_OK(make(&opt, &plan)))
            return;
        CHECK(plan.ring_bytes >= 8 * MIB || plan.ctx_tokens <= 512);
        CHECK(plan.ring_bytes >= 4 * MIB || plan.ctx_tokens <= 256);
        CHECK(plan.chunk_tokens >= 16 || plan.ctx_tokens <= 512);
        CHECK(plan.chunk_tokens >= 4 || plan.ctx_tokens <= 256);
        CHECK(plan.embedding_rows != 0 || plan.ctx_tokens <= 256 || is_resident[0]);
        CHECK(plan.io_depth == QSF_IO_USUAL_DEPTH || plan.ring_bytes < 2 * MIB);
        CHECK(plan.kv_k_bits == 8 && plan.kv_v_bits == 8);
        saw_ring = saw_ring || (plan.ring_bytes > 2 * MIB && plan.ring_bytes < 16 * MIB);
    }
    CHECK(saw_ring);
    /* A longer context has to wait until its cache is an eighth of the memory, or streaming ends.
     */
    CHECK_EQ(plan.ctx_tokens, 1024);
    uint32_t ctx_tokens = 1024;
    for (; opt.budget_bytes < 8 * GIB; opt.budget_bytes += GIB / 4) {
        if (!CHECK_OK(make(&opt, &plan)))
            return;
        CHECK(plan.ctx_tokens >= ctx_tokens);
        ctx_tokens = plan.ctx_tokens;
        if (plan.ring_bytes != 0)
            CHECK(ctx_tokens == 1024 || plan.kv_bytes <= opt.budget_bytes / 8);
    }
    CHECK_EQ(ctx_tokens, 8192);
    /* What the least plan leaves of two megabytes goes to the ring before the chunk. */
    opt.budget_bytes = least_budget(&opt) + 2 * MIB;
    CHECK_OK(make(&opt, &plan));
    CHECK(plan.ring_bytes > MIB);
    opt.io_depth = 2; /* what was asked for stays */
    opt.budget_bytes = least_budget(&opt);
    CHECK_OK(make(&opt, &plan));
    CHECK_EQ(plan.io_depth, 2);
    opt.io_depth = 0;
    opt.budget_bytes = least_budget(&opt);
    CHECK_OK(make(&opt, &plan));
    CHECK_EQ(plan.io_depth, 1);
    CHECK_EQ(plan.embedding_rows, 0);
    CHECK(plan.ring_bytes < MIB);
}

/* A chunk takes an eighth of the room at most, or what no layer fits into, a long run of kept
 * layers widens the ring, and the head is the first to stay. */
static void check_spending(void)
{
    make_7b(false);
    qsf_options opt = options_of(0);
    qsf_plan plan;
    opt.ctx_tokens = 512;
    bool saw_wide = false;
    uint32_t sizes_seen = 0; /* of chunks: powers of two */
    for (opt.budget_bytes = 200 * MIB; opt.budget_bytes < 3 * GIB; opt.budget_bytes += 4 * MIB) {
        if (!CHECK_OK(make(&opt, &plan)))
            return;
        qsf_options asked = opt;
        qsf_plan small;
        asked.chunk_tokens = 4;
        const bool has_head = is_resident[33];
        const uint64_t run_bytes = qsf_residence_longest_run_bytes(&units.reader, is_resident);
        CHECK(has_head || plan.n_units_resident == is_resident[0]);
        CHECK(plan.ring_bytes <= 16 * MIB || plan.ring_bytes <= run_bytes / 8);
        CHECK_OK(make(&asked, &small));
        const uint64_t room_bytes =
            small.weights_bytes + (small.ceiling_bytes - needed_bytes(&small)) + small.ring_bytes;
        CHECK(small.weights_bytes <= plan.weights_bytes + room_bytes / 8 + 112 * MIB);
        if (plan.weights_bytes == 0) /* nothing else to do with it */
            CHECK(plan.chunk_tokens == 256 ||
                  plan.ceiling_bytes - needed_bytes(&plan) < plan.scratch_bytes);
        if (room_bytes / 8 > 60 * MIB) /* a chunk of 256 takes 56 */
            CHECK(plan.chunk_tokens == 256 && plan.ring_bytes >= 16 * MIB);
        saw_wide = saw_wide || plan.ring_bytes > 16 * MIB;
        sizes_seen |= plan.chunk_tokens;
    }
    CHECK(saw_wide);
    CHECK_EQ(sizes_seen & (64 + 128 + 256), 64 + 128 + 256);
    CHECK(plan.n_units_resident > 20 && plan.n_units_resident < plan.n_units);
}

/* A budget that the machine or a group cannot give is cut, and none at all becomes one: by how
 * much, check_plan.c has. */
static void check_supply(void)
{
    make_7b(false);
    qsf_options opt = options_of(4 * GIB);
    qsf_plan plan;
    CHECK_OK(make_beside(&opt, 260 * MIB, 300 * MIB, &plan));
    CHECK_EQ_U64(plan.budget_bytes, 4 * GIB);
    /* 1 % is left to the group, and 2 MiB for the page cache that 8 reads lock. */
    CHECK_EQ_U64(plan.ceiling_bytes, 295 * MIB);
    CHECK(needed_bytes(&plan) <= 295 * MIB && plan.streamed_bytes > 3 * GIB);
    opt.budget_bytes = 0;
    CHECK_OK(make_beside(&opt, GIB, 0, &plan));
    CHECK_EQ_U64(plan.budget_bytes, 0);
    CHECK_EQ_U64(plan.ceiling_bytes, PROCESS_BYTES + GIB - 64 * MIB);
    CHECK(plan.streamed_bytes != 0);
    CHECK_OK(make_beside(&opt, 64 * GIB, 0, &plan));
    CHECK_EQ(plan.n_units_resident, plan.n_units);

    opt.budget_bytes = QSF_BUDGET_AUTO;
    CHECK_OK(make_beside(&opt, 2 * GIB, 0, &plan));
    CHECK_EQ_U64(plan.budget_bytes, (PROCESS_BYTES + 2 * GIB) / 2);
    CHECK_EQ_U64(plan.ceiling_bytes, plan.budget_bytes);
    CHECK_STATUS(make_beside(&opt, 20 * MIB, 60 * MIB, &plan), QSF_ERR_NOMEM);
    CHECK_CONTAINS(qsf_error_detail(), "the control group has only 20.0 MB left");
    opt.budget_bytes = 50 * MIB; /* the budget binds, so it is named */
    CHECK_STATUS(make_beside(&opt, 2 * GIB, 0, &plan), QSF_ERR_NOMEM);
    CHECK_CONTAINS(qsf_error_detail(), "the memory budget of 50.0 MB is too small");
}

/* The refusal names the option that helps most, and what it says is true. */
static void check_relief(void)
{
    make_7b(false);
    qsf_options opt = options_of(100 * MIB);
    qsf_plan plan;
    opt.ctx_tokens = 4096;
    opt.chunk_tokens = 64;
    CHECK_STATUS(make(&opt, &plan), QSF_ERR_NOMEM);
    const char *const at = strstr(qsf_error_detail(), "; with a context of 512 tokens, ");
    if (!CHECK(at != NULL))
        return;
    const uint64_t n_mb = strtoull(strstr(at, ", ") + 2, NULL, 10);
    opt.ctx_tokens = 512;
    CHECK_EQ_U64((least_budget(&opt) + MIB - 1) / MIB, n_mb);
    opt.chunk_tokens = 512; /* now that is what takes most */
    opt.kv_k_type = opt.kv_v_type = QSF_KV_4BIT;
    CHECK_STATUS(make(&opt, &plan), QSF_ERR_NOMEM);
    CHECK_CONTAINS(qsf_error_detail(), "; with prompt chunks of 1 token, ");
}

/* Layers of any size, some compressed. */
static void check_any_sizes(void)
{
    for (uint32_t n = 0; n < 8; n++) {
        make_model(2 + check_draw(30), MIB, n % 3 == 0);
        uint64_t total_bytes = 0;
        for (uint32_t i = 1; i < units.reader.n_stream_units - 1; i++) {
            qsf_unit *const u = &units.units[i];
            u->raw_bytes = u->stored_bytes = 64 * (1 + check_draw(n % 2 == 0 ? 4000 : 400000));
            if (n >= 4 && check_draw(3) == 0) {
                u->compression = check_draw(2) == 0 ? QSF_COMPRESSION_LZ4 : QSF_COMPRESSION_ZSTD;
                u->stored_bytes = u->raw_bytes / 4 * 3;
            }
            units.tensors[i].n_cols = 64 * (1 + check_draw(200));
            total_bytes += u->raw_bytes;
        }
        qsf_options opt = options_of(0);
        opt.n_threads = 1 + check_draw(3);
        opt.io_method = check_draw(5);
        opt.ctx_tokens = check_draw(2) == 0 ? 512 : 0;
        opt.chunk_tokens = check_draw(2) == 0 ? 16 : 0;
        check_budgets(opt, total_bytes / 300 + 100001, false);
    }
}

/* As many layers as a file may have, and sizes whose sum is beyond 2^64. No plan looks at a unit
 * more often than rungs and rounds; a quadratic one would take minutes here. */
static void check_hostile(void)
{
    qsf_plan plan;
    make_model(4096, 2 * MIB, false);
    for (uint32_t i = 1; i <= 4096; i++)
        units.tensors[i].n_cols = 64 * (1 + i);
    qsf_options opt = options_of(0);
    opt.ctx_tokens = 256;
    for (uint64_t n_bytes = 2 * GIB; n_bytes < 12 * GIB; n_bytes += 3 * GIB / 2) {
        opt.budget_bytes = n_bytes;
        const qsf_status status = make(&opt, &plan);
        if (CHECK(status == QSF_OK || plan.min_budget_bytes > n_bytes) && status == QSF_OK)
            check_sums(&plan, &opt);
    }
    const uint64_t sizes[] = {UINT64_MAX / 34, UINT64_MAX / 2, UINT64_MAX - 63};
    for (size_t i = 0; i < 3; i++) {
        make_model(32, sizes[i], true);
        opt.budget_bytes = 0;
        const qsf_status status = make(&opt, &plan);
        CHECK(status == QSF_OK && plan.model_bytes >= plan.weights_bytes);
        opt.budget_bytes = GIB;
        CHECK_OK(make(&opt, &plan));
        CHECK(needed_bytes(&plan) <= GIB);
        CHECK_EQ_U64(plan.streamed_bytes, i == 0 ? 32 * sizes[0] : UINT64_MAX);
    }
}

/* ---- which units stay: runs between streamed units are as equal as can be, no room is wasted that
 * a unit would fit into, and sizes may be anything ---- */

#define MANY_LAYERS 4096

static bool before[SYNTHETIC_MAX_UNITS];

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* The longest run around the circle, found by starting behind each streamed unit. */
static uint64_t longest_run(const qsf_reader *r)
{
    uint64_t longest_bytes = 0;
    for (uint32_t start = 0; start < r->n_stream_units; start++) {
        if (is_resident[start] || (start == 0 && !r->arch.tied_head))
            continue;
        uint64_t run_bytes = 0;
        for (uint32_t k = 1; k < r->n_stream_units; k++) {
            const uint32_t i = (start + k) % r->n_stream_units;
            if (i == 0 && !r->arch.tied_head)
                continue;
            if (!is_resident[i])
                break;
            run_bytes += r->units[i].raw_bytes;
        }
        longest_bytes = larger(run_bytes, longest_bytes);
    }
    return longest_bytes;
}

static uint32_t count_layers(const qsf_reader *r)
{
    uint32_t n = 0;
    for (uint32_t i = 1; i < r->n_stream_units - 1; i++)
        n += is_resident[i];
    return n;
}

/* Layers of one size: room for k keeps k and the head, and every run is shorter than an equal
 * share of the circle, unless the head alone is not. */
static void check_spread(uint32_t n_layers, uint64_t layer_bytes, uint64_t head_bytes, bool is_tied)
{
    synthetic_make(&units, n_layers, layer_bytes, is_tied);
    qsf_reader *const r = &units.reader;
    uint64_t end_bytes = units.units[n_layers + 1].raw_bytes = head_bytes;
    if (is_tied) {
        units.units[n_layers + 1].raw_bytes = 64;
        units.units[0].raw_bytes = head_bytes;
        end_bytes += 64;
    }
    const uint64_t total_bytes = n_layers * layer_bytes + end_bytes;
    for (uint32_t k = 0; k <= n_layers; k++) {
        memset(is_resident, 0, sizeof is_resident);
        const uint64_t exact_bytes = end_bytes + k * layer_bytes;
        const uint64_t room_bytes = exact_bytes + (k % 3) * (layer_bytes - 1) / 2;
        CHECK_EQ_U64(qsf_residence_add(r, room_bytes, is_resident), exact_bytes);
        CHECK_EQ(count_layers(r), k);
        CHECK(is_resident[n_layers + 1]);
        CHECK_EQ(is_resident[0], is_tied);
        const uint64_t run_bytes = qsf_residence_longest_run_bytes(r, is_resident);
        CHECK_EQ_U64(run_bytes, longest_run(r));
        if (k < n_layers)
            CHECK(run_bytes <=
                  larger(end_bytes, total_bytes / (n_layers - k)) + n_layers + layer_bytes / 1000);
        else
            CHECK_EQ_U64(run_bytes, 0);
    }
    /* Too little for the head: layers all the same. */
    memset(is_resident, 0, sizeof is_resident);
    if (head_bytes > layer_bytes) {
        CHECK(qsf_residence_add(r, layer_bytes + 64, is_resident) >= layer_bytes);
        CHECK_EQ(count_layers(r), 1);
        CHECK(is_tied || !is_resident[n_layers + 1]);
    }
}

/* Any sizes, some units kept already: no more than the room is taken, and nothing fits any more. */
static void check_any_units(uint32_t n_layers, uint64_t scale)
{
    synthetic_make(&units, n_layers, 1, check_draw(2) == 0);
    const qsf_reader *const r = &units.reader;
    uint64_t total_bytes = 0;
    for (uint32_t i = 0; i < r->n_stream_units; i++) {
        units.units[i].raw_bytes = 64 + check_draw(1000) * scale;
        total_bytes += units.units[i].raw_bytes;
        before[i] = check_draw(8) == 0;
    }
    memcpy(is_resident, before, sizeof before);
    const uint64_t room_bytes = total_bytes / 4096 * (check_draw(4096));
    const uint64_t kept_bytes = qsf_residence_add(r, room_bytes, is_resident);
    CHECK(kept_bytes <= room_bytes);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < r->n_stream_units; i++) {
        CHECK(is_resident[i] || !before[i]);
        sum += is_resident[i] && !before[i] ? r->units[i].raw_bytes : 0;
        if (i == 0 && !r->arch.tied_head)
            CHECK_EQ(is_resident[0], before[0]);
        else
            CHECK(is_resident[i] || r->units[i].raw_bytes > room_bytes - kept_bytes);
    }
    CHECK_EQ_U64(sum, kept_bytes);
    CHECK_EQ_U64(qsf_residence_longest_run_bytes(r, is_resident), longest_run(r));
}

/* Sums beyond 2^64. */
static void check_hostile_units(void)
{
    const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX / 2, UINT64_C(1) << 63, UINT64_MAX - 63};
    const uint64_t rooms[] = {0, 1, UINT64_C(1) << 40, UINT64_MAX / 2, UINT64_MAX};
    for (size_t s = 0; s < 4; s++)
        for (size_t room = 0; room < 5; room++) {
            synthetic_make(&units, 7, sizes[s], true);
            memset(is_resident, 0, sizeof is_resident);
            CHECK(qsf_residence_add(&units.reader, rooms[room], is_resident) <= rooms[room]);
            (void)qsf_residence_longest_run_bytes(&units.reader, is_resident);
        }
}

/* Layers that a pass runs several times stay before others, and before the head. */
static void check_looped(void)
{
    synthetic_make(&units, 8, 1000, false);
    qsf_reader *const r = &units.reader;
    r->arch.loop_begin = 3;
    r->arch.loop_end = 6;
    r->arch.loop_passes = 3;
    for (uint16_t i = 0; i < 8; i++)
        units.units[1 + i].layer = i;
    memset(is_resident, 0, sizeof is_resident);
    CHECK_EQ_U64(qsf_residence_add(r, 3000, is_resident), 3000);
    for (uint32_t i = 0; i < 8; i++)
        CHECK_EQ(is_resident[1 + i], i >= 3 && i < 6);
    CHECK_EQ(qsf_reader_visited(r, 5), 5);
    CHECK_EQ(qsf_reader_visited(r, 11), 5);
    CHECK_EQ(qsf_reader_visited(r, 12), 6);
    r->arch.loop_end = 0;
}

static void check_residence(void)
{
    check_looped();
    const uint32_t counts[] = {1, 2, 3, 5, 22, 31, 32, 33, 80};
    const uint64_t heads[] = {64, 74000, 112000, 300000};
    for (size_t i = 0; i < COUNT_OF(counts); i++)
        for (size_t h = 0; h < COUNT_OF(heads); h++) {
            check_spread(counts[i], 112000, heads[h], false);
            check_spread(counts[i], 112000, heads[h], true);
            check_spread(counts[i], UINT64_C(112000) << 30, heads[h] << 30, false);
        }
    check_spread(MANY_LAYERS / 8, 112000, 300000, false);
    for (uint32_t i = 0; i < 2000; i++)
        check_any_units(1 + check_draw(40), i % 2 == 0 ? 1 : UINT64_C(1) << 40);
    check_any_units(MANY_LAYERS, UINT64_C(1) << 24);
    check_hostile_units();
}

int main(void)
{
    stride = check_stride();
    for (int is_tied = 0; is_tied < 2; is_tied++) {
        make_7b(is_tied != 0);
        check_budgets(options_of(0), 9 * MIB + 17, true);
        qsf_options opt = options_of(0);
        opt.ctx_tokens = 300;
        opt.io_method = QSF_IO_URING;
        opt.reserve_bytes = 5 * MIB;
        opt.chunk_tokens = 32;
        check_budgets(opt, 17 * MIB + 1, true);
        make_model(22, 25 * MIB, is_tied != 0);
        check_budgets(options_of(0), 3 * MIB + 1, true);
    }
    check_ladder();
    check_spending();
    check_supply();
    check_relief();
    check_any_sizes();
    check_hostile();
    check_residence();
    return check_report("check_plan_streaming");
}
