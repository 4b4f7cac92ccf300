/* model_open.c - opens a model and its text; after a failure, qsf_model_release cleans up. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "format/records.h"
#include "io/io.h"
#include "machine/machine.h"
#include "memory/arena.h"
#include "plan/plan.h"
#include "platform/cpu.h"

/* Largest chunk: layers with windows can roll back this many tokens. */
#define DRAFTER_CHUNK_TOKENS 128
/* Least ratio of tokens per pass with a draft model to those with other guesses. */
#define LEAST_SPEEDUP 2.25

/* Tables that every plan needs, in one allocation for the life of the model. */
typedef struct tables {
    qsf_rope *ropes;          /* [n_ropes] */
    float *rope_frequencies;  /* [n_made_pairs] */
    unsigned char *positions; /* f16 or f32 [max_tokens, dim], or NULL */
    char *kv_folder;          /* a copy of the options', or NULL */
    void *pool;
} tables;

static void layout_tables(tables *t, qsf_arena *a, const qsf_model *m)
{
    const qsf_section *const positions =
        m->config.has_learned_positions ? qsf_reader_section(&m->reader, "WPOS") : NULL;
    t->ropes = qsf_arena_push(a, m->config.n_ropes, sizeof *t->ropes);
    t->rope_frequencies = qsf_arena_push(a, m->config.n_made_pairs, sizeof *t->rope_frequencies);
    t->positions = positions != NULL ? qsf_arena_push(a, (size_t)positions->n_bytes, 1) : NULL;
    const char *const folder = m->options.kv_folder;
    t->kv_folder = folder != NULL ? qsf_arena_push(a, strlen(folder) + 1, 1) : NULL;
    t->pool = m->is_drafter ? NULL : qsf_arena_push(a, qsf_pool_bytes(m->options.n_threads), 1);
}

static qsf_status acquire_memory(qsf_model *m, qsf_use use, size_t n_bytes, void *out)
{
    return qsf_ledger_take(&m->ledger, use, n_bytes, qsf_use_name(use), out);
}

static qsf_status take_tables(qsf_model *m)
{
    qsf_arena measuring;
    tables t;
    qsf_arena_init_measuring(&measuring);
    layout_tables(&t, &measuring, m);
    m->tables_memory_bytes = measuring.used_bytes;
    QSF_TRY(acquire_memory(m, QSF_USE_TABLES, m->tables_memory_bytes, &m->tables_memory));

    qsf_arena arena;
    qsf_arena_init(&arena, m->tables_memory, m->tables_memory_bytes);
    layout_tables(&t, &arena, m);
    if (t.kv_folder != NULL)
        m->options.kv_folder =
            memcpy(t.kv_folder, m->options.kv_folder, strlen(m->options.kv_folder) + 1);
    m->forward.ops.ropes = t.ropes;
    qsf_ropes_choose(&m->config, &m->reader, m->plan.ctx_tokens, t.rope_frequencies, t.ropes);
    if (m->config.has_learned_positions) {
        const qsf_section *const section = qsf_reader_section(&m->reader, "WPOS");
        QSF_TRY(qsf_reader_read_section(&m->reader, section, t.positions));
        m->forward.positions = t.positions;
        m->forward.has_f32_positions =
            section->n_bytes == (uint64_t)m->config.max_tokens * m->config.dim * 4;
    }
    return m->is_drafter
               ? QSF_OK
               : qsf_pool_init(t.pool, m->options.n_threads, m->options.pin_threads != 0, &m->pool);
}

/* Leaves out the layers of other stages. */
static qsf_status choose_stage(qsf_model *m, bool *is_left_out)
{
    qsf_reader *const r = &m->reader;
    qsf_options *const opt = &m->options;
    const uint32_t n_trunk = qsf_reader_trunk_layers(r);
    const uint32_t first = opt->first_layer;
    if (first == 0 && opt->n_layers == 0)
        return QSF_OK;
    QSF_FAIL_IF(first >= n_trunk || opt->n_layers > n_trunk - first, ARG,
                "%u layers from layer %u on: the model has %u", opt->n_layers, first, n_trunk);
    const uint32_t end = opt->n_layers != 0 ? first + opt->n_layers : n_trunk;
    QSF_FAIL_IF(opt->quality < 1.0, ARG, "quality %g is for a whole model, not for a stage of one",
                opt->quality);
    QSF_FAIL_IF(r->arch.loop_end != 0 || r->arch.block_layers != 0, ARG,
                "layers %u to %u: a model with looped layers or residual blocks cannot be cut",
                first, end - 1);
    for (uint32_t i = 0; i < n_trunk; i++)
        is_left_out[i] = i < first || i >= end;
    r->is_without_head = end < n_trunk;
    opt->draft_rows = r->is_without_head ? 0 : opt->draft_rows;
    return QSF_OK;
}

/* Leaves out the layers that the options skip and those of other stages, and the MTP head unless
 * with_mtp. */
static qsf_status choose_layers(qsf_model *m, bool with_mtp)
{
    bool is_left_out[QSF_MAX_LAYERS] = {false};
    qsf_reader_leave_out(&m->reader, is_left_out); /* an earlier choice */
    QSF_TRY(choose_stage(m, is_left_out));
    QSF_TRY(qsf_skip_layers(&m->reader, m->options.quality, is_left_out));
    for (uint32_t i = qsf_reader_trunk_layers(&m->reader); i < m->reader.header.n_layers; i++)
        is_left_out[i] = !with_mtp || m->reader.is_without_head;
    qsf_reader_leave_out(&m->reader, is_left_out);
    return QSF_OK;
}

/* Opens and checks the file, and chooses its layers. Acquires only small tables. */
static qsf_status read_directory(qsf_model *m, const char *path, const qsf_faults *faults,
                                 bool may_have_mtp)
{
    qsf_isa isa;
    QSF_TRY(qsf_isa_choose(&isa));
    qsf_kernels_init(&m->kernels, isa);
    QSF_TRY(qsf_kernels_check_rounding(&m->kernels));
    QSF_TRY(qsf_reader_open(&m->reader, &m->ledger, path,
                            faults != NULL ? faults->reads_until_fault : -1));
    QSF_TRY(choose_layers(m, may_have_mtp));
    m->layers_bytes = m->reader.n_visits * sizeof *m->layers;
    QSF_TRY(acquire_memory(m, QSF_USE_TABLES, m->layers_bytes, &m->layers));
    m->is_resident_bytes = m->reader.n_stream_units * sizeof *m->is_resident;
    return acquire_memory(m, QSF_USE_TABLES, m->is_resident_bytes, &m->is_resident);
}

/* Makes the plan, with drafter_bytes reserved for a draft model. */
static qsf_status make_plan(qsf_model *m, uint64_t drafter_bytes)
{
    qsf_arena measuring;
    tables t;
    qsf_arena_init_measuring(&measuring);
    layout_tables(&t, &measuring, m);
    qsf_plan_input input = {
        .reader = &m->reader,
        .config = &m->config,
        .options = &m->options,
        .fixed_bytes = m->ledger.held_bytes + measuring.used_bytes +
                       qsf_stream_table_bytes(&m->reader) + qsf_experts_table_bytes(&m->reader, 0) +
                       sizeof(qsf_session) * m->options.max_sessions,
        .drafter_bytes = drafter_bytes,
        .adapters_bytes = qsf_adapters_bytes(m),
        .has_pool = m->is_drafter,
        .has_table_on_disk = m->has_table_on_disk || m->options.first_layer != 0,
        .measure_sessions = qsf_session_measure,
    };
    if (!m->is_drafter) { /* a draft model is wholly in memory, or not held at all */
        input.process_bytes = m->memory.resident_bytes;
        input.available_bytes = m->memory.available_bytes;
        input.limit_bytes = m->memory.limit_bytes;
    }
    const qsf_status status = qsf_plan_make(&input, &m->plan, m->is_resident);
    qsf_skip_describe(&m->reader, m->options.quality, &m->plan);
    return status;
}

/* Gives the options' window to the layers that have none. */
static qsf_status limit_windows(const qsf_options *opt, qsf_reader *r)
{
    bool is_limited = opt->kv_window_tokens == 0;
    for (uint32_t i = 0; opt->kv_window_tokens != 0 && i < r->n_kinds; i++) {
        qsf_layer_kind *const k = &r->kinds[i];
        if (k->window_tokens != 0 || !qsf_has_attention(k) || k->is_encoder != 0)
            continue;
        k->window_tokens = opt->kv_window_tokens;
        k->pinned_tokens = opt->kv_pinned_tokens;
        is_limited = true;
    }
    return is_limited ? QSF_OK
                      : QSF_FAIL(ARG,
                                 "a window of %u tokens is for layers that see all of the context "
                                 "before a token, and no more: this model has none",
                                 opt->kv_window_tokens);
}

/* A text passes through an encoder at once, and all layers with equal heads keep their keys and
 * values in the same pages, so f32 costs little. */
static void choose_for_encoder(qsf_options *opt, const qsf_config *c)
{
    if (!c->is_encoder)
        return;
    opt->chunk_tokens = c->max_tokens; /* at most the context */
    opt->draft_rows = 0;
    if (opt->kv_k_type == QSF_KV_DEFAULT)
        opt->kv_k_type = QSF_KV_F32;
    if (opt->kv_v_type == QSF_KV_DEFAULT)
        opt->kv_v_type = QSF_KV_F32;
}

/* Makes the plan with or without the MTP head. */
static qsf_status plan_layers(qsf_model *m, bool with_mtp)
{
    QSF_TRY(choose_layers(m, with_mtp));
    QSF_TRY(qsf_config_init(&m->config, &m->reader, m->layers, &m->ends));
    m->config.low_cols = qsf_adapters_cols(m);
    QSF_FAIL_IF(m->config.is_encoder && m->options.first_layer + m->options.n_layers != 0, ARG,
                "an encoder is not cut: it reads a text at once");
    choose_for_encoder(&m->options, &m->config);
    if (m->is_drafter && m->options.ctx_tokens > m->config.max_tokens)
        m->options.ctx_tokens = m->config.max_tokens;
    return make_plan(m, 0);
}

/* Opens the file and makes the plan: with the MTP head if it may have one and there is room for
 * drafts beside it. */
static qsf_status prepare(qsf_model *m, const char *path, const qsf_faults *faults,
                          bool may_have_mtp)
{
    QSF_TRY(read_directory(m, path, faults, may_have_mtp));
    const bool has_mtp = m->reader.has_mtp;
    QSF_TRY(qsf_adapters_open(m, path));
    QSF_TRY(limit_windows(&m->options, &m->reader));
    QSF_TRY(plan_layers(m, false));
    if (!has_mtp)
        return QSF_OK;
    const uint64_t min_budget_bytes = m->plan.min_budget_bytes;
    const uint32_t ctx_tokens = m->plan.ctx_tokens;
    const bool is_held = plan_layers(m, true) == QSF_OK && m->plan.draft_rows != 0 &&
                         m->plan.ctx_tokens >= ctx_tokens;
    if (!is_held)
        QSF_TRY(plan_layers(m, false));
    m->plan.min_budget_bytes = min_budget_bytes;
    m->plan.mtp_state = is_held ? QSF_DRAFTER_HELD : QSF_DRAFTER_NO_ROOM;
    return QSF_OK;
}

/* Bytes that each pass reads; if it reads none, bytes that loading reads. */
static uint64_t io_read_bytes(const qsf_model *m)
{
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < m->reader.n_pass_units; i++) {
        const uint32_t unit_idx = m->reader.pass_units[i];
        if (m->plan.ring_bytes == 0 || !m->is_resident[unit_idx])
            n_bytes += m->reader.units[unit_idx].stored_bytes;
    }
    return qsf_add_capped(n_bytes, m->plan.expert_token_bytes);
}

/* Chooses how to read and opens the file for it. */
static qsf_status choose_io(qsf_model *m)
{
    const qsf_options *const opt = &m->options;
    const uint64_t free_bytes = m->ledger.ceiling_bytes - m->ledger.held_bytes;
    const uint64_t available_bytes = m->memory.available_bytes;
    const qsf_io_wish wish = {
        .method = opt->io_method,
        .depth = opt->io_depth,
        .max_threads = m->plan.io_depth != 0 ? m->plan.io_depth : QSF_IO_USUAL_DEPTH,
        .cache_bytes = available_bytes > free_bytes ? available_bytes - free_bytes : 0,
        .read_bytes = io_read_bytes(m),
    };
    const qsf_status status = qsf_io_choose(&m->io, &m->reader.file, &wish, &m->io_setup);
    if (status == QSF_OK && m->memory.limit_bytes != 0)
        qsf_io_stop_readahead(&m->io);
    if (m->plan.io_depth != 0)
        m->plan.io_depth = m->io_setup.depth;
    return status;
}

static qsf_status take_embedding_cache(qsf_model *m)
{
    qsf_embedding *const e = &m->forward.embedding;
    qsf_arena measuring;
    qsf_arena_init_measuring(&measuring);
    qsf_embedding_layout(e, &measuring, &m->config, m->plan.embedding_rows);
    m->embedding_memory_bytes = measuring.used_bytes;
    if (m->embedding_memory_bytes == 0)
        return QSF_OK;
    QSF_TRY(acquire_memory(m, QSF_USE_EMBEDDING, m->embedding_memory_bytes, &m->embedding_memory));
    qsf_arena arena;
    qsf_arena_init(&arena, m->embedding_memory, m->embedding_memory_bytes);
    qsf_embedding_layout(e, &arena, &m->config, m->plan.embedding_rows);
    return QSF_OK;
}

static qsf_status take_pools(qsf_model *m)
{
    const qsf_sequence_form form = qsf_plan_sequence_form(&m->config, &m->plan);
    m->kv_memory_bytes = (size_t)m->plan.kv_pool_bytes;
    QSF_TRY(acquire_memory(m, QSF_USE_KV, m->kv_memory_bytes, &m->kv_memory));
    qsf_arena arena;
    qsf_arena_init(&arena, m->kv_memory, m->kv_memory_bytes);
    qsf_sequence_pools_layout(&m->pools, &arena, &m->config, &form);
    m->pools.states.tools = (qsf_state_tools){&m->kernels, m->pool};
    return QSF_OK;
}

static qsf_status take_memory(qsf_model *m)
{
    const qsf_plan *const plan = &m->plan;
    m->ledger.ceiling_bytes = plan->engine_bytes - plan->stacks_bytes - plan->drafter_bytes;
    QSF_TRY(take_tables(m));
    QSF_TRY(choose_io(m));
    const qsf_stream_options streaming = {
        .is_resident = m->is_resident,
        .ring_bytes = (size_t)plan->ring_bytes,
        .io = &m->io,
        .setup = m->io_setup,
        .pool = m->pool,
    };
    QSF_TRY(qsf_stream_init(&m->stream, &m->reader, &m->ledger, &streaming));
    const qsf_experts_options caching = {
        .n_slots = plan->expert_slots,
        .n_transit = plan->expert_transit_slots,
        .io = &m->io,
    };
    QSF_TRY(qsf_experts_init(&m->experts, &m->reader, &m->ledger, &caching));
    QSF_TRY(take_embedding_cache(m));
    m->scratch_memory_bytes = (size_t)plan->scratch_bytes;
    QSF_TRY(acquire_memory(m, QSF_USE_SCRATCH, m->scratch_memory_bytes, &m->scratch_memory));
    qsf_arena arena;
    qsf_arena_init(&arena, m->scratch_memory, m->scratch_memory_bytes);
    QSF_TRY(take_pools(m));
    const qsf_scratch_sizes sizes = qsf_plan_scratch_sizes(plan);
    qsf_scratch_layout(&m->scratch, &arena, &m->config, &m->pools.kv, &sizes);
    qsf_shared_layout(&m->shared, &arena, &m->config, plan);
    m->forward.ops = (qsf_ops){
        .config = &m->config,
        .kernels = &m->kernels,
        .pool = m->pool,
        .stream = &m->stream,
        .experts = &m->experts,
        .scratch = &m->scratch,
        .ropes = m->forward.ops.ropes,
        .exact = m->options.exact != 0,
    };
    m->forward.ends = &m->ends;
    return qsf_adapters_load(m);
}

/* One thread per core, up to the limit of the pool. */
static uint32_t default_thread_count(void)
{
    const uint32_t n_cores = qsf_core_count();
    if (n_cores == 0)
        return 1;
    return QSF_MIN(n_cores, QSF_POOL_MAX_THREADS);
}

static qsf_status create_empty(const qsf_options *opt, const qsf_faults *faults, qsf_model **out)
{
    qsf_sysmem memory;
    qsf_sysmem_read(&memory);
    if (faults != NULL && faults->process_bytes != 0)
        memory.resident_bytes = faults->process_bytes;
    qsf_ledger ledger;
    uint64_t spoken_for = UINT64_MAX;
    uint64_t ceiling_bytes = UINT64_MAX;
    (void)qsf_add_u64(memory.resident_bytes, opt->reserve_bytes, &spoken_for);
    if (opt->budget_bytes != 0) /* until the plan gives the exact ceiling; the tables are small */
        ceiling_bytes = opt->budget_bytes > spoken_for ? opt->budget_bytes - spoken_for : 0;
    qsf_ledger_init(&ledger,
                    ceiling_bytes > (UINT64_C(8) << 20) ? ceiling_bytes : UINT64_C(8) << 20);
    ledger.grants_until_fault = faults != NULL ? faults->grants_until_fault : -1;
    qsf_model *m;
    QSF_TRY(qsf_ledger_take(&ledger, QSF_USE_HANDLE, sizeof *m, "the model's record", &m));
    m->ledger = ledger;
    m->memory = memory;
    m->reader.file.handle = -1;
    m->io.direct = -1;
    m->options = *opt;
    if (m->options.n_threads == 0)
        m->options.n_threads = default_thread_count();
    *out = m;
    QSF_TRY(qsf_mutex_init(&m->lock));
    QSF_TRY(qsf_mutex_init(&m->choosing));
    return qsf_mutex_init(&m->kv_lock);
}

/* Injected faults of tests count reads of both models. */
static void hand_faults(qsf_model *to, const qsf_model *from)
{
    to->ledger.grants_until_fault = from->ledger.grants_until_fault;
    atomic_store(&to->reader.file.reads_until_fault, from->reader.file.reads_until_fault);
}

/* True if layer k of a drafter reads keys like those of this layer. Where the model sees w
 * positions, one of them the token's own, a guess sees w + 1 before its own. */
static bool is_lender(const qsf_model *m, const qsf_layer_kind *layer, const qsf_layer_kind *k)
{
    const bool is_limited = k->window_tokens == m->options.kv_window_tokens;
    return layer->mixer == QSF_MIXER_ATTENTION && layer->kv_source == 0 &&
           layer->latent_rank == 0 && layer->n_kv_heads == k->n_kv_heads &&
           layer->head_dim == k->head_dim &&
           (layer->window_tokens + 2 == k->window_tokens ||
            (layer->window_tokens == k->window_tokens && is_limited));
}

/* Finds the layers whose keys and values the drafter's layers read: the last ones like them. */
static qsf_status lend_layers(const qsf_model *m, qsf_model *drafter, const char *path)
{
    QSF_FAIL_IF(drafter->config.target_dim != m->config.dim, ARG,
                "it guesses for a model of hidden dimension %u, and %s has %u",
                drafter->config.target_dim, path, m->config.dim);
    for (uint32_t i = 0; i < drafter->config.n_layers; i++) {
        const qsf_layer_kind *const k = drafter->layers[i].kind;
        uint32_t n = m->config.n_layers;
        while (n > 0 && !is_lender(m, m->layers[n - 1].kind, k))
            n--;
        QSF_FAIL_IF(n == 0, ARG,
                    "its layer %u reads %u KV heads of %u dimensions, window %u, and no layer of "
                    "%s has such",
                    i, k->n_kv_heads, k->head_dim, k->window_tokens, path);
        drafter->layers[i].kv_layer = n - 1;
    }
    return QSF_OK;
}

/* Plans a drafter that reads the model's keys and values: for one token, in the form of these. */
static qsf_status prepare_lent(qsf_model *m, qsf_model *drafter, const char *path)
{
    qsf_options *const opt = &drafter->options;
    opt->chunk_tokens = 1;
    opt->max_sessions = 1;
    opt->kv_k_type = m->plan.kv_k_bits;
    opt->kv_v_type = m->plan.kv_v_bits;
    opt->kv_rotation = m->plan.kv_is_rotated != 0 ? QSF_KV_ROTATION_ON : QSF_KV_ROTATION_OFF;
    m->config.keeps_hidden = true;
    QSF_TRY(make_plan(drafter, 0));
    return lend_layers(m, drafter, path);
}

/* Opens the draft model as far as its plan. */
static qsf_status prepare_drafter(qsf_model *m, const char *model_path, const char *path)
{
    const qsf_options opt = {
        .n_threads = m->options.n_threads,
        .ctx_tokens = m->plan.ctx_tokens,
        .chunk_tokens = DRAFTER_CHUNK_TOKENS,
        .max_sessions = m->options.max_sessions,
        .logits_rows = 1,
        .kv_window_tokens = m->options.kv_window_tokens,
        .kv_pinned_tokens = m->options.kv_pinned_tokens,
        .io_method = m->options.io_method,
        .io_depth = m->options.io_depth,
        .quality = 1.0,
    };
    const qsf_faults left = {
        .grants_until_fault = m->ledger.grants_until_fault,
        .reads_until_fault = m->reader.file.reads_until_fault,
    };
    QSF_TRY(create_empty(&opt, &left, &m->drafter));
    m->drafter->is_drafter = true;
    QSF_TRY(prepare(m->drafter, path, &left, false));
    hand_faults(m, m->drafter);
    if (m->drafter->config.target_dim != 0)
        QSF_TRY(prepare_lent(m, m->drafter, model_path));
    return qsf_drafter_check_tokens(&m->reader, &m->drafter->reader);
}

/* Bytes that a token reads, of experts on average. */
static double read_bytes(const qsf_plan *plan)
{
    const double n_experts = plan->n_experts;
    const double missing = n_experts > 0.0 ? 1.0 - plan->expert_slots / n_experts : 0.0;
    return (double)plan->streamed_bytes + (double)plan->expert_token_bytes * missing;
}

/* Plans again with the draft model, and compares the two plans. The draft model is not held if
 * the plan without it has a longer context, or if layers in the same memory save as much time:
 * each pass reads more with a draft model, and there are 2.25 times fewer passes
 * (docs/benchmarks.md, "Drafts"). A draft model of m bytes is held if a pass without it reads
 * 0.8 m or more. */
static qsf_drafter_state plan_both(qsf_model *m, const qsf_plan *without)
{
    const qsf_status status = make_plan(m, m->drafter->plan.engine_bytes);
    if (status != QSF_OK || m->plan.draft_rows == 0 || m->plan.ctx_tokens < without->ctx_tokens)
        return QSF_DRAFTER_NO_ROOM;
    if (m->config.keeps_hidden && m->plan.kv_resident_tokens < m->plan.ctx_tokens)
        return QSF_DRAFTER_COLD;
    return read_bytes(&m->plan) > read_bytes(without) * LEAST_SPEEDUP ? QSF_DRAFTER_NOT_WORTH
                                                                      : QSF_DRAFTER_HELD;
}

/* Holds the whole draft model if no weight is streamed then; else without its separate embedding
 * table, of which a guess reads one row; else not at all. */
static qsf_status choose_drafter(qsf_model *m)
{
    const qsf_plan without = m->plan;
    qsf_drafter_state state = plan_both(m, &without);
    if (state != QSF_DRAFTER_HELD || read_bytes(&m->plan) > 0.0) {
        m->drafter->has_table_on_disk = true;
        QSF_TRY(make_plan(m->drafter, 0));
        state = plan_both(m, &without);
    }
    const uint64_t n_bytes = m->drafter->plan.engine_bytes;
    if (state != QSF_DRAFTER_HELD) {
        qsf_model_release(m->drafter);
        m->drafter = NULL;
        m->config.keeps_hidden = false;
        QSF_TRY(make_plan(m, 0));
    }
    m->plan.min_budget_bytes = without.min_budget_bytes;
    m->plan.drafter_state = state;
    m->plan.drafter_wanted_bytes = n_bytes;
    return QSF_OK;
}

/* Returns `status`, and adds to the latest error text which file it is about. */
static qsf_status name_drafter(qsf_status status, const char *path)
{
    char detail[256];
    snprintf(detail, sizeof detail, "%s", qsf_error_detail());
    return qsf_fail(status, "the draft model %s: %s", path, detail);
}

/* Reads both models' directories and makes the plan of both. */
static qsf_status prepare_both(qsf_model *m, const char *path, const qsf_faults *faults)
{
    const char *const draft_path = m->options.draft_path;
    m->options.draft_path = NULL; /* belongs to the caller */
    QSF_TRY(prepare(m, path, faults, draft_path == NULL && m->options.draft_rows != 0));
    QSF_FAIL_IF(m->config.target_dim != 0, ARG,
                "%s only guesses the tokens of a model of hidden dimension %u: give it to that one "
                "as --draft",
                path, m->config.target_dim);
    if (draft_path == NULL || m->reader.is_without_head)
        return QSF_OK;
    const qsf_status status = prepare_drafter(m, path, draft_path);
    return status == QSF_OK ? choose_drafter(m) : name_drafter(status, draft_path);
}

/* Takes the planned memory of both models. */
static qsf_status take_both(qsf_model *m)
{
    QSF_TRY(take_memory(m));
    if (m->drafter == NULL)
        return QSF_OK;
    m->drafter->pool = m->pool;
    hand_faults(m->drafter, m);
    return take_memory(m->drafter);
}

qsf_status qsf_model_create(const char *path, const qsf_options *opt, const qsf_faults *faults,
                            qsf_model **out)
{
    qsf_model *m = NULL;
    *out = NULL;
    qsf_status status = create_empty(opt, faults, &m);
    if (status == QSF_OK)
        status = prepare_both(m, path, faults);
    if (status == QSF_OK)
        status = take_both(m);
    if (status != QSF_OK) {
        if (m != NULL)
            qsf_model_release(m);
        return status;
    }
    qsf_pressure_begin(m);
    *out = m;
    return QSF_OK;
}

qsf_status qsf_model_open(const char *path, const qsf_options *opt, qsf_model **out)
{
    QSF_REQUIRE(out);
    *out = NULL;
    QSF_REQUIRE(path, opt);
    QSF_TRY(qsf_options_check(opt));
    return qsf_model_create(path, opt, NULL, out);
}

qsf_status qsf_model_plan(const char *path, const qsf_options *opt, qsf_plan *out)
{
    QSF_REQUIRE(path, opt, out);
    QSF_TRY(qsf_options_check(opt));
    qsf_model *m = NULL;
    memset(out, 0, sizeof *out);
    qsf_status status = create_empty(opt, NULL, &m);
    if (status == QSF_OK)
        status = prepare_both(m, path, NULL);
    if (m != NULL) {
        *out = m->plan;
        qsf_model_release(m);
    }
    return status;
}

/* ---- the text of a model ---- */

#define READER_BYTES (UINT64_C(8) << 20) /* the file's own tables, until the section is read */

/* Reads and checks the section TEXT. After a failure *out may be set; close it in any case. */
static qsf_status read_text(qsf_reader *r, qsf_text **out)
{
    const qsf_section *const section = qsf_reader_section(r, "TEXT");
    QSF_FAIL_IF(section == NULL, UNSUPPORTED,
                "the file has no section TEXT: convert the model again, or use the Python package, "
                "which reads its tokenizer.json");
    QSF_TRY(qsf_text_reserve(section->n_bytes, out));
    QSF_TRY(qsf_reader_read_section(r, section, (*out)->section));
    return qsf_text_check(*out);
}

qsf_status qsf_text_open(const char *path, qsf_text **out)
{
    QSF_FAIL_IF(path == NULL || out == NULL, ARG, "qsf_text_open: a pointer is NULL");
    *out = NULL;
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, READER_BYTES);
    qsf_reader r = {.file.handle = -1};
    qsf_status status = qsf_reader_open(&r, &ledger, path, -1);
    if (status == QSF_OK)
        status = read_text(&r, out);
    qsf_reader_close(&r);
    if (status != QSF_OK) {
        qsf_text_close(*out);
        *out = NULL;
    }
    return status;
}

/* ---- two files ---- */

/* Bytes of a token that an error shows. */
#define SHOWN_BYTES 24

/* True if both files have this section, and it is the same. */
static bool has_same_section(const qsf_reader *a, const qsf_reader *b, const char *tag)
{
    const qsf_section *const x = qsf_reader_section(a, tag);
    const qsf_section *const y = qsf_reader_section(b, tag);
    return x != NULL && y != NULL && x->n_bytes == y->n_bytes && x->crc32 == y->crc32;
}

static int shown(qsf_bytes token)
{
    return (int)QSF_MIN(token.n, SHOWN_BYTES);
}

static qsf_status compare(const qsf_vocabulary *model, const qsf_vocabulary *drafter)
{
    const uint32_t n_ids = QSF_MIN(model->n_ids, drafter->n_ids);
    for (uint32_t id = 0; id < n_ids; id++) {
        const qsf_bytes a = qsf_vocabulary_text(model, id);
        const qsf_bytes b = qsf_vocabulary_text(drafter, id);
        QSF_FAIL_IF(a.n != b.n || memcmp(a.p, b.p, a.n) != 0, ARG,
                    "it has another tokenizer: token %u is \"%.*s\" there, and \"%.*s\" in the "
                    "model that it is to guess for",
                    id, shown(b), (const char *)b.p, shown(a), (const char *)a.p);
    }
    return QSF_OK;
}

static qsf_status compare_texts(qsf_reader *model, qsf_reader *drafter)
{
    qsf_text *a = NULL;
    qsf_text *b = NULL;
    qsf_status status = read_text(model, &a);
    if (status == QSF_OK)
        status = read_text(drafter, &b);
    if (status == QSF_OK)
        status = compare(&a->vocabulary, &b->vocabulary);
    qsf_text_close(a);
    qsf_text_close(b);
    return status;
}

qsf_status qsf_drafter_check_tokens(qsf_reader *model, qsf_reader *drafter)
{
    if (has_same_section(model, drafter, "TEXT") || has_same_section(model, drafter, "TOKN"))
        return QSF_OK;
    const bool has_text = qsf_reader_section(model, "TEXT") != NULL;
    if (has_text && qsf_reader_section(drafter, "TEXT") != NULL)
        return compare_texts(model, drafter);
    const bool has_none = !has_text && qsf_reader_section(model, "TOKN") == NULL &&
                          qsf_reader_section(drafter, "TEXT") == NULL &&
                          qsf_reader_section(drafter, "TOKN") == NULL;
    const uint32_t n_here = model->header.n_vocab;
    const uint32_t n_there = drafter->header.n_vocab;
    if (has_none && n_here == n_there)
        return QSF_OK;
    return QSF_FAIL(ARG,
                    "its tokenizer (%u tokens) cannot be compared with that of the model that it "
                    "is to guess for (%u): the sections TOKN differ, and not both files have TEXT",
                    n_there, n_here);
}
