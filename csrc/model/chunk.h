/* chunk.h - the tokens that pass through the layers together.
 *
 * Rows of a chunk belong to one or more sequences: a prompt is one segment of many tokens, a
 * batched decode is many segments of one token. Only attention distinguishes between rows.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/cancel.h"
#include "cache/sequence.h"
#include "platform/stopwatch.h"

/* Rows first_row .. first_row + n_tokens - 1 of a chunk: consecutive positions of a sequence. */
typedef struct qsf_segment {
    qsf_sequence *sequence; /* of this segment alone; receives first_position and up */
    uint32_t first_row;
    uint32_t n_tokens;
    uint32_t first_position;
} qsf_segment;

typedef struct qsf_chunk {
    const uint32_t *tokens;      /* [n_tokens], ids below n_vocab */
    uint32_t n_tokens;           /* 1 .. chunk_tokens of the scratch; the sum of the segments' */
    const qsf_segment *segments; /* [n_segments], in the order of their rows */
    uint32_t n_segments;
    /* [n_logits_rows + n_hidden_rows] rows that get logits, then rows that need only the last
     * norm; both ascending */
    const uint32_t *head_rows;
    uint32_t n_logits_rows;
    uint32_t n_hidden_rows;
    float *logits;            /* [n_logits_rows, n_vocab] */
    const qsf_cancel *cancel; /* read before each layer */
    qsf_stopwatch *stopwatch; /* started; gets a lap for each phase; may be NULL */
    /* Called before each layer, unless NULL. Returns true if it moved units of the stream. */
    bool (*before_layer)(void *arg);
    void *before_layer_arg;
} qsf_chunk;
