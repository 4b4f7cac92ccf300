/* unicode.h - what kind of character a code point is, and how characters (de)compose.
 *
 * The tables are those of the tokenizer library that ours must equal; tools/make_unicode_tables.py
 * asks it for them.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TEXT_UNICODE_H
#define QSF_TEXT_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QSF_UNICODE_BLOCK 128 /* code points of a block of the tables */
#define QSF_UNICODE_POINTS 0x110000

/* Bits of a code point. */
enum {
    QSF_CHAR_UPPER = 1,   /* Lu, Lt */
    QSF_CHAR_LOWER = 2,   /* Ll */
    QSF_CHAR_OTHER = 4,   /* Lm, Lo: letters without case */
    QSF_CHAR_MARK = 8,    /* M */
    QSF_CHAR_NUMBER = 16, /* N */
    QSF_CHAR_PUNCT = 32,  /* P */
    QSF_CHAR_SYMBOL = 64, /* S */
    QSF_CHAR_SPACE = 128, /* White_Space */
    QSF_CHAR_LETTER = QSF_CHAR_UPPER | QSF_CHAR_LOWER | QSF_CHAR_OTHER
};

extern const uint8_t qsf_unicode_kind_index[QSF_UNICODE_POINTS / QSF_UNICODE_BLOCK];
extern const uint8_t qsf_unicode_kinds[][QSF_UNICODE_BLOCK];

/* What makes a word at the edge of an added token; numbers as Digits splits them. */
enum { QSF_CHAR_WORD = 1, QSF_CHAR_NUMERIC = 2 };

extern const uint8_t qsf_unicode_word_index[QSF_UNICODE_POINTS / QSF_UNICODE_BLOCK];
extern const uint8_t qsf_unicode_words[][QSF_UNICODE_BLOCK];

static inline unsigned qsf_unicode_kind(uint32_t c)
{
    return qsf_unicode_kinds[qsf_unicode_kind_index[c / QSF_UNICODE_BLOCK]][c % QSF_UNICODE_BLOCK];
}

static inline unsigned qsf_unicode_word(uint32_t c)
{
    return qsf_unicode_words[qsf_unicode_word_index[c / QSF_UNICODE_BLOCK]][c % QSF_UNICODE_BLOCK];
}

/* Canonical combining class; 0 for most. */
extern const uint8_t qsf_unicode_class_index[QSF_UNICODE_POINTS / QSF_UNICODE_BLOCK];
extern const uint8_t qsf_unicode_classes[][QSF_UNICODE_BLOCK];

static inline unsigned qsf_unicode_class(uint32_t c)
{
    return qsf_unicode_classes[qsf_unicode_class_index[c / QSF_UNICODE_BLOCK]]
                              [c % QSF_UNICODE_BLOCK];
}

/* Full decompositions, without Hangul: sorted by code point; `first` is a place in the pool. */
typedef struct qsf_decomposition {
    uint32_t c : 21;
    uint32_t n : 5;
    uint32_t is_compatible : 1; /* only in NFKC */
    uint32_t first : 16;
} qsf_decomposition;

/* Two characters that NFC makes one: sorted by the first, then by the second. */
typedef struct qsf_composition {
    uint32_t first;
    uint32_t second;
    uint32_t c;
} qsf_composition;

extern const qsf_decomposition qsf_unicode_decompositions[];
extern const size_t qsf_unicode_n_decompositions;
extern const uint32_t qsf_unicode_pool[];
extern const qsf_composition qsf_unicode_compositions[];
extern const size_t qsf_unicode_n_compositions;

#endif
