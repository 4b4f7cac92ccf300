/* kvcache.h - the pages that hold keys and values of one session.
 *
 * A page holds 32 positions of one KV head of one layer:
 *     K page [head_dim, 32]   positions lie in lanes, so scores need no horizontal sum
 *     V page [32, head_dim]
 * as f16, or f32 when exact. Logical position p lies in page p / 32, slot p % 32 of its
 * (layer, head) row of the page tables; which memory a page is, only the tables know.
 * Untouched pages cost no memory.
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

typedef struct qsf_kvcache {
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t n_pages;  /* per layer and KV head */
    size_t page_bytes; /* of one K or V page */
    bool is_f32;
    unsigned char *pages; /* [layers, kv_heads, n_pages, 2, page_bytes] */
    void **k_tables;      /* [layers, kv_heads, n_pages] */
    void **v_tables;      /* [layers, kv_heads, n_pages] */
} qsf_kvcache;

/* Layout code for a measuring and for a real arena; see qsf_kvcache_link. */
void qsf_kvcache_layout(qsf_kvcache *kv, qsf_arena *a, const qsf_config *c, uint32_t ctx_tokens,
                        bool is_f32);

/* Fills the page tables after the real layout. */
void qsf_kvcache_link(qsf_kvcache *kv, const qsf_config *c);

/* The page tables [n_pages] of one layer and KV head. */
const void *const *qsf_kvcache_k_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head);
const void *const *qsf_kvcache_v_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head);

/* Stores k or v [head_dim] of one position. Different heads may be stored from different
 * threads. */
void qsf_kvcache_store_k(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *key);
void qsf_kvcache_store_v(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *value);

/* Bytes of the pages that n_tokens positions touch. */
uint64_t qsf_kvcache_used_bytes(const qsf_kvcache *kv, const qsf_config *c, uint32_t n_tokens);

#endif
