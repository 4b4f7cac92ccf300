/* statecache.h - the recurrent states of one sequence.
 *
 * A sequence has the state at one position, followed by the log of the latest pass's drafts: it
 * can continue after any of these, and at its snapshots. A pass reads the state and writes three
 * things: the state after its own tokens into another slot, the state at each multiple of 32
 * positions into slots that become snapshots, and a row for each draft into the log. They become
 * valid when the pass is committed: a pass that fails changes nothing.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/config.h"
#include "kernels/kernels.h"
#include "memory/arena.h"
#include "platform/pool.h"

/* A slot holds the states of all recurrent layers at one position of a sequence. A state cannot
 * be cut to fewer tokens, so a sequence keeps snapshots: slots that no later pass writes into.
 * Sequences with the same beginning share slots. A sequence never needs more than its part of the
 * pool, so taking a slot cannot fail. */

#define QSF_STATE_NO_SLOT UINT32_MAX /* instead of the state of position 0: zeros */

/* Snapshots are taken at positions that are multiples of this: the first of a KV page. */
#define QSF_STATE_STEP 32

/* Number of latest snapshots in the image of a sequence. */
#define QSF_STATE_IMAGE_SNAPSHOTS 2

typedef struct qsf_state_layer qsf_state_layer;

/* The tools of a replay */
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

/* Returns the state of a layer in a slot; NULL for QSF_STATE_NO_SLOT. */
static inline float *qsf_state_pool_at(const qsf_state_pool *pool, uint32_t slot, uint32_t layer)
{
    return slot == QSF_STATE_NO_SLOT
               ? NULL
               : pool->slots + slot * pool->slot_floats + pool->layers[layer].state_off;
}

typedef struct qsf_statecache {
    qsf_state_pool *pool;
    uint32_t *snapshots; /* [n_places] slot of position 32 (i + 1), or QSF_STATE_NO_SLOT */
    uint32_t n_snapshots;
    float *log;        /* [layers][n_drafts, row_floats] after `position` */
    uint32_t slot;     /* slot of the state at `position` */
    uint32_t position; /* QSF_STATE_NOWHERE: there is none */
    uint32_t n_logged;
    /* of the running pass */
    uint32_t *stops; /* [n_snapshots of the pool] slots of the states at multiples of 32, from */
    uint32_t first_stop; /* on */
    uint32_t n_stops;
    uint32_t next_slot; /* slot of the state at */
    uint32_t next_position;
    uint32_t n_next_logged;
    uint32_t loaded[4]; /* head of the image being loaded; bit i of the first word: the image has
                           snapshot i */
} qsf_statecache;

#define QSF_STATE_NOWHERE UINT32_MAX

/* Call once on a measuring arena and once on the real one. Its position is 0 then. */
void qsf_statecache_layout(qsf_statecache *s, qsf_arena *a, qsf_state_pool *pool);

/* Returns the last position <= `position` from which a pass can continue. */
uint32_t qsf_statecache_nearest(const qsf_statecache *s, uint32_t position);

/* Begins a pass at a nearest position: own tokens up to own_end - 1, then n_drafts drafts. */
void qsf_statecache_begin(qsf_statecache *s, uint32_t begin, uint32_t own_end, uint32_t n_drafts);
void qsf_statecache_commit(qsf_statecache *s);
void qsf_statecache_abandon(qsf_statecache *s);

/* Forgets the states after n_tokens. */
void qsf_statecache_trim(qsf_statecache *s, uint32_t n_tokens);

/* Shares the states of another sequence of the same pool, up to a nearest position of it. */
void qsf_statecache_share(qsf_statecache *s, qsf_statecache *from, uint32_t position);

/* The image at a nearest position: a list of its snapshots, the state, then the latest multiples
 * of 32 before the position; missing snapshots are zeros. */
uint64_t qsf_statecache_image_bytes(const qsf_statecache *s, uint32_t position);
void qsf_statecache_read_image(qsf_statecache *s, uint32_t position, uint64_t offset, void *dst,
                               size_t n_bytes);
void qsf_statecache_begin_image(qsf_statecache *s, uint32_t position);
void qsf_statecache_write_image(qsf_statecache *s, uint64_t offset, const void *src,
                                size_t n_bytes);
/* Makes a loaded image valid. */
void qsf_statecache_adopt(qsf_statecache *s);

/* ---- for mixers during a pass ---- */

/* The state of a layer before the first token of the pass; NULL: zeros */
static inline const float *qsf_statecache_before(const qsf_statecache *s, uint32_t layer)
{
    return qsf_state_pool_at(s->pool, s->slot, layer);
}

/* The state of a layer to be written: for i < n_stops at a multiple of 32, for i = n_stops after
 * the last own token. Sets its position. */
static inline float *qsf_statecache_after(const qsf_statecache *s, uint32_t layer, uint32_t i,
                                          uint32_t *position)
{
    *position = i < s->n_stops ? s->first_stop + i * QSF_STATE_STEP : s->next_position;
    return qsf_state_pool_at(s->pool, i < s->n_stops ? s->stops[i] : s->next_slot, layer);
}

/* The log's row of a draft, whose position is next_position or later */
static inline float *qsf_statecache_row(const qsf_statecache *s, uint32_t layer, uint32_t position)
{
    const qsf_state_layer *const l = &s->pool->layers[layer];
    return s->log + l->row_off * s->pool->n_drafts + (position - s->next_position) * l->row_floats;
}
