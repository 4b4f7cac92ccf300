/* unicode.h - words and spaces, and the (de)composition of characters.
 *
 * The tables equal those of the `tokenizers` library; tools/make_unicode_tables.py computes them
 * with it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QSF_UNICODE_BLOCK 128 /* code points of a block of the tables */
#define QSF_UNICODE_POINTS 0x110000
#define QSF_UNICODE_DECOMPOSITIONS 5738
#define QSF_UNICODE_POOL 6619
#define QSF_UNICODE_COMPOSITIONS 940
#define QSF_UNICODE_MAX_DECOMPOSED 32 /* characters of one decomposition, at most */

/* Decodes the tables. Before it every table is zero. Any thread may call it; only the first call
 * decodes. */
void qsf_unicode_load(void);

/* The properties of a code point in two stages: a block, and its place in the block. */
typedef struct qsf_unicode_property {
    uint8_t index[QSF_UNICODE_POINTS / QSF_UNICODE_BLOCK];
    uint8_t blocks[UINT8_MAX + 1][QSF_UNICODE_BLOCK];
} qsf_unicode_property;

/* Word characters, for added tokens that match whole words only, and spaces (White_Space). */
enum { QSF_CHAR_WORD = 1, QSF_CHAR_SPACE = 2 };

extern qsf_unicode_property qsf_unicode_words;

static inline unsigned qsf_unicode_look_up(const qsf_unicode_property *p, uint32_t c)
{
    return p->blocks[p->index[c / QSF_UNICODE_BLOCK]][c % QSF_UNICODE_BLOCK];
}

static inline unsigned qsf_unicode_word(uint32_t c)
{
    return qsf_unicode_look_up(&qsf_unicode_words, c);
}

/* Canonical combining class; 0 for most. */
extern qsf_unicode_property qsf_unicode_classes;

static inline unsigned qsf_unicode_class(uint32_t c)
{
    return qsf_unicode_look_up(&qsf_unicode_classes, c);
}

/* Full decompositions, without Hangul: sorted by code point; `first` is a place in the pool. */
typedef struct qsf_decomposition {
    uint32_t c;
    uint16_t first;
    uint8_t n;
    bool is_compatible; /* only in NFKC */
} qsf_decomposition;

/* Two characters that NFC makes one: sorted by the first, then by the second. */
typedef struct qsf_composition {
    uint32_t first;
    uint32_t second;
    uint32_t c;
} qsf_composition;

extern qsf_decomposition qsf_unicode_decompositions[QSF_UNICODE_DECOMPOSITIONS];
extern uint32_t qsf_unicode_pool[QSF_UNICODE_POOL];
extern qsf_composition qsf_unicode_compositions[QSF_UNICODE_COMPOSITIONS];
