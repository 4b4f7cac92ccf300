/* kvcache.h - the keys and values of one session: a table of blocks of a pool.
 *
 * Logical position p lies in page p / 32, slot p % 32, of each layer and KV head. The table has,
 * for each group of layers, the block of each page. A group with a window holds only the pages that
 * a chunk sees, as a ring: a new page replaces one that no token sees any more. Pages of pinned
 * positions stay outside of the ring.
 *
 * If the pool does not hold a whole context, the places of the first group are a ring as well: a
 * replaced page becomes cold. Functions that move cold pages return errors of their
 * file.
 *
 * A session takes blocks as it grows and gives them back. Sessions with the same beginning may
 * share blocks; a session copies a shared block before it writes.
 *
 * Keys and values may be rotated by a Hadamard matrix before they are stored. It spreads outliers
 * over the head, so that few bits suffice. Queries are then rotated too, and the attended values
 * are rotated back.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/config.h"
#include "include/qsf.h"
#include "kernels/kernels.h"
#include "memory/arena.h"
#include "platform/file.h"

/* A page holds 32 positions of the keys, or of the values, of one KV head of one layer, in the
 * layouts of kernels.h ("KV pages and attention"). Layers that keep equally many positions are a
 * group: those without a window, and those of each window. A block of a group is its pages of the
 * same 32 positions. A session's table (kvcache.h) has a place for each block that it may need:
 * for all of the context, or for the positions that a chunk sees through a window. If a session
 * keeps only a part of the context in memory, the first group's older pages are cold: in a file of
 * the session.
 *
 * Pages of a head lie in the order of the blocks, so consecutive blocks are consecutive pages.
 * Untouched pages cost no memory. */

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

/* ---- cold pages, in a file ---- */

/* A layer's records lie one after the other, so that attention reads many of them at
 * once. Checksums stay in memory: 4 bytes a page. */

typedef struct qsf_kv_cold {
    qsf_file file;
    const char *folder; /* folder of the file; for error texts */
    uint32_t n_records; /* for each layer of the first group, from position 0 on; 0: no page is ever
                           cold */
    uint32_t *checksums; /* [n_cold_pages of the pool] */
    uint64_t read_bytes; /* so far */
    uint64_t written_bytes;
} qsf_kv_cold;

/* Call once on a measuring arena and once on the real one. There is no file then. */
void qsf_kv_cold_layout(qsf_kv_cold *cold, qsf_arena *a, const qsf_kv_pool *pool);

/* Creates the file. `folder` is borrowed. Errors of qsf_file_create_unnamed(). */
qsf_status qsf_kv_cold_open(qsf_kv_cold *cold, const char *folder);

/* A page of a layer of the first group */
typedef struct qsf_kv_cold_page {
    const qsf_kv_layer *layer;
    uint32_t record;
    uint32_t kv_head;
    bool is_key;
} qsf_kv_cold_page;

/* Part `part` of a record: the keys and values of the KV heads in turn */
static inline qsf_kv_cold_page qsf_kv_cold_part(const qsf_kv_layer *layer, uint32_t record,
                                                uint32_t part)
{
    return (qsf_kv_cold_page){
        .layer = layer, .record = record, .kv_head = part / 2, .is_key = part % 2 == 0};
}

static inline size_t qsf_kv_cold_page_bytes(const qsf_kv_cold_page *p)
{
    return p->is_key ? p->layer->k_page_bytes : p->layer->v_page_bytes;
}

/* Writes bytes from .. to - 1 of a page. Parts of a page are written in ascending order.
 * QSF_ERR_IO: the disk is full, or fails. */
qsf_status qsf_kv_cold_write(qsf_kv_cold *cold, const qsf_kv_cold_page *page, size_t from,
                             size_t to, const void *src);

/* Reads bytes from .. to - 1 of a page. QSF_ERR_IO: it cannot be read; QSF_ERR_DAMAGED: the page
 * does not have its checksum. */
qsf_status qsf_kv_cold_read(qsf_kv_cold *cold, const qsf_kv_cold_page *page, size_t from, size_t to,
                            void *dst);

/* Reads records first .. end - 1 of a layer to dst. Errors as above. */
qsf_status qsf_kv_cold_read_records(qsf_kv_cold *cold, const qsf_kv_layer *layer, uint32_t first,
                                    uint32_t end, unsigned char *dst);

/* ---- the cache of a session ---- */

typedef struct qsf_kvcache {
    qsf_kv_pool *pool;
    uint32_t *blocks;  /* [n_places of the pool] or QSF_KV_NO_BLOCK */
    uint32_t home;     /* the part of the pool, of n_sessions parts, from which it takes blocks if
                          possible */
    uint32_t n_stored; /* last stored position + 1; 0: nothing valid is stored */
    uint32_t
        n_adopted;    /* pages of another cache were shared to continue at this position; 0: none */
    qsf_kv_cold cold; /* the first group's older pages, if the pool does not hold all of them */
} qsf_kvcache;

/* Call once on a measuring arena and once on the real one. The table is empty then. */
void qsf_kvcache_layout(qsf_kvcache *kv, qsf_arena *a, qsf_kv_pool *pool, uint32_t home);

/* True if heads of this model can be rotated. */
bool qsf_kvcache_can_rotate(const qsf_config *c);

/* Makes room for positions begin .. end - 1, which follow those stored before `begin`: takes
 * blocks, copies shared ones, releases blocks after `end`, and writes pages that become cold.
 * begin = 0 forgets all stored positions. QSF_ERR_NOMEM: too few blocks are free. After an error
 * positions before `begin` are unchanged. */
qsf_status qsf_kvcache_reserve(qsf_kvcache *kv, uint32_t begin, uint32_t end);

/* Releases the blocks whose positions are all >= n_tokens. Groups that are rings keep theirs unless
 * n_tokens is 0. */
void qsf_kvcache_trim(qsf_kvcache *kv, uint32_t n_tokens);

/* True if the pages still hold all positions that a token at `position` sees. */
bool qsf_kvcache_holds(const qsf_kvcache *kv, uint32_t position);

/* Write the addresses of pages first .. end - 1 of the span whose first page is `page`, a multiple
 * of 8, to entries first .. end - 1 of k_pages and v_pages [8]. None of them may be cold. */
void qsf_kvcache_find_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head, size_t page,
                            size_t first, size_t end, const void **k_pages, const void **v_pages);

/* Returns how many pages of a layer are cold, from the first on. */
uint32_t qsf_kvcache_cold_pages(const qsf_kvcache *kv, uint32_t layer);

/* Stores k or v [head_dim] of one position. Different heads may be stored from different
 * threads. */
void qsf_kvcache_store_k(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *key);
void qsf_kvcache_store_v(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *value);

/* The image of a cache at a position contains all that continuing there needs: for each layer
 * and KV head the pages of K, then those of V, from the first page that the position sees to the
 * page of the position before it. It does not depend on the context or the chunk. Only valid if
 * the cache holds the position. */
uint64_t qsf_kvcache_image_bytes(const qsf_kvcache *kv, uint32_t position);

/* Copy n_bytes of the image from `offset` on, which must be inside it. Before writing, reserve from
 * position 0 on. A cache that is written to holds nothing until it adopts the position. */
qsf_status qsf_kvcache_read_image(qsf_kvcache *kv, uint32_t position, uint64_t offset, void *dst,
                                  size_t n_bytes);
qsf_status qsf_kvcache_write_image(qsf_kvcache *kv, uint32_t position, uint64_t offset,
                                   const void *src, size_t n_bytes);

/* Replaces the blocks of this cache by those of `from` up to the position, which both share (same
 * pool), copies the cold pages of `from`, and sets this cache to the position. After an error trim
 * this cache to 0 tokens. */
qsf_status qsf_kvcache_share(qsf_kvcache *kv, qsf_kvcache *from, uint32_t position);

/* Call it after the whole image of `position` was written. */
void qsf_kvcache_adopt(qsf_kvcache *kv, uint32_t position);

/* Returns the bytes of the pages that n_tokens positions touch. */
uint64_t qsf_kvcache_used_bytes(const qsf_kvcache *kv, uint32_t n_tokens);
