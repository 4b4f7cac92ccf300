/* forward.h - one chunk of tokens through all layers.
 *
 * Requests each unit from the stream in the order of the pass. Use its results only if it returned
 * QSF_OK: only then did all bytes that it read pass their checksums.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/config.h"
#include "kernels/kernels.h"
#include "memory/arena.h"
#include "model/ops.h"
#include "stream/stream.h"

/* ---- rows of the embedding table as f32, with an LRU cache ---- */

/* If the table is not resident, a row costs a read of its band of 16 rows, and decoding. Texts
 * repeat words, so a small cache answers most requests. Rows of a resident table are decoded from
 * memory: they neither use the cache nor count as requests, so the statistics describe reads.
 * Weights do not change, so cached rows stay valid when a table is loaded or evicted.
 *
 * Places are numbered from 1. Place 0 stands for no place; its neighbours are the ends of the list.
 * So a zeroed record is an empty cache, and a cache without rows is valid. */

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

/* ---- the input of the MTP head (multi-token prediction), which a checkpoint brings along ---- */

/* The head is one more layer. At position p it reads the embedding of token p and the final hidden
 * state of token p - 1, and guesses token p + 1:
 *
 *     x = join @ [token_norm(embedding) | hidden_norm(hidden)]; hidden' = end_norm(layer(x))
 *     logits = the model's head @ hidden'; hidden' stands for the hidden state of token p + 1
 *
 * Its keys and values lie in the sequence's cache like those of other layers. Each pass stores them
 * for its tokens, with the true hidden states; a guess stores those of its own position, which the
 * pass that follows replaces. Guesses are checked like all drafts, so nothing here changes a
 * text. */

/* The tools of the MTP head */
typedef struct qsf_mtp {
    qsf_ops *ops;
    qsf_embedding *embedding;
    const qsf_tensor *table; /* of the embedding */
} qsf_mtp;

/* Stores keys and values of the MTP head, and the last hidden states, for the rows of the chunk, of
 * which x is the residual after the last layer of the trunk. x stays. In the head's unit. */
qsf_status qsf_mtp_store(const qsf_mtp *m, const qsf_chunk *chunk);

/* x = the head's input for the only row of the chunk, of the token `token`. In the head's unit. */
qsf_status qsf_mtp_begin(const qsf_mtp *m, uint32_t token, const float *hidden);

/* ---- the pass ---- */

typedef struct qsf_forward {
    qsf_ops ops;
    const qsf_ends *ends;
    const unsigned char *positions; /* [max_tokens, dim], learned positions; or NULL */
    bool has_f32_positions;         /* else they are f16 */
    qsf_embedding embedding;        /* zeroed: no cache */
    const float *hidden; /* [n_hidden_rows, dim_stride] of the latest chunk: the last norm's; after
                            a guess the one that stands for the token's */
} qsf_forward;

qsf_status qsf_forward_run(qsf_forward *f, const qsf_chunk *chunk);

/* Of a drafter that reads the keys and values of another model, in the segment's sequence, before
 * its position: logits [n_vocab] = those for the token after the one whose embedding is in the
 * first target_dim numbers of qsf_forward_joined(), before the hidden state of the token before it.
 * f->hidden [target_dim] stands for its own then. All units are resident. */
float *qsf_forward_joined(qsf_forward *f);
qsf_status qsf_forward_lent(qsf_forward *f, const qsf_segment *segment, float *logits);

/* logits [n_vocab] = those of the MTP head for the token after `token`, the only one of the
 * segment, which is behind position 0; hidden: of the token before it. */
qsf_status qsf_forward_guess(qsf_forward *f, const qsf_segment *segment, uint32_t token,
                             const float *hidden, float *logits);
