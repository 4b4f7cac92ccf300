/* plan.c - the arithmetic of plan.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/plan.h"

#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "engine/session.h"
#include "format/stream.h"
#include "memory/arena.h"
#include "model/scratch.h"
#include "platform/pool.h"

#define DEFAULT_CTX_TOKENS 4096
/* Tokens that share one pass over the weights, and one hand-over of each matrix to the threads. */
#define DEFAULT_CHUNK_TOKENS 64
/* Where all weights stay resident all the same: more tokens per unpacked tile. A multiple of the
 * default by a power of two. */
#define LARGE_CHUNK_TOKENS 256
/* Room for a few hundred rows, so that one read feeds all threads for a while. */
#define WINDOW_TARGET_BYTES ((size_t)2 << 20)

/* Heads up to here are turned unless something else is asked for. */
#define MAX_DEFAULT_ROTATION 256

/* More than anyone has: what a sum or product that does not fit becomes. */
#define TOO_MANY_BYTES UINT64_MAX

typedef struct choice {
    uint32_t ctx_tokens;
    uint32_t chunk_tokens;
    bool wide_window;
    uint32_t kv_k_bits;
    uint32_t kv_v_bits;
} choice;

static qsf_dtype dtype_of_bits(uint32_t bits)
{
    return bits == QSF_KV_2BIT   ? QSF_DTYPE_2BIT
           : bits == QSF_KV_4BIT ? QSF_DTYPE_4BIT
           : bits == QSF_KV_8BIT ? QSF_DTYPE_8BIT
           : bits == QSF_KV_F16  ? QSF_DTYPE_F16
                                 : QSF_DTYPE_F32;
}

qsf_kv_form qsf_plan_kv_form(const qsf_plan *plan)
{
    return (qsf_kv_form){
        .k_type = dtype_of_bits(plan->kv_k_bits),
        .v_type = dtype_of_bits(plan->kv_v_bits),
        .is_rotated = plan->kv_is_rotated != 0,
    };
}

/* Bytes of a session's block, by measuring. */
static size_t session_bytes(const qsf_config *c, const qsf_plan *plan)
{
    const qsf_kv_form kv_form = qsf_plan_kv_form(plan);
    qsf_arena measuring;
    qsf_session_buffers buffers;
    qsf_arena_init_measuring(&measuring);
    qsf_session_layout(&buffers, &measuring, c, plan->ctx_tokens, &kv_form);
    return measuring.failed ? SIZE_MAX : measuring.used_bytes;
}

/* Bytes of a chunk's scratch, by measuring. */
static size_t scratch_bytes(const qsf_config *c, const qsf_plan *plan)
{
    const qsf_kv_form kv_form = qsf_plan_kv_form(plan);
    qsf_arena measuring;
    qsf_scratch scratch;
    qsf_arena_init_measuring(&measuring);
    qsf_scratch_layout(&scratch, &measuring, c, &kv_form, plan->chunk_tokens, plan->ctx_tokens,
                       plan->n_threads);
    return measuring.failed ? SIZE_MAX : measuring.used_bytes;
}

static uint64_t sum_of(uint64_t a, uint64_t b)
{
    uint64_t sum = TOO_MANY_BYTES;
    (void)qsf_add_u64(a, b, &sum);
    return sum;
}

/* Sizes that depend on which units are resident. */
static void add_weights(const qsf_plan_input *in, const bool *is_resident, bool wide_window,
                        qsf_plan *plan)
{
    size_t window_bytes;
    size_t stored_bytes;
    size_t band_bytes;
    qsf_stream_least_bytes(in->reader, is_resident, &window_bytes, &stored_bytes, &band_bytes);
    if (window_bytes != 0 && wide_window && window_bytes < WINDOW_TARGET_BYTES)
        window_bytes = WINDOW_TARGET_BYTES;
    plan->window_bytes = window_bytes + stored_bytes;
    plan->embedding_bytes = band_bytes;
    plan->weights_bytes = 0;
    plan->n_units_resident = 0;
    for (uint32_t i = 0; i < in->reader->n_units; i++) {
        plan->weights_bytes += is_resident[i] ? in->reader->units[i].raw_bytes : 0;
        plan->n_units_resident += is_resident[i];
    }
}

/* Turning pays with few bits; a very wide head averages its outliers in any case. */
static bool is_rotated(const qsf_config *c, const qsf_options *opt, choice how)
{
    if (opt->kv_rotation != QSF_KV_ROTATION_AUTO)
        return opt->kv_rotation == QSF_KV_ROTATION_ON;
    return (how.kv_k_bits <= QSF_KV_4BIT || how.kv_v_bits <= QSF_KV_4BIT) &&
           qsf_kvcache_can_rotate(c) && c->head_dim <= MAX_DEFAULT_ROTATION;
}

/* The plan of one choice with these units resident; engine_bytes is its total. */
static void add_up(const qsf_plan_input *in, choice how, const bool *is_resident, qsf_plan *plan)
{
    const qsf_config *const c = in->config;
    const qsf_options *const opt = in->options;
    plan->ctx_tokens = how.ctx_tokens;
    plan->chunk_tokens = how.chunk_tokens;
    plan->kv_k_bits = how.kv_k_bits;
    plan->kv_v_bits = how.kv_v_bits;
    plan->kv_is_rotated = is_rotated(c, opt, how);
    plan->tables_bytes = in->fixed_bytes;
    plan->kv_bytes = TOO_MANY_BYTES;
    (void)qsf_mul_u64(session_bytes(c, plan), opt->max_sessions, &plan->kv_bytes);
    plan->scratch_bytes = scratch_bytes(c, plan);
    add_weights(in, is_resident, how.wide_window, plan);
    const uint64_t parts[] = {plan->tables_bytes, plan->kv_bytes,        plan->scratch_bytes,
                              plan->window_bytes, plan->embedding_bytes, plan->weights_bytes,
                              plan->stacks_bytes};
    plan->engine_bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        plan->engine_bytes = sum_of(plan->engine_bytes, parts[i]);
}

static uint64_t needed_bytes(const qsf_plan *plan)
{
    return sum_of(sum_of(plan->process_bytes, plan->reserve_bytes), plan->engine_bytes);
}

static bool fits(const qsf_plan *plan)
{
    const uint64_t n_bytes = needed_bytes(plan);
    return n_bytes != TOO_MANY_BYTES && (plan->budget_bytes == 0 || n_bytes <= plan->budget_bytes);
}

/* Chooses the units that take the least memory. That is none of them, unless the window for
 * the most demanding takes more than they do themselves: the window for a compressed unit has
 * room for a whole block, of a megabyte. */
static void choose_least(const qsf_plan_input *in, choice how, qsf_plan *plan, bool *is_resident)
{
    const uint32_t n_units = in->reader->n_units;
    memset(is_resident, 0, n_units * sizeof *is_resident);
    add_up(in, how, is_resident, plan);
    uint64_t least_bytes = plan->engine_bytes;
    size_t limit_bytes = SIZE_MAX; /* units whose window is as wide as this are resident */
    for (;;) {
        size_t widest_bytes = 0;
        for (uint32_t i = 0; i < n_units; i++) {
            const size_t n_bytes = qsf_stream_unit_window_bytes(in->reader, i);
            if (!is_resident[i] && n_bytes > widest_bytes)
                widest_bytes = n_bytes;
        }
        if (widest_bytes == 0)
            break;
        for (uint32_t i = 0; i < n_units; i++)
            is_resident[i] = qsf_stream_unit_window_bytes(in->reader, i) >= widest_bytes;
        add_up(in, how, is_resident, plan);
        if (plan->engine_bytes < least_bytes) {
            least_bytes = plan->engine_bytes;
            limit_bytes = widest_bytes;
        }
    }
    for (uint32_t i = 0; i < n_units; i++)
        is_resident[i] = qsf_stream_unit_window_bytes(in->reader, i) >= limit_bytes;
    add_up(in, how, is_resident, plan);
}

/* Keeps unit i in memory if the plan still fits. */
static void try_resident(const qsf_plan_input *in, choice how, uint32_t unit_idx, qsf_plan *plan,
                         bool *is_resident)
{
    const bool was_resident = is_resident[unit_idx];
    is_resident[unit_idx] = true;
    add_up(in, how, is_resident, plan);
    if (fits(plan))
        return;
    is_resident[unit_idx] = was_resident;
    add_up(in, how, is_resident, plan);
}

/* Every unit is read once a token, except an embedding table that is not the head too,
 * of which a few rows are; so that one comes last. */
static void choose_resident(const qsf_plan_input *in, choice how, qsf_plan *plan, bool *is_resident)
{
    const uint32_t n_units = in->reader->n_units;
    memset(is_resident, 1, n_units * sizeof *is_resident);
    add_up(in, how, is_resident, plan);
    if (fits(plan))
        return;
    choose_least(in, how, plan, is_resident);
    try_resident(in, how, n_units - 1, plan, is_resident);
    if (in->config->has_tied_head)
        try_resident(in, how, 0, plan, is_resident);
    for (uint32_t i = 1; i < n_units - 1; i++)
        try_resident(in, how, i, plan, is_resident);
    try_resident(in, how, 0, plan, is_resident);
}

/* What is given up first when memory is short, and down to where. A chunk of 16 still shares a
 * pass over the weights between many tokens, so it goes before the context; the window goes
 * late, because a narrow one leaves the threads idle. A cache of 2 bits goes last of all: the
 * other rungs cost time or length, this one the quality of every word (bench/LOG.md). */
static const struct rung {
    enum { RUNG_CHUNK, RUNG_CTX, RUNG_WINDOW, RUNG_KV } what;
    uint32_t floor_tokens;
} ladder[] = {
    {RUNG_CHUNK, 16}, {RUNG_CTX, 512}, {RUNG_CHUNK, 4}, {RUNG_CTX, 256},
    {RUNG_WINDOW, 0}, {RUNG_CHUNK, 1}, {RUNG_KV, 0},
};

/* Two bits for keys or values, unless the caller chose. */
static bool narrow_kv(const qsf_options *opt, choice *how)
{
    bool is_smaller = false;
    if (opt->exact != 0)
        return false;
    if (opt->kv_k_type == QSF_KV_DEFAULT && how->kv_k_bits > QSF_KV_2BIT) {
        how->kv_k_bits = QSF_KV_2BIT;
        is_smaller = true;
    }
    if (opt->kv_v_type == QSF_KV_DEFAULT && how->kv_v_bits > QSF_KV_2BIT) {
        how->kv_v_bits = QSF_KV_2BIT;
        is_smaller = true;
    }
    return is_smaller;
}

/* Halves *n_tokens towards the floor, unless the caller asked for a number. */
static bool halve(uint32_t asked_tokens, uint32_t floor_tokens, uint32_t *n_tokens)
{
    if (asked_tokens != 0 || *n_tokens <= floor_tokens)
        return false;
    *n_tokens = *n_tokens / 2 > floor_tokens ? *n_tokens / 2 : floor_tokens;
    return true;
}

/* The next smaller choice; false when this is the smallest. */
static bool shrink(const qsf_options *opt, choice *how)
{
    bool is_smaller = false;
    for (size_t i = 0; !is_smaller && i < sizeof ladder / sizeof ladder[0]; i++) {
        const struct rung *const r = &ladder[i];
        if (r->what == RUNG_CHUNK) {
            is_smaller = halve(opt->chunk_tokens, r->floor_tokens, &how->chunk_tokens);
        } else if (r->what == RUNG_CTX) {
            is_smaller = halve(opt->ctx_tokens, r->floor_tokens, &how->ctx_tokens);
        } else if (r->what == RUNG_WINDOW) {
            is_smaller = how->wide_window;
            how->wide_window = false;
        } else {
            is_smaller = narrow_kv(opt, how);
        }
    }
    if (how->chunk_tokens > how->ctx_tokens)
        how->chunk_tokens = how->ctx_tokens;
    return is_smaller;
}

static qsf_status first_choice(const qsf_plan_input *in, choice *how)
{
    const qsf_options *const opt = in->options;
    const uint32_t max_tokens = in->config->max_tokens;
    if (opt->ctx_tokens > max_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "a context of %u tokens: this model was made for at most %u",
                        opt->ctx_tokens, max_tokens);
    if (opt->kv_rotation == QSF_KV_ROTATION_ON && !qsf_kvcache_can_rotate(in->config))
        return QSF_FAIL(QSF_ERR_ARG,
                        "heads of %u dimensions cannot be rotated: only of 16, 32, .. 4096",
                        in->config->head_dim);
    const uint32_t default_bits = opt->exact != 0 ? QSF_KV_F32 : QSF_KV_4BIT;
    how->kv_k_bits = opt->kv_k_type != QSF_KV_DEFAULT ? opt->kv_k_type : default_bits;
    how->kv_v_bits = opt->kv_v_type != QSF_KV_DEFAULT ? opt->kv_v_type : default_bits;
    how->ctx_tokens = opt->ctx_tokens;
    if (how->ctx_tokens == 0)
        how->ctx_tokens = max_tokens < DEFAULT_CTX_TOKENS ? max_tokens : DEFAULT_CTX_TOKENS;
    how->chunk_tokens = opt->chunk_tokens != 0 ? opt->chunk_tokens : DEFAULT_CHUNK_TOKENS;
    if (how->chunk_tokens > how->ctx_tokens)
        how->chunk_tokens = how->ctx_tokens;
    how->wide_window = true;
    return QSF_OK;
}

/* Lets the chunk grow as far as every unit is resident with it. */
static void enlarge_chunk(const qsf_plan_input *in, choice how, qsf_plan *plan, bool *is_resident)
{
    const uint32_t n_units = in->reader->n_units;
    if (in->options->chunk_tokens != 0 || how.chunk_tokens != DEFAULT_CHUNK_TOKENS ||
        plan->n_units_resident != n_units)
        return;
    const qsf_plan small = *plan;
    for (uint32_t n = LARGE_CHUNK_TOKENS; n > DEFAULT_CHUNK_TOKENS; n /= 2) {
        how.chunk_tokens = n < how.ctx_tokens ? n : how.ctx_tokens;
        add_up(in, how, is_resident, plan);
        if (fits(plan))
            return;
    }
    *plan = small;
}

qsf_status qsf_plan_make(const qsf_plan_input *in, qsf_plan *plan, bool *is_resident)
{
    const qsf_options *const opt = in->options;
    *plan = (qsf_plan){
        .budget_bytes = opt->budget_bytes,
        .process_bytes = in->process_bytes,
        .reserve_bytes = opt->reserve_bytes,
        .stacks_bytes = (uint64_t)(opt->n_threads - 1) * QSF_POOL_STACK_BYTES,
        .n_units = in->reader->n_units,
        .n_threads = opt->n_threads,
        .max_sessions = opt->max_sessions,
    };
    for (uint32_t i = 0; i < in->reader->n_units; i++)
        plan->model_bytes += in->reader->units[i].raw_bytes;
    choice how = {0};
    QSF_TRY(first_choice(in, &how));

    choice least = how;
    while (shrink(opt, &least)) {
    }
    choose_least(in, least, plan, is_resident);
    plan->min_budget_bytes = needed_bytes(plan);
    if (!fits(plan))
        return QSF_FAIL(
            QSF_ERR_NOMEM,
            "a budget of %llu bytes is too small: the process already uses %llu, %llu "
            "are kept for the caller, and the engine needs at least %llu; the smallest "
            "budget that would do is %llu",
            (unsigned long long)plan->budget_bytes, (unsigned long long)plan->process_bytes,
            (unsigned long long)plan->reserve_bytes, (unsigned long long)plan->engine_bytes,
            (unsigned long long)plan->min_budget_bytes);
    for (choose_least(in, how, plan, is_resident); !fits(plan);
         choose_least(in, how, plan, is_resident))
        (void)shrink(opt, &how);
    choose_resident(in, how, plan, is_resident);
    enlarge_chunk(in, how, plan, is_resident);
    return QSF_OK;
}
