/* vocabulary.h - the section TEXT in the form of the file: checked once, then only read.
 *
 * docs/format.md, section 9, describes every byte. The section is untrusted: after
 * qsf_vocabulary_init every id in it is below n_ids, every range lies inside it, and every search
 * ends after max_probes.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "base/bytes.h"
#include "include/qsf.h"

#define QSF_TEXT_HEADER_BYTES 128
#define QSF_TEXT_MAX_BYTES (UINT32_C(64) << 20)
#define QSF_TEXT_MAX_IDS (UINT32_C(1) << 24)
#define QSF_TEXT_MAX_PROBES 255
#define QSF_TEXT_MAX_STEPS 16
#define QSF_TEXT_MAX_PREFIX 16
#define QSF_TEXT_MAX_TOKEN_BYTES 65535
#define QSF_TEXT_MAX_ADDED_BYTES 512
#define QSF_TEXT_MAX_CLASSES 255
#define QSF_TEXT_MAX_AHEADS 3
#define QSF_TEXT_MAX_STATES 4096
#define QSF_TEXT_CLASS_BLOCK 128 /* characters of a block of the table of classes */
#define QSF_TEXT_CLASS_BLOCKS (0x110000 / QSF_TEXT_CLASS_BLOCK)

#define QSF_WORD_PREFIX "##" /* WordPiece: of tokens that go on with a word */
#define QSF_WORD_PREFIX_BYTES 2

typedef enum qsf_text_model {
    QSF_TEXT_BPE_BYTES = 0, /* units are bytes */
    QSF_TEXT_BPE_CHARS = 1, /* units are characters */
    QSF_TEXT_UNIGRAM = 2,
    QSF_TEXT_WORDPIECE = 3,
    QSF_TEXT_MODEL_COUNT = 4
} qsf_text_model;

enum {                             /* flags of the section */
       QSF_TEXT_IGNORE_MERGES = 1, /* a piece that is a token becomes that token */
       QSF_TEXT_FUSE_UNK = 2,      /* neighbouring unknown units become one unknown token */
       QSF_TEXT_BYTE_FALLBACK = 4, /* unknown characters become tokens of their bytes */
       QSF_TEXT_MARKS = 8,         /* decoding: U+2581 is a space */
       QSF_TEXT_BYTE_TOKENS = 16,  /* decoding: a token named <0xHH> is that byte */
       QSF_TEXT_FIRST_TOKEN = 32,  /* decoding: the first token loses all its U+2581 */
       QSF_TEXT_ALL_FLAGS = 63
};

enum { /* of a token */
       QSF_TOKEN_PRESENT = 1,
       QSF_TOKEN_SPECIAL = 2,
       QSF_TOKEN_ALL_KINDS = 3
};

enum { /* of an added token */
       QSF_ADDED_LSTRIP = 1,
       QSF_ADDED_RSTRIP = 2,
       QSF_ADDED_SINGLE_WORD = 4,
       QSF_ADDED_NORMALIZED = 8,
       QSF_ADDED_SPECIAL = 16,
       QSF_ADDED_ALL_FLAGS = 31
};

/* Steps on the text between added tokens, in this order; below QSF_STEP_SPLIT it is
 * normalised, from there on it is split into pieces. */
typedef enum qsf_step_kind {
    QSF_STEP_NFC = 1,
    QSF_STEP_NFKC = 2,
    QSF_STEP_PREPEND = 3, /* a, before a text that is not empty */
    QSF_STEP_REPLACE = 4, /* b for every a */
    QSF_STEP_NFD = 5,
    QSF_STEP_MAP = 6, /* texts of the second tree, the longest first, by others */
    QSF_STEP_NFKD = 7,
    QSF_STEP_REPLACE_MATCHES = 8, /* a qsf_split: b for every match of a regular expression */
    QSF_STEP_SPLIT = 16,
    QSF_STEP_PREFIX_SPACE = 16, /* a space before a text that does not begin with one */
    QSF_STEP_MARK_SPACES = 17,  /* U+2581 for every space */
    QSF_STEP_MARK_ALL = 18,   /* the same, and a space before a text that does not begin with one */
    QSF_STEP_MARK_FIRST = 19, /* in front only at the beginning of the text */
    QSF_STEP_SPLIT_MARKS = 20, /* a piece begins at every U+2581 */
    QSF_STEP_CUT_MARKS = 21,   /* the same, but only after a character that is neither U+2581 nor in
                                  a: no token crosses such a place, so the ids stay the same */
    QSF_STEP_EXPRESSION = 22,  /* a qsf_split: matches of a regular expression */
    QSF_STEP_COUNT
} qsf_step_kind;

typedef struct qsf_bytes {
    const unsigned char *p;
    size_t n;
} qsf_bytes;

typedef struct qsf_step {
    qsf_step_kind kind;
    qsf_bytes a;
    qsf_bytes b;
} qsf_step;

#define QSF_SPLIT_MATCH 0x8000U /* of an entry: a match ends in front of the character */

#define QSF_SPLIT_BACKWARD_BITS 12 /* of an entry of `backward`: the state */

enum { /* of a split: what becomes of matches and of the texts between them */
       QSF_SPLIT_ISOLATED = 0,
       QSF_SPLIT_REMOVED = 1,
       QSF_SPLIT_WITH_PREVIOUS = 2, /* a match and what is in front of it are one piece */
       QSF_SPLIT_WITH_NEXT = 3,
       QSF_SPLIT_CONTIGUOUS = 4, /* neighbouring matches are one piece */
       QSF_SPLIT_BEHAVIORS = 7,
       QSF_SPLIT_INVERTED = 8,  /* the texts between matches take their part */
       QSF_SPLIT_ON_BYTES = 16, /* characters are bytes, those of ByteLevel's alphabet */
       QSF_SPLIT_LOOKS_BEHIND = 32,
       QSF_SPLIT_ALL_FLAGS = 63
};

/* An automaton, whose rows are states, its columns classes of characters; docs/format.md. */
typedef struct qsf_split {
    const unsigned char *forward;  /* u16 [n_forward, n_columns] */
    const unsigned char *backward; /* u16 [n_backward, n_classes], for look-aheads */
    uint32_t n_forward;
    uint32_t n_backward;
    uint32_t n_columns; /* n_classes, twice as many for each look-ahead */
    uint32_t flags;
} qsf_split;

typedef struct qsf_added {
    uint32_t id;
    uint32_t flags;
    qsf_bytes content;
} qsf_added;

/* Pointers into the section, which outlives this. */
typedef struct qsf_vocabulary {
    qsf_text_model model;
    uint32_t flags;
    uint32_t n_leading; /* decoding: spaces that a text loses at its beginning */
    uint32_t n_ids;     /* one more than the largest id */
    uint32_t n_tokens;
    uint32_t unk_id; /* or QSF_TOKEN_NONE */
    uint32_t n_slots;
    uint32_t n_merges;
    uint32_t n_merge_slots;
    uint32_t n_added;
    uint32_t n_added_raw; /* added tokens before this one are searched in the text before
                             normalisation */
    uint32_t n_prefix;
    uint32_t n_steps;
    uint32_t n_nodes;
    uint32_t n_map_nodes;
    uint32_t n_classes; /* of characters; the last one is the edge of a text */
    uint32_t n_class_blocks;
    uint32_t n_entries; /* of all splits */
    uint32_t max_probes;
    uint32_t max_token_bytes;
    double unk_score;
    const unsigned char *offsets; /* u32 [n_ids + 1] */
    const unsigned char *kinds;   /* u8 [n_ids] */
    const unsigned char *text;
    const unsigned char *slots;       /* u32 [n_slots]: an id or QSF_TOKEN_NONE */
    const unsigned char *unit_ids;    /* u32 [256]: of bytes, or of characters of one byte */
    const unsigned char *byte_ids;    /* u32 [256]: of tokens <0xHH> */
    const unsigned char *merges;      /* u32 [n_merges, 3]: left, right, result, by rank */
    const unsigned char *merge_slots; /* u32 [n_merge_slots]: a rank or QSF_TOKEN_NONE */
    const unsigned char *added;       /* u32 [n_added, 4] */
    const unsigned char *prefix;      /* u32 [n_prefix] */
    const unsigned char *pool;
    const unsigned char *scores;       /* f64 [n_ids] */
    const unsigned char *nodes;        /* u32 [n_nodes, 3]: first child, children << 8 | byte, id */
    const unsigned char *map_nodes;    /* the same; id: place in the pool << 8 | bytes */
    const unsigned char *class_index;  /* u16 [QSF_TEXT_CLASS_BLOCKS] */
    const unsigned char *class_blocks; /* u8 [n_class_blocks, QSF_TEXT_CLASS_BLOCK] */
    const unsigned char *byte_classes; /* u8 [256] */
    qsf_step steps[QSF_TEXT_MAX_STEPS];
    qsf_split splits[QSF_TEXT_MAX_STEPS]; /* of steps that have an expression */
    uint32_t first_added[2][257];         /* raw and normalised: by first byte, into `added` */
} qsf_vocabulary;

/* QSF_ERR_FORMAT: a rule is broken; QSF_ERR_UNSUPPORTED: a newer version. */
qsf_status qsf_vocabulary_init(qsf_vocabulary *v, const unsigned char *section, size_t n_bytes);

/* Text of a token; empty for ids that do not exist. */
static inline qsf_bytes qsf_vocabulary_text(const qsf_vocabulary *v, uint32_t id)
{
    if (id >= v->n_ids)
        return (qsf_bytes){v->text, 0};
    const uint32_t begin = qsf_load_u32(v->offsets + (size_t)id * 4);
    return (qsf_bytes){v->text + begin, qsf_load_u32(v->offsets + (size_t)id * 4 + 4) - begin};
}

/* The token with this text, or QSF_TOKEN_NONE. */
uint32_t qsf_vocabulary_find(const qsf_vocabulary *v, qsf_bytes text);

/* The child of a node of a tree for a byte; 0: no child. */
uint32_t qsf_tree_child(const unsigned char *nodes, uint32_t node, unsigned char byte);

#define QSF_MERGE_NONE UINT32_MAX

static inline uint32_t qsf_merge_hash(uint32_t left, uint32_t right)
{
    uint32_t h = left * UINT32_C(0x9E3779B1) ^ right * UINT32_C(0x85EBCA77);
    h = (h ^ h >> 15) * UINT32_C(0x2C1B3C6D);
    return h ^ h >> 13;
}

/* Rank of the merge of two tokens, or QSF_MERGE_NONE. */
static inline uint32_t qsf_merge_rank(const qsf_vocabulary *v, uint32_t left, uint32_t right)
{
    const uint32_t mask = v->n_merge_slots - 1;
    uint32_t slot = qsf_merge_hash(left, right) & mask;
    for (uint32_t i = 0; i < v->max_probes; i++) {
        const uint32_t rank = qsf_load_u32(v->merge_slots + (size_t)slot * 4);
        if (rank == QSF_MERGE_NONE)
            return rank;
        const unsigned char *const merge = v->merges + (size_t)rank * 12;
        if (qsf_load_u32(merge) == left && qsf_load_u32(merge + 4) == right)
            return rank;
        slot = (slot + 1) & mask;
    }
    return QSF_MERGE_NONE;
}

static inline uint32_t qsf_merge_result(const qsf_vocabulary *v, uint32_t rank)
{
    return qsf_load_u32(v->merges + (size_t)rank * 12 + 8);
}

static inline qsf_added qsf_vocabulary_added(const qsf_vocabulary *v, uint32_t idx)
{
    const unsigned char *const p = v->added + (size_t)idx * 16;
    return (qsf_added){
        .id = qsf_load_u32(p),
        .flags = qsf_load_u32(p + 4),
        .content = {v->pool + qsf_load_u32(p + 8), qsf_load_u32(p + 12)},
    };
}
