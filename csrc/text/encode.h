/* encode.h - a text to token ids, all of it or a piece of it by each kind of model, and tokens to
 * text.
 *
 * Encoding allocates only when a piece is longer than all before it, never for each token.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "memory/ledger.h"
#include "text/vocabulary.h"

/* The most memory of one call; docs/memory.md says how much texts need. */
#define QSF_TEXT_WORK_BYTES (UINT64_C(64) << 20)

enum {
    QSF_WORK_NORMAL_A,
    QSF_WORK_NORMAL_B,
    QSF_WORK_RUN,  /* a character with its combining marks */
    QSF_WORK_SORT, /* the same, in order */
    QSF_WORK_UNITS,
    QSF_WORK_HEAP,
    QSF_WORK_STEPS, /* one for each step */
    QSF_WORK_COUNT = QSF_WORK_STEPS + QSF_TEXT_MAX_STEPS
};

typedef struct qsf_work {
    qsf_ledger ledger;
    void *blocks[QSF_WORK_COUNT];
    size_t block_bytes[QSF_WORK_COUNT];
} qsf_work;

void qsf_work_init(qsf_work *w);
void qsf_work_destroy(qsf_work *w);

/* Grows block `idx` to at least n_bytes and keeps its contents. QSF_ERR_NOMEM if all blocks
 * together exceed QSF_TEXT_WORK_BYTES. */
qsf_status qsf_work_reserve(qsf_work *w, int idx, size_t n_bytes);

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

/* Applies the vocabulary's normalising steps to valid UTF-8. *out is `in` itself if they change
 * nothing; else it lies in a block of w until the next call. */
qsf_status qsf_normalize(const qsf_vocabulary *v, qsf_work *w, qsf_bytes in, qsf_bytes *out);

/* ---- the matches of a regular expression in a text, from the tables of the section TEXT ---- */

/* Matches are those of Oniguruma: the leftmost ones, and of those that begin at one place the first
 * in the order of alternatives and quantifiers. Time is linear in the text. */

typedef struct qsf_scan {
    const qsf_vocabulary *v;
    const qsf_split *split;
    qsf_work *work;
    int block; /* of `work`: where look-aheads match, then `memory` */
    qsf_bytes text;
    const unsigned char *low; /* classes of single bytes, those below n_low */
    unsigned n_low;
    const unsigned char *at;       /* the search goes on here */
    const unsigned char *last_end; /* of the last match, or NULL */
    bool has_memory; /* a bit for each state at every 64th byte: no match is reached from it */
} qsf_scan;

/* `text` is valid UTF-8, or any bytes if the expression is one on bytes. */
qsf_status qsf_scan_begin(qsf_scan *s, const qsf_vocabulary *v, uint32_t step_idx, qsf_work *w,
                          int block, qsf_bytes text);

/* The next match, which may be empty; its p is NULL if there is none. */
qsf_status qsf_scan_next(qsf_scan *s, qsf_bytes *match);

/* ---- tokens to text, one after another: complete characters, never half a one ---- */

/* Room for one token and the pending bytes of earlier ones: each byte may become U+FFFD. */
static inline size_t qsf_decode_room(size_t n_token_bytes)
{
    return 3 * (n_token_bytes + 4);
}

/* Writes the text of a token to out [cap], as much as fits, and returns its bytes. The first token
 * of a text (is_first_token) loses the space that its mark stands for. */
size_t qsf_decode_token(const qsf_vocabulary *v, uint32_t id, bool is_first_token,
                        unsigned char *out, size_t cap);

/* Writes the characters that a token completes to out [qsf_decode_room(its bytes)]. Returns bytes.
 */
size_t qsf_decode_push(const qsf_vocabulary *v, qsf_text_decoder *d, uint32_t id,
                       unsigned char *out);

/* Ends the text: writes U+FFFD for an incomplete character, or nothing; out [3]. */
size_t qsf_decode_flush(qsf_text_decoder *d, unsigned char *out);
