/* bytes_buffer.c - bytes that grow. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "bytes_buffer.h"

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
