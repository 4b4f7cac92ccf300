/* json.c - bytes that grow, values of a JSON text without copies, and texts as JSON. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *grown(void *p, size_t n_bytes)
{
    void *const q = realloc(p, n_bytes);
    if (q == NULL) {
        fprintf(stderr, "qsf: no memory for %zu bytes\n", n_bytes);
        exit(1);
    }
    return q;
}

void buffer_add(buffer *b, const char *p, size_t n)
{
    if (b->n + n + 1 > b->cap) {
        b->cap = 2 * (b->n + n + 1);
        b->p = grown(b->p, b->cap);
    }
    if (n > 0)
        memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = '\0';
}

void buffer_add_text(buffer *b, const char *text)
{
    buffer_add(b, text, strlen(text));
}

void buffer_free(buffer *b)
{
    free(b->p);
    *b = (buffer){0};
}

void buffer_replace(buffer *b, size_t at, size_t n_old, const char *by, size_t n_by)
{
    if (n_by > n_old) /* room; the bytes are moved over below */
        for (size_t i = n_old; i < n_by; i++)
            buffer_add(b, "", 1);
    const size_t n_all = n_by > n_old ? b->n - (n_by - n_old) : b->n;
    memmove(b->p + at + n_by, b->p + at + n_old, n_all - at - n_old);
    memcpy(b->p + at, by, n_by);
    b->n = n_all - n_old + n_by;
    b->p[b->n] = '\0';
}

size_t buffer_find(const buffer *b, size_t from, const char *what, size_t n_what)
{
    for (size_t i = from; n_what > 0 && i + n_what <= b->n; i++)
        if (b->p[i] == what[0] && memcmp(b->p + i, what, n_what) == 0)
            return i;
    return b->n;
}

/* ---- JSON ---- */

static json skip_space(json v)
{
    while (v.p < v.end && strchr(" \t\r\n", *v.p) != NULL && *v.p != '\0')
        v.p++;
    return v;
}

/* Returns the position after the string that begins at v. */
static json skip_string(json v)
{
    for (v.p++; v.p < v.end && *v.p != '"'; v.p++)
        if (*v.p == '\\')
            v.p++;
    if (v.p < v.end)
        v.p++;
    return (json){v.p < v.end ? v.p : v.end, v.end};
}

/* Returns the position after the value that begins at v; only strings and brackets are read. */
static json skip_value(json v)
{
    size_t depth = 0;
    while (v.p < v.end) {
        if (*v.p == '"') {
            v = skip_string(v);
        } else if (*v.p == '{' || *v.p == '[') {
            depth++;
            v.p++;
        } else if (depth > 0 && (*v.p == '}' || *v.p == ']')) {
            depth--;
            v.p++;
        } else if (depth == 0 && strchr(",}]", *v.p) != NULL) {
            return v;
        } else {
            v.p++;
            continue;
        }
        if (depth == 0)
            return v;
    }
    return v;
}

static bool is_at(json v, char c)
{
    return v.p < v.end && *v.p == c;
}

/* Finds a member of an object by its name, or if that is NULL element idx of a list. */
static bool find_item(json v, const char *name, size_t idx, json *out)
{
    v = skip_space(v);
    if (!is_at(v, name != NULL ? '{' : '['))
        return false;
    for (v.p++; v.p < v.end; v.p++) {
        bool is_it = name == NULL && idx-- == 0;
        v = skip_space(v);
        if (name != NULL) {
            buffer key = {0};
            is_it = json_text(v, &key) && strcmp(key.p, name) == 0;
            buffer_free(&key);
            if (!is_at(v, '"') || !is_at(v = skip_space(skip_string(v)), ':'))
                return false;
            v.p++;
            v = skip_space(v);
        }
        if (v.p == v.end || is_at(v, ']'))
            return false;
        if (is_it) {
            *out = v;
            return true;
        }
        v = skip_space(skip_value(v));
        if (!is_at(v, ','))
            return false;
    }
    return false;
}

bool json_member(json object, const char *name, json *out)
{
    return find_item(object, name, 0, out);
}

bool json_element(json list, size_t idx, json *out)
{
    return find_item(list, NULL, idx, out);
}

static uint32_t hex4(const char *p, const char *end)
{
    char digits[5] = {0};
    if (end - p < 4)
        return 0xFFFD;
    memcpy(digits, p, 4);
    return (uint32_t)strtoul(digits, NULL, 16);
}

static void add_code_point(buffer *out, uint32_t c)
{
    static const unsigned char LEADS[] = {0, 0xC0, 0xE0, 0xF0};
    const unsigned n_more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    char u[4] = {(char)(LEADS[n_more] | c >> 6 * n_more)};
    for (unsigned i = 1; i <= n_more; i++)
        u[i] = (char)(0x80 | (c >> 6 * (n_more - i) & 0x3F));
    buffer_add(out, u, n_more + 1);
}

/* Adds what stands behind a backslash at p; returns where it ends. */
static const char *add_escape(buffer *out, const char *p, const char *end)
{
    static const char NAMES[] = "nrtbf\"\\/";
    static const char VALUES[] = "\n\r\t\b\f\"\\/";
    const char *const name = p < end && *p != '\0' ? strchr(NAMES, *p) : NULL;
    if (name != NULL) {
        buffer_add(out, &VALUES[name - NAMES], 1);
        return p + 1;
    }
    if (p >= end || *p != 'u')
        return p;
    uint32_t c = hex4(p + 1, end);
    p += end - p < 5 ? end - p : 5;
    if (c >= 0xD800 && c < 0xDC00 && end - p >= 6 && p[0] == '\\' && p[1] == 'u') {
        c = 0x10000 + ((c - 0xD800) << 10) + ((hex4(p + 2, end) - 0xDC00) & 0x3FF);
        p += 6;
    }
    add_code_point(out, c);
    return p;
}

bool json_text(json value, buffer *out)
{
    if (!is_at(value, '"'))
        return false;
    buffer_add(out, "", 0);
    for (const char *p = value.p + 1; p < value.end && *p != '"';) {
        if (*p == '\\')
            p = add_escape(out, p + 1, value.end);
        else
            buffer_add(out, p++, 1);
    }
    return true;
}

bool json_number(json value, double *out)
{
    char digits[400] = {0}; /* whole numbers beyond are above every double */
    for (size_t i = 0; i + 1 < sizeof digits && value.p + i < value.end; i++)
        digits[i] = value.p[i];
    char *end;
    *out = strtod(digits, &end);
    return end != digits && strchr("-0123456789", digits[0]) != NULL;
}

bool json_is(json value, const char *word)
{
    const size_t n = strlen(word);
    return (size_t)(value.end - value.p) >= n && memcmp(value.p, word, n) == 0;
}

void json_add_text(buffer *out, const char *text, size_t n)
{
    buffer_add_text(out, "\"");
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)text[i];
        char escaped[8];
        if (c == '"' || c == '\\')
            snprintf(escaped, sizeof escaped, "\\%c", c);
        else if (c == '\n')
            snprintf(escaped, sizeof escaped, "\\n");
        else if (c < 0x20 || c == 0x7F)
            snprintf(escaped, sizeof escaped, "\\u%04x", c);
        else if (c == 0xC2 && i + 1 < n && (unsigned char)text[i + 1] < 0xA0) /* U+0080 .. U+009F */
            snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned char)text[++i]);
        else
            snprintf(escaped, sizeof escaped, "%c", c);
        buffer_add_text(out, escaped);
    }
    buffer_add_text(out, "\"");
}
