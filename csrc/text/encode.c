/* encode.c - cuts out added tokens; normalises, splits and encodes the texts between them.
 *
 * In the order of the `tokenizers` library: added tokens of the original text, normalising steps,
 * added tokens of the normalised text, splitting steps, model.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/encode.h"

#include <string.h>

#include "base/status.h"
#include "text/unicode.h"
#include "text/utf8.h"

typedef struct encoder {
    const qsf_vocabulary *v;
    qsf_work *w;
    qsf_sink *out;
    bool has_special;
} encoder;

/* ---- splitting ---- */

static const unsigned char mark[3] = {0xE2, 0x96, 0x81}; /* U+2581 */

static bool has_mark(const unsigned char *p, const unsigned char *end)
{
    return end - p >= 3 && memcmp(p, mark, sizeof mark) == 0;
}

static qsf_status split(const encoder *e, uint32_t step_idx, qsf_bytes piece, bool is_first);

static qsf_status split_on(const encoder *e, uint32_t step_idx, const unsigned char *begin,
                           const unsigned char *end, bool is_first)
{
    if (begin == end)
        return QSF_OK;
    return split(e, step_idx + 1, (qsf_bytes){begin, (size_t)(end - begin)}, is_first);
}

/* Pieces that matches and the texts between them are put together to. */
typedef struct joiner {
    const encoder *e;
    uint32_t step_idx;
    const unsigned char *first; /* of the whole, for pieces that begin there */
    bool is_first;
    const unsigned char *begin; /* of the piece that the next range may belong to; NULL: none */
    const unsigned char *end;
    bool was_match;
} joiner;

static qsf_status pass_on(joiner *j)
{
    const unsigned char *const begin = j->begin;
    j->begin = NULL;
    if (begin == NULL)
        return QSF_OK;
    return split_on(j->e, j->step_idx, begin, j->end, j->is_first && begin == j->first);
}

static qsf_status join(joiner *j, uint32_t flags, const unsigned char *begin,
                       const unsigned char *end, bool is_match)
{
    const uint32_t behavior = flags & QSF_SPLIT_BEHAVIORS;
    is_match ^= (flags & QSF_SPLIT_INVERTED) != 0;
    const bool was_match = j->was_match;
    j->was_match = is_match;
    const bool is_joined = (behavior == QSF_SPLIT_CONTIGUOUS && is_match == was_match) ||
                           (behavior == QSF_SPLIT_WITH_PREVIOUS && is_match && !was_match) ||
                           (behavior == QSF_SPLIT_WITH_NEXT && !is_match && was_match);
    if (!is_joined || j->begin == NULL) {
        QSF_TRY(pass_on(j));
        j->begin = behavior == QSF_SPLIT_REMOVED && is_match ? NULL : begin;
    }
    j->end = end;
    return QSF_OK;
}

static qsf_status split_matches(const encoder *e, uint32_t step_idx, qsf_bytes piece, bool is_first)
{
    const uint32_t flags = e->v->splits[step_idx].flags;
    joiner j = {.e = e, .step_idx = step_idx, .first = piece.p, .is_first = is_first};
    const unsigned char *at = piece.p;
    qsf_scan scan;
    QSF_TRY(qsf_scan_begin(&scan, e->v, step_idx, e->w, QSF_WORK_STEPS + (int)step_idx, piece));
    for (;;) {
        qsf_bytes match;
        QSF_TRY(qsf_scan_next(&scan, &match));
        const unsigned char *const end = match.p != NULL ? match.p : piece.p + piece.n;
        if (at != end)
            QSF_TRY(join(&j, flags, at, end, false));
        if (match.p == NULL)
            return pass_on(&j);
        at = match.p + match.n;
        QSF_TRY(join(&j, flags, match.p, at, true));
    }
}

/* True if `c`, which ends before `end`, is in `list`. */
static bool ends_with_one_of(const unsigned char *begin, const unsigned char *end, qsf_bytes list)
{
    const unsigned char *last = end;
    do
        last--;
    while (last != begin && (*last & 0xC0) == 0x80);
    const size_t n_bytes = (size_t)(end - last);
    for (size_t i = 0; i + n_bytes <= list.n; i += qsf_utf8_length(list.p[i]))
        if (memcmp(list.p + i, last, n_bytes) == 0)
            return true;
    return false;
}

static qsf_status split_marks(const encoder *e, uint32_t step_idx, qsf_bytes piece, bool is_first)
{
    const qsf_step *const step = &e->v->steps[step_idx];
    const unsigned char *const end = piece.p + piece.n;
    const unsigned char *begin = piece.p;
    bool is_after_mark = true;
    for (const unsigned char *p = piece.p; p != end;) {
        const bool is_mark = *p == mark[0] && has_mark(p, end);
        const bool is_cut = is_mark && (step->kind == QSF_STEP_SPLIT_MARKS ||
                                        (!is_after_mark && !ends_with_one_of(piece.p, p, step->a)));
        if (is_cut) {
            QSF_TRY(split_on(e, step_idx, begin, p, is_first && begin == piece.p));
            begin = p;
        }
        is_after_mark = is_mark;
        p += qsf_utf8_length(*p);
    }
    return split_on(e, step_idx, begin, end, is_first && begin == piece.p);
}

static qsf_status add_space(const encoder *e, uint32_t step_idx, qsf_bytes piece, bool is_first)
{
    if (piece.p[0] == ' ')
        return split(e, step_idx + 1, piece, is_first);
    const int block = QSF_WORK_STEPS + (int)step_idx;
    QSF_TRY(qsf_work_reserve(e->w, block, piece.n + 1));
    unsigned char *const bytes = e->w->blocks[block];
    bytes[0] = ' ';
    memcpy(bytes + 1, piece.p, piece.n);
    return split(e, step_idx + 1, (qsf_bytes){bytes, piece.n + 1}, is_first);
}

static qsf_status mark_spaces(const encoder *e, uint32_t step_idx, qsf_bytes piece, bool is_first)
{
    const qsf_step_kind kind = e->v->steps[step_idx].kind;
    const bool has_first = piece.p[0] == ' ' || has_mark(piece.p, piece.p + piece.n);
    const bool is_prepended =
        !has_first && (kind == QSF_STEP_MARK_ALL || (kind == QSF_STEP_MARK_FIRST && is_first));
    size_t n_bytes = piece.n + (is_prepended ? sizeof mark : 0);
    for (size_t i = 0; i < piece.n; i++)
        n_bytes += piece.p[i] == ' ' ? sizeof mark - 1 : 0;
    const int block = QSF_WORK_STEPS + (int)step_idx;
    QSF_TRY(qsf_work_reserve(e->w, block, n_bytes));
    unsigned char *const bytes = e->w->blocks[block];
    size_t n = 0;
    if (is_prepended) {
        memcpy(bytes, mark, sizeof mark);
        n = sizeof mark;
    }
    for (size_t i = 0; i < piece.n; i++) {
        if (piece.p[i] == ' ') {
            memcpy(bytes + n, mark, sizeof mark);
            n += sizeof mark;
        } else {
            bytes[n++] = piece.p[i];
        }
    }
    return split(e, step_idx + 1, (qsf_bytes){bytes, n}, is_first);
}

/* Applies the steps from step_idx on, then the model; the recursion is as deep as the number of
 * steps. is_first: the piece begins at the beginning of the whole text. */
static qsf_status split(const encoder *e, uint32_t step_idx, qsf_bytes piece, bool is_first)
{
    if (step_idx == e->v->n_steps)
        return (e->v->model == QSF_TEXT_UNIGRAM     ? qsf_unigram_encode
                : e->v->model == QSF_TEXT_WORDPIECE ? qsf_wordpiece_encode
                                                    : qsf_bpe_encode)(e->v, e->w, piece, e->out);
    const qsf_step_kind kind = e->v->steps[step_idx].kind;
    if (kind < QSF_STEP_SPLIT)
        return split(e, step_idx + 1, piece, is_first);
    if (kind == QSF_STEP_PREFIX_SPACE)
        return add_space(e, step_idx, piece, is_first);
    if (kind == QSF_STEP_MARK_SPACES || kind == QSF_STEP_MARK_ALL || kind == QSF_STEP_MARK_FIRST)
        return mark_spaces(e, step_idx, piece, is_first);
    if (kind == QSF_STEP_SPLIT_MARKS || kind == QSF_STEP_CUT_MARKS)
        return split_marks(e, step_idx, piece, is_first);
    return split_matches(e, step_idx, piece, is_first);
}

/* ---- added tokens ---- */

/* Returns the longest added token of the group that begins at `from`, or QSF_TOKEN_NONE. Their
 * contents are sorted, so tokens with a common beginning form a range, which shrinks with every
 * byte. */
static uint32_t find_added(const qsf_vocabulary *v, int group, qsf_bytes text, size_t from)
{
    const uint32_t *const firsts = v->first_added[group];
    uint32_t low = firsts[text.p[from]];
    uint32_t high = firsts[text.p[from] + 1];
    uint32_t longest = QSF_TOKEN_NONE;
    for (size_t k = 1; low < high; k++) {
        if (qsf_vocabulary_added(v, low).content.n == k)
            longest = low++;
        if (from + k == text.n)
            break;
        const unsigned char byte = text.p[from + k];
        uint32_t bounds[2] = {low, high}; /* the first with at least this byte; with a larger one */
        for (int i = 0; i < 2; i++) {
            uint32_t end = high;
            bounds[i] = low;
            while (bounds[i] < end) {
                const uint32_t middle = bounds[i] + (end - bounds[i]) / 2;
                if (qsf_vocabulary_added(v, middle).content.p[k] < byte + i)
                    bounds[i] = middle + 1;
                else
                    end = middle;
            }
        }
        low = bounds[0];
        high = bounds[1];
    }
    return longest;
}

static bool is_word_before(qsf_bytes text, size_t at)
{
    if (at == 0)
        return false;
    size_t last = at - 1;
    while (last != 0 && (text.p[last] & 0xC0) == 0x80)
        last--;
    size_t n_bytes;
    return (qsf_unicode_word(qsf_utf8_load(text.p + last, &n_bytes)) & QSF_CHAR_WORD) != 0;
}

static bool is_word_behind(qsf_bytes text, size_t at)
{
    size_t n_bytes;
    return at != text.n &&
           (qsf_unicode_word(qsf_utf8_load(text.p + at, &n_bytes)) & QSF_CHAR_WORD) != 0;
}

static size_t spaces_begin(qsf_bytes text, size_t end)
{
    while (end != 0) {
        size_t last = end - 1;
        while (last != 0 && (text.p[last] & 0xC0) == 0x80)
            last--;
        size_t n_bytes;
        if ((qsf_unicode_word(qsf_utf8_load(text.p + last, &n_bytes)) & QSF_CHAR_SPACE) == 0)
            break;
        end = last;
    }
    return end;
}

static size_t spaces_end(qsf_bytes text, size_t at)
{
    size_t n_bytes;
    while (at != text.n &&
           (qsf_unicode_word(qsf_utf8_load(text.p + at, &n_bytes)) & QSF_CHAR_SPACE) != 0)
        at += n_bytes;
    return at;
}

static qsf_status encode_between(const encoder *e, int group, qsf_bytes text, bool is_first);

/* Cuts the added tokens of a group out of a text. */
static qsf_status cut_added(const encoder *e, int group, qsf_bytes text, bool is_first)
{
    const uint32_t *const firsts = e->v->first_added[group];
    size_t done = 0; /* everything before it is encoded */
    for (size_t i = 0; i < text.n;) {
        const unsigned char byte = text.p[i];
        const uint32_t idx =
            firsts[byte] == firsts[byte + 1] ? QSF_TOKEN_NONE : find_added(e->v, group, text, i);
        if (idx == QSF_TOKEN_NONE) {
            i++;
            continue;
        }
        const qsf_added added = qsf_vocabulary_added(e->v, idx);
        size_t begin = i;
        size_t end = i + added.content.n;
        i = end;
        if (!e->has_special && (added.flags & QSF_ADDED_SPECIAL) != 0)
            continue;
        if ((added.flags & QSF_ADDED_SINGLE_WORD) != 0 &&
            (is_word_before(text, begin) || is_word_behind(text, end)))
            continue;
        if ((added.flags & QSF_ADDED_LSTRIP) != 0) {
            const size_t stripped = spaces_begin(text, begin);
            begin = stripped > done ? stripped : done;
        }
        if ((added.flags & QSF_ADDED_RSTRIP) != 0)
            end = spaces_end(text, end);
        if (done < begin)
            QSF_TRY(encode_between(e, group, (qsf_bytes){text.p + done, begin - done},
                                   is_first && done == 0));
        qsf_sink_put(e->out, added.id);
        done = end;
    }
    if (done != text.n)
        return encode_between(e, group, (qsf_bytes){text.p + done, text.n - done},
                              is_first && done == 0);
    return QSF_OK;
}

static qsf_status encode_between(const encoder *e, int group, qsf_bytes text, bool is_first)
{
    if (group == 1)
        return split(e, 0, text, is_first);
    qsf_bytes normal;
    QSF_TRY(qsf_normalize(e->v, e->w, text, &normal));
    return cut_added(e, 1, normal, is_first);
}

qsf_status qsf_text_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes text, bool has_special,
                           qsf_sink *out)
{
    const encoder e = {.v = v, .w = w, .out = out, .has_special = has_special};
    return cut_added(&e, 0, text, true);
}
