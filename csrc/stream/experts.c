/* experts.c - requests of experts, the places that they are read into, and which of them stay. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/experts.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "platform/clock.h"

/* Counts of an expert that a share s of all tokens chooses approach s / (1 - decay). */
#define STEADY (1.0F / (1.0F - QSF_EXPERT_DECAY))
/* A chunk of 1024 tokens makes the unit 3e13 times larger: far below the largest float. */
#define MAX_UNIT 1e15F

void qsf_expert_policy_init(qsf_expert_policy *p, float *counts, uint32_t n)
{
    *p = (qsf_expert_policy){counts, n, 1.0F};
    for (uint32_t i = 0; i < n; i++)
        counts[i] *= STEADY;
}

void qsf_expert_policy_advance(qsf_expert_policy *p, uint32_t n_tokens)
{
    for (uint32_t t = 0; t < n_tokens; t++) {
        p->unit /= QSF_EXPERT_DECAY;
        if (p->unit <= MAX_UNIT)
            continue;
        for (uint32_t i = 0; i < p->n; i++)
            p->counts[i] /= p->unit;
        p->unit = 1.0F;
    }
}

void qsf_expert_policy_use(qsf_expert_policy *p, uint32_t expert, uint32_t n_tokens)
{
    p->counts[expert] += (float)n_tokens * p->unit;
}

bool qsf_expert_policy_is_worse(const qsf_expert_policy *p, uint32_t a, uint32_t a_distance,
                                uint32_t b, uint32_t b_distance)
{
    if (p->counts[a] != p->counts[b])
        return p->counts[a] < p->counts[b];
    return a_distance > b_distance;
}

bool qsf_expert_policy_admits(const qsf_expert_policy *p, uint32_t missing, uint32_t victim)
{
    return p->counts[missing] > p->counts[victim];
}

/* ---- places: slots and transit slots ---- */

uint32_t qsf_experts_count(const qsf_reader *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_pass_layers; i++)
        n += qsf_experts_of_layer(r, i);
    return n;
}

size_t qsf_experts_place_bytes(size_t slot_bytes)
{
    return slot_bytes + QSF_IO_ALIGN;
}

static void use_memory(qsf_expert_slot *s, void *memory)
{
    s->memory = memory;
    s->raw = (unsigned char *)memory + -(uintptr_t)memory % QSF_IO_ALIGN;
    s->state = QSF_SLOT_EMPTY;
    s->expert = QSF_EXPERTS_NONE;
}

static bool acquire_place(qsf_experts *e, qsf_expert_slot *s)
{
    void *const memory =
        qsf_ledger_acquire(e->ledger, QSF_USE_EXPERTS, qsf_experts_place_bytes(e->slot_bytes));
    if (memory != NULL)
        use_memory(s, memory);
    return memory != NULL;
}

/* Acquires memory for as many places as possible. Places are adjacent if possible: the disk reads
 * faster into huge pages, which a single place fills only in part. */
static qsf_status acquire_places(qsf_experts *e)
{
    const size_t n_bytes = qsf_experts_place_bytes(e->slot_bytes);
    unsigned char *const row =
        qsf_ledger_acquire_row(e->ledger, QSF_USE_EXPERTS, e->n_places, n_bytes);
    for (uint32_t i = 0; i < e->n_places; i++) {
        e->slots[i].stays = i < e->n_slots;
        if (row != NULL)
            use_memory(&e->slots[i], row + i * n_bytes);
        else if (!acquire_place(e, &e->slots[i]))
            return QSF_FAIL(NOMEM, "no memory for expert %u of %u in memory: %.1f MB", i,
                            e->n_places, qsf_mb(e->slot_bytes));
    }
    return QSF_OK;
}

/* Empties a place, and removes it from its expert. */
static void empty_place(qsf_experts *e, qsf_expert_slot *s)
{
    if (s->expert != QSF_EXPERTS_NONE && e->slot_of[s->expert] == (uint32_t)(s - e->slots))
        e->slot_of[s->expert] = QSF_EXPERTS_NONE;
    s->state = QSF_SLOT_EMPTY;
    s->expert = QSF_EXPERTS_NONE;
    s->is_wanted = false;
}

static void release_place(qsf_experts *e, qsf_expert_slot *s)
{
    empty_place(e, s);
    qsf_ledger_release(e->ledger, QSF_USE_EXPERTS, s->memory,
                       qsf_experts_place_bytes(e->slot_bytes));
    s->memory = NULL;
}

/* Returns an empty slot, or that of the least used expert; QSF_EXPERTS_NONE: no slot is left. */
static uint32_t find_worst(const qsf_experts *e)
{
    uint32_t worst = QSF_EXPERTS_NONE;
    for (uint32_t i = 0; i < e->n_places; i++) {
        const qsf_expert_slot *const s = &e->slots[i];
        if (s->memory == NULL || !s->stays)
            continue;
        const bool is_empty = s->state == QSF_SLOT_EMPTY;
        if (worst == QSF_EXPERTS_NONE || is_empty ||
            (e->slots[worst].state != QSF_SLOT_EMPTY &&
             qsf_expert_policy_is_worse(&e->policy, s->expert, 0, e->slots[worst].expert, 0)))
            worst = i;
    }
    return worst;
}

/* ---- chunks of prompts ---- */

/* Slots for the layer with most experts, if a chunk of n_tokens reads all its experts. */
static uint32_t most_read(const qsf_reader *r, uint32_t n_tokens)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < r->n_pass_layers; i++) {
        const qsf_layer_kind *const k = qsf_reader_layer_kind(r, i);
        if (n_tokens * k->n_chosen >= 2 * k->n_experts && k->n_experts > most)
            most = k->n_experts;
    }
    return most;
}

/* The slots are divided by this: such a share of them may be lent. */
#define LENT_PART 4

/* Before a pass of n_tokens that uses nearly all experts, lends a quarter of the slots, at most
 * one for each expert of a layer, as transit slots: those of the least used experts. The next
 * layer's experts are read into them while this layer's attention is computed. */
static void lend_slots(qsf_experts *e, uint32_t n_tokens)
{
    const uint32_t most = most_read(e->reader, n_tokens);
    if (e->n_held >= qsf_experts_count(e->reader))
        return; /* nothing will be read */
    while (e->n_lent < most && e->n_lent < e->n_held / LENT_PART) {
        qsf_expert_slot *const s = &e->slots[find_worst(e)];
        empty_place(e, s);
        s->stays = false;
        e->n_lent++;
    }
}

/* Returns lent slots. Nothing is in transit. */
static void return_slots(qsf_experts *e)
{
    for (uint32_t i = 0; e->n_lent > 0 && i < e->n_places; i++)
        if (!e->slots[i].stays) {
            e->slots[i].stays = true;
            e->n_lent--;
        }
}

/* ---- memory pressure ---- */

bool qsf_experts_give_slot(qsf_experts *e)
{
    const uint32_t worst = find_worst(e);
    if (worst == QSF_EXPERTS_NONE)
        return false;
    release_place(e, &e->slots[worst]);
    e->n_held--;
    return true;
}

bool qsf_experts_take_slot(qsf_experts *e)
{
    for (uint32_t i = 0; i < e->n_places; i++)
        if (e->slots[i].memory == NULL) {
            const bool is_there = acquire_place(e, &e->slots[i]);
            e->n_held += is_there;
            return is_there;
        }
    return false;
}

#define NONE QSF_EXPERTS_NONE
/* An expert is read in pieces: several reads run at once, and a piece is checked while the next
 * arrive. Larger pieces, and whole experts, were slower (bench/LOG.md). */
#define PIECE_BYTES ((size_t)1 << 20)
#define CANCEL_POLL_NS (UINT64_C(20) * 1000 * 1000)

/* ---- sizes ---- */

size_t qsf_experts_slot_bytes(const qsf_reader *r)
{
    uint64_t most_bytes = 0;
    for (uint32_t i = 0; i < r->n_pass_layers; i++)
        for (uint32_t j = 0; j < qsf_experts_of_layer(r, i); j++) {
            const uint64_t n_bytes = r->units[qsf_reader_layer(r, i)->first_expert + j].raw_bytes;
            most_bytes = QSF_MAX(n_bytes, most_bytes);
        }
    return qsf_round_up((size_t)most_bytes, QSF_IO_ALIGN);
}

size_t qsf_experts_table_bytes(const qsf_reader *r, uint32_t n_places)
{
    return r->n_experts * (sizeof(uint32_t) + sizeof(float)) +
           n_places * (sizeof(qsf_expert_slot) + sizeof(uint32_t));
}

/* ---- memory ---- */

static qsf_status acquire(qsf_experts *e, size_t n, size_t item_bytes, void *out)
{
    return qsf_ledger_take(e->ledger, QSF_USE_TABLES, n * item_bytes, "experts' tables", out);
}

static qsf_status acquire_all(qsf_experts *e)
{
    const size_t n = e->reader->n_experts;
    QSF_TRY(acquire(e, e->n_places, sizeof *e->slots, &e->slots));
    QSF_TRY(acquire(e, e->n_places, sizeof *e->jobs, &e->jobs));
    QSF_TRY(acquire(e, n, sizeof *e->slot_of, &e->slot_of));
    QSF_TRY(acquire(e, n, sizeof *e->counts, &e->counts));
    for (size_t i = 0; i < n; i++) {
        const float share = qsf_experts_unit(e, (uint32_t)i)->importance;
        e->slot_of[i] = NONE;
        e->counts[i] = share < 1.0F ? share : 0.0F; /* 1: not measured */
    }
    qsf_expert_policy_init(&e->policy, e->counts, (uint32_t)n);
    return acquire_places(e);
}

static qsf_status start_threads(qsf_experts *e)
{
    QSF_TRY(qsf_mutex_init(&e->lock));
    QSF_TRY(qsf_condition_init(&e->has_job));
    QSF_TRY(qsf_condition_init(&e->has_data));
    for (; e->n_threads < QSF_EXPERT_READERS; e->n_threads++)
        QSF_TRY(qsf_thread_start(&e->threads[e->n_threads], QSF_EXPERT_STACK_BYTES,
                                 qsf_experts_read, e));
    return QSF_OK;
}

/* Loads all experts if each has a slot. As for other weights, this reading is not counted. */
static qsf_status load_all(qsf_experts *e)
{
    static const uint32_t no_uses[QSF_MAX_LAYER_EXPERTS];
    uint32_t units[QSF_MAX_LAYER_EXPERTS];
    qsf_status status = QSF_OK;
    for (uint32_t i = 0; status == QSF_OK && i < e->reader->n_pass_layers; i++) {
        const uint32_t n = qsf_experts_of_layer(e->reader, i);
        for (uint32_t j = 0; j < n; j++)
            units[j] = qsf_reader_layer(e->reader, i)->first_expert + j;
        qsf_experts_request(e, i, units, no_uses, n);
        for (uint32_t j = 0; status == QSF_OK && j < n; j++) {
            const unsigned char *bytes;
            status = qsf_experts_take(e, j, &bytes);
        }
        qsf_experts_end(e);
    }
    e->totals = (qsf_expert_counts){0};
    return status;
}

qsf_status qsf_experts_init(qsf_experts *e, const qsf_reader *r, qsf_ledger *ledger,
                            const qsf_experts_options *options)
{
    *e = (qsf_experts){
        .reader = r,
        .ledger = ledger,
        .io = options->io,
        .slot_bytes = qsf_experts_slot_bytes(r),
        .piece_bytes = PIECE_BYTES,
        .n_slots = options->n_slots,
        .n_held = options->n_slots,
        .n_places = options->n_slots + options->n_transit,
    };
    if (e->slot_bytes == 0)
        return QSF_OK;
    qsf_status status = acquire_all(e);
    if (status == QSF_OK)
        status = start_threads(e);
    if (status == QSF_OK && e->n_slots >= qsf_experts_count(r))
        status = load_all(e);
    if (status != QSF_OK)
        qsf_experts_destroy(e);
    return status;
}

void qsf_experts_destroy(qsf_experts *e)
{
    if (e->n_threads > 0) {
        qsf_mutex_lock(&e->lock);
        e->is_stopping = true;
        qsf_condition_wake_all(&e->has_job);
        qsf_mutex_unlock(&e->lock);
        for (uint32_t i = 0; i < e->n_threads; i++)
            qsf_thread_join(&e->threads[i]);
    }
    qsf_condition_destroy(&e->has_data);
    qsf_condition_destroy(&e->has_job);
    qsf_mutex_destroy(&e->lock);
    for (uint32_t i = 0; e->counts != NULL && i < e->n_places; i++)
        release_place(e, &e->slots[i]);
    if (e->ledger != NULL) {
        const size_t n = e->reader->n_experts;
        qsf_ledger_release(e->ledger, QSF_USE_TABLES, e->counts, n * sizeof *e->counts);
        qsf_ledger_release(e->ledger, QSF_USE_TABLES, e->slot_of, n * sizeof *e->slot_of);
        qsf_ledger_release(e->ledger, QSF_USE_TABLES, e->jobs, e->n_places * sizeof *e->jobs);
        qsf_ledger_release(e->ledger, QSF_USE_TABLES, e->slots, e->n_places * sizeof *e->slots);
    }
    *e = (qsf_experts){0};
}

/* ---- requests ---- */

/* Layers from the requesting layer to the next use of an expert; its own layer is the farthest. */
static uint32_t distance_of(const qsf_experts *e, uint32_t expert)
{
    const uint32_t first = qsf_reader_layer(e->reader, e->layer_idx)->first_expert;
    const uint32_t here =
        qsf_reader_expert_place(e->reader, first) + qsf_experts_of_layer(e->reader, e->layer_idx);
    const uint32_t n = e->reader->n_experts;
    return (expert + n - here % n) % n; /* in experts instead of layers: the order is the same */
}

/* Returns the slot for a missing expert: an empty one, or that of the least used expert if the
 * policy agrees; NONE if there is none. */
static uint32_t find_slot(const qsf_experts *e, uint32_t missing)
{
    uint32_t worst = NONE;
    for (uint32_t i = 0; i < e->n_places; i++) {
        const qsf_expert_slot *const s = &e->slots[i];
        if (s->memory == NULL || !s->stays || s->is_wanted)
            continue;
        if (s->state == QSF_SLOT_EMPTY)
            return i;
        if (worst == NONE || qsf_expert_policy_is_worse(
                                 &e->policy, s->expert, distance_of(e, s->expert),
                                 e->slots[worst].expert, distance_of(e, e->slots[worst].expert)))
            worst = i;
    }
    if (worst != NONE && !qsf_expert_policy_admits(&e->policy, missing, e->slots[worst].expert))
        return NONE;
    return worst;
}

static uint32_t find_transit(const qsf_experts *e)
{
    for (uint32_t i = 0; i < e->n_places; i++)
        if (!e->slots[i].stays && e->slots[i].expert == NONE && e->slots[i].n_reading == 0)
            return i;
    return NONE;
}

/* Queues the read into the place. Caller holds the lock. */
static void queue(qsf_experts *e, uint32_t place, uint32_t expert)
{
    qsf_expert_slot *const s = &e->slots[place];
    empty_place(e, s);
    s->state = QSF_SLOT_QUEUED;
    s->expert = expert;
    s->done_bytes = 0;
    s->crc32 = 0;
    e->slot_of[expert] = place;
    s->job = e->end_job;
    e->jobs[e->end_job++ % e->n_places] = place;
}

/* A guess was right: if the expert may stay, its place and a slot exchange roles. */
static void keep_guess(qsf_experts *e, qsf_expert_slot *guess)
{
    const uint32_t place = find_slot(e, guess->expert);
    if (place == NONE)
        return;
    empty_place(e, &e->slots[place]);
    e->slots[place].stays = false;
    guess->stays = true;
}

/* Gives places to the missing experts of the request, in order, and then to guesses, as long as
 * places are free. */
static void place_wanted(qsf_experts *e)
{
    const uint64_t before = e->end_job;
    qsf_mutex_lock(&e->lock);
    for (; e->n_placed < e->n_wanted; e->n_placed++) {
        const uint32_t expert = qsf_reader_expert_place(e->reader, e->wanted[e->n_placed]);
        if (e->is_released[e->n_placed])
            continue; /* the guess was read in time */
        if (e->slot_of[expert] != NONE) {
            if (!e->slots[e->slot_of[expert]].stays)
                keep_guess(e, &e->slots[e->slot_of[expert]]);
            continue;
        }
        uint32_t place = find_slot(e, expert);
        if (place == NONE)
            place = find_transit(e);
        if (place == NONE)
            break;
        queue(e, place, expert);
        e->slots[place].is_wanted = true;
    }
    for (; e->n_placed == e->n_wanted && e->n_guesses > 0; e->n_guesses--, e->guesses++) {
        const uint32_t expert = qsf_reader_expert_place(e->reader, e->guesses[0]);
        if (e->slot_of[expert] != NONE)
            continue;
        const uint32_t place = find_transit(e);
        if (place == NONE)
            break;
        queue(e, place, expert);
        e->totals.n_guesses++;
    }
    if (e->end_job != before)
        qsf_condition_wake_all(&e->has_job);
    qsf_mutex_unlock(&e->lock);
}

/* Drops experts in transit places that the request does not want. Caller holds the lock. */
static void drop_guesses(qsf_experts *e)
{
    uint64_t end = e->next_job;
    const uint32_t first = e->next_job < e->end_job ? e->jobs[e->next_job % e->n_places] : NONE;
    for (uint32_t i = 0; i < e->n_places; i++)
        if (!e->slots[i].stays && !e->slots[i].is_wanted)
            empty_place(e, &e->slots[i]);
    for (uint64_t i = e->next_job; i < e->end_job; i++) {
        const uint32_t place = e->jobs[i % e->n_places];
        if (e->slots[place].state == QSF_SLOT_QUEUED)
            e->jobs[end++ % e->n_places] = place;
    }
    e->end_job = end;
    if (first != NONE && e->slots[first].state != QSF_SLOT_QUEUED)
        e->next_off = 0;
}

/* Prevents a deadlock. Experts are released in ascending order, and right guesses for later
 * experts may hold all places: then the last of these guesses is dropped in favour of the missing
 * expert. */
static void make_way(qsf_experts *e)
{
    uint32_t last = NONE;
    for (uint32_t i = 0; i < e->n_wanted && e->n_placed < e->n_wanted; i++) {
        const uint32_t place = e->slot_of[qsf_reader_expert_place(e->reader, e->wanted[i])];
        if (place == NONE || e->slots[place].stays)
            continue;
        if (i < e->n_placed)
            return;
        last = place;
    }
    if (last == NONE)
        return;
    qsf_mutex_lock(&e->lock);
    e->slots[last].is_wanted = false;
    drop_guesses(e);
    qsf_mutex_unlock(&e->lock);
    place_wanted(e);
}

void qsf_experts_begin_pass(qsf_experts *e, uint32_t n_tokens, const qsf_cancel *cancel,
                            qsf_stopwatch *stopwatch)
{
    e->cancel = cancel;
    e->stopwatch = stopwatch;
    if (e->n_places == 0)
        return;
    qsf_expert_policy_advance(&e->policy, n_tokens);
    lend_slots(e, n_tokens);
}

void qsf_experts_request(qsf_experts *e, uint32_t layer_idx, const uint32_t *wanted,
                         const uint32_t *uses, uint32_t n_wanted)
{
    assert(e->n_wanted == 0);
    e->layer_idx = layer_idx;
    e->wanted = wanted;
    e->n_wanted = n_wanted;
    e->n_placed = 0;
    e->n_released = 0;
    e->n_missing = n_wanted;
    e->totals.n_uses += n_wanted;
    qsf_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < n_wanted; i++) {
        const uint32_t expert = qsf_reader_expert_place(e->reader, wanted[i]);
        e->is_released[i] = false;
        qsf_expert_policy_use(&e->policy, expert, uses[i]);
        if (e->slot_of[expert] == NONE)
            continue;
        qsf_expert_slot *const s = &e->slots[e->slot_of[expert]];
        s->is_wanted = s->state != QSF_SLOT_FAILED; /* a guess whose read failed is read again */
        e->totals.n_hits += s->stays;
        e->n_missing -= s->stays;
        e->totals.n_right_guesses += !s->stays;
    }
    drop_guesses(e);
    qsf_mutex_unlock(&e->lock);
    place_wanted(e);
    make_way(e);
}

void qsf_experts_guess(qsf_experts *e, const uint32_t *units, uint32_t n)
{
    assert(e->n_wanted > 0);
    e->guesses = units;
    e->n_guesses = n;
    place_wanted(e);
}

/* Waits until the read of a dropped guess ends, which frees its place. */
static void wait_for_place(qsf_experts *e)
{
    qsf_mutex_lock(&e->lock);
    if (e->n_reading > 0 && find_transit(e) == NONE)
        qsf_condition_wait(&e->has_data, &e->lock);
    qsf_mutex_unlock(&e->lock);
    place_wanted(e);
}

/* Waits until the place is filled. */
static qsf_status wait_for(qsf_experts *e, const qsf_expert_slot *s)
{
    qsf_status status = QSF_OK;
    uint64_t begin_ns = 0;
    qsf_mutex_lock(&e->lock);
    while (s->state == QSF_SLOT_QUEUED && status == QSF_OK) {
        if (begin_ns == 0)
            begin_ns = qsf_clock_ns();
        if (qsf_cancel_is_set(e->cancel))
            status =
                QSF_FAIL(CANCELLED, "cancelled while reading experts of layer %u", e->layer_idx);
        else
            qsf_condition_wait_for(&e->has_data, &e->lock, CANCEL_POLL_NS);
    }
    if (s->state == QSF_SLOT_FAILED)
        status = qsf_fail(e->failure_status, "%s", e->failure);
    qsf_mutex_unlock(&e->lock);
    if (begin_ns != 0) {
        const uint64_t end_ns = qsf_clock_ns();
        e->totals.wait_ns += end_ns - begin_ns;
        qsf_stopwatch_set_aside(e->stopwatch, QSF_PHASE_WAIT, begin_ns, end_ns);
    }
    return status;
}

bool qsf_experts_is_ready(qsf_experts *e, uint32_t i)
{
    assert(i < e->n_wanted);
    const uint32_t place = e->slot_of[qsf_reader_expert_place(e->reader, e->wanted[i])];
    qsf_mutex_lock(&e->lock);
    const bool is_ready = place != NONE && e->slots[place].state == QSF_SLOT_READY;
    qsf_mutex_unlock(&e->lock);
    return is_ready;
}

uint32_t qsf_experts_next(const qsf_experts *e)
{
    uint32_t next = e->n_placed; /* if none has a place, the next one to get a place */
    uint64_t next_job = UINT64_MAX;
    for (uint32_t i = 0; i < e->n_wanted; i++) {
        const uint32_t place = e->slot_of[qsf_reader_expert_place(e->reader, e->wanted[i])];
        if (place == NONE || !e->slots[place].is_wanted || e->slots[place].job >= next_job)
            continue;
        next = i;
        next_job = e->slots[place].job;
    }
    return next;
}

qsf_status qsf_experts_take(qsf_experts *e, uint32_t i, const unsigned char **out)
{
    assert(i < e->n_wanted);
    const uint32_t expert = qsf_reader_expert_place(e->reader, e->wanted[i]);
    place_wanted(e);
    while (e->slot_of[expert] == NONE)
        wait_for_place(e);
    const qsf_expert_slot *const s = &e->slots[e->slot_of[expert]];
    QSF_TRY(wait_for(e, s));
    *out = s->raw;
    return QSF_OK;
}

void qsf_experts_release(qsf_experts *e, uint32_t i)
{
    const uint32_t place = e->slot_of[qsf_reader_expert_place(e->reader, e->wanted[i])];
    assert(place != NONE);
    e->slots[place].is_wanted = false;
    e->is_released[i] = true;
    e->n_released++;
    if (!e->slots[place].stays)
        empty_place(e, &e->slots[place]);
    place_wanted(e);
}

/* Ends all reading. Caller holds the lock. */
static void stop_reading(qsf_experts *e)
{
    for (; e->next_job < e->end_job; e->next_job++)
        e->slots[e->jobs[e->next_job % e->n_places]].state = QSF_SLOT_FAILED;
    e->next_off = 0;
    while (e->n_reading > 0)
        qsf_condition_wait(&e->has_data, &e->lock);
    e->failure_status = QSF_OK;
}

void qsf_experts_end(qsf_experts *e)
{
    if (e->n_wanted == 0)
        return;
    qsf_mutex_lock(&e->lock);
    if (e->n_released < e->n_wanted)
        stop_reading(e);
    for (uint32_t i = 0; i < e->n_places; i++) {
        qsf_expert_slot *const s = &e->slots[i];
        if (s->is_wanted && (!s->stays || s->state == QSF_SLOT_FAILED))
            empty_place(e, s);
        s->is_wanted = false;
    }
    qsf_mutex_unlock(&e->lock);
    e->n_wanted = e->n_guesses = 0;
    e->wanted = NULL;
}

void qsf_experts_end_pass(qsf_experts *e)
{
    if (e->n_threads == 0) /* no experts */
        return;
    qsf_experts_end(e);
    qsf_mutex_lock(&e->lock);
    stop_reading(e);
    drop_guesses(e);
    qsf_mutex_unlock(&e->lock);
    return_slots(e);
}

void qsf_experts_report(qsf_experts *e, qsf_stats *out)
{
    if (e->n_threads == 0) /* no experts */
        return;
    qsf_mutex_lock(&e->lock);
    const qsf_expert_counts totals = e->totals;
    qsf_mutex_unlock(&e->lock);
    out->n_expert_uses = totals.n_uses;
    out->n_expert_hits = totals.n_hits;
    out->n_expert_guesses = totals.n_guesses;
    out->n_expert_right_guesses = totals.n_right_guesses;
    out->expert_read_bytes = totals.read_bytes;
    out->read_bytes += totals.read_bytes;
    out->checksum_ns += totals.checksum_ns;
    out->wait_ns += totals.wait_ns;
}
