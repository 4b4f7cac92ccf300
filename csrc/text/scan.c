/* scan.c - runs the automata of regular expressions over texts. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/encode.h"

#include <string.h>

#include "base/status.h"
#include "text/utf8.h"

#define STRIDE_BITS 6
#define STRIDE ((size_t)1 << STRIDE_BITS)

typedef const unsigned char *place;

static inline unsigned class_at(const qsf_scan *s, place p, size_t *n_bytes)
{
    if (*p < s->n_low) {
        *n_bytes = 1;
        return s->low[*p];
    }
    const uint32_t c = qsf_utf8_load(p, n_bytes);
    const uint32_t block = qsf_load_u16(s->v->class_index + (size_t)(c / QSF_TEXT_CLASS_BLOCK) * 2);
    return s->v->class_blocks[block * QSF_TEXT_CLASS_BLOCK + c % QSF_TEXT_CLASS_BLOCK];
}

/* The place of the character before p. */
static inline place before(const qsf_scan *s, place p)
{
    do
        p--;
    while (s->n_low == 128 && (*p & 0xC0) == 0x80);
    return p;
}

static inline const unsigned char *aheads(const qsf_scan *s)
{
    return s->split->n_backward != 0 ? s->work->blocks[s->block] : NULL;
}

/* The entry of the table for a state and the character at p, or the text's end. */
static inline unsigned entry_at(const qsf_scan *s, const unsigned char *ahead, unsigned state,
                                place p, size_t *n_bytes)
{
    unsigned column = s->v->n_classes - 1;
    if (p != s->text.p + s->text.n)
        column = class_at(s, p, n_bytes);
    if (ahead != NULL)
        column += ahead[p - s->text.p] * s->v->n_classes;
    return qsf_load_u16(s->split->forward + ((size_t)state * s->split->n_columns + column) * 2);
}

static unsigned begin_at(const qsf_scan *s, place p)
{
    unsigned column = s->v->n_classes - 1;
    size_t n_bytes;
    if ((s->split->flags & QSF_SPLIT_LOOKS_BEHIND) != 0 && p != s->text.p)
        column = class_at(s, before(s, p), &n_bytes);
    return qsf_load_u16(s->split->forward + (size_t)column * 2);
}

/* ---- what is known to match nothing, so that no part of a text is read again and again ---- */

static unsigned char *memory_of(const qsf_scan *s, place p, unsigned state, unsigned *bit)
{
    const size_t n_aheads = aheads(s) != NULL ? s->text.n + 1 : 0;
    const size_t row = (size_t)(p - s->text.p) >> STRIDE_BITS;
    *bit = 1U << state % 8;
    return (unsigned char *)s->work->blocks[s->block] + n_aheads +
           row * ((s->split->n_forward + 7) / 8) + state / 8;
}

/* Scans from `from` to `end` a second time and remembers the states: no match lies between them. */
static qsf_status remember(qsf_scan *s, place from, unsigned state, place end)
{
    if (!s->has_memory) {
        const size_t n_aheads = aheads(s) != NULL ? s->text.n + 1 : 0;
        const size_t n_bytes =
            ((s->text.n >> STRIDE_BITS) + 1) * ((size_t)(s->split->n_forward + 7) / 8);
        QSF_TRY(qsf_work_reserve(s->work, s->block, n_aheads + n_bytes));
        memset((unsigned char *)s->work->blocks[s->block] + n_aheads, 0, n_bytes);
        s->has_memory = true;
    }
    const unsigned char *const ahead = aheads(s);
    while (from < end && state != 0) {
        size_t n_bytes = 0;
        const size_t idx = (size_t)(from - s->text.p) >> STRIDE_BITS;
        state = entry_at(s, ahead, state, from, &n_bytes) & ~QSF_SPLIT_MATCH;
        from += n_bytes;
        unsigned bit;
        if ((size_t)(from - s->text.p) >> STRIDE_BITS != idx)
            *memory_of(s, from, state, &bit) |= (unsigned char)bit;
    }
    return QSF_OK;
}

static bool is_remembered(const qsf_scan *s, place p, unsigned state)
{
    unsigned bit;
    return s->has_memory && (*memory_of(s, p, state, &bit) & bit) != 0;
}

/* Sets *match_end to the end of the match that begins at p; NULL if there is none. */
static qsf_status match_at(qsf_scan *s, place p, place *match_end)
{
    const unsigned char *const ahead = aheads(s);
    const place end = s->text.p + s->text.n;
    const size_t n_row_bytes = (size_t)s->split->n_columns * 2;
    unsigned state = begin_at(s, p);
    place last = p; /* the last end of a match, or the beginning, and the state there */
    unsigned last_state = state;
    place found = NULL;
    const unsigned char *const low = s->low;
    const unsigned n_low = s->n_low;
    while (state != 0) {
        const size_t n_left = (size_t)(end - p);
        const size_t n_stride = STRIDE - ((size_t)(p - s->text.p) & (STRIDE - 1));
        const place stop = p + (n_left < n_stride ? n_left : n_stride);
        const unsigned char *row = s->split->forward + state * n_row_bytes;
        while (p < stop) {
            size_t n_bytes = 1;
            unsigned column = *p < n_low ? low[*p] : class_at(s, p, &n_bytes);
            if (ahead != NULL)
                column += ahead[p - s->text.p] * s->v->n_classes;
            const unsigned entry = qsf_load_u16(row + (size_t)column * 2);
            const unsigned next = entry & ~QSF_SPLIT_MATCH;
            if (entry != next) {
                found = last = p;
                last_state = state;
            }
            p += n_bytes;
            if (next != state) { /* within a run the next step needs not wait for this one */
                state = next;
                row = s->split->forward + state * n_row_bytes;
                if (state == 0)
                    break;
            }
        }
        if (state == 0 || is_remembered(s, p, state))
            break;
        if (p == end) {
            size_t n_bytes;
            if ((entry_at(s, ahead, state, p, &n_bytes) & QSF_SPLIT_MATCH) != 0)
                found = last = p;
            break;
        }
    }
    *match_end = found;
    if ((size_t)(p - last) > 2 * STRIDE)
        return remember(s, last, last_state, p);
    return QSF_OK;
}

qsf_status qsf_scan_begin(qsf_scan *s, const qsf_vocabulary *v, uint32_t step_idx, qsf_work *w,
                          int block, qsf_bytes text)
{
    const qsf_split *const split = &v->splits[step_idx];
    const bool is_on_bytes = (split->flags & QSF_SPLIT_ON_BYTES) != 0;
    *s = (qsf_scan){.v = v, .split = split, .work = w, .block = block, .text = text};
    s->low = is_on_bytes
                 ? v->byte_classes
                 : v->class_blocks + (size_t)qsf_load_u16(v->class_index) * QSF_TEXT_CLASS_BLOCK;
    s->n_low = is_on_bytes ? 256 : 128;
    s->at = text.p;
    if (split->n_backward == 0)
        return QSF_OK;
    /* From the end on: which look-aheads match in front of each character. */
    QSF_TRY(qsf_work_reserve(w, block, text.n + 1));
    unsigned char *const ahead = w->blocks[block];
    size_t state = 0;
    for (place p = text.p + text.n;;) {
        size_t column = v->n_classes - 1;
        const place last = p;
        size_t n_bytes;
        if (p != text.p) {
            p = before(s, p);
            column = class_at(s, p, &n_bytes);
        }
        const unsigned entry = qsf_load_u16(split->backward + (state * v->n_classes + column) * 2);
        ahead[last - text.p] = (unsigned char)(entry >> QSF_SPLIT_BACKWARD_BITS);
        if (last == text.p)
            break;
        state = entry & ((1U << QSF_SPLIT_BACKWARD_BITS) - 1);
    }
    return QSF_OK;
}

qsf_status qsf_scan_next(qsf_scan *s, qsf_bytes *match)
{
    const place end = s->text.p + s->text.n;
    *match = (qsf_bytes){NULL, 0};
    for (place p = s->at;;) {
        place match_end;
        QSF_TRY(match_at(s, p, &match_end));
        const bool is_again = match_end == p && match_end == s->last_end; /* empty, and no more */
        if (match_end != NULL && !is_again) {
            *match = (qsf_bytes){p, (size_t)(match_end - p)};
            s->at = s->last_end = match_end;
            return QSF_OK;
        }
        if (p == end)
            return QSF_OK;
        p += s->n_low == 256 ? 1 : qsf_utf8_length(*p);
    }
}
