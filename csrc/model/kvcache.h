/* kvcache.h - the pages that hold keys and values of one session.
 *
 * A page holds 32 positions of the keys, or of the values, of one KV head of one layer, in the
 * layouts of kernels.h ("KV pages and attention"). Logical position p lies in page p / 32,
 * slot p % 32, of its layer and head; the page tables have the addresses of the pages. Untouched
 * pages cost no memory.
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

typedef struct qsf_kvcache {
    qsf_kv_form form;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t n_pages; /* per layer and KV head */
    size_t k_page_bytes;
    size_t v_page_bytes;
    unsigned char *pages; /* [layers, kv_heads]: n_pages pages of K, then n_pages of V */
    void **k_tables;      /* [layers, kv_heads, n_pages] */
    void **v_tables;      /* [layers, kv_heads, n_pages] */
} qsf_kvcache;

/* Call once on a measuring arena and once on the real one, then qsf_kvcache_link. */
void qsf_kvcache_layout(qsf_kvcache *kv, qsf_arena *a, const qsf_config *c, uint32_t ctx_tokens,
                        const qsf_kv_form *form);

/* Fills the page tables after the real layout. */
void qsf_kvcache_link(qsf_kvcache *kv, const qsf_config *c);

/* True if heads of this model can be rotated. */
bool qsf_kvcache_can_rotate(const qsf_config *c);

/* Returns the page table [n_pages] of one layer and KV head. */
const void *const *qsf_kvcache_k_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head);
const void *const *qsf_kvcache_v_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head);

/* Stores k or v [head_dim] of one position. Different heads may be stored from different
 * threads. */
void qsf_kvcache_store_k(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *key);
void qsf_kvcache_store_v(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *value);

/* Returns the bytes of the pages that n_tokens positions touch. */
uint64_t qsf_kvcache_used_bytes(const qsf_kvcache *kv, const qsf_config *c, uint32_t n_tokens);

#endif
