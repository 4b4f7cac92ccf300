/* decode.c - the rules of decoding, and a buffer of up to three bytes. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/encode.h"

#include <string.h>

#include "text/utf8.h"

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
