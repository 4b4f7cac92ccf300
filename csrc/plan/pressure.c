/* pressure.c - decides when the model releases memory and when it acquires memory again.
 *
 *     available    0 ......... low ......... 2 low ......... 4 low + a unit ........
 *                  | give back  | as it is                    | take, if calm for 5 s
 *                  | up to 2 low|
 *
 * The gap prevents oscillation: taking a unit leaves more than 4 low. If each taking is followed
 * by a shortage, the wait doubles each time.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/checked.h"
#include "plan/plan.h"

#define SECOND_NS UINT64_C(1000000000)
#define PAUSE_NS (SECOND_NS / 4)
#define CALM_NS (5 * SECOND_NS)
#define MOST_CALM_NS (320 * SECOND_NS)
#define TAKE_PAUSE_NS SECOND_NS        /* between two units in one calm */
#define RELAPSE_NS (60 * SECOND_NS)    /* a shortage so soon after taking is its consequence */
#define STALL_PAUSE_NS (2 * SECOND_NS) /* the kernel updates the PSI averages this often */
#define STALLED_PERCENT 10.0           /* with little memory available, this means pressure too */
#define CALM_PERCENT 5.0               /* above this, it is not calm */
#define MOST_LOW_BYTES (UINT64_C(1) << 30)

/* A sixth of the available memory: when the other processes have released theirs, more than 4 low
 * are available again. */
void qsf_pressure_init(qsf_pressure *p, const qsf_pressure_signs *signs)
{
    const uint64_t low_bytes = QSF_MIN(signs->available_bytes / 6, signs->total_bytes / 20);
    *p = (qsf_pressure){
        .pause_ns = PAUSE_NS,
        .open_ns = signs->now_ns,
        .next_look_ns = signs->now_ns + PAUSE_NS,
        .low_bytes = QSF_MIN(low_bytes, MOST_LOW_BYTES),
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
        p->calm_ns = is_relapse ? QSF_MIN(2 * p->calm_ns, MOST_CALM_NS) : CALM_NS;
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

bool qsf_pressure_is_due(const qsf_pressure *p, uint64_t now_ns)
{
    return p->look != NULL && now_ns >= p->next_look_ns;
}

void qsf_pressure_record(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t n_bytes,
                         bool is_given, uint32_t n_units_resident)
{
    p->events[p->n_events++ % QSF_PRESSURE_EVENTS] = (qsf_memory_event){
        .seconds = (signs->now_ns - p->open_ns) / SECOND_NS,
        .bytes = n_bytes,
        .available_bytes = signs->available_bytes,
        .is_given_back = is_given,
        .n_units_resident = n_units_resident,
    };
    p->n_given_back += is_given;
    p->n_taken_again += !is_given;
    p->given_back_bytes += is_given ? n_bytes : 0;
    p->taken_again_bytes += is_given ? 0 : n_bytes;
}

size_t qsf_pressure_list_events(const qsf_pressure *p, qsf_memory_event *out, size_t cap_events)
{
    uint64_t n = QSF_MIN(p->n_events, QSF_PRESSURE_EVENTS);
    n = QSF_MIN(n, cap_events);
    for (uint64_t i = 0; i < n; i++)
        out[i] = p->events[(p->n_events - n + i) % QSF_PRESSURE_EVENTS];
    return (size_t)n;
}
