/* embedding.h - rows of the embedding table as f32, with an LRU cache.
 *
 * If the table is not resident, a row costs a read of its band of 16 rows, and decoding. Texts
 * repeat words, so a small cache answers most requests. Rows of a resident table are decoded from
 * memory: they neither use the cache nor count as requests, so the statistics describe reads.
 * Weights do not change, so cached rows stay valid when a table is loaded or evicted.
 *
 * Places are numbered from 1. Place 0 stands for no place; its neighbours are the ends of the list.
 * So a zeroed record is an empty cache, and a cache without rows is valid.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "stream/stream.h"
#include "kernels/kernels.h"
#include "memory/arena.h"
#include "format/config.h"

typedef struct qsf_embedding {
    uint32_t n_rows;      /* places; 0: no cache */
    uint32_t n_used;      /* places 1 .. n_used have a row */
    size_t dim_stride;    /* floats of a row */
    float *rows;          /* [n_rows, dim_stride], from place 1 */
    uint32_t *tokens;     /* [n_rows + 1] token of each place */
    uint32_t *newer;      /* [n_rows + 1] next newer place; of place 0: the oldest */
    uint32_t *older;      /* [n_rows + 1] next older place; of place 0: the newest */
    uint32_t *chain;      /* [n_rows + 1] next place of the same bucket */
    uint32_t *buckets;    /* [n_buckets] first place of each bucket */
    uint32_t n_buckets;   /* a power of two, at least n_rows */
    uint64_t n_requested; /* rows requested of a table that is not resident */
    uint64_t n_hits;      /* requests that the cache answered */
} qsf_embedding;

/* Call once on a measuring arena and once on the real one, whose memory is zeroed. The cache has at
 * most n_vocab rows. n_rows 0 needs no memory. */
void qsf_embedding_layout(qsf_embedding *e, qsf_arena *a, const qsf_config *c, uint32_t n_rows);

/* x [columns, padded to 64] = the row of `token` of a table, from the stream's band. */
qsf_status qsf_embedding_decode(qsf_stream *stream, const qsf_kernels *kernels,
                                const qsf_tensor *table, uint32_t token, float *x);

/* x [dim, padded to 64] = the row of `token` of `table`, from the cache or the stream, with the
 * same bits. If it fails, the cache does not change. */
qsf_status qsf_embedding_row(qsf_embedding *e, qsf_stream *stream, const qsf_kernels *kernels,
                             const qsf_tensor *table, uint32_t token, float *x);
