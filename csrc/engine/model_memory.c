/* model_memory.c - evicts and loads units, resizes the ring, and updates the plan. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model.h"

#include "base/checked.h"
#include "machine/machine.h"
#include "plan/plan.h"
#include "platform/clock.h"
#include "platform/system_memory.h"

#define RING_BYTES ((size_t)4 << 20)
#define LEAST_RING_BYTES ((size_t)2 << 20) /* a smaller ring makes reads small (docs/memory.md) */

static qsf_residency residency_of(const qsf_model *m)
{
    return (qsf_residency){.stream = &m->stream, .is_planned = m->is_resident};
}

/* Updates the plan to the memory that is held now; `before` is the ledger before the change. */
static void update_plan(qsf_model *m, const qsf_ledger *before)
{
    qsf_plan *const plan = &m->plan;
    const uint64_t *const now = m->ledger.held_by_use;
    const uint64_t *const then = before->held_by_use;
    const uint32_t old_depth = plan->io_depth;
    const uint32_t n_threads = old_depth != 0 ? old_depth : m->io_setup.depth;
    plan->weights_bytes += now[QSF_USE_WEIGHTS] - then[QSF_USE_WEIGHTS];
    plan->stream_bytes += now[QSF_USE_STREAM] - then[QSF_USE_STREAM];
    plan->experts_bytes += now[QSF_USE_EXPERTS] - then[QSF_USE_EXPERTS];
    plan->expert_slots = m->experts.n_held;
    plan->embedding_bytes += now[QSF_USE_EMBEDDING] - then[QSF_USE_EMBEDDING];
    plan->ring_bytes = m->stream.ring_bytes;
    plan->io_depth = m->stream.ring != NULL ? n_threads : 0;
    const uint64_t more_stacks = ((uint64_t)plan->io_depth - old_depth) * QSF_RING_STACK_BYTES;
    plan->stacks_bytes += more_stacks;
    plan->engine_bytes += m->ledger.held_bytes - before->held_bytes + more_stacks;
    plan->n_units_resident = 0;
    plan->streamed_bytes = 0;
    for (uint32_t i = 0; i < m->reader.n_pass_units; i++) {
        const uint32_t unit_idx = m->reader.pass_units[i];
        const bool is_resident = qsf_stream_is_resident(&m->stream, unit_idx);
        plan->n_units_resident += is_resident;
        if (!is_resident && qsf_stream_passes_ring(&m->reader, unit_idx))
            plan->streamed_bytes += m->reader.units[unit_idx].stored_bytes;
    }
}

/* Releases most of the ring, as the last resort. */
static bool shrink_ring(qsf_model *m)
{
    if (m->stream.ring == NULL)
        return false;
    size_t ring_bytes = qsf_ring_least_bytes(m->stream.sizes.range_bytes);
    if (ring_bytes < LEAST_RING_BYTES)
        ring_bytes = LEAST_RING_BYTES;
    if (m->stream.ring_bytes <= ring_bytes)
        return false;
    (void)qsf_stream_resize_ring(&m->stream, ring_bytes);
    return true; /* even if it fails: the ring was restarted */
}

static uint64_t missing_ring_bytes(const qsf_model *m)
{
    return m->stream.ring != NULL ? qsf_sub_floored(m->full_ring_bytes, m->stream.ring_bytes) : 0;
}

qsf_memory_move qsf_model_give(qsf_model *m, uint64_t wanted_bytes)
{
    const qsf_ledger before = m->ledger;
    const qsf_residency now = residency_of(m);
    bool has_moved = false; /* units of the stream moved */
    bool has_given = false; /* slots of experts were released, which disturbs nothing */
    while (qsf_sub_floored(before.held_bytes, m->ledger.held_bytes) < wanted_bytes &&
           qsf_experts_give_slot(&m->experts))
        has_given = true;
    while (qsf_sub_floored(before.held_bytes, m->ledger.held_bytes) < wanted_bytes) {
        const uint32_t unit_idx = qsf_eviction_choose(&now);
        if (unit_idx == QSF_UNIT_NONE)
            break;
        const bool is_large = m->reader.units[unit_idx].raw_bytes / 4 > RING_BYTES;
        (void)qsf_stream_drop(&m->stream, unit_idx, is_large ? RING_BYTES : 0);
        if (qsf_stream_is_resident(&m->stream, unit_idx))
            break;
        has_moved = true; /* the next eviction makes room even for a ring */
    }
    if (qsf_sub_floored(before.held_bytes, m->ledger.held_bytes) < wanted_bytes)
        has_moved |= shrink_ring(m);
    if (!has_moved && !has_given)
        return (qsf_memory_move){0};
    update_plan(m, &before);
    return (qsf_memory_move){
        .has_disturbed = has_moved,
        .is_done = true,
        .n_bytes = qsf_sub_floored(before.held_bytes, m->ledger.held_bytes),
    };
}

/* Bytes below the ceiling that the plan did not use. */
static uint64_t slack_bytes(const qsf_model *m)
{
    const qsf_plan *const plan = &m->plan;
    if (plan->ceiling_bytes == 0)
        return UINT64_MAX - m->ledger.ceiling_bytes;
    const uint64_t used_bytes = plan->process_bytes + plan->reserve_bytes + plan->stacks_bytes;
    return qsf_sub_floored(qsf_sub_floored(plan->ceiling_bytes, used_bytes),
                           m->ledger.ceiling_bytes);
}

static qsf_memory_move widen_ring(qsf_model *m)
{
    const qsf_ledger before = m->ledger;
    if (qsf_stream_resize_ring(&m->stream, (size_t)m->full_ring_bytes) != QSF_OK)
        return (qsf_memory_move){.has_disturbed = true};
    update_plan(m, &before);
    return (qsf_memory_move){.has_disturbed = true,
                             .is_done = true,
                             .n_bytes = m->ledger.held_bytes - before.held_bytes};
}

static uint32_t missing_slots(const qsf_model *m)
{
    return m->experts.n_slots - m->experts.n_held;
}

static uint64_t slot_cost_bytes(const qsf_model *m)
{
    return qsf_experts_place_bytes(m->experts.slot_bytes);
}

/* Slots were given back first, so they come back last. */
static qsf_memory_move take_slots(qsf_model *m, uint64_t room_bytes)
{
    const qsf_ledger before = m->ledger;
    for (uint64_t left = room_bytes;
         missing_slots(m) > 0 && left >= slot_cost_bytes(m) && qsf_experts_take_slot(&m->experts);
         left -= slot_cost_bytes(m)) {
    }
    if (m->ledger.held_bytes == before.held_bytes)
        return (qsf_memory_move){0};
    update_plan(m, &before);
    return (qsf_memory_move){.is_done = true, .n_bytes = m->ledger.held_bytes - before.held_bytes};
}

/* The last unit is loaded through the ring, which is released afterwards: for a moment the model
 * may hold more than its first plan, but never more than the ceiling. */
qsf_memory_move qsf_model_take(qsf_model *m, uint64_t room_bytes)
{
    const uint64_t ring_bytes = missing_ring_bytes(m);
    if (ring_bytes != 0)
        return ring_bytes <= room_bytes ? widen_ring(m) : (qsf_memory_move){0};
    const qsf_residency now = residency_of(m);
    const uint32_t unit_idx = qsf_eviction_choose_return(&now);
    if (unit_idx == QSF_UNIT_NONE)
        return take_slots(m, room_bytes);
    if (m->reader.units[unit_idx].raw_bytes > room_bytes)
        return (qsf_memory_move){0};
    const qsf_ledger before = m->ledger;
    m->ledger.ceiling_bytes += slack_bytes(m);
    const qsf_status status = qsf_stream_keep(&m->stream, unit_idx);
    m->ledger.ceiling_bytes = before.ceiling_bytes;
    if (m->ledger.held_bytes > before.ceiling_bytes) /* the ring exceeds the units left to stream */
        m->ledger.ceiling_bytes = m->ledger.held_bytes;
    if (status != QSF_OK)
        return (qsf_memory_move){.has_disturbed = true};
    update_plan(m, &before);
    return (qsf_memory_move){
        .has_disturbed = true, .is_done = true, .n_bytes = m->reader.units[unit_idx].raw_bytes};
}

uint64_t qsf_model_next_cost_bytes(const qsf_model *m)
{
    const uint64_t ring_bytes = missing_ring_bytes(m);
    if (ring_bytes != 0)
        return ring_bytes;
    const qsf_residency now = residency_of(m);
    const uint32_t next = qsf_eviction_choose_return(&now);
    if (next != QSF_UNIT_NONE)
        return m->reader.units[next].raw_bytes;
    return missing_slots(m) > 0 ? slot_cost_bytes(m) : 0;
}

/* ---- measures the system and moves the model's memory ---- */

static void look_at_system(void *arg, qsf_pressure_signs *out)
{
    (void)arg;
    qsf_sysmem memory;
    qsf_sysmem_read(&memory);
    *out = (qsf_pressure_signs){
        .now_ns = qsf_clock_ns(),
        .available_bytes = memory.available_bytes,
        .total_bytes = memory.total_bytes,
        .stalled_percent = qsf_psi_memory_percent(""),
    };
}

/* Sessions, activations and the caller's reserve are planned but mostly untouched, so the system
 * still counts their memory as available. */
void qsf_pressure_begin(qsf_model *m)
{
    const qsf_plan *const plan = &m->plan;
    qsf_pressure_signs signs;
    look_at_system(NULL, &signs);
    signs.available_bytes = qsf_sub_floored(
        qsf_sub_floored(qsf_sub_floored(qsf_sub_floored(signs.available_bytes, plan->kv_bytes),
                                        plan->scratch_bytes),
                        plan->stream_bytes),
        plan->reserve_bytes);
    if (m->drafter != NULL)
        signs.available_bytes = qsf_sub_floored(
            signs.available_bytes, m->drafter->plan.kv_bytes + m->drafter->plan.scratch_bytes);
    qsf_pressure_init(&m->pressure, &signs);
    m->full_ring_bytes = plan->ring_bytes;
    m->pressure.look = look_at_system;
}

bool qsf_pressure_watch(qsf_model *m)
{
    qsf_pressure *const p = &m->pressure;
    const uint64_t now_ns = qsf_clock_ns();
    if (!qsf_pressure_is_due(p, now_ns))
        return false;
    p->next_look_ns = now_ns + p->pause_ns;
    qsf_pressure_signs signs;
    p->look(p->look_arg, &signs);
    uint64_t give;
    uint64_t take;
    qsf_pressure_judge(p, &signs, &give, &take);
    const qsf_memory_move move = give > 0   ? qsf_model_give(m, give)
                                 : take > 0 ? qsf_model_take(m, take)
                                            : (qsf_memory_move){0};
    if (move.is_done)
        qsf_pressure_record(p, &signs, move.n_bytes, give > 0, m->plan.n_units_resident);
    if (move.has_disturbed)
        p->next_cost_bytes = qsf_model_next_cost_bytes(m);
    return move.has_disturbed;
}
