/* statepool.h - memory for recurrent states: slots of one size that all sessions share.
 *
 * A slot holds the states of all recurrent layers at one position of a sequence. A state cannot
 * be cut to fewer tokens, so a sequence keeps snapshots: slots that no later pass writes into.
 * Sequences with the same beginning share slots. A sequence never needs more than its part of the
 * pool, so taking a slot cannot fail.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "format/config.h"
#include "kernels/kernels.h"
#include "memory/arena.h"
#include "platform/pool.h"

#define QSF_STATE_NO_SLOT UINT32_MAX /* instead of the state of position 0: zeros */

/* Snapshots are taken at positions that are multiples of this: the first of a KV page. */
#define QSF_STATE_STEP 32

/* Number of latest snapshots in the image of a sequence. */
#define QSF_STATE_IMAGE_SNAPSHOTS 2

typedef struct qsf_state_layer qsf_state_layer;

/* What a replay needs for its computation */
typedef struct qsf_state_tools {
    const qsf_kernels *kernels;
    qsf_pool *pool;
} qsf_state_tools;

/* to [state_floats] = the state `from` after n_rows logged rows; from may be NULL (zeros) */
typedef void qsf_state_replay_fn(const qsf_state_layer *l, const qsf_state_tools *tools,
                                 const float *from, const float *rows, size_t n_rows, float *to);

/* Memory of a layer's mixer: a state, and a row for each draft, from which a replay starts. */
struct qsf_state_layer {
    size_t state_floats; /* 0: the layer has none */
    size_t row_floats;
    qsf_state_replay_fn *replay;
    const qsf_layer_kind *kind; /* NULL if the replay does not need it */
    size_t state_off;           /* floats, in a slot */
    size_t row_off;             /* first float of the layer in a row of the log */
};

/* Fills the first fields, up to kind, for a layer of the model. */
typedef void qsf_state_describe_fn(const qsf_config *c, uint32_t layer, qsf_state_layer *out);

typedef struct qsf_state_sizes {
    uint32_t ctx_tokens; /* of a session */
    uint32_t n_sessions;
    uint32_t n_drafts;        /* most of a pass */
    uint64_t snapshots_bytes; /* of a session, for more snapshots than two */
} qsf_state_sizes;

typedef struct qsf_state_pool {
    uint32_t n_layers;
    qsf_state_layer *layers; /* [n_layers] */
    qsf_state_tools tools;   /* caller's own copy for each thread that replays */
    size_t slot_floats;      /* 0: no layer has a state */
    size_t row_floats;       /* of all layers */
    uint32_t n_drafts;
    uint32_t n_snapshots; /* most of a sequence */
    uint32_t n_places;    /* positions of a context that may have a snapshot */
    uint32_t n_slots;
    uint32_t *n_holders; /* [n_slots] */
    float *slots;        /* [n_slots, slot_floats] */
} qsf_state_pool;

/* Call once on a measuring arena and once on the real one. All slots are free then. */
void qsf_state_pool_layout(qsf_state_pool *pool, qsf_arena *a, const qsf_config *c,
                           qsf_state_describe_fn *describe, const qsf_state_sizes *sizes);

/* Returns the bytes of all slots. */
uint64_t qsf_state_pool_bytes(const qsf_state_pool *pool);

/* Takes a free slot for one holder; its contents are undefined. */
uint32_t qsf_state_pool_take(qsf_state_pool *pool);

/* Add or remove a holder; accept QSF_STATE_NO_SLOT. hold returns the slot. */
uint32_t qsf_state_pool_hold(qsf_state_pool *pool, uint32_t slot);
void qsf_state_pool_drop(qsf_state_pool *pool, uint32_t slot);

/* Returns the state of a layer in a slot; NULL for QSF_STATE_NO_SLOT. */
static inline float *qsf_state_pool_at(const qsf_state_pool *pool, uint32_t slot, uint32_t layer)
{
    return slot == QSF_STATE_NO_SLOT
               ? NULL
               : pool->slots + slot * pool->slot_floats + pool->layers[layer].state_off;
}
