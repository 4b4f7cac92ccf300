/* kvcache.c - the blocks of one session: taking, sharing, copying and storing them. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/kv/kvcache.h"

#include <string.h>

#include "base/checked.h"
#include "base/status.h"

void qsf_kvcache_layout(qsf_kvcache *kv, qsf_arena *a, qsf_kv_pool *pool, uint32_t home)
{
    *kv = (qsf_kvcache){.pool = pool, .home = home};
    kv->blocks = qsf_arena_push(a, pool->n_places, sizeof *kv->blocks);
    qsf_kv_cold_layout(&kv->cold, a, pool);
    if (a->measuring || a->failed)
        return;
    for (uint32_t i = 0; i < pool->n_places; i++)
        kv->blocks[i] = QSF_KV_NO_BLOCK;
}

bool qsf_kvcache_can_rotate(const qsf_config *c)
{
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const qsf_layer_kind *const k = c->layers[i].kind;
        if (qsf_has_attention(k) && (k->head_dim < 16 || k->head_dim > 4096))
            return false;
    }
    return true;
}

/* ---- blocks ---- */

static uint32_t page_of(uint32_t position)
{
    return position / QSF_KV_PAGE_TOKENS;
}

static uint32_t end_page_of(uint32_t end)
{
    return (uint32_t)qsf_ceil_div(end, QSF_KV_PAGE_TOKENS);
}

/* Returns the preferred block of a place: the successor of the previous place's block if no other
 * session has it, else one of the session's part of the pool. */
static uint32_t wanted_block(const qsf_kvcache *kv, const qsf_kv_group *g, uint32_t place)
{
    const uint32_t before = place > 0 ? kv->blocks[g->first_place + place - 1] : QSF_KV_NO_BLOCK;
    if (before != QSF_KV_NO_BLOCK && g->n_holders[before] == 1)
        return before + 1;
    return (uint32_t)((uint64_t)g->n_blocks * kv->home / kv->pool->n_sessions) + place;
}

/* Makes sure that only this session has the block of a page: keeps its own, copies a shared one,
 * or takes a new one. */
static bool own_block(qsf_kvcache *kv, uint32_t group_idx, uint32_t page, bool is_begun)
{
    const qsf_kv_group *const g = &kv->pool->groups[group_idx];
    const uint32_t place = qsf_kv_place(g, page);
    uint32_t *const block = &kv->blocks[g->first_place + place];
    if (*block != QSF_KV_NO_BLOCK && g->n_holders[*block] == 1)
        return true;
    const uint32_t taken = qsf_kv_pool_take(kv->pool, group_idx, wanted_block(kv, g, place),
                                            is_begun ? *block : QSF_KV_NO_BLOCK);
    if (taken == QSF_KV_NO_BLOCK)
        return false;
    qsf_kv_pool_drop(kv->pool, group_idx, *block);
    *block = taken;
    return true;
}

/* Returns a page of the pool that a place of the first group has. */
static unsigned char *page_in_pool(const qsf_kvcache *kv, const qsf_kv_cold_page *p)
{
    const uint32_t block = kv->blocks[qsf_kv_place(&kv->pool->groups[0], p->record)];
    return (p->is_key ? qsf_kv_pool_k_page : qsf_kv_pool_v_page)(kv->pool, p->layer, p->kv_head,
                                                                 block);
}

/* Writes all pages of the first group at 32 positions to the file, or reads them from there. */
static qsf_status move_record(qsf_kvcache *kv, uint32_t record, bool is_written)
{
    for (uint32_t i = 0; i < kv->pool->n_layers; i++) {
        const qsf_kv_layer *const l = &kv->pool->layers[i];
        for (uint32_t part = 0; l->group_idx == 0 && part < qsf_kv_part_count(l); part++) {
            const qsf_kv_cold_page p = qsf_kv_cold_part(l, record, part);
            const size_t n_bytes = qsf_kv_cold_page_bytes(&p);
            QSF_TRY(is_written ? qsf_kv_cold_write(&kv->cold, &p, 0, n_bytes, page_in_pool(kv, &p))
                               : qsf_kv_cold_read(&kv->cold, &p, 0, n_bytes, page_in_pool(kv, &p)));
        }
    }
    return QSF_OK;
}

/* Zeroes a record's pages that no image has. */
static qsf_status clear_record(qsf_kvcache *kv, uint32_t record)
{
    static const unsigned char zeros[4096];
    for (uint32_t i = kv->pool->n_saved_layers; i < kv->pool->n_layers; i++) {
        const qsf_kv_layer *const l = &kv->pool->layers[i];
        for (uint32_t part = 0; l->group_idx == 0 && part < qsf_kv_part_count(l); part++) {
            const qsf_kv_cold_page p = qsf_kv_cold_part(l, record, part);
            const size_t n_bytes = qsf_kv_cold_page_bytes(&p);
            for (size_t at = 0; at < n_bytes; at += sizeof zeros) {
                const size_t end = n_bytes - at < sizeof zeros ? n_bytes : at + sizeof zeros;
                QSF_TRY(qsf_kv_cold_write(&kv->cold, &p, at, end, zeros));
            }
        }
    }
    return QSF_OK;
}

/* Moves older pages to the file of cold pages: those whose places positions up to end - 1 will
 * need. Positions before `begin` are stored. */
static qsf_status write_cold(qsf_kvcache *kv, uint32_t begin, uint32_t end)
{
    const uint32_t n_places = kv->pool->groups[0].n_places;
    const uint32_t n_wanted = end_page_of(end) > n_places ? end_page_of(end) - n_places : 0;
    if (begin == 0)
        kv->cold.n_records = 0;
    for (; kv->cold.n_records < n_wanted && kv->cold.n_records < end_page_of(begin);
         kv->cold.n_records++)
        QSF_TRY(move_record(kv, kv->cold.n_records, true));
    for (; kv->cold.n_records < n_wanted; kv->cold.n_records++) /* an image will be written there */
        QSF_TRY(clear_record(kv, kv->cold.n_records));
    return QSF_OK;
}

/* Reads the page of `begin` if it is cold, because the session was rewound. */
static qsf_status read_cold(qsf_kvcache *kv, uint32_t begin)
{
    if (kv->cold.n_records <= page_of(begin))
        return QSF_OK;
    if (begin % QSF_KV_PAGE_TOKENS != 0)
        QSF_TRY(move_record(kv, page_of(begin), false));
    kv->cold.n_records = page_of(begin);
    return QSF_OK;
}

qsf_status qsf_kvcache_reserve(qsf_kvcache *kv, uint32_t begin, uint32_t end)
{
    const qsf_kv_pool *const pool = kv->pool;
    qsf_kvcache_trim(kv, end);
    if (pool->n_cold_records != 0)
        QSF_TRY(write_cold(kv, begin, end));
    for (uint32_t i = 0; i < pool->n_groups; i++) {
        for (uint32_t page = page_of(begin); page < end_page_of(end); page++)
            QSF_FAIL_IF(
                !own_block(kv, i, page, page * QSF_KV_PAGE_TOKENS < begin), NOMEM,
                "the KV pool of %u positions is full: none of its %u blocks is free for position "
                "%u; end or rewind a session, or open the model with more kv_contexts",
                pool->groups[i].n_blocks * QSF_KV_PAGE_TOKENS, pool->groups[i].n_blocks,
                page * QSF_KV_PAGE_TOKENS);
    }
    if (begin != 0)
        QSF_TRY(read_cold(kv, begin));
    if (begin == 0)
        kv->n_adopted = 0;
    if (begin == 0 || end > kv->n_stored)
        kv->n_stored = end;
    return QSF_OK;
}

void qsf_kvcache_trim(qsf_kvcache *kv, uint32_t n_tokens)
{
    for (uint32_t i = 0; i < kv->pool->n_groups; i++) {
        const qsf_kv_group *const g = &kv->pool->groups[i];
        uint32_t *const blocks = kv->blocks + g->first_place;
        const bool is_ring = i != 0 || kv->pool->n_cold_records != 0;
        const uint32_t n_kept = !is_ring || n_tokens == 0 ? end_page_of(n_tokens) : g->n_places;
        for (uint32_t place = n_kept; place < g->n_places; place++) {
            qsf_kv_pool_drop(kv->pool, i, blocks[place]);
            blocks[place] = QSF_KV_NO_BLOCK;
        }
    }
}

/* Returns the first position that a token at `position` sees. */
static uint32_t first_seen(const qsf_layer_kind *k, uint32_t position)
{
    return k->window_tokens != 0 && position >= k->window_tokens ? position + 1 - k->window_tokens
                                                                 : 0;
}

/* Returns the group that has the blocks of a layer. */
static const qsf_kv_group *group_of(const qsf_kvcache *kv, uint32_t layer)
{
    return &kv->pool->groups[kv->pool->layers[layer].group_idx];
}

bool qsf_kvcache_holds(const qsf_kvcache *kv, uint32_t position)
{
    const uint32_t end_page = end_page_of(kv->n_stored);
    for (uint32_t i = 0; i < kv->pool->n_layers; i++) {
        const qsf_layer_kind *const kind = kv->pool->layers[i].kind;
        const qsf_kv_group *const g = group_of(kv, i);
        const uint32_t seen_page = page_of(first_seen(kind, position));
        const uint32_t first_page = QSF_MAX(seen_page, g->n_pinned);
        const bool is_ring = g != &kv->pool->groups[0] || kv->pool->n_cold_records == 0;
        if (kv->pool->layers[i].n_kv_heads != 0 && first_seen(kind, position) < position &&
            ((is_ring && first_page + (g->n_places - g->n_pinned) < end_page) ||
             first_page < page_of(first_seen(kind, kv->n_adopted))))
            return false;
    }
    return true;
}

/* ---- pages ---- */

static uint32_t block_of(const qsf_kvcache *kv, const qsf_kv_layer *l, size_t page)
{
    const qsf_kv_group *const g = &kv->pool->groups[l->group_idx];
    return kv->blocks[g->first_place + qsf_kv_place(g, page)];
}

void qsf_kvcache_find_pages(const qsf_kvcache *kv, uint32_t layer, uint32_t kv_head, size_t page,
                            size_t first, size_t end, const void **k_pages, const void **v_pages)
{
    const qsf_kv_layer *const l = &kv->pool->layers[layer];
    const qsf_kv_group *const g = &kv->pool->groups[l->group_idx];
    const unsigned char *const k_first = qsf_kv_pool_k_page(kv->pool, l, kv_head, 0);
    const unsigned char *const v_first = qsf_kv_pool_v_page(kv->pool, l, kv_head, 0);
    const uint32_t *const blocks = kv->blocks + g->first_place;
    uint32_t place = qsf_kv_place(g, page + first);
    for (size_t i = first; i < end; i++) {
        k_pages[i] = k_first + blocks[place] * l->k_page_bytes;
        v_pages[i] = v_first + blocks[place] * l->v_page_bytes;
        place = place + 1 < g->n_places ? place + 1 : g->n_pinned;
    }
}

uint32_t qsf_kvcache_cold_pages(const qsf_kvcache *kv, uint32_t layer)
{
    return kv->pool->layers[layer].group_idx == 0 ? kv->cold.n_records : 0;
}

void qsf_kvcache_store_k(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *key)
{
    const qsf_kv_layer *const l = &kv->pool->layers[layer];
    k->k_store[kv->pool->form.k_type](
        key, l->head_dim, position % QSF_KV_PAGE_TOKENS,
        qsf_kv_pool_k_page(kv->pool, l, kv_head, block_of(kv, l, page_of(position))));
}

void qsf_kvcache_store_v(qsf_kvcache *kv, const qsf_kernels *k, uint32_t layer, uint32_t kv_head,
                         uint32_t position, const float *value)
{
    const qsf_kv_layer *const l = &kv->pool->layers[layer];
    k->v_store[kv->pool->form.v_type](
        value, l->value_dim, position % QSF_KV_PAGE_TOKENS,
        qsf_kv_pool_v_page(kv->pool, l, kv_head, block_of(kv, l, page_of(position))));
}

uint64_t qsf_kvcache_used_bytes(const qsf_kvcache *kv, uint32_t n_tokens)
{
    const uint32_t n_pages = end_page_of(n_tokens);
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < kv->pool->n_layers; i++) {
        const qsf_kv_layer *const l = &kv->pool->layers[i];
        const uint32_t n_places = group_of(kv, i)->n_places;
        const uint64_t n_held = QSF_MIN(n_pages, n_places);
        n_bytes += n_held * (l->k_page_bytes + l->v_page_bytes) * l->n_kv_heads;
    }
    return n_bytes;
}

/* ---- images ---- */

/* Pages that a token sees: those below `pinned`, and first .. end - 1 */
typedef struct qsf_seen_pages {
    uint32_t pinned;
    uint32_t first; /* not below pinned */
    uint32_t end;
} qsf_seen_pages;

/* The part of an image that belongs to one layer, KV head, and K or V */
typedef struct qsf_image_part {
    const qsf_kv_layer *layer;
    uint32_t kv_head;
    bool is_key;
    qsf_seen_pages pages;
    size_t page_bytes;
} qsf_image_part;

static uint32_t count_pages(const qsf_seen_pages *s)
{
    return s->pinned + (s->end - s->first);
}

/* Returns the number of the i-th page that a query sees. */
static uint32_t page_at(const qsf_seen_pages *s, uint32_t i)
{
    return i < s->pinned ? i : s->first + (i - s->pinned);
}

/* Returns the pages of a layer that are in the image of a position. */
static qsf_seen_pages find_range(const qsf_kv_layer *l, uint32_t position)
{
    const qsf_layer_kind *const k = l->kind;
    const uint32_t first = first_seen(k, position);
    qsf_seen_pages s = {qsf_kv_pinned_pages(k), page_of(first), end_page_of(position)};
    if (first == position)
        s.end = s.first;
    s.pinned = QSF_MIN(s.pinned, s.end);
    s.first = QSF_MAX(s.first, s.pinned);
    return s;
}

static qsf_image_part find_part(const qsf_kvcache *kv, uint32_t position, uint32_t layer,
                                uint32_t part)
{
    const qsf_kv_layer *const l = &kv->pool->layers[layer];
    return (qsf_image_part){
        .layer = l,
        .kv_head = part / 2,
        .is_key = part % 2 == 0,
        .pages = find_range(l, position),
        .page_bytes = part % 2 == 0 ? l->k_page_bytes : l->v_page_bytes,
    };
}

uint64_t qsf_kvcache_image_bytes(const qsf_kvcache *kv, uint32_t position)
{
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < kv->pool->n_saved_layers; i++) {
        const qsf_kv_layer *const l = &kv->pool->layers[i];
        const qsf_seen_pages pages = find_range(l, position);
        n_bytes +=
            (uint64_t)count_pages(&pages) * (l->k_page_bytes + l->v_page_bytes) * l->n_kv_heads;
    }
    return n_bytes;
}

/* Copies bytes from .. to - 1 of page i of a part between the cache and dst or src, of which
 * exactly one is not NULL. */
static qsf_status move_page(qsf_kvcache *kv, const qsf_image_part *p, uint32_t i, size_t from,
                            size_t to, unsigned char *dst, const unsigned char *src)
{
    const uint32_t page = page_at(&p->pages, i);
    if (p->layer->group_idx == 0 && page < kv->cold.n_records) {
        const qsf_kv_cold_page cold = {
            .layer = p->layer, .record = page, .kv_head = p->kv_head, .is_key = p->is_key};
        return dst != NULL ? qsf_kv_cold_read(&kv->cold, &cold, from, to, dst)
                           : qsf_kv_cold_write(&kv->cold, &cold, from, to, src);
    }
    const uint32_t block = block_of(kv, p->layer, page);
    unsigned char *const here = (p->is_key ? qsf_kv_pool_k_page : qsf_kv_pool_v_page)(
                                    kv->pool, p->layer, p->kv_head, block) +
                                from;
    if (dst != NULL)
        memcpy(dst, here, to - from);
    if (src != NULL)
        memcpy(here, src, to - from);
    return QSF_OK;
}

/* Copies bytes between the cache and a buffer: the overlap of [offset, offset + n_bytes) of the
 * image with the part that begins at part_offset. */
static qsf_status move_part(qsf_kvcache *kv, const qsf_image_part *p, uint64_t part_offset,
                            uint64_t offset, unsigned char *dst, const unsigned char *src,
                            size_t n_bytes)
{
    const uint64_t end = offset + n_bytes;
    for (uint32_t i = 0; i < count_pages(&p->pages); i++) {
        const uint64_t at = part_offset + (uint64_t)i * p->page_bytes;
        const uint64_t from = QSF_MAX(at, offset);
        const uint64_t to = QSF_MIN(at + p->page_bytes, end);
        if (from < to)
            QSF_TRY(move_page(kv, p, i, (size_t)(from - at), (size_t)(to - at),
                              dst != NULL ? dst + (from - offset) : NULL,
                              src != NULL ? src + (from - offset) : NULL));
    }
    return QSF_OK;
}

static qsf_status move_image(qsf_kvcache *kv, uint32_t position, uint64_t offset,
                             unsigned char *dst, const unsigned char *src, size_t n_bytes)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < kv->pool->n_saved_layers && at < offset + n_bytes; i++) {
        for (uint32_t part = 0; part < qsf_kv_part_count(&kv->pool->layers[i]); part++) {
            const qsf_image_part p = find_part(kv, position, i, part);
            const uint64_t part_bytes = (uint64_t)count_pages(&p.pages) * p.page_bytes;
            if (at < offset + n_bytes && offset < at + part_bytes)
                QSF_TRY(move_part(kv, &p, at, offset, dst, src, n_bytes));
            at += part_bytes;
        }
    }
    return QSF_OK;
}

qsf_status qsf_kvcache_read_image(qsf_kvcache *kv, uint32_t position, uint64_t offset, void *dst,
                                  size_t n_bytes)
{
    return move_image(kv, position, offset, dst, NULL, n_bytes);
}

qsf_status qsf_kvcache_write_image(qsf_kvcache *kv, uint32_t position, uint64_t offset,
                                   const void *src, size_t n_bytes)
{
    return move_image(kv, position, offset, NULL, src, n_bytes);
}

/* Shares the other cache's blocks of one group. Layers of a group may have different windows. */
static void share_group(qsf_kvcache *kv, const qsf_kvcache *from, uint32_t group_idx,
                        uint32_t position)
{
    const qsf_kv_group *const g = &kv->pool->groups[group_idx];
    uint32_t *const to_blocks = kv->blocks + g->first_place;
    const uint32_t *const from_blocks = from->blocks + g->first_place;
    qsf_seen_pages all = {0, UINT32_MAX, 0};
    for (uint32_t i = 0; i < kv->pool->n_layers; i++) {
        const qsf_seen_pages s = find_range(&kv->pool->layers[i], position);
        if (kv->pool->layers[i].group_idx != group_idx || count_pages(&s) == 0)
            continue;
        all.pinned = QSF_MAX(s.pinned, all.pinned);
        all.first = QSF_MIN(s.first, all.first);
        all.end = QSF_MAX(s.end, all.end);
    }
    if (all.end == 0)
        all.first = 0;
    all.first = QSF_MAX(all.first, all.pinned);
    if (group_idx == 0 && kv->pool->n_cold_records != 0) /* all pages that may become cold */
        all.first = QSF_MIN(from->cold.n_records, all.end);
    for (uint32_t i = 0; i < count_pages(&all); i++)
        qsf_kv_pool_hold(kv->pool, group_idx, from_blocks[qsf_kv_place(g, page_at(&all, i))]);
    for (uint32_t place = 0; place < g->n_places; place++) {
        qsf_kv_pool_drop(kv->pool, group_idx, to_blocks[place]);
        to_blocks[place] = QSF_KV_NO_BLOCK;
    }
    for (uint32_t i = 0; i < count_pages(&all); i++) {
        const uint32_t place = qsf_kv_place(g, page_at(&all, i));
        to_blocks[place] = from_blocks[place];
    }
}

/* Copies the part of a record that belongs to the image of a position, from one cache's file to the
 * other's. */
static qsf_status copy_record(qsf_kvcache *kv, qsf_kvcache *from, uint32_t position,
                              uint32_t record)
{
    unsigned char bytes[4096];
    for (uint32_t i = 0; i < kv->pool->n_layers; i++) {
        const qsf_kv_layer *const l = &kv->pool->layers[i];
        if (l->group_idx != 0 || record < find_range(l, position).first)
            continue;
        for (uint32_t part = 0; part < qsf_kv_part_count(l); part++) {
            const qsf_kv_cold_page p = qsf_kv_cold_part(l, record, part);
            const size_t n_bytes = qsf_kv_cold_page_bytes(&p);
            for (size_t at = 0; at < n_bytes; at += sizeof bytes) {
                const size_t end = n_bytes - at < sizeof bytes ? n_bytes : at + sizeof bytes;
                QSF_TRY(qsf_kv_cold_read(&from->cold, &p, at, end, bytes));
                QSF_TRY(qsf_kv_cold_write(&kv->cold, &p, at, end, bytes));
            }
        }
    }
    return QSF_OK;
}

qsf_status qsf_kvcache_share(qsf_kvcache *kv, qsf_kvcache *from, uint32_t position)
{
    for (uint32_t i = 0; i < kv->pool->n_groups; i++)
        share_group(kv, from, i, position);
    qsf_kvcache_adopt(kv, position);
    for (kv->cold.n_records = 0;
         kv->cold.n_records < from->cold.n_records && kv->cold.n_records < end_page_of(position);
         kv->cold.n_records++)
        QSF_TRY(copy_record(kv, from, position, kv->cold.n_records));
    return QSF_OK;
}

void qsf_kvcache_adopt(qsf_kvcache *kv, uint32_t position)
{
    kv->n_stored = position;
    kv->n_adopted = position;
}
