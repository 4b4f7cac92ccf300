/* candidate.c - computes the sizes of a plan. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan.h"

#include <string.h>

#include "base/checked.h"
#include "cache/kv/kvcache.h"
#include "stream/experts.h"
#include "stream/stream.h"
#include "memory/arena.h"
#include "model/forward.h"
#include "io/io.h"
#include "platform/pool.h"

/* Larger heads are not rotated by default. */
#define MAX_DEFAULT_ROTATION 256

/* While one expert is computed, another one arrives. */
#define LEAST_TRANSIT 2U
#define MOST_TRANSIT 4U

/* Replaces a sum or product that does not fit 64 bits. */
#define TOO_MANY_BYTES UINT64_MAX

/* Rotation spreads outliers over a block's codes; a very wide head averages them without it. */
static bool is_rotated(const qsf_config *c, const qsf_options *opt, const qsf_choice *how)
{
    if (opt->kv_rotation != QSF_KV_ROTATION_AUTO)
        return opt->kv_rotation == QSF_KV_ROTATION_ON;
    return (how->kv_k_bits <= QSF_KV_8BIT || how->kv_v_bits <= QSF_KV_8BIT) &&
           qsf_kvcache_can_rotate(c) && c->head_dim <= MAX_DEFAULT_ROTATION;
}

static uint64_t pool_stacks_bytes(const qsf_candidate *d)
{
    return d->in->has_pool ? 0 : (uint64_t)(d->plan->n_threads - 1) * QSF_POOL_STACK_BYTES;
}

/* Stacks of the reading threads: io_uring needs one thread, the other methods one for each read. */
static uint64_t reader_stacks_bytes(const qsf_options *opt, uint32_t io_depth)
{
    const qsf_io_setup setup = {.method = opt->io_method, .depth = io_depth};
    return io_depth == 0 ? 0 : (uint64_t)qsf_io_queue_count(&setup) * QSF_RING_STACK_BYTES;
}

uint64_t qsf_plan_embedding_bytes(const qsf_config *c, uint32_t n_rows)
{
    qsf_arena measuring;
    qsf_embedding cache;
    qsf_arena_init_measuring(&measuring);
    qsf_embedding_layout(&cache, &measuring, c, n_rows);
    return measuring.failed ? UINT64_MAX : measuring.used_bytes;
}

/* Bytes of a slot and of its entries in the tables. */
static uint64_t expert_place_bytes(const qsf_candidate *d)
{
    return qsf_experts_place_bytes((size_t)d->plan->expert_slot_bytes) +
           qsf_experts_table_bytes(d->in->reader, 1) - qsf_experts_table_bytes(d->in->reader, 0);
}

uint32_t qsf_candidate_count_slots(const qsf_candidate *d, uint64_t n_bytes)
{
    const uint64_t n_fitting = n_bytes / expert_place_bytes(d);
    return n_fitting < d->plan->n_experts ? (uint32_t)n_fitting : d->plan->n_experts;
}

void qsf_candidate_find_experts(qsf_candidate *d)
{
    const qsf_reader *const r = d->in->reader;
    qsf_plan *const plan = d->plan;
    uint32_t most_chosen = 0;
    plan->n_experts = qsf_experts_count(r);
    plan->expert_slot_bytes = qsf_experts_slot_bytes(r);
    for (uint32_t i = 0; i < r->n_pass_layers; i++) {
        const qsf_layer_kind *const k = qsf_reader_layer_kind(r, i);
        const uint32_t n_visits = qsf_reader_visits(r, qsf_reader_layer(r, i));
        uint64_t layer_bytes = 0;
        for (uint32_t j = 0; j < k->n_experts; j++)
            layer_bytes += r->units[qsf_reader_layer(r, i)->first_expert + j].raw_bytes;
        if (k->n_experts != 0)
            plan->expert_token_bytes += layer_bytes / k->n_experts * k->n_chosen * n_visits;
        plan->model_bytes = qsf_add_capped(plan->model_bytes, layer_bytes);
        plan->experts_a_token += k->n_chosen * n_visits;
        most_chosen = QSF_MAX(k->n_chosen, most_chosen);
    }
    if (plan->n_experts != 0)
        plan->expert_transit_slots = most_chosen < LEAST_TRANSIT  ? LEAST_TRANSIT
                                     : most_chosen > MOST_TRANSIT ? MOST_TRANSIT
                                                                  : most_chosen;
}

/* Sizes of the slots of experts. */
static void add_experts(qsf_candidate *d)
{
    qsf_plan *const plan = d->plan;
    plan->expert_slots = plan->n_experts == 0 ? 0 : d->how.n_expert_slots;
    plan->experts_bytes = 0;
    if (plan->n_experts == 0)
        return;
    (void)qsf_mul_u64((uint64_t)plan->expert_slots + plan->expert_transit_slots,
                      expert_place_bytes(d), &plan->experts_bytes);
    plan->stacks_bytes += QSF_EXPERT_READERS * QSF_EXPERT_STACK_BYTES;
}

/* Sizes that depend on which units are resident. */
static void add_units(qsf_candidate *d)
{
    const qsf_reader *const r = d->in->reader;
    qsf_plan *const plan = d->plan;
    qsf_stream_sizes sizes;
    qsf_stream_least(r, d->is_resident, &sizes);
    const bool is_streaming = sizes.ring_bytes != 0;
    plan->ring_bytes = !is_streaming ? 0 : QSF_MAX(d->how.ring_bytes, sizes.ring_bytes);
    plan->io_depth = is_streaming ? d->how.io_depth : 0;
    plan->stream_bytes = qsf_stream_buffer_bytes(r, &sizes, (size_t)plan->ring_bytes);
    plan->stacks_bytes = pool_stacks_bytes(d) + reader_stacks_bytes(d->in->options, plan->io_depth);
    if (sizes.load_bytes != 0) {
        /* Loading ends before sessions and activations exist, so it may use their memory. */
        const uint64_t later_bytes = qsf_add_capped(plan->kv_bytes, plan->scratch_bytes);
        const uint64_t load_bytes =
            sizes.load_bytes + reader_stacks_bytes(d->in->options, d->how.io_depth);
        plan->stream_bytes += load_bytes > later_bytes ? load_bytes - later_bytes : 0;
    }
    plan->embedding_rows = d->is_resident[r->embedding_unit] ? 0 : d->how.n_embedding_rows;
    plan->embedding_bytes =
        qsf_add_capped(sizes.band_bytes + sizes.ple_band_bytes,
                       qsf_plan_embedding_bytes(d->in->config, plan->embedding_rows));
    plan->weights_bytes = 0;
    plan->streamed_bytes = 0;
    plan->n_units_resident = 0;
    for (uint32_t i = 0; i < r->n_pass_units; i++) {
        const uint32_t unit_idx = r->pass_units[i];
        const qsf_unit *const u = &r->units[unit_idx];
        if (d->is_resident[unit_idx])
            plan->weights_bytes = qsf_add_capped(plan->weights_bytes, u->raw_bytes);
        else if (qsf_stream_passes_ring(r, unit_idx))
            for (uint32_t j = 0; j < qsf_reader_visits(r, u); j++)
                plan->streamed_bytes = qsf_add_capped(plan->streamed_bytes, u->stored_bytes);
        plan->n_units_resident += d->is_resident[unit_idx];
    }
}

void qsf_candidate_add_up(qsf_candidate *d)
{
    const qsf_config *const c = d->in->config;
    qsf_plan *const plan = d->plan;
    const uint32_t n_contexts = d->in->options->kv_contexts;
    plan->ctx_tokens = d->how.ctx_tokens;
    plan->kv_resident_tokens = QSF_MIN(d->how.resident_tokens, d->how.ctx_tokens);
    plan->chunk_tokens = d->how.chunk_tokens;
    plan->draft_rows = d->how.draft_rows;
    plan->kv_k_bits = d->how.kv_k_bits;
    plan->kv_v_bits = d->how.kv_v_bits;
    plan->kv_is_rotated = is_rotated(c, d->in->options, &d->how);
    plan->tables_bytes = d->in->fixed_bytes;
    plan->drafter_bytes = d->in->drafter_bytes;
    plan->adapters_bytes = d->in->adapters_bytes;
    plan->max_sessions = d->in->options->max_sessions;
    plan->kv_contexts =
        n_contexts != 0 ? QSF_MIN(n_contexts, plan->max_sessions) : plan->max_sessions;
    const uint64_t text_bytes = (uint64_t)d->in->options->reserve_token_bytes *
                                QSF_MIN(plan->ctx_tokens, QSF_DEFAULT_CTX_TOKENS);
    plan->reserve_bytes = QSF_MAX(text_bytes, d->in->options->reserve_bytes);
    d->in->measure_sessions(c, plan);
    add_units(d);
    add_experts(d);
    const uint64_t parts[] = {plan->tables_bytes,  plan->kv_bytes,        plan->scratch_bytes,
                              plan->stream_bytes,  plan->embedding_bytes, plan->weights_bytes,
                              plan->stacks_bytes,  plan->experts_bytes,   plan->drafter_bytes,
                              plan->adapters_bytes};
    plan->engine_bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        plan->engine_bytes = qsf_add_capped(plan->engine_bytes, parts[i]);
}

uint64_t qsf_candidate_needed_bytes(const qsf_plan *plan)
{
    return qsf_add_capped(qsf_add_capped(plan->process_bytes, plan->reserve_bytes),
                          plan->engine_bytes);
}

bool qsf_candidate_fits(const qsf_plan *plan)
{
    const uint64_t n_bytes = qsf_candidate_needed_bytes(plan);
    return n_bytes != TOO_MANY_BYTES &&
           (plan->ceiling_bytes == 0 || n_bytes <= plan->ceiling_bytes);
}

uint64_t qsf_candidate_room_bytes(const qsf_plan *plan)
{
    return (plan->ceiling_bytes == 0 ? TOO_MANY_BYTES : plan->ceiling_bytes) -
           qsf_candidate_needed_bytes(plan);
}

void qsf_candidate_find_tiers(qsf_candidate *d)
{
    const qsf_reader *const r = d->in->reader;
    d->n_tiers = 0;
    for (uint32_t i = 0; i < r->n_pass_units; i++) {
        const uint32_t unit_idx = r->pass_units[i];
        const size_t n_bytes = qsf_stream_unit_buffer_bytes(r, unit_idx);
        uint32_t at = 0;
        while (at < d->n_tiers && d->tiers[at].buffer_bytes > n_bytes)
            at++;
        if (n_bytes == 0 || at == QSF_CANDIDATE_TIERS)
            continue;
        if (at == d->n_tiers || d->tiers[at].buffer_bytes != n_bytes) {
            d->n_tiers += d->n_tiers < QSF_CANDIDATE_TIERS;
            memmove(d->tiers + at + 1, d->tiers + at, (d->n_tiers - at - 1) * sizeof d->tiers[0]);
            d->tiers[at] = (qsf_tier){.buffer_bytes = n_bytes};
        }
        d->tiers[at].raw_bytes =
            qsf_add_capped(d->tiers[at].raw_bytes, r->units[unit_idx].raw_bytes);
    }
}

static void keep_from(qsf_candidate *d, size_t buffer_bytes)
{
    for (uint32_t i = 0; i < d->in->reader->n_stream_units; i++)
        d->is_resident[i] = qsf_stream_unit_buffer_bytes(d->in->reader, i) >= buffer_bytes;
    qsf_candidate_add_up(d);
}

void qsf_candidate_weigh_table(qsf_candidate *d)
{
    bool *const is_resident = &d->is_resident[d->in->reader->embedding_unit];
    *is_resident = false;
    qsf_candidate_add_up(d);
    const uint64_t engine_bytes = d->plan->engine_bytes;
    *is_resident = true;
    qsf_candidate_add_up(d);
    if (d->plan->engine_bytes > engine_bytes) {
        *is_resident = false;
        qsf_candidate_add_up(d);
    }
}

void qsf_candidate_choose_least(qsf_candidate *d)
{
    qsf_plan *const plan = d->plan;
    memset(d->is_resident, 0, d->in->reader->n_stream_units * sizeof *d->is_resident);
    qsf_candidate_add_up(d);
    const uint64_t buffers_bytes = qsf_add_capped(
        qsf_add_capped(plan->stream_bytes, plan->stacks_bytes), plan->embedding_bytes);
    uint64_t least_bytes = plan->engine_bytes;
    uint64_t raw_bytes = 0;
    size_t best_bytes = SIZE_MAX;
    size_t tried_bytes = SIZE_MAX;
    for (uint32_t i = 0; i < d->n_tiers; i++) {
        raw_bytes = qsf_add_capped(raw_bytes, d->tiers[i].raw_bytes);
        if (raw_bytes > buffers_bytes) /* exceeds the possible saving */
            break;
        tried_bytes = d->tiers[i].buffer_bytes;
        keep_from(d, tried_bytes);
        if (plan->engine_bytes < least_bytes) {
            least_bytes = plan->engine_bytes;
            best_bytes = tried_bytes;
        }
    }
    if (tried_bytes != best_bytes)
        keep_from(d, best_bytes);
    /* A small table may be smaller than a band of it with a cache of rows. */
    const uint32_t table = d->in->reader->embedding_unit;
    if (!d->is_resident[table] && d->in->reader->units[table].raw_bytes <= plan->embedding_bytes)
        qsf_candidate_weigh_table(d);
}
