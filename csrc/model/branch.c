/* branch.c - finds the rows of a branch behind their positions, and puts them into their places. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/branch.h"

#include <string.h>

#include "model/scratch.h"

/* Returns the slot of the span at which the first branch of the path begins; 0 if it is before. */
static uint32_t first_own_slot(const qsf_branch_span *b)
{
    const qsf_segment *first = b->branch;
    while (first->trunk->trunk != NULL)
        first = first->trunk;
    return first->first_position > b->begin ? (uint32_t)(first->first_position - b->begin) : 0;
}

/* Finds the pages that hold the row of a position of the branch; returns where it is stored. */
static size_t find_row(const qsf_branch_span *b, size_t position, const void **k_pages,
                       const void **v_pages)
{
    const qsf_segment *g = b->branch;
    while (position < g->first_position)
        g = g->trunk;
    const size_t place = position + g->n_behind;
    const size_t page = place / QSF_KV_PAGE_TOKENS;
    const size_t i = page % QSF_KV_SPAN_PAGES;
    qsf_kvcache_find_pages(&g->sequence->kv, b->layer, b->kv_head, page - i, i, i + 1, k_pages,
                           v_pages);
    return place;
}

void qsf_branch_score(const qsf_ops *o, const qsf_branch_span *b, const qsf_acts *x,
                      size_t end_slot, float *scores)
{
    const qsf_kv_pool *const pool = b->branch->sequence->kv.pool;
    const size_t tile_bytes =
        pool->layers[b->layer].k_page_bytes / (QSF_KV_PAGE_TOKENS / QSF_TILE_ROWS);
    const void *k_pages[QSF_KV_SPAN_PAGES];
    const void *v_pages[QSF_KV_SPAN_PAGES];
    float tile_scores[QSF_ATTEND_ROWS * QSF_TILE_ROWS];
    for (size_t slot = first_own_slot(b); slot < end_slot; slot++) {
        const size_t place = find_row(b, b->begin + slot, k_pages, v_pages);
        const unsigned char *const page = k_pages[place / QSF_KV_PAGE_TOKENS % QSF_KV_SPAN_PAGES];
        const size_t tile = place % QSF_KV_PAGE_TOKENS / QSF_TILE_ROWS;
        o->kernels->matmul[pool->form.k_type](page + tile * tile_bytes, 1, x, tile_scores,
                                              QSF_TILE_ROWS);
        for (size_t r = 0; r < x->n_tokens; r++)
            scores[r * QSF_KV_SPAN_TOKENS + slot] =
                tile_scores[r * QSF_TILE_ROWS + place % QSF_TILE_ROWS];
    }
}

void qsf_branch_values(const qsf_branch_span *b, size_t block, size_t end_slot,
                       const unsigned char **blocks, qsf_branch_copies *copies)
{
    const qsf_dtype type = b->branch->sequence->kv.pool->form.v_type;
    const size_t block_bytes = qsf_kv_value_block_bytes(type);
    const void *k_pages[QSF_KV_SPAN_PAGES];
    const void *v_pages[QSF_KV_SPAN_PAGES];
    for (size_t slot = first_own_slot(b); slot < end_slot; slot++) {
        const size_t to = slot / QSF_KV_PAGE_TOKENS;
        if (blocks[to] != copies->at[to]) {
            memcpy(copies->at[to], blocks[to], block_bytes);
            blocks[to] = copies->at[to];
        }
        const size_t place = find_row(b, b->begin + slot, k_pages, v_pages);
        const unsigned char *const from = v_pages[place / QSF_KV_PAGE_TOKENS % QSF_KV_SPAN_PAGES];
        qsf_kv_copy_slot(type, false, 1, place % QSF_KV_PAGE_TOKENS, from + block * block_bytes,
                         slot % QSF_KV_PAGE_TOKENS, copies->at[to]);
    }
}
