/* experts_places.c - the memory that experts are read into: slots and transit slots. */
/* SPDX-License-Identifier: Apache-2.0 */

#include "base/checked.h"
#include "base/status.h"
#include "stream/experts_private.h"

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

/* Places are adjacent if possible: the disk reads faster into huge pages, which a single place
 * fills only in part. */
qsf_status qsf_experts_acquire_places(qsf_experts *e)
{
    const size_t n_bytes = qsf_experts_place_bytes(e->slot_bytes);
    unsigned char *const row =
        qsf_ledger_acquire_row(e->ledger, QSF_USE_EXPERTS, e->n_places, n_bytes);
    for (uint32_t i = 0; i < e->n_places; i++) {
        e->slots[i].stays = i < e->n_slots;
        if (row != NULL)
            use_memory(&e->slots[i], row + i * n_bytes);
        else if (!acquire_place(e, &e->slots[i]))
            return QSF_FAIL(QSF_ERR_NOMEM, "no memory for expert %u of %u in memory: %.1f MB", i,
                            e->n_places, qsf_mb(e->slot_bytes));
    }
    return QSF_OK;
}

void qsf_experts_empty(qsf_experts *e, qsf_expert_slot *s)
{
    if (s->expert != QSF_EXPERTS_NONE && e->slot_of[s->expert] == (uint32_t)(s - e->slots))
        e->slot_of[s->expert] = QSF_EXPERTS_NONE;
    s->state = QSF_SLOT_EMPTY;
    s->expert = QSF_EXPERTS_NONE;
    s->is_wanted = false;
}

void qsf_experts_release_place(qsf_experts *e, qsf_expert_slot *s)
{
    qsf_experts_empty(e, s);
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

void qsf_experts_lend_slots(qsf_experts *e, uint32_t n_tokens)
{
    const uint32_t most = most_read(e->reader, n_tokens);
    if (e->n_held >= qsf_experts_count(e->reader))
        return; /* nothing will be read */
    while (e->n_lent < most && e->n_lent < e->n_held / LENT_PART) {
        qsf_expert_slot *const s = &e->slots[find_worst(e)];
        qsf_experts_empty(e, s);
        s->stays = false;
        e->n_lent++;
    }
}

void qsf_experts_return_slots(qsf_experts *e)
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
    qsf_experts_release_place(e, &e->slots[worst]);
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
