/* kvpool.h - the pages that hold keys and values, in blocks that all sessions share.
 *
 * A page holds 32 positions of the keys, or of the values, of one KV head of one layer, in the
 * layouts of kernels.h ("KV pages and attention"). Layers that keep equally many positions are a
 * group: those without a window, and those of each window. A block of a group is its pages of the
 * same 32 positions. A session's table (kvcache.h) has a place for each block that it may need:
 * for all of the context, or for the positions that a chunk sees through a window. If a session
 * keeps only a part of the context in memory, the first group's older pages are cold: in a file of
 * the session (kvcold.h).
 *
 * Pages of a head lie in the order of the blocks, so consecutive blocks are consecutive pages.
 * Untouched pages cost no memory.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"
#include "kernels/kernels.h"
#include "memory/arena.h"
#include "format/config.h"

/* Layers with more kinds of windows than this keep the whole context. */
#define QSF_KV_MOST_GROUPS 8

#define QSF_KV_NO_BLOCK UINT32_MAX

/* How keys and values are stored; the same for all sessions of a model. */
typedef struct qsf_kv_form {
    qsf_dtype k_type; /* f32, f16, 8bit, 4bit or 2bit, as below */
    qsf_dtype v_type;
    bool is_rotated; /* by qsf_hadamard_fn; heads of 16 .. 4096 dimensions */
} qsf_kv_form;

/* How much a pool holds. */
typedef struct qsf_kv_sizes {
    uint32_t ctx_tokens;   /* of a session */
    uint32_t chunk_tokens; /* stored at once, drafts included */
    uint32_t n_sessions;
    uint32_t n_contexts; /* of ctx_tokens that fit, 1 .. n_sessions */
    /* newest positions that stay in memory for each session, in addition to a chunk; 0: all of
     * the context */
    uint32_t resident_tokens;
} qsf_kv_sizes;

/* Approximate size in bytes of the buffer that cold pages pass through. */
#define QSF_KV_TRANSIT_BYTES ((size_t)1 << 18)

/* Returns the pages of the positions that a layer sees outside of its window. */
static inline uint32_t qsf_kv_pinned_pages(const qsf_layer_kind *k)
{
    return (k->pinned_tokens + QSF_KV_PAGE_TOKENS - 1) / QSF_KV_PAGE_TOKENS;
}

/* Where the pages of a layer are */
typedef struct qsf_kv_layer {
    const qsf_layer_kind *kind;
    uint32_t n_kv_heads;
    uint32_t head_dim;  /* of a key */
    uint32_t value_dim; /* of a value */
    uint32_t group_idx;
    size_t k_page_bytes;
    size_t v_page_bytes;  /* 0: the values are the first dimensions of the keys */
    unsigned char *pages; /* [kv_heads]: n_blocks pages of K, then n_blocks of V */
    uint64_t cold_off;    /* of its records in a session's file */
    size_t first_cold;    /* index of its first page there */
} qsf_kv_layer;

/* Returns the number of parts of a layer's pages of the same 32 positions: part 2 h is K of head h,
 * part 2 h + 1 is V; only part 0 if the values are in the keys, whose head is the only one. */
static inline uint32_t qsf_kv_part_count(const qsf_kv_layer *l)
{
    return l->v_page_bytes != 0 ? 2 * l->n_kv_heads : l->n_kv_heads;
}

/* Returns the bytes of a record: a layer's pages of the same 32 positions, of each head K and V. */
static inline size_t qsf_kv_record_bytes(const qsf_kv_layer *l)
{
    return l->n_kv_heads * (l->k_page_bytes + l->v_page_bytes);
}

typedef struct qsf_kv_group {
    uint32_t n_places;    /* in a session's table */
    uint32_t n_pinned;    /* places of the first pages; the other places are a ring */
    uint32_t first_place; /* in a session's table */
    uint32_t n_blocks;
    uint32_t n_free;
    uint32_t *n_holders; /* [n_blocks] tables that have the block */
} qsf_kv_group;

/* Not thread-safe: only one thread at a time may take, share or release blocks. Pages may be read
 * and written meanwhile. */
typedef struct qsf_kv_pool {
    qsf_kv_form form;
    uint32_t n_layers;
    uint32_t n_saved_layers; /* those in an image: not the MTP head, which only guesses */
    uint32_t n_groups;       /* group 0: the layers without a window */
    uint32_t n_places;       /* of a session's table */
    uint32_t n_sessions;
    uint32_t n_cold_records; /* of a layer of the first group, for all of the context; 0: no page
                              * is ever cold */
    size_t n_cold_pages;     /* in all of them */
    size_t most_record_bytes;
    uint64_t
        cold_token_bytes; /* bytes of cold pages that a token at the end of a full context reads */
    qsf_kv_group groups[QSF_KV_MOST_GROUPS];
    qsf_kv_layer *layers; /* [n_layers] */
} qsf_kv_pool;

/* Returns the bytes of a K page or a V page. */
size_t qsf_kv_page_bytes(uint32_t head_dim, qsf_dtype type);

/* Call once on a measuring arena and once on the real one. All blocks are free then. */
void qsf_kv_pool_layout(qsf_kv_pool *pool, qsf_arena *a, const qsf_config *c,
                        const qsf_kv_sizes *sizes, const qsf_kv_form *form);

/* Returns the size of the buffer for cold pages, at least the pages of a span; 0: no page is
 * ever cold. */
size_t qsf_kv_transit_bytes(const qsf_kv_pool *pool);

/* Takes a free block for one holder: `wanted` if it is free, else the next one after it. Its
 * pages are zeroed, or copied from block `from`. QSF_KV_NO_BLOCK if none is free. */
uint32_t qsf_kv_pool_take(qsf_kv_pool *pool, uint32_t group_idx, uint32_t wanted, uint32_t from);

/* Add or remove a holder; accept QSF_KV_NO_BLOCK. */
void qsf_kv_pool_hold(qsf_kv_pool *pool, uint32_t group_idx, uint32_t block);
void qsf_kv_pool_drop(qsf_kv_pool *pool, uint32_t group_idx, uint32_t block);

/* Returns the place of a page in the group's part of a table. */
static inline uint32_t qsf_kv_place(const qsf_kv_group *g, size_t page)
{
    return (uint32_t)(page < g->n_pinned
                          ? page
                          : g->n_pinned + (page - g->n_pinned) % (g->n_places - g->n_pinned));
}

/* Return a page of a layer's KV head. */
static inline unsigned char *qsf_kv_pool_k_page(const qsf_kv_pool *pool, const qsf_kv_layer *l,
                                                uint32_t kv_head, uint32_t block)
{
    const size_t n_blocks = pool->groups[l->group_idx].n_blocks;
    return l->pages + kv_head * n_blocks * (l->k_page_bytes + l->v_page_bytes) +
           block * l->k_page_bytes;
}

static inline unsigned char *qsf_kv_pool_v_page(const qsf_kv_pool *pool, const qsf_kv_layer *l,
                                                uint32_t kv_head, uint32_t block)
{
    const size_t n_blocks = pool->groups[l->group_idx].n_blocks;
    return l->pages + kv_head * n_blocks * (l->k_page_bytes + l->v_page_bytes) +
           n_blocks * l->k_page_bytes + block * l->v_page_bytes;
}
