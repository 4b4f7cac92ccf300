/* statepool.c - lays out the slots and counts their holders. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/state/statepool.h"

#include <assert.h>
#include <string.h>

#include "base/checked.h"

/* States of a sequence: one that a pass reads, and one that it writes */
#define LIVE_SLOTS 2U
#define LEAST_SNAPSHOTS 2U

static uint32_t count_snapshots(const qsf_state_sizes *sizes, size_t slot_floats, uint32_t n_places)
{
    uint64_t n = sizes->snapshots_bytes / (slot_floats * sizeof(float));
    n = n < LEAST_SNAPSHOTS ? LEAST_SNAPSHOTS : n;
    return n < n_places ? (uint32_t)n : n_places;
}

void qsf_state_pool_layout(qsf_state_pool *pool, qsf_arena *a, const qsf_config *c,
                           qsf_state_describe_fn *describe, const qsf_state_sizes *sizes)
{
    *pool = (qsf_state_pool){.n_layers = c->n_layers, .n_drafts = sizes->n_drafts};
    pool->layers = qsf_arena_push(a, c->n_layers, sizeof *pool->layers);
    const bool is_real = !a->measuring && !a->failed;
    for (uint32_t i = 0; i < c->n_layers; i++) {
        qsf_state_layer l = {0};
        describe(c, i, &l);
        l.state_off = pool->slot_floats;
        l.row_off = pool->row_floats;
        /* Each layer's state begins at a cache line. */
        pool->slot_floats += qsf_round_up(l.state_floats, QSF_ARENA_ALIGN / sizeof(float));
        pool->row_floats += l.row_floats;
        if (is_real)
            pool->layers[i] = l;
    }
    if (pool->slot_floats == 0)
        return;
    pool->n_places = sizes->ctx_tokens / QSF_STATE_STEP;
    pool->n_snapshots = count_snapshots(sizes, pool->slot_floats, pool->n_places);
    pool->n_slots = sizes->n_sessions * (LIVE_SLOTS + pool->n_snapshots);
    pool->n_holders = qsf_arena_push(a, pool->n_slots, sizeof *pool->n_holders);
    pool->slots =
        qsf_arena_push(a, (uint64_t)pool->n_slots * pool->slot_floats, sizeof *pool->slots);
    if (!a->measuring && !a->failed)
        memset(pool->n_holders, 0, pool->n_slots * sizeof *pool->n_holders);
}

uint64_t qsf_state_pool_bytes(const qsf_state_pool *pool)
{
    uint64_t n_bytes = UINT64_MAX;
    (void)qsf_mul_u64((uint64_t)pool->n_slots * sizeof(float), pool->slot_floats, &n_bytes);
    return n_bytes;
}

uint32_t qsf_state_pool_take(qsf_state_pool *pool)
{
    uint32_t slot = 0;
    while (slot < pool->n_slots && pool->n_holders[slot] != 0)
        slot++;
    assert(slot < pool->n_slots);
    pool->n_holders[slot] = 1;
    return slot;
}

uint32_t qsf_state_pool_hold(qsf_state_pool *pool, uint32_t slot)
{
    if (slot != QSF_STATE_NO_SLOT)
        pool->n_holders[slot]++;
    return slot;
}

void qsf_state_pool_drop(qsf_state_pool *pool, uint32_t slot)
{
    if (slot != QSF_STATE_NO_SLOT)
        pool->n_holders[slot]--;
}
