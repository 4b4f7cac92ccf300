/* qsf_text.h - part of qsf.h: text to token ids and back. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TEXT_H
#define QSF_TEXT_H

#include "qsf_library.h"

QSF_C_BEGIN

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

/* The vocabulary of a file: text to token ids and back. It never changes once it is open, so any
 * number of threads may use it at the same time, with or without a model. The plan of a model that
 * is opened afterwards counts its tables as memory of the process. */
typedef struct qsf_text qsf_text;

/* Reads and checks the section TEXT of the file `path` (UTF-8). QSF_ERR_UNSUPPORTED if the file has
 * none: the engine does not cover its kind of tokenizer, or an older converter wrote the file.
 * After an error *out is NULL and nothing is held. */
QSF_API qsf_status qsf_text_open(const char *path, qsf_text **out);

/* Does the same with the bytes of the section, which it copies. */
QSF_API qsf_status qsf_text_create(const void *section, uint64_t n_bytes, qsf_text **out);
QSF_API void qsf_text_close(qsf_text *t);

typedef struct qsf_text_facts {
    char model[16];      /* "byte-level BPE", "BPE", "unigram" or "WordPiece" */
    uint32_t n_tokens;   /* tokens, added ones included */
    uint32_t n_ids;      /* one more than the largest id */
    uint64_t n_bytes;    /* memory that the vocabulary takes */
    uint64_t room_bytes; /* cap_bytes of qsf_decoder_push that is enough for every token */
} qsf_text_facts;

/* Fills *out. If t is NULL, *out does not change. */
QSF_API void qsf_text_info(const qsf_text *t, qsf_text_facts *out);

/* Flags of qsf_tokenize. PREFIX: prepend the tokens that begin a text (BOS), unless the text
 * already begins with them. SPECIAL: names of special tokens in the text become these tokens;
 * without it they are ordinary text, as text from a user should be. */
#define QSF_TOKENIZE_PREFIX 1
#define QSF_TOKENIZE_SPECIAL 2

/* Converts text [n_bytes] to token ids, without an end token. It writes at most cap_ids of them to
 * ids. *n_ids becomes their number; if that is more than cap_ids, call again with as many. A token
 * has at least one byte of text, except for the prefix and what normalisation adds.
 * QSF_ERR_ARG: the text is not UTF-8. QSF_ERR_NOMEM: the call would need more than 64 MB of memory;
 * docs/memory.md says how much a text needs. */
QSF_API qsf_status qsf_tokenize(const qsf_text *t, const char *text, size_t n_bytes, uint32_t flags,
                                uint32_t *ids, size_t cap_ids, size_t *n_ids);

/* Flags of qsf_detokenize. SPECIAL: special tokens have text too. START: the ids begin a text, so
 * the space that a SentencePiece vocabulary puts there is dropped. */
#define QSF_DETOKENIZE_SPECIAL 1
#define QSF_DETOKENIZE_START 2

/* Converts ids [n_ids] to text: valid UTF-8 without a terminating zero. Bytes that no continuation
 * can complete to a character become U+FFFD. Ids that do not exist have no text. *n_bytes becomes
 * the size of the text. out [cap_bytes] is filled only if cap_bytes is large enough. */
QSF_API qsf_status qsf_detokenize(const qsf_text *t, const uint32_t *ids, size_t n_ids,
                                  uint32_t flags, char *out, size_t cap_bytes, size_t *n_bytes);

/* The state of a text that arrives token by token. A copy of the struct is a copy of the state. */
typedef struct qsf_text_decoder {
    uint32_t skips_special;
    uint32_t is_at_start;
    uint32_t n_leading;
    uint32_t n_pending;
    unsigned char pending[4];
} qsf_text_decoder;

/* Begins a text. The flags are those of qsf_detokenize. */
QSF_API void qsf_decoder_init(const qsf_text *t, uint32_t flags, qsf_text_decoder *out);

/* Adds one token and writes the characters that it completes, often none, to out [cap_bytes].
 * room_bytes of qsf_text_facts is enough for every token. QSF_ERR_ARG if cap_bytes is too small for
 * this token; the decoder does not change then. */
QSF_API qsf_status qsf_decoder_push(const qsf_text *t, qsf_text_decoder *d, uint32_t id, char *out,
                                    size_t cap_bytes, size_t *n_bytes);

/* Ends a text: writes U+FFFD to out [3] if a character is unfinished. Returns the number of bytes
 * written. */
QSF_API size_t qsf_decoder_flush(qsf_text_decoder *d, char *out);

/* Writes the bytes of one token, which need not be UTF-8, to out [cap_bytes]: _text: its bytes in
 * a text; _name: its name in the vocabulary. Returns their number, which may be more than
 * cap_bytes; 0 if the id does not exist. */
QSF_API size_t qsf_token_text(const qsf_text *t, uint32_t id, char *out, size_t cap_bytes);
QSF_API size_t qsf_token_name(const qsf_text *t, uint32_t id, char *out, size_t cap_bytes);

/* Returns the token with this name, or QSF_TOKEN_NONE. If a token of the model and an added token
 * have the same name, is_added chooses: 1 the added one, 0 the other. */
QSF_API uint32_t qsf_token_find(const qsf_text *t, const char *name, size_t n_bytes,
                                uint32_t is_added);

/* Fills ids [cap_ids] with the special tokens in ascending order. Returns their number. */
QSF_API size_t qsf_text_special(const qsf_text *t, uint32_t *ids, size_t cap_ids);

/* Counts of a JSON text, which bound the memory of its values. */
typedef struct qsf_json_size {
    uint64_t depth;        /* nesting of the deepest object or list; 0: none */
    uint64_t n_containers; /* objects and lists */
    uint64_t n_members;    /* colons */
    uint64_t n_commas;
    uint64_t n_strings;
    uint32_t char_bytes;         /* 1, 2 or 4: bytes of the widest character in UCS-1, -2 or -4 */
    uint32_t has_lone_surrogate; /* 1: an escape is a lone surrogate */
} qsf_json_size;

/* Counts the elements of the first value of `text` [n_bytes], in one pass and without memory.
 * The text need not be JSON or UTF-8: no prefix that a parser accepts contains more than the
 * counts. */
QSF_API void qsf_json_measure(const void *text, size_t n_bytes, qsf_json_size *out);

/* ---- cdef end ---- */

QSF_C_END

#endif
