/* json.h - values of a JSON text without copies, and texts as JSON. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "bytes_buffer.h"

/* The beginning of a value in a text that ends at `end`. What is no JSON has no members. */
typedef struct json {
    const char *p;
    const char *end;
} json;

/* Finds a member of an object, or element idx of a list. */
bool json_member(json object, const char *name, json *out);
bool json_element(json list, size_t idx, json *out);

/* Adds the text of a string to `out`; false for every other value. */
bool json_text(json value, buffer *out);
bool json_number(json value, double *out);
bool json_is(json value, const char *word); /* "true", "false", "null" */

/* Adds `text` [n] with its quotes; characters that could steer a terminal are escaped. */
void json_add_text(buffer *out, const char *text, size_t n);
