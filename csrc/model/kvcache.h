/* kvcache.h - the pages that hold keys and values of one session.
 *
 * A page holds 32 positions of the keys, or of the values, of one KV head of one layer, in the
 * layouts of kernels.h ("KV pages and attention"). Logical position p lies in page p / 32,
 * slot p % 32, of its layer and head; the page tables have the addresses of the pages. Untouched
 * pages cost no memory. A layer with a window holds only the pages that a chunk sees, as a ring:
 * page p takes the place of page p - n_pages.
 *
 * Keys and values may be rotated by a Hadamard matrix before they are stored. It spreads outliers
 * over the head, so that few bits suffice. Queries are then rotated too, and the attended values
 * are rotated back.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_KVCACHE_H
#define QSF_MODEL_KVCACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "memory/arena.h"
#include "model/config.h"

/* How keys and values are stored; the same for all sessions of a model. */
typedef struct qsf_kv_form {
    qsf_dtype k_type; /* f32, f16, 8bit, 4bit or 2bit, as below */
    qsf_dtype v_type;
    bool is_rotated; /* by qsf_hadamard_fn; heads of 16 .. 4096 dimensions */
} qsf_kv_form;

/* The pages of one layer */
typedef struct qsf_kv_layer {
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t n_pages;   /* of a KV head */
    uint32_t n_entries; /* of a head's page table: of a ring, a span more than its pages */
    size_t first_entry; /* of the layer in the tables */
    size_t k_page_bytes;
    size_t v_page_bytes;
} qsf_kv_layer;

typedef struct qsf_kvcache {
    qsf_kv_form form;
    uint32_t n_stored;  /* one more than the last position that was stored; 0: none that counts */
    uint32_t n_adopted; /* pages were taken over for going on at this position; 0: they were not */
    qsf_kv_layer *layers; /* [n_layers] */
    unsigned char *pages; /* [layers, kv_heads]: n_pages pages of K, then n_pages of V */
    void **k_tables;      /* [layers, kv_heads, n_entries] */
    void **v_tables;      /* [layers, kv_heads, n_entries] */
} qsf_kvcache;

/* Call once on a measuring arena and once on the real one, then qsf_kvcache_link. */
void qsf_kvcache_layout(qsf_kvcache *kv, qsf_arena *a, const qsf_config *c, uint32_t ctx_tokens,
                        uint32_t chunk_tokens, const qsf_kv_form *form);

/* Fills the page tables after the real layout, with the same numbers. */
void qsf_kvcache_link(qsf_kvcache *kv, const qsf_config *c, uint32_t ctx_tokens,
                      uint32_t chunk_tokens);

/* True if heads of this model can be rotated. */
bool qsf_kvcache_can_rotate(const qsf_config *c);

/* Notes that a chunk will store positions up to `end`, the first of them `begin`. From position 0
 * on, what is stored is forgotten. */
void qsf_kvcache_begin_chunk(qsf_kvcache *kv, uint32_t begin, uint32_t end);

/* True if the pages still hold all positions that a token at `position` sees. */
bool qsf_kvcache_holds(const qsf_kvcache *kv, const qsf_config *c, uint32_t position);

/* Return the addresses of a span's pages, of which page `page`, a multiple of 8, is the first. */
const void *const *qsf_kvcache_k_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head,
                                       size_t page);
const void *const *qsf_kvcache_v_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head,
                                       size_t page);

/* Stores k or v [head_dim] of one position. Different heads may be stored from different
 * threads. */
void qsf_kvcache_store_k(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *key);
void qsf_kvcache_store_v(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *value);

/* The image of a cache at a position is what continuing there needs: of each layer and KV head the
 * pages of K, then those of V, from the first that the position sees to that of the position before
 * it. It does not depend on the context or the chunk. Meaningful if the cache holds the position.
 */
uint64_t qsf_kvcache_image_bytes(const qsf_kvcache *kv, const qsf_config *c, uint32_t position);

/* Copy n_bytes of the image from `offset` on, which must be inside it. Writing into a cache makes
 * it hold nothing, until it adopts the position. */
void qsf_kvcache_read_image(const qsf_kvcache *kv, const qsf_config *c, uint32_t position,
                            uint64_t offset, void *dst, size_t n_bytes);
void qsf_kvcache_write_image(qsf_kvcache *kv, const qsf_config *c, uint32_t position,
                             uint64_t offset, const void *src, size_t n_bytes);

/* Takes the image of a cache of the same model and form, page by page, and adopts the position. */
void qsf_kvcache_copy(qsf_kvcache *kv, const qsf_kvcache *from, const qsf_config *c,
                      uint32_t position);

/* Notes that the whole image of `position` was written. */
void qsf_kvcache_adopt(qsf_kvcache *kv, uint32_t position);

/* Returns the bytes of the pages that n_tokens positions touch. */
uint64_t qsf_kvcache_used_bytes(const qsf_kvcache *kv, const qsf_config *c, uint32_t n_tokens);

#endif
