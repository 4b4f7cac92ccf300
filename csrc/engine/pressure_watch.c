/* pressure_watch.c - measures the system and moves the model's memory. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/pressure_watch.h"

#include "base/checked.h"
#include "engine/model.h"
#include "engine/model_memory.h"
#include "platform/psi.h"
#include "machine/sysmem.h"
#include "platform/clock.h"

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
