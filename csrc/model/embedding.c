/* embedding.c - an LRU cache of decoded embedding rows: a hash table and a list. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/embedding.h"

#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "types/dtype.h"
#include "base/status.h"

void qsf_embedding_layout(qsf_embedding *e, qsf_arena *a, const qsf_config *c, uint32_t n_rows)
{
    *e = (qsf_embedding){.n_rows = n_rows < c->n_vocab ? n_rows : c->n_vocab,
                         .dim_stride = qsf_round_up(c->dim, QSF_BLOCK)};
    if (e->n_rows == 0)
        return;
    e->n_buckets = 1;
    while (e->n_buckets < e->n_rows)
        e->n_buckets *= 2;
    const size_t n_places = (size_t)e->n_rows + 1;
    e->rows = qsf_arena_push(a, e->n_rows, e->dim_stride * sizeof *e->rows);
    e->tokens = qsf_arena_push(a, n_places, sizeof *e->tokens);
    e->newer = qsf_arena_push(a, n_places, sizeof *e->newer);
    e->older = qsf_arena_push(a, n_places, sizeof *e->older);
    e->chain = qsf_arena_push(a, n_places, sizeof *e->chain);
    e->buckets = qsf_arena_push(a, e->n_buckets, sizeof *e->buckets);
}

/* Tokens are small dense numbers, so their low bits are a good hash. */
static uint32_t *bucket_of(const qsf_embedding *e, uint32_t token)
{
    return &e->buckets[token & (e->n_buckets - 1)];
}

static float *row_at(const qsf_embedding *e, uint32_t place)
{
    return e->rows + (size_t)(place - 1) * e->dim_stride;
}

/* Returns the place of a token; 0: not in the cache. */
static uint32_t find(const qsf_embedding *e, uint32_t token)
{
    uint32_t place = *bucket_of(e, token);
    while (place != 0 && e->tokens[place] != token)
        place = e->chain[place];
    return place;
}

/* Removes a place from the list. */
static void unlink_place(qsf_embedding *e, uint32_t place)
{
    e->newer[e->older[place]] = e->newer[place];
    e->older[e->newer[place]] = e->older[place];
}

/* Adds a place to the list, as the newest. */
static void link_newest(qsf_embedding *e, uint32_t place)
{
    const uint32_t next = e->older[0];
    e->older[place] = next;
    e->newer[place] = 0;
    e->newer[next] = place;
    e->older[0] = place;
}

/* Removes the oldest place from the list and from its bucket, and returns it. */
static uint32_t evict(qsf_embedding *e)
{
    const uint32_t place = e->newer[0];
    uint32_t *at = bucket_of(e, e->tokens[place]);
    while (*at != place)
        at = &e->chain[*at];
    *at = e->chain[place];
    unlink_place(e, place);
    return place;
}

static void keep(qsf_embedding *e, uint32_t token, const float *x)
{
    const uint32_t place = e->n_used < e->n_rows ? ++e->n_used : evict(e);
    uint32_t *const bucket = bucket_of(e, token);
    memcpy(row_at(e, place), x, e->dim_stride * sizeof *x);
    e->tokens[place] = token;
    e->chain[place] = *bucket;
    *bucket = place;
    link_newest(e, place);
}

qsf_status qsf_embedding_decode(qsf_stream *stream, const qsf_kernels *kernels,
                                const qsf_tensor *table, uint32_t token, float *x)
{
    const unsigned char *band;
    QSF_TRY(qsf_stream_table_band(stream, table, token / QSF_TILE_ROWS, &band));
    kernels->dequant_row[table->dtype](band, qsf_ceil_div(table->n_cols, QSF_BLOCK),
                                       token % QSF_TILE_ROWS, x);
    return QSF_OK;
}

qsf_status qsf_embedding_row(qsf_embedding *e, qsf_stream *stream, const qsf_kernels *kernels,
                             const qsf_tensor *table, uint32_t token, float *x)
{
    assert(e->n_rows == 0 || e->dim_stride == qsf_round_up(table->n_cols, QSF_BLOCK));
    if (stream->resident[0] != NULL)
        return qsf_embedding_decode(stream, kernels, table, token, x);
    const uint32_t place = e->n_rows > 0 ? find(e, token) : 0;
    if (place != 0) {
        memcpy(x, row_at(e, place), e->dim_stride * sizeof *x);
        unlink_place(e, place);
        link_newest(e, place);
    } else {
        QSF_TRY(qsf_embedding_decode(stream, kernels, table, token, x));
        if (e->n_rows > 0)
            keep(e, token, x);
    }
    e->n_requested++;
    e->n_hits += place != 0;
    return QSF_OK;
}
