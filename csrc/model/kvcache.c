/* kvcache.c - lays out the pages and their tables. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/kvcache.h"

#include <string.h>

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
        const qsf_kv_layer l = describe_layer(c->layers[i].kind, ctx_tokens, chunk_tokens, form);
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
    if (begin == 0)
        kv->n_adopted = 0;
    if (begin == 0 || end > kv->n_stored)
        kv->n_stored = end;
}

/* Returns the first position that a token at `position` sees. */
static uint32_t first_seen(const qsf_layer_kind *k, uint32_t position)
{
    return k->window_tokens != 0 && position >= k->window_tokens ? position + 1 - k->window_tokens
                                                                 : 0;
}

bool qsf_kvcache_holds(const qsf_kvcache *kv, const qsf_config *c, uint32_t position)
{
    const uint32_t end_page = (uint32_t)qsf_ceil_div(kv->n_stored, QSF_KV_PAGE_TOKENS);
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const qsf_layer_kind *const kind = c->layers[i].kind;
        const uint32_t first_page = first_seen(kind, position) / QSF_KV_PAGE_TOKENS;
        if (first_seen(kind, position) < position &&
            (first_page + kv->layers[i].n_pages < end_page ||
             first_page < first_seen(kind, kv->n_adopted) / QSF_KV_PAGE_TOKENS))
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

/* ---- images ---- */

/* The part of an image that belongs to one layer, KV head, and K or V */
typedef struct qsf_image_part {
    void **table;
    uint32_t n_table; /* pages, from which the table repeats */
    uint32_t first_page;
    uint32_t end_page;
    size_t page_bytes;
} qsf_image_part;

static qsf_image_part find_part(const qsf_kvcache *kv, const qsf_config *c, uint32_t position,
                                uint32_t layer, uint32_t part)
{
    const qsf_kv_layer *const l = &kv->layers[layer];
    const uint32_t first = first_seen(c->layers[layer].kind, position);
    void **const tables = part % 2 == 0 ? kv->k_tables : kv->v_tables;
    return (qsf_image_part){
        .table = tables + l->first_entry + (size_t)(part / 2) * l->n_entries,
        .n_table = l->n_pages,
        .first_page = first / QSF_KV_PAGE_TOKENS,
        .end_page = first < position ? (uint32_t)qsf_ceil_div(position, QSF_KV_PAGE_TOKENS)
                                     : first / QSF_KV_PAGE_TOKENS,
        .page_bytes = part % 2 == 0 ? l->k_page_bytes : l->v_page_bytes,
    };
}

uint64_t qsf_kvcache_image_bytes(const qsf_kvcache *kv, const qsf_config *c, uint32_t position)
{
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const qsf_kv_layer *const l = &kv->layers[i];
        const qsf_image_part p = find_part(kv, c, position, i, 0);
        n_bytes += (uint64_t)(p.end_page - p.first_page) * (l->k_page_bytes + l->v_page_bytes) *
                   l->n_kv_heads;
    }
    return n_bytes;
}

/* Copies a part's bytes between the cache and a buffer, where [offset, offset + n_bytes) of the
 * image meets the part, which begins at part_offset. Exactly one of dst and src is not NULL. */
static void move_part(const qsf_image_part *p, uint64_t part_offset, uint64_t offset,
                      unsigned char *dst, const unsigned char *src, size_t n_bytes)
{
    const uint64_t end = offset + n_bytes;
    for (uint32_t page = p->first_page; page < p->end_page; page++) {
        const uint64_t at = part_offset + (uint64_t)(page - p->first_page) * p->page_bytes;
        const uint64_t from = at > offset ? at : offset;
        const uint64_t to = at + p->page_bytes < end ? at + p->page_bytes : end;
        if (from >= to)
            continue;
        unsigned char *const here =
            (unsigned char *)p->table[page % p->n_table] + (size_t)(from - at);
        if (dst != NULL)
            memcpy(dst + (from - offset), here, (size_t)(to - from));
        else
            memcpy(here, src + (from - offset), (size_t)(to - from));
    }
}

static void move_image(const qsf_kvcache *kv, const qsf_config *c, uint32_t position,
                       uint64_t offset, unsigned char *dst, const unsigned char *src,
                       size_t n_bytes)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < c->n_layers && at < offset + n_bytes; i++) {
        for (uint32_t part = 0; part < 2 * kv->layers[i].n_kv_heads; part++) {
            const qsf_image_part p = find_part(kv, c, position, i, part);
            const uint64_t part_bytes = (uint64_t)(p.end_page - p.first_page) * p.page_bytes;
            if (at < offset + n_bytes && offset < at + part_bytes)
                move_part(&p, at, offset, dst, src, n_bytes);
            at += part_bytes;
        }
    }
}

void qsf_kvcache_read_image(const qsf_kvcache *kv, const qsf_config *c, uint32_t position,
                            uint64_t offset, void *dst, size_t n_bytes)
{
    move_image(kv, c, position, offset, dst, NULL, n_bytes);
}

void qsf_kvcache_write_image(qsf_kvcache *kv, const qsf_config *c, uint32_t position,
                             uint64_t offset, const void *src, size_t n_bytes)
{
    move_image(kv, c, position, offset, NULL, src, n_bytes);
}

void qsf_kvcache_copy(qsf_kvcache *kv, const qsf_kvcache *from, const qsf_config *c,
                      uint32_t position)
{
    for (uint32_t i = 0; i < c->n_layers; i++) {
        for (uint32_t part = 0; part < 2 * kv->layers[i].n_kv_heads; part++) {
            const qsf_image_part to = find_part(kv, c, position, i, part);
            const qsf_image_part p = find_part(from, c, position, i, part);
            for (uint32_t page = p.first_page; page < p.end_page; page++)
                memcpy(to.table[page % to.n_table], p.table[page % p.n_table], p.page_bytes);
        }
    }
    qsf_kvcache_adopt(kv, position);
}

void qsf_kvcache_adopt(qsf_kvcache *kv, uint32_t position)
{
    kv->n_stored = position;
    kv->n_adopted = position;
}
