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

#define N_DIGITS 92U
#define N_LAST_DIGITS 70U /* digits that end a number */

qsf_unicode_property qsf_unicode_words;
qsf_unicode_property qsf_unicode_classes;
qsf_decomposition qsf_unicode_decompositions[QSF_UNICODE_DECOMPOSITIONS];
uint32_t qsf_unicode_pool[QSF_UNICODE_POOL];
qsf_composition qsf_unicode_compositions[QSF_UNICODE_COMPOSITIONS];

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
    const char *at = qsf_unicode_text[0];
    read_property(&at, &qsf_unicode_words);
    read_property(&at, &qsf_unicode_classes);
    read_decompositions(&at);
    read_compositions(&at);
    atomic_store_explicit(&state, DONE, memory_order_release);
}
