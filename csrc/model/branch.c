/* branch.c - copies of pages, and of the rows that lie behind them. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/branch.h"

#include <string.h>

#include "base/checked.h"

/* Returns the branch at the end of a path of branches whose trunk is none. */
static const qsf_segment *first_branch(const qsf_segment *branch)
{
    while (branch->trunk->trunk != NULL)
        branch = branch->trunk;
    return branch;
}

/* Copies a row of a branch from where it is stored to the page and slot of its position. */
static void copy_row(const qsf_segment *branch, uint32_t layer, uint32_t kv_head, uint32_t position,
                     unsigned char *k_page, unsigned char *v_page)
{
    const qsf_kv_pool *const pool = branch->kv->pool;
    const size_t n_blocks = qsf_ceil_div(pool->layers[layer].head_dim, QSF_BLOCK);
    const size_t from = (size_t)position + branch->n_behind;
    const size_t i = from / QSF_KV_PAGE_TOKENS % QSF_KV_SPAN_PAGES;
    const void *k_pages[QSF_KV_SPAN_PAGES];
    const void *v_pages[QSF_KV_SPAN_PAGES];
    qsf_kvcache_find_pages(branch->kv, layer, kv_head, from / QSF_KV_PAGE_TOKENS - i, i, i + 1,
                           k_pages, v_pages);
    qsf_kv_copy_slot(pool->form.k_type, true, n_blocks, from % QSF_KV_PAGE_TOKENS, k_pages[i],
                     position % QSF_KV_PAGE_TOKENS, k_page);
    qsf_kv_copy_slot(pool->form.v_type, false, n_blocks, from % QSF_KV_PAGE_TOKENS, v_pages[i],
                     position % QSF_KV_PAGE_TOKENS, v_page);
}

void qsf_branch_compose_pages(const qsf_attend_scratch *s, const qsf_segment *branch,
                              uint32_t layer, uint32_t kv_head, size_t page, size_t first,
                              size_t end, size_t worker_idx, const void **k_pages,
                              const void **v_pages)
{
    const qsf_kv_layer *const l = &branch->kv->pool->layers[layer];
    const size_t first_page = first_branch(branch)->first_position / QSF_KV_PAGE_TOKENS;
    unsigned char *const k_own = s->k_pages + worker_idx * QSF_BRANCH_PAGES * s->k_page_bytes;
    unsigned char *const v_own = s->v_pages + worker_idx * QSF_BRANCH_PAGES * s->v_page_bytes;
    first = first_page > page + first ? first_page - page : first;
    for (size_t i = first; i < end; i++) {
        const size_t own = page + i - first_page;
        k_pages[i] = memcpy(k_own + own * s->k_page_bytes, k_pages[i], l->k_page_bytes);
        v_pages[i] = memcpy(v_own + own * s->v_page_bytes, v_pages[i], l->v_page_bytes);
    }
    uint32_t end_position = branch->first_position + branch->n_tokens;
    for (const qsf_segment *b = branch; b->trunk != NULL; b = b->trunk) {
        for (uint32_t p = b->first_position; p < end_position; p++) {
            const size_t i = p / QSF_KV_PAGE_TOKENS;
            const size_t own = i - first_page;
            if (i >= page + first && i < page + end)
                copy_row(b, layer, kv_head, p, k_own + own * s->k_page_bytes,
                         v_own + own * s->v_page_bytes);
        }
        end_position = b->first_position;
    }
}
