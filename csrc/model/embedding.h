/* embedding.h - rows of the embedding table as f32, the latest of them kept.
 *
 * Where the table is not resident, a row costs a read of its band of 16 rows and decoding.
 * Text repeats its words, so a small cache of decoded rows, the least recently used giving way,
 * answers most of them. A resident table is decoded from memory: it neither uses the cache nor
 * counts as asked, whatever n_rows is, so that the statistics speak of reads. Weights do not
 * change, so what is kept stays true when a table is made resident or dropped.
 *
 * Places are numbered from 1. Place 0 is none; its neighbours in order of use are the ends of
 * that order, so the zeroed record is an empty cache and one without rows is no cache.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_EMBEDDING_H
#define QSF_MODEL_EMBEDDING_H

#include <stddef.h>
#include <stdint.h>

#include "stream/stream.h"
#include "kernels/kernels.h"
#include "memory/arena.h"
#include "model/config.h"

typedef struct qsf_embedding {
    uint32_t n_rows;    /* places; 0: no cache */
    uint32_t n_used;    /* places 1 .. n_used have a row */
    size_t dim_stride;  /* floats of a row */
    float *rows;        /* [n_rows, dim_stride], from place 1 */
    uint32_t *tokens;   /* [n_rows + 1] whose row it is */
    uint32_t *newer;    /* [n_rows + 1] neighbour in order of use; of place 0: the oldest */
    uint32_t *older;    /* [n_rows + 1] the other one; of place 0: the newest */
    uint32_t *chain;    /* [n_rows + 1] the next place of the same bucket */
    uint32_t *buckets;  /* [n_buckets] the first place of each */
    uint32_t n_buckets; /* a power of two, at least n_rows */
    uint64_t n_asked;   /* statistics: rows given from a table that is not resident, */
    uint64_t n_found;   /* and those of them that were kept */
} qsf_embedding;

/* Called once on a measuring arena and once on the real one, whose block is zeroed. More rows
 * than words are not taken. 0 rows: takes nothing. */
void qsf_embedding_layout(qsf_embedding *e, qsf_arena *a, const qsf_config *c, uint32_t n_rows);

/* x [dim, padded to 64] = the row of `token` of `table`, from the cache or the stream's band,
 * bit for bit the same. On failure the cache is as before. */
qsf_status qsf_embedding_row(qsf_embedding *e, qsf_stream *stream, const qsf_kernels *kernels,
                             const qsf_tensor *table, uint32_t token, float *x);

#endif
