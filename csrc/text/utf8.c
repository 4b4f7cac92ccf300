/* utf8.c - reads bytes that may be UTF-8. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/utf8.h"

#include <string.h>

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
