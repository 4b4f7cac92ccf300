/* kvcache.c - lays out the pages and their tables. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/kvcache.h"

#include "base/checked.h"

static size_t table_idx(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head)
{
    return ((size_t)layer * kv->n_kv_heads + kv_head) * kv->n_pages;
}

void qsf_kvcache_layout(qsf_kvcache *kv, qsf_arena *a, const qsf_config *c, uint32_t ctx_tokens,
                        const qsf_kv_form *form)
{
    const size_t n_blocks = qsf_ceil_div(c->head_dim, QSF_BLOCK);
    const size_t n_tile_rows = QSF_KV_PAGE_TOKENS / QSF_TILE_ROWS;
    *kv = (qsf_kvcache){
        .form = *form,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .n_pages = (uint32_t)qsf_ceil_div(ctx_tokens, QSF_KV_PAGE_TOKENS),
        .k_page_bytes = n_tile_rows * n_blocks * qsf_dtype_tile_bytes(form->k_type),
        .v_page_bytes = n_blocks * qsf_kv_value_block_bytes(form->v_type),
    };
    const size_t n_page_pairs = (size_t)c->n_layers * c->n_kv_heads * kv->n_pages;
    kv->k_tables = qsf_arena_push(a, n_page_pairs, sizeof *kv->k_tables);
    kv->v_tables = qsf_arena_push(a, n_page_pairs, sizeof *kv->v_tables);
    kv->pages = qsf_arena_push(a, n_page_pairs, kv->k_page_bytes + kv->v_page_bytes);
}

void qsf_kvcache_link(qsf_kvcache *kv, const qsf_config *c)
{
    unsigned char *at = kv->pages;
    for (size_t head = 0; head < (size_t)c->n_layers * c->n_kv_heads; head++) {
        for (size_t i = 0; i < kv->n_pages; i++, at += kv->k_page_bytes)
            kv->k_tables[head * kv->n_pages + i] = at;
        for (size_t i = 0; i < kv->n_pages; i++, at += kv->v_page_bytes)
            kv->v_tables[head * kv->n_pages + i] = at;
    }
}

bool qsf_kvcache_can_rotate(const qsf_config *c)
{
    return c->head_dim >= 16 && c->head_dim <= 4096;
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
    k->k_store[kv->form.k_type](key, kv->head_dim, position % QSF_KV_PAGE_TOKENS,
                                kv->k_tables[page]);
}

void qsf_kvcache_store_v(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *value)
{
    const size_t page = table_idx(kv, layer, kv_head) + position / QSF_KV_PAGE_TOKENS;
    k->v_store[kv->form.v_type](value, kv->head_dim, position % QSF_KV_PAGE_TOKENS,
                                kv->v_tables[page]);
}

uint64_t qsf_kvcache_used_bytes(const qsf_kvcache *kv, const qsf_config *c, uint32_t n_tokens)
{
    const uint64_t n_pages = qsf_ceil_div(n_tokens, QSF_KV_PAGE_TOKENS);
    return n_pages * (kv->k_page_bytes + kv->v_page_bytes) * c->n_layers * c->n_kv_heads;
}
