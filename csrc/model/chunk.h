/* chunk.h - the tokens that pass through the layers together.
 *
 * Rows of a chunk belong to one or more sequences: a prompt is one segment of many tokens,
 * a batched decode many segments of one. Everything but attention treats all rows alike.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_CHUNK_H
#define QSF_MODEL_CHUNK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "model/kvcache.h"
#include "platform/stopwatch.h"

/* Rows first_row .. first_row + n_tokens - 1 of a chunk: consecutive positions of a sequence. */
typedef struct qsf_segment {
    qsf_kvcache *kv; /* positions first_position .. are written; no two segments share one */
    uint32_t first_row;
    uint32_t n_tokens;
    uint32_t first_position;
} qsf_segment;

typedef struct qsf_chunk {
    const uint32_t *tokens;      /* [n_tokens], ids below n_vocab */
    uint32_t n_tokens;           /* 1 .. chunk_tokens of the scratch; the sum of the segments' */
    const qsf_segment *segments; /* [n_segments], in the order of their rows */
    uint32_t n_segments;
    uint32_t first_logits;        /* rows from here on get logits; n_tokens: none do */
    float *logits;                /* [n_tokens - first_logits, n_vocab] */
    const atomic_bool *cancelled; /* looked at before each layer */
    qsf_stopwatch *stopwatch; /* started; gets a lap for each phase. NULL: nobody wants to know */
    /* Called before each layer, or NULL. It may make resident units streamed ones or the reverse,
     * and then says true. */
    bool (*before_layer)(void *arg);
    void *before_layer_arg;
} qsf_chunk;

#endif
