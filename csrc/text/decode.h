/* decode.h - tokens to text, one after another: complete characters, never half a one. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "text/vocabulary.h"

/* Room for one token and the pending bytes of earlier ones: each byte may become U+FFFD. */
static inline size_t qsf_decode_room(size_t n_token_bytes)
{
    return 3 * (n_token_bytes + 4);
}

/* Writes the text of a token to out [cap], as much as fits, and returns its bytes. The first token
 * of a text (is_first_token) loses the space that its mark stands for. */
size_t qsf_decode_token(const qsf_vocabulary *v, uint32_t id, bool is_first_token,
                        unsigned char *out, size_t cap);

/* Writes the characters that a token completes to out [qsf_decode_room(its bytes)]. Returns bytes.
 */
size_t qsf_decode_push(const qsf_vocabulary *v, qsf_text_decoder *d, uint32_t id,
                       unsigned char *out);

/* Ends the text: writes U+FFFD for an incomplete character, or nothing; out [3]. */
size_t qsf_decode_flush(qsf_text_decoder *d, unsigned char *out);
