/* kvpool.c - lays out the pages, hands out blocks of them. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/kv/kvcache.h"

#include <string.h>

#include "base/checked.h"

/* ---- layout ---- */

/* Returns the pages that n_tokens, 0 for all of the context, and a chunk after them touch. */
static uint32_t count_pages(const qsf_kv_sizes *sizes, uint32_t n_tokens, uint32_t n_pinned)
{
    const size_t n_all = qsf_ceil_div(sizes->ctx_tokens, QSF_KV_PAGE_TOKENS);
    const size_t n_seen =
        qsf_ceil_div((size_t)n_tokens + sizes->chunk_tokens, QSF_KV_PAGE_TOKENS) + 1 + n_pinned;
    return (uint32_t)(n_tokens != 0 && n_seen < n_all ? n_seen : n_all);
}

/* Returns the pages of a head that a session needs: those of the layer's window, or all that
 * stay in memory. */
static uint32_t count_kept(const qsf_layer_kind *k, const qsf_kv_sizes *sizes)
{
    const uint32_t n_window = count_pages(sizes, k->window_tokens, qsf_kv_pinned_pages(k));
    const uint32_t n_resident = count_pages(sizes, sizes->resident_tokens, 0);
    return QSF_MIN(n_window, n_resident);
}

/* Adds a group of which a session needs n_places blocks. */
static void add_group(qsf_kv_pool *pool, uint32_t n_places, uint32_t n_pinned, uint32_t n_blocks)
{
    pool->groups[pool->n_groups++] = (qsf_kv_group){
        .n_places = n_places,
        .n_pinned = n_pinned,
        .first_place = pool->n_places,
        .n_blocks = n_blocks,
        .n_free = n_blocks,
    };
    pool->n_places += n_places;
}

/* Returns the group of layers that need n_places blocks: a new one if there is room for it. */
static uint32_t find_group(qsf_kv_pool *pool, uint32_t n_places, uint32_t n_pinned)
{
    if (n_places == pool->groups[0].n_places)
        return 0;
    for (uint32_t i = 1; i < pool->n_groups; i++)
        if (pool->groups[i].n_places == n_places && pool->groups[i].n_pinned == n_pinned)
            return i;
    if (pool->n_groups == QSF_KV_MOST_GROUPS)
        return 0;
    add_group(pool, n_places, n_pinned, n_places * pool->n_sessions);
    return pool->n_groups - 1;
}

/* Returns the bytes of a K page or a V page. */
static size_t page_bytes(uint32_t head_dim, qsf_dtype type)
{
    return qsf_ceil_div(head_dim, QSF_BLOCK) * qsf_kv_value_block_bytes(type); /* two tiles each */
}

/* A layer whose keys and values lie in the pages of an earlier one has no pages. */
static qsf_kv_layer describe_layer(qsf_kv_pool *pool, const qsf_config *c, uint32_t idx,
                                   const qsf_kv_sizes *sizes)
{
    const qsf_layer_kind *const k = c->layers[idx].kind;
    if (!qsf_has_attention(k) || c->layers[idx].kv_layer != idx)
        return (qsf_kv_layer){.kind = k};
    return (qsf_kv_layer){
        .kind = k,
        .n_kv_heads = k->n_kv_heads,
        .head_dim = k->head_dim,
        .value_dim = qsf_value_dim(k),
        .group_idx = find_group(pool, count_kept(k, sizes), qsf_kv_pinned_pages(k)),
        .k_page_bytes = page_bytes(k->head_dim, pool->form.k_type),
        .v_page_bytes = k->latent_rank != 0 ? 0 : page_bytes(qsf_value_dim(k), pool->form.v_type),
    };
}

/* Returns the bytes of all pages of a layer. */
static uint64_t layer_bytes(const qsf_kv_pool *pool, const qsf_kv_layer *l)
{
    const uint64_t page_bytes = (uint64_t)l->n_kv_heads * (l->k_page_bytes + l->v_page_bytes);
    uint64_t n_bytes = UINT64_MAX;
    (void)qsf_mul_u64(page_bytes, pool->groups[l->group_idx].n_blocks, &n_bytes);
    return n_bytes;
}

/* Reserves a layer's records in the session's file, if some of its pages can become cold. */
static void add_records(qsf_kv_pool *pool, qsf_kv_layer *l, uint64_t *file_bytes)
{
    if (l->group_idx != 0 || pool->n_cold_records == 0)
        return;
    l->cold_off = *file_bytes;
    l->first_cold = pool->n_cold_pages;
    *file_bytes += (uint64_t)pool->n_cold_records * qsf_kv_record_bytes(l);
    pool->n_cold_pages += (size_t)2 * pool->n_cold_records * l->n_kv_heads;
    pool->cold_token_bytes +=
        (uint64_t)(pool->n_cold_records - pool->groups[0].n_places) * qsf_kv_record_bytes(l);
    if (qsf_kv_record_bytes(l) > pool->most_record_bytes)
        pool->most_record_bytes = qsf_kv_record_bytes(l);
}

void qsf_kv_pool_layout(qsf_kv_pool *pool, qsf_arena *a, const qsf_config *c,
                        const qsf_kv_sizes *sizes, const qsf_kv_form *form)
{
    const uint32_t n_context = (uint32_t)qsf_ceil_div(sizes->ctx_tokens, QSF_KV_PAGE_TOKENS);
    const uint32_t n_resident = count_pages(sizes, sizes->resident_tokens, 0);
    uint64_t pages_bytes = 0;
    uint64_t file_bytes = 0;
    *pool = (qsf_kv_pool){
        .form = *form,
        .n_layers = c->n_layers,
        .n_saved_layers = c->n_trunk_layers,
        .n_sessions = sizes->n_sessions,
        .n_cold_records = n_resident < n_context ? n_context : 0,
    };
    add_group(pool, n_resident, 0, n_resident * sizes->n_contexts); /* below 2^30: layout.h */
    for (uint32_t i = 0; i < c->n_layers; i++) {
        qsf_kv_layer l = describe_layer(pool, c, i, sizes);
        pages_bytes = qsf_add_capped(pages_bytes, layer_bytes(pool, &l));
        add_records(pool, &l, &file_bytes);
    }
    pool->layers = qsf_arena_push(a, c->n_layers, sizeof *pool->layers);
    for (uint32_t i = 0; i < pool->n_groups; i++)
        pool->groups[i].n_holders =
            qsf_arena_push(a, pool->groups[i].n_blocks, sizeof *pool->groups[i].n_holders);
    unsigned char *at = qsf_arena_push(a, pages_bytes, 1);
    if (a->measuring || a->failed)
        return;
    for (uint32_t i = 0; i < pool->n_groups; i++)
        memset(pool->groups[i].n_holders, 0, pool->groups[i].n_blocks * sizeof(uint32_t));
    pool->n_cold_pages = 0; /* counted again below */
    pool->cold_token_bytes = 0;
    file_bytes = 0;
    for (uint32_t i = 0; i < c->n_layers; i++) {
        pool->layers[i] = describe_layer(pool, c, i, sizes);
        pool->layers[i].pages = at;
        at += layer_bytes(pool, &pool->layers[i]);
        add_records(pool, &pool->layers[i], &file_bytes);
    }
}

size_t qsf_kv_transit_bytes(const qsf_kv_pool *pool)
{
    const size_t span_bytes = QSF_KV_SPAN_PAGES * pool->most_record_bytes;
    if (pool->n_cold_records == 0)
        return 0;
    return QSF_MAX(span_bytes, QSF_KV_TRANSIT_BYTES);
}

/* ---- blocks ---- */

/* Zeroes the pages of a block, or copies those of another. */
static void fill_block(const qsf_kv_pool *pool, uint32_t group_idx, uint32_t block, uint32_t from)
{
    for (uint32_t i = 0; i < pool->n_layers; i++) {
        const qsf_kv_layer *const l = &pool->layers[i];
        if (l->group_idx != group_idx)
            continue;
        for (uint32_t head = 0; head < l->n_kv_heads; head++) {
            unsigned char *const k = qsf_kv_pool_k_page(pool, l, head, block);
            unsigned char *const v = qsf_kv_pool_v_page(pool, l, head, block);
            if (from == QSF_KV_NO_BLOCK) {
                memset(k, 0, l->k_page_bytes);
                memset(v, 0, l->v_page_bytes);
                continue;
            }
            memcpy(k, qsf_kv_pool_k_page(pool, l, head, from), l->k_page_bytes);
            memcpy(v, qsf_kv_pool_v_page(pool, l, head, from), l->v_page_bytes);
        }
    }
}

uint32_t qsf_kv_pool_take(qsf_kv_pool *pool, uint32_t group_idx, uint32_t wanted, uint32_t from)
{
    qsf_kv_group *const g = &pool->groups[group_idx];
    if (g->n_free == 0)
        return QSF_KV_NO_BLOCK;
    uint32_t block = wanted % g->n_blocks;
    while (g->n_holders[block] != 0)
        block = block + 1 < g->n_blocks ? block + 1 : 0;
    fill_block(pool, group_idx, block, from);
    g->n_holders[block] = 1;
    g->n_free--;
    return block;
}

void qsf_kv_pool_hold(qsf_kv_pool *pool, uint32_t group_idx, uint32_t block)
{
    if (block != QSF_KV_NO_BLOCK)
        pool->groups[group_idx].n_holders[block]++;
}

void qsf_kv_pool_drop(qsf_kv_pool *pool, uint32_t group_idx, uint32_t block)
{
    qsf_kv_group *const g = &pool->groups[group_idx];
    if (block != QSF_KV_NO_BLOCK && --g->n_holders[block] == 0)
        g->n_free++;
}
