/* text.c - the public functions on texts (arguments, the memory of a call), and decoding. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/text.h"

#include <string.h>

#include "base/status.h"
#include "text/encode.h"
#include "text/unicode.h"
#include "text/utf8.h"

qsf_status qsf_text_reserve(uint64_t n_bytes, qsf_text **out)
{
    *out = NULL;
    QSF_FAIL_IF(n_bytes == 0 || n_bytes > QSF_TEXT_MAX_BYTES, FORMAT,
                "section TEXT has %llu bytes, allowed: 1 to %u", (unsigned long long)n_bytes,
                QSF_TEXT_MAX_BYTES);
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, n_bytes + sizeof(qsf_text));
    qsf_text *t;
    QSF_TRY(qsf_ledger_take(&ledger, QSF_USE_TEXT, sizeof *t, "a vocabulary", &t));
    t->n_bytes = (size_t)n_bytes;
    t->ledger = ledger;
    *out = t;
    return qsf_ledger_take(&t->ledger, QSF_USE_TEXT, n_bytes, "a vocabulary", &t->section);
}

qsf_status qsf_text_check(qsf_text *t)
{
    qsf_unicode_load();
    return qsf_vocabulary_init(&t->vocabulary, t->section, t->n_bytes);
}

qsf_status qsf_text_create(const void *section, uint64_t n_bytes, qsf_text **out)
{
    QSF_FAIL_IF(section == NULL || out == NULL, ARG, "qsf_text_create: a pointer is NULL");
    qsf_status status = qsf_text_reserve(n_bytes, out);
    if (status == QSF_OK) {
        memcpy((*out)->section, section, (size_t)n_bytes);
        status = qsf_text_check(*out);
    }
    if (status != QSF_OK) {
        qsf_text_close(*out);
        *out = NULL;
    }
    return status;
}

void qsf_text_close(qsf_text *t)
{
    if (t == NULL)
        return;
    qsf_ledger ledger = t->ledger; /* its last entry is the block it lives in */
    qsf_ledger_release(&ledger, QSF_USE_TEXT, t->section, t->n_bytes);
    qsf_ledger_release(&ledger, QSF_USE_TEXT, t, sizeof *t);
}

void qsf_text_info(const qsf_text *t, qsf_text_facts *out)
{
    static const char *const names[QSF_TEXT_MODEL_COUNT] = {"byte-level BPE", "BPE", "unigram",
                                                            "WordPiece"};
    if (t == NULL || out == NULL)
        return;
    const qsf_vocabulary *const v = &t->vocabulary;
    memset(out, 0, sizeof *out);
    memcpy(out->model, names[v->model], strlen(names[v->model]));
    out->n_tokens = v->n_tokens;
    out->n_ids = v->n_ids;
    out->n_bytes = t->n_bytes;
    out->room_bytes = qsf_decode_room(v->max_token_bytes);
}

qsf_status qsf_tokenize(const qsf_text *t, const char *text, size_t n_bytes, uint32_t flags,
                        uint32_t *ids, size_t cap_ids, size_t *n_ids)
{
    QSF_FAIL_IF(t == NULL || (text == NULL && n_bytes != 0) || (ids == NULL && cap_ids != 0) ||
                    n_ids == NULL ||
                    (flags & ~(uint32_t)(QSF_TOKENIZE_PREFIX | QSF_TOKENIZE_SPECIAL)) != 0,
                ARG, "qsf_tokenize: a pointer is NULL or a flag unknown");
    const qsf_vocabulary *const v = &t->vocabulary;
    const qsf_bytes bytes = {(const unsigned char *)text, n_bytes};
    const size_t n_valid = n_bytes == 0 ? 0 : qsf_utf8_valid_bytes(bytes.p, n_bytes);
    QSF_FAIL_IF(n_valid != n_bytes, ARG, "the text is not UTF-8 from byte %zu on", n_valid);
    qsf_sink sink = {ids, cap_ids, 0};
    const uint32_t n_prefix = (flags & QSF_TOKENIZE_PREFIX) != 0 ? v->n_prefix : 0;
    for (uint32_t i = 0; i < n_prefix; i++)
        qsf_sink_put(&sink, qsf_load_u32(v->prefix + (size_t)i * 4));
    qsf_work w;
    qsf_work_init(&w);
    const qsf_status status =
        qsf_text_encode(v, &w, bytes, (flags & QSF_TOKENIZE_SPECIAL) != 0, &sink);
    qsf_work_destroy(&w);
    QSF_TRY(status);
    *n_ids = sink.n;
    /* A text that already begins with the prefix does not get it again. */
    if (n_prefix != 0 && sink.n >= 2 * (size_t)n_prefix && sink.n <= cap_ids &&
        memcmp(ids, ids + n_prefix, n_prefix * sizeof *ids) == 0) {
        *n_ids -= n_prefix;
        memmove(ids, ids + n_prefix, *n_ids * sizeof *ids);
    }
    return QSF_OK;
}

size_t qsf_token_text(const qsf_text *t, uint32_t id, char *out, size_t cap_bytes)
{
    if (t == NULL || (out == NULL && cap_bytes != 0))
        return 0;
    return qsf_decode_token(&t->vocabulary, id, false, (unsigned char *)out, cap_bytes);
}

size_t qsf_token_name(const qsf_text *t, uint32_t id, char *out, size_t cap_bytes)
{
    if (t == NULL || (out == NULL && cap_bytes != 0))
        return 0;
    const qsf_bytes name = qsf_vocabulary_text(&t->vocabulary, id);
    if (cap_bytes != 0)
        memcpy(out, name.p, name.n < cap_bytes ? name.n : cap_bytes);
    return name.n;
}

uint32_t qsf_token_find(const qsf_text *t, const char *name, size_t n_bytes, uint32_t is_added)
{
    if (t == NULL || name == NULL)
        return QSF_TOKEN_NONE;
    const qsf_vocabulary *const v = &t->vocabulary;
    const qsf_bytes wanted = {(const unsigned char *)name, n_bytes};
    uint32_t match = is_added != 0 ? QSF_TOKEN_NONE : qsf_vocabulary_find(v, wanted);
    /* Added tokens outside the vocabulary of the model have the highest ids: search from the end.
     */
    for (uint32_t id = v->n_ids; match == QSF_TOKEN_NONE && id-- > 0;) {
        const qsf_bytes text = qsf_vocabulary_text(v, id);
        if ((v->kinds[id] & QSF_TOKEN_PRESENT) != 0 && text.n == n_bytes &&
            memcmp(text.p, name, n_bytes) == 0)
            match = id;
    }
    return match;
}

size_t qsf_text_special(const qsf_text *t, uint32_t *ids, size_t cap_ids)
{
    size_t n = 0;
    if (t == NULL || (ids == NULL && cap_ids != 0))
        return 0;
    for (uint32_t id = 0; id < t->vocabulary.n_ids; id++) {
        if ((t->vocabulary.kinds[id] & QSF_TOKEN_SPECIAL) == 0)
            continue;
        if (n < cap_ids)
            ids[n] = id;
        n++;
    }
    return n;
}

void qsf_decoder_init(const qsf_text *t, uint32_t flags, qsf_text_decoder *out)
{
    if (out == NULL)
        return;
    memset(out, 0, sizeof *out);
    out->skips_special = (flags & QSF_DETOKENIZE_SPECIAL) == 0;
    out->is_at_start = (flags & QSF_DETOKENIZE_START) != 0;
    out->n_leading = t != NULL && out->is_at_start != 0 ? t->vocabulary.n_leading : 0;
}

qsf_status qsf_decoder_push(const qsf_text *t, qsf_text_decoder *d, uint32_t id, char *out,
                            size_t cap_bytes, size_t *n_bytes)
{
    QSF_FAIL_IF(t == NULL || d == NULL || out == NULL || n_bytes == NULL || d->n_pending > 3, ARG,
                "qsf_decoder_push: a pointer is NULL or the decoder damaged");
    const size_t n_room = qsf_decode_room(qsf_vocabulary_text(&t->vocabulary, id).n);
    QSF_FAIL_IF(cap_bytes < n_room, ARG, "room for %zu bytes of text, token %u may need %zu",
                cap_bytes, (unsigned)id, n_room);
    *n_bytes = qsf_decode_push(&t->vocabulary, d, id, (unsigned char *)out);
    return QSF_OK;
}

size_t qsf_decoder_flush(qsf_text_decoder *d, char *out)
{
    return d == NULL || out == NULL ? 0 : qsf_decode_flush(d, (unsigned char *)out);
}

qsf_status qsf_detokenize(const qsf_text *t, const uint32_t *ids, size_t n_ids, uint32_t flags,
                          char *out, size_t cap_bytes, size_t *n_bytes)
{
    QSF_FAIL_IF(t == NULL || (ids == NULL && n_ids != 0) || (out == NULL && cap_bytes != 0) ||
                    n_bytes == NULL ||
                    (flags & ~(uint32_t)(QSF_DETOKENIZE_SPECIAL | QSF_DETOKENIZE_START)) != 0,
                ARG, "qsf_detokenize: a pointer is NULL or a flag unknown");
    const qsf_vocabulary *const v = &t->vocabulary;
    qsf_text_decoder d;
    qsf_decoder_init(t, flags, &d);
    size_t n = 0;
    bool is_full = false;
    for (size_t i = 0; i < n_ids; i++) {
        const size_t n_room = qsf_decode_room(qsf_vocabulary_text(v, ids[i]).n);
        is_full |= cap_bytes - (is_full ? 0 : n) < n_room;
        if (is_full) /* from here on only an upper bound is counted */
            n += n_room;
        else
            n += qsf_decode_push(v, &d, ids[i], (unsigned char *)out + n);
    }
    if (!is_full && cap_bytes - n < 3 && d.n_pending != 0)
        n += 3;
    else if (!is_full && d.n_pending != 0)
        n += qsf_decode_flush(&d, (unsigned char *)out + n);
    *n_bytes = n;
    return QSF_OK;
}

/* ---- decoding ---- */

static const unsigned char mark[3] = {0xE2, 0x96, 0x81};        /* U+2581 */
static const unsigned char replacement[3] = {0xEF, 0xBF, 0xBD}; /* U+FFFD */

static int hex_value(unsigned char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    const unsigned char lower = c | 0x20;
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/* The byte that a token called <0xHH> stands for, or -1. */
static int byte_of(qsf_bytes name)
{
    if (name.n != 6 || memcmp(name.p, "<0x", 3) != 0 || name.p[5] != '>')
        return -1;
    const int high = hex_value(name.p[3]);
    const int low = hex_value(name.p[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

size_t qsf_decode_token(const qsf_vocabulary *v, uint32_t id, bool is_first_token,
                        unsigned char *out, size_t cap)
{
    const qsf_bytes name = qsf_vocabulary_text(v, id);
    const int byte = (v->flags & QSF_TEXT_BYTE_TOKENS) != 0 ? byte_of(name) : -1;
    if (byte >= 0) {
        if (cap != 0)
            out[0] = (unsigned char)byte;
        return 1;
    }
    if (v->model == QSF_TEXT_WORDPIECE && name.n > 0) {
        const size_t n_prefix = QSF_WORD_PREFIX_BYTES;
        const bool goes_on = name.n > n_prefix && memcmp(name.p, QSF_WORD_PREFIX, n_prefix) == 0;
        const size_t n_out = goes_on ? name.n - n_prefix : name.n + 1;
        for (size_t i = 0; i < n_out && i < cap; i++)
            out[i] = goes_on ? name.p[n_prefix + i] : i == 0 ? ' ' : name.p[i - 1];
        return n_out;
    }
    if ((v->flags & QSF_TEXT_MARKS) == 0) {
        memcpy(out, name.p, name.n < cap ? name.n : cap);
        return name.n;
    }
    size_t n = 0;
    for (size_t i = 0; i < name.n; i++) {
        unsigned char c = name.p[i];
        if (name.n - i >= sizeof mark && memcmp(name.p + i, mark, sizeof mark) == 0) {
            i += sizeof mark - 1;
            if (is_first_token)
                continue;
            c = ' ';
        }
        if (n < cap)
            out[n] = c;
        n++;
    }
    return n;
}

/* Emits a character, unless it is a leading space that this text loses. */
static size_t put(qsf_text_decoder *d, const unsigned char *c, size_t n_bytes, unsigned char *out)
{
    if (d->n_leading != 0) {
        if (c[0] == ' ') {
            d->n_leading--;
            return 0;
        }
        d->n_leading = 0;
    }
    memcpy(out, c, n_bytes);
    return n_bytes;
}

static size_t put_byte(qsf_text_decoder *d, unsigned char byte, unsigned char *out)
{
    size_t n = 0;
    if (d->n_pending == 0 && byte < 0x80)
        return put(d, &byte, 1, out);
    d->pending[d->n_pending++] = byte;
    while (d->n_pending != 0) {
        size_t n_used;
        const qsf_utf8_kind kind = qsf_utf8_look(d->pending, d->n_pending, &n_used);
        if (kind == QSF_UTF8_CUT)
            break;
        n += kind == QSF_UTF8_CHAR ? put(d, d->pending, n_used, out + n)
                                   : put(d, replacement, sizeof replacement, out + n);
        d->n_pending -= (uint32_t)n_used;
        memmove(d->pending, d->pending + n_used, d->n_pending);
    }
    return n;
}

size_t qsf_decode_push(const qsf_vocabulary *v, qsf_text_decoder *d, uint32_t id,
                       unsigned char *out)
{
    if (id >= v->n_ids || (v->kinds[id] & QSF_TOKEN_PRESENT) == 0 ||
        (d->skips_special != 0 && (v->kinds[id] & QSF_TOKEN_SPECIAL) != 0))
        return 0;
    const bool is_first = d->is_at_start != 0 && (v->flags & QSF_TEXT_FIRST_TOKEN) != 0;
    d->is_at_start = 0;
    /* The bytes are put at the end of the room, the text at its beginning. The text never
     * reaches unread bytes: each byte becomes at most three, and four more may be pending. */
    const size_t n_most = qsf_vocabulary_text(v, id).n + (v->model == QSF_TEXT_WORDPIECE);
    unsigned char *const bytes = out + qsf_decode_room(n_most) - n_most;
    const size_t n_bytes = qsf_decode_token(v, id, is_first, bytes, n_most);
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++)
        n += put_byte(d, bytes[i], out + n);
    return n;
}

size_t qsf_decode_flush(qsf_text_decoder *d, unsigned char *out)
{
    if (d->n_pending == 0)
        return 0;
    d->n_pending = 0;
    return put(d, replacement, sizeof replacement, out);
}
