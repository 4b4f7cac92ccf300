/* utf8.h - characters of UTF-8, in texts known to be valid and in others. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the character that begins with this byte of valid UTF-8. */
static inline size_t qsf_utf8_length(unsigned char lead)
{
    return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

/* The character at p in valid UTF-8, and its length. */
static inline uint32_t qsf_utf8_load(const unsigned char *p, size_t *n_bytes)
{
    const unsigned char lead = p[0];
    if (lead < 0x80) {
        *n_bytes = 1;
        return lead;
    }
    if (lead < 0xE0) {
        *n_bytes = 2;
        return (uint32_t)(lead & 0x1F) << 6 | (p[1] & 0x3FU);
    }
    if (lead < 0xF0) {
        *n_bytes = 3;
        return (uint32_t)(lead & 0x0F) << 12 | (uint32_t)(p[1] & 0x3F) << 6 | (p[2] & 0x3FU);
    }
    *n_bytes = 4;
    return (uint32_t)(lead & 0x07) << 18 | (uint32_t)(p[1] & 0x3F) << 12 |
           (uint32_t)(p[2] & 0x3F) << 6 | (p[3] & 0x3FU);
}

/* Writes up to 4 bytes to out; returns how many. */
static inline size_t qsf_utf8_store(unsigned char *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (unsigned char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (unsigned char)(0xC0 | c >> 6);
        out[1] = (unsigned char)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (unsigned char)(0xE0 | c >> 12);
        out[1] = (unsigned char)(0x80 | (c >> 6 & 0x3F));
        out[2] = (unsigned char)(0x80 | (c & 0x3F));
        return 3;
    }
    out[0] = (unsigned char)(0xF0 | c >> 18);
    out[1] = (unsigned char)(0x80 | (c >> 12 & 0x3F));
    out[2] = (unsigned char)(0x80 | (c >> 6 & 0x3F));
    out[3] = (unsigned char)(0x80 | (c & 0x3F));
    return 4;
}

/* Decodes a character from bytes that may be invalid. */
typedef enum qsf_utf8_kind {
    QSF_UTF8_CHAR,   /* a character of *n_used bytes */
    QSF_UTF8_BROKEN, /* *n_used bytes that no continuation could complete */
    QSF_UTF8_CUT     /* all n_bytes are a character's beginning */
} qsf_utf8_kind;

/* Reads [n_bytes >= 1] bytes. A broken sequence ends before the first byte that cannot belong to
 * it, as Unicode recommends for replacement by U+FFFD. */
qsf_utf8_kind qsf_utf8_look(const unsigned char *p, size_t n_bytes, size_t *n_used);

/* Offset of the first byte that is not part of a character; n_bytes if all is valid. */
size_t qsf_utf8_valid_bytes(const unsigned char *p, size_t n_bytes);
