/* kvcache.h - the keys and values of one session: a table of blocks of the pool (kvpool.h).
 *
 * Logical position p lies in page p / 32, slot p % 32, of each layer and KV head. The table has,
 * for each group of layers, the block of each page. A group with a window holds only the pages that
 * a chunk sees, as a ring: a new page replaces one that no token sees any more. Pages of pinned
 * positions stay outside of the ring.
 *
 * If the pool does not hold a whole context, the places of the first group are a ring as well: a
 * replaced page becomes cold (kvcold.h). Functions that move cold pages return errors of their
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

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cache/kv/kvcold.h"
#include "cache/kv/kvpool.h"

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
