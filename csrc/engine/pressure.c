/* pressure.c - when memory is given back and taken again, and which units that means.
 *
 *     available    0 ......... low ......... 2 low ......... 4 low + a unit ........
 *                  | give back  | as it is                    | take, if calm for 5 s
 *                  | up to 2 low|
 *
 * The gap between the two is what keeps it from going to and fro: taking a unit leaves more than
 * 4 low. Where somebody else answers each taking with a shortage, the wait doubles each time.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/pressure.h"

#include "engine/model.h"
#include "platform/clock.h"
#include "machine/psi.h"
#include "machine/sysmem.h"

#define SECOND_NS UINT64_C(1000000000)
#define PAUSE_NS (SECOND_NS / 4)
#define CALM_NS (5 * SECOND_NS)
#define MOST_CALM_NS (320 * SECOND_NS)
#define TAKE_PAUSE_NS SECOND_NS        /* between two units taken in one calm */
#define RELAPSE_NS (60 * SECOND_NS)    /* a shortage so soon after a taking is its fault */
#define STALL_PAUSE_NS (2 * SECOND_NS) /* PSI averages are renewed so often */
#define STALLED_PERCENT 10.0           /* pressure, where little is available besides */
#define CALM_PERCENT 5.0               /* at most, to be called calm */
#define MOST_LOW_BYTES (UINT64_C(1) << 30)
#define RING_BYTES ((size_t)4 << 20)
#define LEAST_RING_BYTES ((size_t)2 << 20) /* below, reads get small (docs/memory.md) */

static uint64_t least_of(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t less(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* ---- the decision ---- */

/* A sixth: so 4 low and more are there again once those who took it are gone. */
void qsf_pressure_init(qsf_pressure *p, const qsf_pressure_signs *signs)
{
    const uint64_t low_bytes = least_of(signs->available_bytes / 6, signs->total_bytes / 20);
    *p = (qsf_pressure){
        .pause_ns = PAUSE_NS,
        .open_ns = signs->now_ns,
        .next_look_ns = signs->now_ns + PAUSE_NS,
        .low_bytes = least_of(low_bytes, MOST_LOW_BYTES),
        .calm_ns = CALM_NS,
    };
}

static void judge_shortage(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t *give)
{
    p->calm_since_ns = 0;
    const bool is_low = signs->available_bytes < p->low_bytes;
    if (!is_low && p->last_give_ns != 0 && signs->now_ns - p->last_give_ns < STALL_PAUSE_NS)
        return;
    const uint64_t wanted_bytes = 2 * p->low_bytes;
    *give = signs->available_bytes < wanted_bytes ? wanted_bytes - signs->available_bytes : 1;
    if (p->last_take_ns != 0) {
        const bool is_relapse = signs->now_ns - p->last_take_ns < RELAPSE_NS;
        p->calm_ns = is_relapse ? least_of(2 * p->calm_ns, MOST_CALM_NS) : CALM_NS;
        p->last_take_ns = 0;
    }
    p->last_give_ns = signs->now_ns;
}

static void judge_calm(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t *take)
{
    if (p->calm_since_ns == 0)
        p->calm_since_ns = signs->now_ns;
    if (signs->now_ns - p->calm_since_ns < p->calm_ns)
        return;
    *take = signs->available_bytes - 4 * p->low_bytes;
    p->calm_since_ns = signs->now_ns - p->calm_ns + TAKE_PAUSE_NS;
    p->last_take_ns = signs->now_ns;
}

void qsf_pressure_judge(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t *give,
                        uint64_t *take)
{
    *give = 0;
    *take = 0;
    const uint64_t available_bytes = signs->available_bytes;
    const uint64_t high_bytes = 4 * p->low_bytes;
    if (available_bytes < p->low_bytes ||
        (signs->stalled_percent > STALLED_PERCENT && available_bytes < high_bytes))
        judge_shortage(p, signs, give);
    else if (p->next_cost_bytes != 0 && signs->stalled_percent <= CALM_PERCENT &&
             available_bytes > high_bytes && available_bytes - high_bytes > p->next_cost_bytes)
        judge_calm(p, signs, take);
    else
        p->calm_since_ns = 0;
}

/* ---- which units ---- */

static bool is_held(const qsf_model *m, uint32_t unit_idx)
{
    return qsf_stream_is_resident(&m->stream, unit_idx);
}

/* Was it given back? */
static bool is_missing(const qsf_model *m, uint32_t unit_idx)
{
    return m->is_resident[unit_idx] && !is_held(m, unit_idx);
}

/* Resident, and streaming it takes less memory than it does. */
static bool is_worth_dropping(const qsf_model *m, uint32_t unit_idx)
{
    const uint64_t buffer_bytes = m->stream.ring == NULL
                                      ? qsf_stream_unit_buffer_bytes(&m->reader, unit_idx) +
                                            (uint64_t)m->io_setup.depth * QSF_RING_STACK_BYTES
                                      : 0;
    return is_held(m, unit_idx) && m->reader.units[unit_idx].raw_bytes > buffer_bytes;
}

/* Layers around the circle of passes up to the nearest that is streamed. */
static uint32_t distance_to_streamed(const qsf_model *m, uint32_t unit_idx)
{
    const uint32_t n_layers = m->config.n_layers;
    uint32_t distance = 1;
    for (; distance < n_layers; distance++) {
        const uint32_t after = (unit_idx - 1 + distance) % n_layers + 1;
        const uint32_t before = (unit_idx - 1 + n_layers - distance) % n_layers + 1;
        if (!is_held(m, after) || !is_held(m, before))
            break;
    }
    return distance;
}

/* An embedding of its own costs a small read for a token and so goes first, or nearly: to load it
 * again takes a ring. Then the layers, each as far from streamed ones as can be, so that reading
 * has time everywhere. The head, which is as large as several, last. UINT32_MAX: none. */
static uint32_t choose_to_drop(const qsf_model *m)
{
    const uint32_t n_layers = m->config.n_layers;
    const bool has_own_embedding = !qsf_stream_passes_ring(&m->reader, 0);
    if (has_own_embedding && m->stream.ring != NULL && is_worth_dropping(m, 0))
        return 0;
    uint32_t best = UINT32_MAX;
    uint32_t best_distance = 0;
    for (uint32_t i = n_layers; i >= 1; i--) {
        const uint32_t distance = is_worth_dropping(m, i) ? distance_to_streamed(m, i) : 0;
        if (distance > best_distance) {
            best = i;
            best_distance = distance;
        }
    }
    if (best == UINT32_MAX && is_worth_dropping(m, n_layers + 1))
        best = n_layers + 1;
    if (best == UINT32_MAX && !has_own_embedding && is_worth_dropping(m, 0))
        best = 0;
    return best;
}

/* The reverse: the embedding of its own while another unit keeps the ring there. */
static uint32_t choose_to_keep(const qsf_model *m)
{
    const uint32_t n_layers = m->config.n_layers;
    const bool has_own_embedding = !qsf_stream_passes_ring(&m->reader, 0);
    if (m->stream.ring == NULL)
        return UINT32_MAX;
    if (!has_own_embedding && is_missing(m, 0))
        return 0;
    if (is_missing(m, n_layers + 1))
        return n_layers + 1;
    uint32_t n_missing = 0;
    uint32_t n_streamed = 0;
    uint32_t best = UINT32_MAX;
    uint32_t best_distance = UINT32_MAX;
    for (uint32_t i = 1; i <= n_layers; i++) {
        n_streamed += !is_held(m, i);
        if (!is_missing(m, i))
            continue;
        n_missing++;
        const uint32_t distance = distance_to_streamed(m, i);
        if (distance < best_distance) {
            best = i;
            best_distance = distance;
        }
    }
    if (has_own_embedding && is_missing(m, 0) && (n_missing == 0 || n_streamed == 1))
        return 0;
    return best;
}

/* ---- acting ---- */

/* Brings the plan in line with what is held now, which was `before`. */
static void update_plan(qsf_model *m, const qsf_ledger *before)
{
    qsf_plan *const plan = &m->plan;
    const uint64_t *const now = m->ledger.held_by_use;
    const uint64_t *const then = before->held_by_use;
    const uint32_t old_depth = plan->io_depth;
    const uint32_t n_threads = old_depth != 0 ? old_depth : m->io_setup.depth;
    plan->weights_bytes += now[QSF_USE_WEIGHTS] - then[QSF_USE_WEIGHTS];
    plan->window_bytes += now[QSF_USE_WINDOW] - then[QSF_USE_WINDOW];
    plan->embedding_bytes += now[QSF_USE_EMBEDDING] - then[QSF_USE_EMBEDDING];
    plan->ring_bytes = m->stream.ring_bytes;
    plan->io_depth = m->stream.ring != NULL ? n_threads : 0;
    const uint64_t more_stacks = ((uint64_t)plan->io_depth - old_depth) * QSF_RING_STACK_BYTES;
    plan->stacks_bytes += more_stacks;
    plan->engine_bytes += m->ledger.held_bytes - before->held_bytes + more_stacks;
    plan->n_units_resident = 0;
    plan->streamed_bytes = 0;
    for (uint32_t i = 0; i < m->reader.n_units; i++) {
        plan->n_units_resident += is_held(m, i);
        if (!is_held(m, i) && qsf_stream_passes_ring(&m->reader, i))
            plan->streamed_bytes += m->reader.units[i].stored_bytes;
    }
}

static void record(qsf_model *m, const qsf_pressure_signs *signs, uint64_t n_bytes, bool is_given)
{
    qsf_pressure *const p = &m->pressure;
    p->events[p->n_events++ % QSF_PRESSURE_EVENTS] = (qsf_memory_event){
        .seconds = (signs->now_ns - p->open_ns) / SECOND_NS,
        .bytes = n_bytes,
        .available_bytes = signs->available_bytes,
        .is_given_back = is_given,
        .n_units_resident = m->plan.n_units_resident,
    };
    p->n_given_back += is_given;
    p->n_taken_again += !is_given;
    p->given_back_bytes += is_given ? n_bytes : 0;
    p->taken_again_bytes += is_given ? 0 : n_bytes;
}

/* The last thing to give: most of the ring. */
static bool shrink_ring(qsf_model *m)
{
    if (m->stream.ring == NULL)
        return false;
    size_t ring_bytes = qsf_ring_least_bytes(m->stream.sizes.span_bytes);
    if (ring_bytes < LEAST_RING_BYTES)
        ring_bytes = LEAST_RING_BYTES;
    if (m->stream.ring_bytes <= ring_bytes)
        return false;
    (void)qsf_stream_resize_ring(&m->stream, ring_bytes);
    return true; /* even if not, reading ahead was disturbed */
}

/* And the first to be taken again, since without room to read ahead all passes are slow. */
static uint64_t missing_ring_bytes(const qsf_model *m)
{
    return m->stream.ring != NULL ? less(m->pressure.full_ring_bytes, m->stream.ring_bytes) : 0;
}

/* True: memory moved. What fails is left as it is: the next look tries again. */
static bool give_back(qsf_model *m, const qsf_pressure_signs *signs, uint64_t wanted_bytes)
{
    const qsf_ledger before = m->ledger;
    bool has_moved = false;
    while (less(before.held_bytes, m->ledger.held_bytes) < wanted_bytes) {
        const uint32_t unit_idx = choose_to_drop(m);
        if (unit_idx == UINT32_MAX)
            break;
        const bool is_large = m->reader.units[unit_idx].raw_bytes / 4 > RING_BYTES;
        (void)qsf_stream_drop(&m->stream, unit_idx, is_large ? RING_BYTES : 0);
        if (is_held(m, unit_idx))
            break;
        has_moved = true; /* even if there is no ring yet: the next one makes room for it */
    }
    if (less(before.held_bytes, m->ledger.held_bytes) < wanted_bytes)
        has_moved |= shrink_ring(m);
    if (!has_moved)
        return false;
    update_plan(m, &before);
    record(m, signs, less(before.held_bytes, m->ledger.held_bytes), true);
    return true;
}

/* What of the ceiling, which is the caller's or the system's, the plan never used. */
static uint64_t slack_bytes(const qsf_model *m)
{
    const qsf_plan *const plan = &m->plan;
    if (plan->ceiling_bytes == 0)
        return UINT64_MAX - m->ledger.ceiling_bytes;
    const uint64_t used_bytes = plan->process_bytes + plan->reserve_bytes + plan->stacks_bytes;
    return less(less(plan->ceiling_bytes, used_bytes), m->ledger.ceiling_bytes);
}

static bool widen_ring(qsf_model *m, const qsf_pressure_signs *signs)
{
    const qsf_ledger before = m->ledger;
    if (qsf_stream_resize_ring(&m->stream, (size_t)m->pressure.full_ring_bytes) == QSF_OK) {
        update_plan(m, &before);
        record(m, signs, m->ledger.held_bytes - before.held_bytes, false);
    }
    return true;
}

/* The ring is given back only after the last unit has come through it, so for a moment there may
 * be more than the plan held at first; never more than was allowed. */
static bool take_again(qsf_model *m, const qsf_pressure_signs *signs, uint64_t room_bytes)
{
    const uint64_t ring_bytes = missing_ring_bytes(m);
    if (ring_bytes != 0)
        return ring_bytes <= room_bytes && widen_ring(m, signs);
    const uint32_t unit_idx = choose_to_keep(m);
    if (unit_idx == UINT32_MAX || m->reader.units[unit_idx].raw_bytes > room_bytes)
        return false;
    const qsf_ledger before = m->ledger;
    m->ledger.ceiling_bytes += slack_bytes(m);
    const qsf_status status = qsf_stream_keep(&m->stream, unit_idx);
    m->ledger.ceiling_bytes = before.ceiling_bytes;  /* or more: the ring may be larger than what */
    if (m->ledger.held_bytes > before.ceiling_bytes) /* is still streamed through it */
        m->ledger.ceiling_bytes = m->ledger.held_bytes;
    if (status == QSF_OK) {
        update_plan(m, &before);
        record(m, signs, m->reader.units[unit_idx].raw_bytes, false);
    }
    return true; /* even so, reading ahead was disturbed */
}

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

/* Sessions, activations and what the caller reserved are promised but mostly untouched yet, so the
 * system still calls them available. */
void qsf_pressure_begin(qsf_model *m)
{
    const qsf_plan *const plan = &m->plan;
    qsf_pressure_signs signs;
    look_at_system(NULL, &signs);
    signs.available_bytes =
        less(less(less(less(signs.available_bytes, plan->kv_bytes), plan->scratch_bytes),
                  plan->window_bytes),
             plan->reserve_bytes);
    qsf_pressure_init(&m->pressure, &signs);
    m->pressure.full_ring_bytes = plan->ring_bytes;
    m->pressure.look = look_at_system;
}

bool qsf_pressure_is_due(const qsf_model *m, uint64_t now_ns)
{
    return m->pressure.look != NULL && now_ns >= m->pressure.next_look_ns;
}

bool qsf_pressure_watch(qsf_model *m)
{
    qsf_pressure *const p = &m->pressure;
    const uint64_t now_ns = qsf_clock_ns();
    if (!qsf_pressure_is_due(m, now_ns))
        return false;
    p->next_look_ns = now_ns + p->pause_ns;
    qsf_pressure_signs signs;
    p->look(p->look_arg, &signs);
    uint64_t give;
    uint64_t take;
    qsf_pressure_judge(p, &signs, &give, &take);
    const bool has_moved = give > 0   ? give_back(m, &signs, give)
                           : take > 0 ? take_again(m, &signs, take)
                                      : false;
    if (has_moved) {
        const uint32_t next = choose_to_keep(m);
        p->next_cost_bytes = missing_ring_bytes(m) != 0 ? missing_ring_bytes(m)
                             : next != UINT32_MAX       ? m->reader.units[next].raw_bytes
                                                        : 0;
    }
    return has_moved;
}

size_t qsf_pressure_list_events(const qsf_pressure *p, qsf_memory_event *out, size_t cap_events)
{
    uint64_t n = least_of(p->n_events, QSF_PRESSURE_EVENTS);
    n = least_of(n, cap_events);
    for (uint64_t i = 0; i < n; i++)
        out[i] = p->events[(p->n_events - n + i) % QSF_PRESSURE_EVENTS];
    return (size_t)n;
}
