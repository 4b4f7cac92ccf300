/* statecache.c - which states a sequence has, and how they move. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/state/statecache.h"

#include <assert.h>
#include <string.h>

#include "base/checked.h"

/* ---- the pool ---- */

/* States of a sequence: one that a pass reads, and one that it writes */
#define LIVE_SLOTS 2U
#define LEAST_SNAPSHOTS 2U

static uint32_t count_snapshots(const qsf_state_sizes *sizes, size_t slot_floats, uint32_t n_places)
{
    uint64_t n = sizes->snapshots_bytes / (slot_floats * sizeof(float));
    n = QSF_MAX(n, LEAST_SNAPSHOTS);
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

/* Takes a free slot for one holder; its contents are undefined. */
static uint32_t pool_take(qsf_state_pool *pool)
{
    uint32_t slot = 0;
    while (slot < pool->n_slots && pool->n_holders[slot] != 0)
        slot++;
    assert(slot < pool->n_slots);
    pool->n_holders[slot] = 1;
    return slot;
}

/* Counts one more holder of the slot, and returns the slot. NO_SLOT has no count. */
static uint32_t pool_hold(qsf_state_pool *pool, uint32_t slot)
{
    if (slot != QSF_STATE_NO_SLOT)
        pool->n_holders[slot]++;
    return slot;
}

static void pool_drop(qsf_state_pool *pool, uint32_t slot)
{
    if (slot != QSF_STATE_NO_SLOT)
        pool->n_holders[slot]--;
}

#define NO_SLOT QSF_STATE_NO_SLOT
#define NOWHERE QSF_STATE_NOWHERE
#define STEP QSF_STATE_STEP

void qsf_statecache_layout(qsf_statecache *s, qsf_arena *a, qsf_state_pool *pool)
{
    const uint64_t n_logged = (uint64_t)pool->row_floats * pool->n_drafts;
    *s = (qsf_statecache){.pool = pool, .slot = NO_SLOT, .next_slot = NO_SLOT};
    s->snapshots = qsf_arena_push(a, pool->n_places, sizeof *s->snapshots);
    s->stops = qsf_arena_push(a, pool->n_snapshots, sizeof *s->stops);
    s->log = qsf_arena_push(a, n_logged, sizeof *s->log);
    if (a->measuring || a->failed)
        return;
    for (uint32_t i = 0; i < pool->n_places; i++)
        s->snapshots[i] = NO_SLOT;
}

/* ---- snapshots ---- */

/* Returns the place of the snapshot at a multiple of 32, position > 0. */
static uint32_t *snapshot_at(const qsf_statecache *s, uint32_t position)
{
    return &s->snapshots[position / STEP - 1];
}

static void drop_snapshot(qsf_statecache *s, uint32_t place)
{
    if (s->snapshots[place] == NO_SLOT)
        return;
    pool_drop(s->pool, s->snapshots[place]);
    s->snapshots[place] = NO_SLOT;
    s->n_snapshots--;
}

static void drop_snapshots_behind(qsf_statecache *s, uint32_t position)
{
    for (uint32_t i = position / STEP; i < s->pool->n_places; i++)
        drop_snapshot(s, i);
}

/* Drops the snapshot whose neighbours are nearest to each other relative to their distance from
 * `end`: old snapshots become rare, recent ones stay dense. */
static void thin_out(qsf_statecache *s, uint32_t end)
{
    uint32_t victim = 0;
    double least = 0.0;
    uint32_t before = 0; /* position of the previous snapshot */
    uint32_t middle = 0; /* 1 + place of the snapshot being considered; 0: none */
    for (uint32_t i = 0; i <= s->pool->n_places; i++) {
        const bool is_end = i == s->pool->n_places;
        if (!is_end && s->snapshots[i] == NO_SLOT)
            continue;
        const uint32_t position = is_end ? end : (i + 1) * STEP;
        const double gap = (double)(position - before) / (double)(end - middle * STEP);
        if (middle != 0 && (victim == 0 || gap < least)) {
            victim = middle;
            least = gap;
        }
        before = middle * STEP;
        middle = i + 1;
    }
    drop_snapshot(s, victim - 1);
}

/* ---- passes ---- */

static void go_to(qsf_statecache *s, uint32_t slot, uint32_t position)
{
    pool_drop(s->pool, s->slot);
    s->slot = slot;
    s->position = position;
    s->n_logged = 0;
}

static bool covers(const qsf_statecache *s, uint32_t position)
{
    return s->position != NOWHERE && s->position <= position &&
           position <= s->position + s->n_logged;
}

uint32_t qsf_statecache_nearest(const qsf_statecache *s, uint32_t position)
{
    if (s->pool->slot_floats == 0 || covers(s, position))
        return position;
    uint32_t at = position / STEP * STEP;
    while (at > 0 && *snapshot_at(s, at) == NO_SLOT)
        at -= STEP;
    const uint32_t end = s->position != NOWHERE ? s->position + s->n_logged : 0;
    return end > at && end <= position ? end : at;
}

/* Returns a new slot with the state at a position that state and log cover. */
static uint32_t replay_to(const qsf_statecache *s, uint32_t position)
{
    const qsf_state_pool *const pool = s->pool;
    const uint32_t slot = pool_take(s->pool);
    for (uint32_t i = 0; i < pool->n_layers; i++) {
        const qsf_state_layer *const l = &pool->layers[i];
        if (l->state_floats != 0)
            l->replay(l, &pool->tools, qsf_state_pool_at(pool, s->slot, i),
                      s->log + l->row_off * pool->n_drafts, position - s->position,
                      qsf_state_pool_at(pool, slot, i));
    }
    return slot;
}

/* Makes the current state a snapshot, if its position allows it and it is none yet. */
static void keep_snapshot(qsf_statecache *s)
{
    if (s->position % STEP != 0 || *snapshot_at(s, s->position) != NO_SLOT)
        return;
    while (s->n_snapshots == s->pool->n_snapshots)
        thin_out(s, s->position + 1);
    *snapshot_at(s, s->position) = pool_hold(s->pool, s->slot);
    s->n_snapshots++;
}

/* Replays rows of the log up to a position that the log covers; later rows stay. */
static void replay_log(qsf_statecache *s, uint32_t position)
{
    const qsf_state_pool *const pool = s->pool;
    const uint32_t n = position - s->position;
    const uint32_t n_left = s->n_logged - n;
    go_to(s, replay_to(s, position), position);
    s->n_logged = n_left;
    for (uint32_t i = 0; i < pool->n_layers; i++) {
        const size_t n_floats = pool->layers[i].row_floats;
        float *const rows = s->log + pool->layers[i].row_off * pool->n_drafts;
        memmove(rows, rows + n * n_floats, n_left * n_floats * sizeof *rows);
    }
}

/* Advances the state to a position that state and log cover, and takes the snapshots on the way. */
static void advance(qsf_statecache *s, uint32_t position)
{
    while (s->position < position) {
        const uint32_t next = (s->position / STEP + 1) * STEP;
        replay_log(s, QSF_MIN(next, position));
        keep_snapshot(s);
    }
}

/* Sets the state to a nearest position. */
static void restore(qsf_statecache *s, uint32_t position)
{
    if (covers(s, position))
        advance(s, position);
    else
        go_to(s, position == 0 ? NO_SLOT : pool_hold(s->pool, *snapshot_at(s, position)), position);
}

/* Takes slots for the latest multiples of 32 up to own_end, as many as a sequence may have. */
static void take_stops(qsf_statecache *s, uint32_t begin, uint32_t own_end)
{
    const uint32_t last = own_end / STEP;
    uint32_t n = last - begin / STEP;
    n = QSF_MIN(n, s->pool->n_snapshots);
    while (s->n_snapshots + n > s->pool->n_snapshots)
        thin_out(s, own_end + 1);
    s->first_stop = (last - n + 1) * STEP;
    for (s->n_stops = 0; s->n_stops < n; s->n_stops++)
        s->stops[s->n_stops] = pool_take(s->pool);
}

void qsf_statecache_begin(qsf_statecache *s, uint32_t begin, uint32_t own_end, uint32_t n_drafts)
{
    if (s->pool->slot_floats == 0)
        return;
    qsf_statecache_abandon(s);
    restore(s, begin);
    s->n_logged = 0; /* its rows are overwritten */
    drop_snapshots_behind(s, begin);
    take_stops(s, begin, own_end);
    s->next_slot = pool_take(s->pool);
    s->next_position = own_end;
    s->n_next_logged = n_drafts;
}

void qsf_statecache_commit(qsf_statecache *s)
{
    if (s->next_slot == NO_SLOT)
        return;
    for (uint32_t i = 0; i < s->n_stops; i++)
        *snapshot_at(s, s->first_stop + i * STEP) = s->stops[i];
    s->n_snapshots += s->n_stops;
    s->n_stops = 0;
    go_to(s, s->next_slot, s->next_position);
    s->n_logged = s->n_next_logged;
    s->next_slot = NO_SLOT;
}

void qsf_statecache_abandon(qsf_statecache *s)
{
    for (uint32_t i = 0; i < s->n_stops; i++)
        pool_drop(s->pool, s->stops[i]);
    s->n_stops = 0;
    pool_drop(s->pool, s->next_slot);
    s->next_slot = NO_SLOT;
}

void qsf_statecache_trim(qsf_statecache *s, uint32_t n_tokens)
{
    qsf_statecache_abandon(s);
    drop_snapshots_behind(s, n_tokens);
    if (n_tokens == 0)
        go_to(s, NO_SLOT, 0);
    else if (s->position != NOWHERE && s->position > n_tokens)
        go_to(s, NO_SLOT, NOWHERE);
    else if (s->position != NOWHERE && s->n_logged > n_tokens - s->position)
        s->n_logged = n_tokens - s->position;
}

void qsf_statecache_share(qsf_statecache *s, qsf_statecache *from, uint32_t position)
{
    qsf_statecache_trim(s, 0);
    if (s->pool->slot_floats == 0)
        return;
    if (covers(from, position))
        advance(from, position);
    for (uint32_t i = 0; i < position / STEP; i++) {
        s->snapshots[i] = pool_hold(s->pool, from->snapshots[i]);
        s->n_snapshots += s->snapshots[i] != NO_SLOT;
    }
    if (from->position == position)
        go_to(s, pool_hold(s->pool, from->slot), position);
    else
        restore(s, position);
}

/* ---- images ---- */

static size_t slot_bytes(const qsf_statecache *s)
{
    return s->pool->slot_floats * sizeof(float);
}

/* Returns the position of snapshot i of an image; 0: the image lacks it. */
static uint32_t snapshot_of_image(uint32_t position, uint32_t i)
{
    const uint32_t last = position == 0 ? 0 : (position - 1) / STEP;
    return last > i ? (last - i) * STEP : 0;
}

uint64_t qsf_statecache_image_bytes(const qsf_statecache *s, uint32_t position)
{
    uint64_t n_bytes = 0;
    if (s->pool->slot_floats == 0 || position == 0)
        return 0;
    for (uint32_t i = 0; i < QSF_STATE_IMAGE_SNAPSHOTS; i++)
        n_bytes += snapshot_of_image(position, i) != 0 ? slot_bytes(s) : 0;
    return sizeof s->loaded + slot_bytes(s) + n_bytes;
}

/* Copies the overlap of part [begin, begin + n_part) of an image with [offset, offset + n_bytes)
 * to dst or from src. The part is at `here`; NULL means zeros. */
static void move_part(uint64_t begin, size_t n_part, void *here, uint64_t offset, void *dst,
                      const void *src, size_t n_bytes)
{
    const uint64_t from = QSF_MAX(begin, offset);
    const uint64_t to = QSF_MIN(begin + n_part, offset + n_bytes);
    if (from >= to)
        return;
    if (src != NULL)
        memcpy((char *)here + (from - begin), (const char *)src + (from - offset),
               (size_t)(to - from));
    else if (here != NULL && dst != NULL)
        memcpy((char *)dst + (from - offset), (char *)here + (from - begin), (size_t)(to - from));
    else if (dst != NULL)
        memset((char *)dst + (from - offset), 0, (size_t)(to - from));
}

void qsf_statecache_read_image(qsf_statecache *s, uint32_t position, uint64_t offset, void *dst,
                               size_t n_bytes)
{
    uint32_t head[4] = {0};
    uint64_t at = sizeof head;
    restore(s, position);
    move_part(at, slot_bytes(s), qsf_state_pool_at(s->pool, s->slot, 0), offset, dst, NULL,
              n_bytes);
    for (uint32_t i = 0; i < QSF_STATE_IMAGE_SNAPSHOTS; i++) {
        const uint32_t snapshot = snapshot_of_image(position, i);
        if (snapshot == 0)
            continue;
        const uint32_t slot = *snapshot_at(s, snapshot);
        head[0] |= (uint32_t)(slot != NO_SLOT) << i;
        at += slot_bytes(s);
        move_part(at, slot_bytes(s), qsf_state_pool_at(s->pool, slot, 0), offset, dst, NULL,
                  n_bytes);
    }
    move_part(0, sizeof head, head, offset, dst, NULL, n_bytes);
}

void qsf_statecache_begin_image(qsf_statecache *s, uint32_t position)
{
    if (s->pool->slot_floats == 0)
        return;
    qsf_statecache_trim(s, 0);
    if (position == 0)
        return;
    s->next_slot = pool_take(s->pool);
    s->next_position = position;
    s->n_next_logged = 0;
    for (uint32_t i = 0; i < QSF_STATE_IMAGE_SNAPSHOTS; i++)
        if (snapshot_of_image(position, i) != 0) {
            s->first_stop = snapshot_of_image(position, i);
            s->stops[s->n_stops++] = pool_take(s->pool);
        }
}

void qsf_statecache_write_image(qsf_statecache *s, uint64_t offset, const void *src, size_t n_bytes)
{
    uint64_t at = sizeof s->loaded;
    move_part(0, sizeof s->loaded, s->loaded, offset, NULL, src, n_bytes);
    move_part(at, slot_bytes(s), qsf_state_pool_at(s->pool, s->next_slot, 0), offset, NULL, src,
              n_bytes);
    for (uint32_t i = 0; i < s->n_stops; i++) {
        at += slot_bytes(s);
        move_part(at, slot_bytes(s), qsf_state_pool_at(s->pool, s->stops[i], 0), offset, NULL, src,
                  n_bytes);
    }
}

void qsf_statecache_adopt(qsf_statecache *s)
{
    const uint32_t n = s->n_stops; /* the latest first */
    for (uint32_t i = 0; i < n; i++) {
        if ((s->loaded[0] >> i & 1) != 0) {
            *snapshot_at(s, snapshot_of_image(s->next_position, i)) = s->stops[i];
            s->n_snapshots++;
        } else {
            pool_drop(s->pool, s->stops[i]);
        }
    }
    s->n_stops = 0;
    qsf_statecache_commit(s);
}
