/* kvcache.c - lays out the pages and their tables. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/kvcache.h"

#include "base/checked.h"

/* Returns the pages of a KV head: all of the context, or as many as a chunk with its window can
 * touch. */
static uint32_t count_pages(const qsf_layer_kind *k, uint32_t ctx_tokens, uint32_t chunk_tokens)
{
    const size_t n_all = qsf_ceil_div(ctx_tokens, QSF_KV_PAGE_TOKENS);
    const size_t n_seen =
        qsf_ceil_div((size_t)k->window_tokens + chunk_tokens, QSF_KV_PAGE_TOKENS) + 1;
    return (uint32_t)(k->window_tokens != 0 && n_seen < n_all ? n_seen : n_all);
}

/* Returns the pages of a layer; first_entry is left to the caller. */
static qsf_kv_layer describe_layer(const qsf_layer_kind *k, uint32_t ctx_tokens,
                                   uint32_t chunk_tokens, const qsf_kv_form *form)
{
    const size_t n_blocks = qsf_ceil_div(k->head_dim, QSF_BLOCK);
    const size_t n_tile_rows = QSF_KV_PAGE_TOKENS / QSF_TILE_ROWS;
    const uint32_t n_pages = count_pages(k, ctx_tokens, chunk_tokens);
    const bool is_ring = n_pages < qsf_ceil_div(ctx_tokens, QSF_KV_PAGE_TOKENS);
    return (qsf_kv_layer){
        .n_kv_heads = k->n_kv_heads,
        .head_dim = k->head_dim,
        .n_pages = n_pages,
        .n_entries = n_pages + (is_ring ? QSF_KV_SPAN_PAGES - 1 : 0),
        .k_page_bytes = n_tile_rows * n_blocks * qsf_dtype_tile_bytes(form->k_type),
        .v_page_bytes = n_blocks * qsf_kv_value_block_bytes(form->v_type),
    };
}

void qsf_kvcache_layout(qsf_kvcache *kv, qsf_arena *a, const qsf_config *c, uint32_t ctx_tokens,
                        uint32_t chunk_tokens, const qsf_kv_form *form)
{
    uint64_t n_entries = 0; /* below 2^43: limits of layout.h */
    uint64_t pages_bytes = 0;
    *kv = (qsf_kvcache){.form = *form};
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const qsf_kv_layer l =
            describe_layer(c->layers[i].kind, ctx_tokens, chunk_tokens, form);
        const uint64_t page_bytes = (uint64_t)l.n_kv_heads * (l.k_page_bytes + l.v_page_bytes);
        uint64_t layer_bytes = UINT64_MAX;
        (void)qsf_mul_u64(page_bytes, l.n_pages, &layer_bytes);
        pages_bytes = qsf_add_capped(pages_bytes, layer_bytes);
        n_entries += (uint64_t)l.n_kv_heads * l.n_entries;
    }
    kv->layers = qsf_arena_push(a, c->n_layers, sizeof *kv->layers);
    kv->k_tables = qsf_arena_push(a, n_entries, sizeof *kv->k_tables);
    kv->v_tables = qsf_arena_push(a, n_entries, sizeof *kv->v_tables);
    kv->pages = qsf_arena_push(a, pages_bytes, 1);
}

/* Points a head's table at n_pages pages of page_bytes, again from the first for a ring. */
static unsigned char *link_pages(void **table, const qsf_kv_layer *l, size_t page_bytes,
                                 unsigned char *pages)
{
    for (size_t i = 0; i < l->n_entries; i++)
        table[i] = pages + i % l->n_pages * page_bytes;
    return pages + l->n_pages * page_bytes;
}

void qsf_kvcache_link(qsf_kvcache *kv, const qsf_config *c, uint32_t ctx_tokens,
                      uint32_t chunk_tokens)
{
    unsigned char *at = kv->pages;
    size_t entry = 0;
    for (uint32_t i = 0; i < c->n_layers; i++) {
        qsf_kv_layer *const l = &kv->layers[i];
        *l = describe_layer(c->layers[i].kind, ctx_tokens, chunk_tokens, &kv->form);
        l->first_entry = entry;
        for (uint32_t head = 0; head < l->n_kv_heads; head++, entry += l->n_entries) {
            at = link_pages(kv->k_tables + entry, l, l->k_page_bytes, at);
            at = link_pages(kv->v_tables + entry, l, l->v_page_bytes, at);
        }
    }
}

bool qsf_kvcache_can_rotate(const qsf_config *c)
{
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const uint32_t head_dim = c->layers[i].kind->head_dim;
        if (head_dim < 16 || head_dim > 4096)
            return false;
    }
    return true;
}

void qsf_kvcache_begin_chunk(qsf_kvcache *kv, uint32_t begin, uint32_t end)
{
    if (begin == 0 || end > kv->n_stored)
        kv->n_stored = end;
}

bool qsf_kvcache_holds(const qsf_kvcache *kv, const qsf_config *c, uint32_t position)
{
    const uint32_t end_page = (uint32_t)qsf_ceil_div(kv->n_stored, QSF_KV_PAGE_TOKENS);
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const uint32_t window = c->layers[i].kind->window_tokens;
        const uint32_t first = window != 0 && position >= window ? position + 1 - window : 0;
        if (first < position && first / QSF_KV_PAGE_TOKENS + kv->layers[i].n_pages < end_page)
            return false;
    }
    return true;
}

/* Returns the index in the tables of a page of a layer and KV head. */
static size_t entry_of(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head, size_t page)
{
    const qsf_kv_layer *const l = &kv->layers[layer];
    return l->first_entry + (size_t)kv_head * l->n_entries + page % l->n_pages;
}

const void *const *qsf_kvcache_k_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head,
                                       size_t page)
{
    return (const void *const *)(kv->k_tables + entry_of(kv, layer, kv_head, page));
}

const void *const *qsf_kvcache_v_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head,
                                       size_t page)
{
    return (const void *const *)(kv->v_tables + entry_of(kv, layer, kv_head, page));
}

void qsf_kvcache_store_k(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *key)
{
    const size_t entry = entry_of(kv, layer, kv_head, position / QSF_KV_PAGE_TOKENS);
    k->k_store[kv->form.k_type](key, kv->layers[layer].head_dim, position % QSF_KV_PAGE_TOKENS,
                                kv->k_tables[entry]);
}

void qsf_kvcache_store_v(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *value)
{
    const size_t entry = entry_of(kv, layer, kv_head, position / QSF_KV_PAGE_TOKENS);
    k->v_store[kv->form.v_type](value, kv->layers[layer].head_dim, position % QSF_KV_PAGE_TOKENS,
                                kv->v_tables[entry]);
}

uint64_t qsf_kvcache_used_bytes(const qsf_kvcache *kv, const qsf_config *c, uint32_t n_tokens)
{
    const uint64_t n_pages = qsf_ceil_div(n_tokens, QSF_KV_PAGE_TOKENS);
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const qsf_kv_layer *const l = &kv->layers[i];
        n_bytes += (n_pages < l->n_pages ? n_pages : l->n_pages) *
                   (l->k_page_bytes + l->v_page_bytes) * l->n_kv_heads;
    }
    return n_bytes;
}
