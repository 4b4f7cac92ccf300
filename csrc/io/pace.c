/* pace.c - compares numbers of reads in flight by turns. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "io/pace.h"

#include "base/checked.h"

#define FIRST 4                     /* good on most disks */
#define LEAST_NS UINT64_C(50000000) /* of a measurement */
#define LEAST_ROUNDS 4              /* of `most` reads each, in a measurement */
#define N_TURNS 4
#define CLEARLY 1.03      /* better: noise would else move the limit */
#define MOST_DISTURBED 16 /* measurements in a row; then the best number is better than a trial */
#define MOST_IDLE 64      /* measurements: a worse number costs a sixtieth of its loss */

void qsf_pace_init(qsf_pace *p, uint32_t most, bool is_fixed)
{
    *p = (qsf_pace){.most = most, .idle = 1, .is_rising = true};
    p->best = is_fixed || most == 1 ? 0 : QSF_MIN(most, FIRST);
    p->limit = p->best != 0 ? p->best : most;
}

static void end_comparison(qsf_pace *p)
{
    p->n_turns = 0;
    p->speeds[0] = p->speeds[1] = 0.0;
}

void qsf_pace_disturb(qsf_pace *p)
{
    p->n_reads = 0;
    if (p->best == 0 || p->n_turns == 0 || ++p->n_disturbed < MOST_DISTURBED)
        return;
    end_comparison(p);
    p->n_disturbed = 0;
    p->limit = p->best;
}

static uint32_t other_than_best(qsf_pace *p)
{
    if (p->is_rising ? p->best == p->most : p->best == 1)
        p->is_rising = !p->is_rising;
    return p->is_rising ? QSF_MIN(2 * p->best, p->most) : p->best / 2;
}

/* Both have had their turns. */
static void decide(qsf_pace *p)
{
    if (p->speeds[1] > CLEARLY * p->speeds[0]) {
        p->best = other_than_best(p);
        p->idle = 1;
    } else {
        p->is_rising = !p->is_rising;
        p->n_idle = p->idle;
        p->idle = QSF_MIN(2 * p->idle, MOST_IDLE);
    }
    end_comparison(p);
}

bool qsf_pace_count(qsf_pace *p, size_t n_bytes, uint64_t now_ns)
{
    if (p->best == 0)
        return false;
    if (p->n_reads++ < p->most) { /* started under the limit before this one */
        p->begin_ns = now_ns;
        p->n_bytes = 0;
        return false;
    }
    p->n_bytes += n_bytes;
    const uint64_t took_ns = now_ns - p->begin_ns;
    if (took_ns < LEAST_NS || p->n_reads < (1 + LEAST_ROUNDS) * p->most)
        return false;
    p->n_reads = p->n_disturbed = 0;
    if (p->n_idle > 0) {
        p->n_idle--;
        return false;
    }
    const uint32_t before = p->limit;
    p->speeds[p->n_turns++ % 2] += (double)p->n_bytes / (double)took_ns;
    if (p->n_turns == N_TURNS)
        decide(p);
    p->limit = p->n_turns % 2 == 0 ? p->best : other_than_best(p);
    return p->limit != before;
}
