/* unicode.c - decodes the tables of characters into memory.
 *
 * They are printed as numbers in characters that a C string may hold: digits of two kinds, of which
 * one ends a number. tools/make_unicode_tables.py writes them and says what each number means.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/unicode.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "platform/thread.h"
#include "text/utf8.h"

#define ROW 96 /* characters of a row of the encoded tables */
#define N_DIGITS 92U
#define N_LAST_DIGITS 70U /* digits that end a number */

qsf_unicode_property qsf_unicode_words;
qsf_unicode_property qsf_unicode_classes;
qsf_decomposition qsf_unicode_decompositions[QSF_UNICODE_DECOMPOSITIONS];
uint32_t qsf_unicode_pool[QSF_UNICODE_POOL];
qsf_composition qsf_unicode_compositions[QSF_UNICODE_COMPOSITIONS];

/* The tables, encoded */
static const char encoded[][ROW + 1] = {
#include "text/unicode_tables.inc"
};

static uint32_t read_number(const char **at)
{
    for (uint32_t number = 0;;) {
        const char c = *(*at)++;
        if (c == '\0') /* the end of a row */
            continue;
        /* Three characters are no digits: a C string would need escapes for them. */
        const uint32_t digit = (uint32_t)(c - ' ' - (c > '"') - (c > '?') - (c > '\\'));
        if (digit < N_LAST_DIGITS)
            return number * N_LAST_DIGITS + digit;
        number = number * (N_DIGITS - N_LAST_DIGITS) + digit - N_LAST_DIGITS;
    }
}

/* Adds a distance of any sign: 0, -1, 1, -2 are written as 0, 1, 2, 3. */
static uint32_t read_from(const char **at, uint32_t base)
{
    const uint32_t folded = read_number(at);
    return (folded & 1) == 0 ? base + folded / 2 : base - folded / 2 - 1;
}

/* Returns the highest value. */
static uint32_t read_runs(const char **at, uint8_t *out, size_t n)
{
    uint32_t highest = 0;
    for (size_t i = 0; i < n;) {
        const uint32_t n_equal = read_number(at);
        const uint32_t value = read_number(at);
        assert(n_equal > 0 && n_equal <= n - i && value <= UINT8_MAX);
        memset(out + i, (int)value, n_equal);
        i += n_equal;
        highest = value > highest ? value : highest;
    }
    return highest;
}

static void read_property(const char **at, qsf_unicode_property *p)
{
    const uint32_t n_blocks = read_runs(at, p->index, sizeof p->index) + 1;
    read_runs(at, &p->blocks[0][0], n_blocks * sizeof p->blocks[0]);
}

static void read_decompositions(const char **at)
{
    uint32_t point = 0;
    uint32_t n_pool = 0;
    qsf_decomposition last = {0}; /* the last one that added its characters to the pool */
    for (size_t i = 0; i < QSF_UNICODE_DECOMPOSITIONS; i++) {
        point += read_number(at);
        const uint32_t head = read_number(at);
        qsf_decomposition d = {.n = (uint8_t)(head >> 1), .first = (uint16_t)n_pool};
        if (d.n == 0)
            d = qsf_unicode_decompositions[read_number(at)];
        d.c = point;
        d.is_compatible = (head & 1) != 0;
        if (head > 1) {
            assert(d.n <= QSF_UNICODE_MAX_DECOMPOSED && n_pool + d.n <= QSF_UNICODE_POOL);
            for (uint32_t k = 0; k < d.n; k++, n_pool++) {
                const uint32_t before = k < last.n ? qsf_unicode_pool[last.first + k]
                                        : k > 0    ? qsf_unicode_pool[n_pool - 1]
                                                   : 0;
                qsf_unicode_pool[n_pool] = read_from(at, before);
            }
            last = d;
        }
        qsf_unicode_decompositions[i] = d;
    }
    assert(n_pool == QSF_UNICODE_POOL);
}

static void read_compositions(const char **at)
{
    qsf_composition pair = {0};
    for (size_t i = 0; i < QSF_UNICODE_COMPOSITIONS; i++) {
        pair.first += read_number(at);
        pair.second = read_from(at, pair.second);
        pair.c = read_from(at, pair.c);
        qsf_unicode_compositions[i] = pair;
    }
}

void qsf_unicode_load(void)
{
    enum { NOT_BEGUN, UNDER_WAY, DONE };
    static _Atomic int state;
    int before = NOT_BEGUN;
    if (!atomic_compare_exchange_strong(&state, &before, UNDER_WAY)) {
        while (atomic_load_explicit(&state, memory_order_acquire) != DONE)
            qsf_thread_yield();
        return;
    }
    const char *at = encoded[0];
    read_property(&at, &qsf_unicode_words);
    read_property(&at, &qsf_unicode_classes);
    read_decompositions(&at);
    read_compositions(&at);
    atomic_store_explicit(&state, DONE, memory_order_release);
}

/* ---- UTF-8 ---- */

qsf_utf8_kind qsf_utf8_look(const unsigned char *p, size_t n_bytes, size_t *n_used)
{
    const unsigned char lead = p[0];
    *n_used = 1;
    if (lead < 0x80)
        return QSF_UTF8_CHAR;
    if (lead < 0xC2 || lead > 0xF4)
        return QSF_UTF8_BROKEN;
    const size_t n_needed = qsf_utf8_length(lead);
    /* The second byte's range keeps out overlong forms, surrogates and what is beyond U+10FFFF. */
    const unsigned char least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned char most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    for (size_t i = 1; i < n_needed; i++) {
        *n_used = i;
        if (i == n_bytes)
            return QSF_UTF8_CUT;
        if (p[i] < (i == 1 ? least : 0x80) || p[i] > (i == 1 ? most : 0xBF))
            return QSF_UTF8_BROKEN;
    }
    *n_used = n_needed;
    return QSF_UTF8_CHAR;
}

size_t qsf_utf8_valid_bytes(const unsigned char *p, size_t n_bytes)
{
    size_t at = 0;
    while (at < n_bytes) {
        uint64_t eight;
        if (n_bytes - at >= sizeof eight) {
            memcpy(&eight, p + at, sizeof eight);
            if ((eight & UINT64_C(0x8080808080808080)) == 0) {
                at += sizeof eight;
                continue;
            }
        }
        size_t n_used;
        if (qsf_utf8_look(p + at, n_bytes - at, &n_used) != QSF_UTF8_CHAR)
            return at;
        at += n_used;
    }
    return n_bytes;
}
