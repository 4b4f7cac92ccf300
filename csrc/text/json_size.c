/* json_size.c - counts the elements of a JSON text without creating any. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "include/qsf_text.h"

#include <stdbool.h>

/* The code unit of an escape \uXXXX whose digits begin at p; UINT32_MAX if they are not four hex
 * digits. */
static uint32_t unit_at(const unsigned char *p, const unsigned char *end)
{
    uint32_t unit = 0;
    if (end - p < 4)
        return UINT32_MAX;
    for (int i = 0; i < 4; i++) {
        const uint32_t c = p[i], small = c | 0x20;
        if (c >= '0' && c <= '9')
            unit = unit << 4 | (c - '0');
        else if (small >= 'a' && small <= 'f')
            unit = unit << 4 | (small - 'a' + 10);
        else
            return UINT32_MAX;
    }
    return unit;
}

static void widen(qsf_json_size *s, uint32_t n_bytes)
{
    if (s->char_bytes < n_bytes)
        s->char_bytes = n_bytes;
}

/* The place after an escape; p is after its backslash. */
static const unsigned char *skip_escape(qsf_json_size *s, const unsigned char *p,
                                        const unsigned char *end)
{
    if (p == end || *p != 'u')
        return p == end ? end : p + 1;
    const uint32_t unit = unit_at(p + 1, end);
    if (unit == UINT32_MAX)
        return p + 1; /* not JSON: the parser will report it */
    p += 5;
    if (unit < 0xD800 || unit > 0xDFFF) {
        widen(s, unit > 0xFF ? 2 : 1);
        return p;
    }
    widen(s, 4);
    const bool is_pair = unit < 0xDC00 && end - p >= 6 && p[0] == '\\' && p[1] == 'u' &&
                         (unit_at(p + 2, end) & 0xFFFFFC00u) == 0xDC00;
    s->has_lone_surrogate |= !is_pair;
    return is_pair ? p + 6 : p;
}

/* The place after a string; p is after the quote that begins it. */
static const unsigned char *skip_string(qsf_json_size *s, const unsigned char *p,
                                        const unsigned char *end)
{
    s->n_strings++;
    while (p < end && *p != '"') {
        const unsigned char c = *p++;
        if (c == '\\') {
            p = skip_escape(s, p, end);
        } else if (c >= 0xC4) {
            widen(s, c >= 0xF0 ? 4 : 2);
        }
    }
    return p < end ? p + 1 : end;
}

void qsf_json_measure(const void *text, size_t n_bytes, qsf_json_size *out)
{
    qsf_json_size s = {.char_bytes = 1};
    const unsigned char *p = text;
    const unsigned char *const end = n_bytes == 0 ? p : p + n_bytes;
    uint64_t depth = 0;
    while (p < end) {
        switch (*p++) {
        case '"':
            p = skip_string(&s, p, end);
            break;
        case '{':
        case '[':
            s.n_containers++;
            if (s.depth < ++depth)
                s.depth = depth;
            break;
        case '}':
        case ']':
            if (depth <= 1)
                p = end; /* the value ends here, and so does a parser */
            else
                depth--;
            break;
        case ':':
            s.n_members++;
            break;
        case ',':
            s.n_commas++;
            break;
        default:
            break;
        }
    }
    *out = s;
}
