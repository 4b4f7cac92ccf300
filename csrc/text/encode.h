/* encode.h - a text to token ids: all of it, and a piece of it by each kind of model. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "text/work.h"

/* Collects token ids: stores as many as fit the caller's array, and counts all. */
typedef struct qsf_sink {
    uint32_t *ids; /* [cap] */
    size_t cap;
    size_t n;
} qsf_sink;

static inline void qsf_sink_put(qsf_sink *s, uint32_t id)
{
    if (s->n < s->cap)
        s->ids[s->n] = id;
    s->n++;
}

/* `text` is valid UTF-8. Without has_special, names of special tokens are ordinary text. */
qsf_status qsf_text_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes text, bool has_special,
                           qsf_sink *out);

/* Byte-pair encoding: of two neighbouring tokens, those whose merge has the lowest rank are merged
 * first, the leftmost ones first among equals. Time O(n log n) in the piece's bytes; 28 bytes of
 * memory for each. */
qsf_status qsf_bpe_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes piece, qsf_sink *out);

/* The most probable tokens: maximises the sum of scores; time O(n) times the longest token, 16
 * bytes of memory for each byte. */
qsf_status qsf_unigram_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes piece, qsf_sink *out);

/* The tokens of a word, longest first; all but the first have the prefix. A word of more than 100
 * characters, or one that tokens do not cover, is the unknown token. */
qsf_status qsf_wordpiece_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes word,
                                qsf_sink *out);
