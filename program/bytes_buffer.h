/* bytes_buffer.h - bytes that grow; memory of the program, not of the engine. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

typedef struct buffer {
    char *p; /* ends with a zero, which n does not count; NULL while nothing was added */
    size_t n;
    size_t cap;
} buffer;

/* Ends the program with one line and exit code 1 where memory is missing. */
void buffer_add(buffer *b, const char *p, size_t n);
void buffer_add_text(buffer *b, const char *text);
void buffer_free(buffer *b);

/* Puts `by` [n_by] in the place of n_old bytes at `at`. */
void buffer_replace(buffer *b, size_t at, size_t n_old, const char *by, size_t n_by);

/* Position of `what` [n_what] at or after `from`; b->n if there is none. */
size_t buffer_find(const buffer *b, size_t from, const char *what, size_t n_what);

/* Memory or the end of the program. */
void *grown(void *p, size_t n_bytes);
