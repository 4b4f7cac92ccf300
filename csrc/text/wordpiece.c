/* wordpiece.c - takes the longest token that begins where the last one ends. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/encode.h"

#include <string.h>

#include "base/status.h"
#include "text/utf8.h"

#define MOST_CHARS 100 /* of a word */

static size_t count_chars(qsf_bytes text)
{
    size_t n = 0;
    for (size_t i = 0; i < text.n; i += qsf_utf8_length(text.p[i]))
        n++;
    return n;
}

/* Returns the longest token of at least `least` bytes at the beginning of a text, or
 * QSF_TOKEN_NONE; its end is the beginning of a character. */
static uint32_t find_longest(const qsf_vocabulary *v, qsf_bytes text, size_t least, size_t *n_bytes)
{
    size_t n = text.n < v->max_token_bytes ? text.n : v->max_token_bytes;
    for (; n >= least; n--) {
        if (n < text.n && (text.p[n] & 0xC0) == 0x80)
            continue;
        const uint32_t id = qsf_vocabulary_find(v, (qsf_bytes){text.p, n});
        *n_bytes = n;
        if (id != QSF_TOKEN_NONE)
            return id;
    }
    return QSF_TOKEN_NONE;
}

qsf_status qsf_wordpiece_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes word, qsf_sink *out)
{
    if (v->unk_id == QSF_TOKEN_NONE)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED, "a WordPiece vocabulary without an unknown token");
    const size_t n_prefix = QSF_WORD_PREFIX_BYTES;
    QSF_TRY(qsf_work_reserve(w, QSF_WORK_HEAP, n_prefix + word.n));
    QSF_TRY(qsf_work_reserve(w, QSF_WORK_UNITS, word.n * sizeof(uint32_t)));
    /* The word after room for a prefix; later prefixes replace what was taken. */
    unsigned char *const bytes = w->blocks[QSF_WORK_HEAP];
    uint32_t *const ids = w->blocks[QSF_WORK_UNITS];
    memcpy(bytes + n_prefix, word.p, word.n);
    size_t n = 0;
    size_t n_bytes = 0;
    bool is_known = count_chars(word) <= MOST_CHARS;
    for (size_t i = 0; i < word.n && is_known;) {
        const size_t n_here = i == 0 ? 0 : n_prefix;
        unsigned char *const at = bytes + n_prefix + i - n_here;
        memcpy(at, QSF_WORD_PREFIX, n_here);
        const qsf_bytes rest = {at, word.n - i + n_here};
        ids[n] = find_longest(v, rest, n_here + 1, &n_bytes);
        is_known = ids[n++] != QSF_TOKEN_NONE;
        i += n_bytes - n_here;
    }
    if (!is_known)
        qsf_sink_put(out, v->unk_id);
    for (size_t i = 0; i < n && is_known; i++)
        qsf_sink_put(out, ids[i]);
    return QSF_OK;
}
