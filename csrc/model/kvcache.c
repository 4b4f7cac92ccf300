/* kvcache.c - lays pages out in one block and finds them again. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/kvcache.h"

#include "base/checked.h"

static size_t table_idx(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head)
{
    return ((size_t)layer * kv->n_kv_heads + kv_head) * kv->n_pages;
}

void qsf_kvcache_layout(qsf_kvcache *kv, qsf_arena *a, const qsf_config *c, uint32_t ctx_tokens,
                        bool is_f32)
{
    const size_t value_bytes = is_f32 ? sizeof(float) : sizeof(uint16_t);
    *kv = (qsf_kvcache){
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .n_pages = (uint32_t)qsf_ceil_div(ctx_tokens, QSF_KV_PAGE_TOKENS),
        .page_bytes = (size_t)c->head_dim * QSF_KV_PAGE_TOKENS * value_bytes,
        .is_f32 = is_f32,
    };
    const size_t n_page_pairs = (size_t)c->n_layers * c->n_kv_heads * kv->n_pages;
    kv->k_tables = qsf_arena_push(a, n_page_pairs, sizeof *kv->k_tables);
    kv->v_tables = qsf_arena_push(a, n_page_pairs, sizeof *kv->v_tables);
    kv->pages = qsf_arena_push(a, n_page_pairs * 2, kv->page_bytes);
}

void qsf_kvcache_link(qsf_kvcache *kv, const qsf_config *c)
{
    const size_t n_page_pairs = (size_t)c->n_layers * c->n_kv_heads * kv->n_pages;
    for (size_t i = 0; i < n_page_pairs; i++) {
        kv->k_tables[i] = kv->pages + 2 * i * kv->page_bytes;
        kv->v_tables[i] = kv->pages + (2 * i + 1) * kv->page_bytes;
    }
}

const void *const *qsf_kvcache_k_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head)
{
    return (const void *const *)(kv->k_tables + table_idx(kv, layer, kv_head));
}

const void *const *qsf_kvcache_v_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head)
{
    return (const void *const *)(kv->v_tables + table_idx(kv, layer, kv_head));
}

void qsf_kvcache_store_k(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *key)
{
    const size_t page = table_idx(kv, layer, kv_head) + position / QSF_KV_PAGE_TOKENS;
    qsf_kv_store_fn *const store = kv->is_f32 ? k->k_store_f32 : k->k_store_f16;
    store(key, kv->head_dim, position % QSF_KV_PAGE_TOKENS, kv->k_tables[page]);
}

void qsf_kvcache_store_v(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *value)
{
    const size_t page = table_idx(kv, layer, kv_head) + position / QSF_KV_PAGE_TOKENS;
    qsf_kv_store_fn *const store = kv->is_f32 ? k->v_store_f32 : k->v_store_f16;
    store(value, kv->head_dim, position % QSF_KV_PAGE_TOKENS, kv->v_tables[page]);
}

uint64_t qsf_kvcache_used_bytes(const qsf_kvcache *kv, const qsf_config *c, uint32_t n_tokens)
{
    const uint64_t n_pages = qsf_ceil_div(n_tokens, QSF_KV_PAGE_TOKENS);
    return n_pages * 2 * kv->page_bytes * c->n_layers * c->n_kv_heads;
}
