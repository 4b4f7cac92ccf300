/* qsf_state.h - part of qsf.h: the state of a session as bytes, and what two sessions share.
 *
 * The state is what a session needs to go on: the logits of its last token, if it has them, and its
 * KV cache. Who keeps it with the tokens can continue the session later, in another process, with
 * the same bits and without evaluating a token again. It does not depend on threads, instruction
 * set, budget, chunk or context. docs/sessions.md has the file that Python makes of it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_STATE_H
#define QSF_STATE_H

#include "qsf_session.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

#define QSF_STATE_KEY_BYTES 32

/* Writes a key [QSF_STATE_KEY_BYTES] of all that the bits of a state depend on: the file's contents
 * by its checksums, layers that are skipped, how keys and values are stored, `exact`, RoPE, the
 * release, and the C library's functions. A state goes on with a model of the same key only. The
 * key does not protect against forgery. QSF_ERR_IO: the file cannot be read. */
QSF_API qsf_status qsf_model_state_key(qsf_model *m, unsigned char *key);

typedef struct qsf_state {
    uint32_t n_tokens;
    uint32_t has_logits; /* 0 or 1 */
    uint64_t n_bytes;    /* logits f32 [n_vocab], little end first, then the cache */
} qsf_state;

/* Describes the state of what the session holds. A session that cannot go on where it is, because a
 * layer with a window has given up what the next token sees, is described as empty; one whose
 * recurrent states lag, after a rewind, as what it held at its last snapshot. */
QSF_API qsf_status qsf_session_describe_state(const qsf_session *s, qsf_state *out);

/* Copies n_bytes of the state from `offset` on to dst; *crc32 becomes their checksum (IEEE 802.3).
 * QSF_ERR_ARG: they are not inside the state. */
QSF_API qsf_status qsf_session_read_state(const qsf_session *s, uint64_t offset, void *dst,
                                          size_t n_bytes, uint32_t *crc32);

/* Takes n_bytes of a state that is to replace what the session holds, which is nothing from the
 * first call on. `offset` begins at 0 and goes on where the call before has ended.
 * QSF_ERR_DAMAGED: the bytes do not have the checksum. QSF_ERR_ARG: such a state does not fit this
 * model or its context, or `offset` is another. After an error begin again. */
QSF_API qsf_status qsf_session_write_state(qsf_session *s, const qsf_state *state, uint64_t offset,
                                           const void *src, size_t n_bytes, uint32_t crc32);

/* Makes the session hold tokens [n_tokens of the state], whose state was written completely.
 * QSF_ERR_ARG: it was not, or a token is outside the vocabulary. */
QSF_API qsf_status qsf_session_adopt_state(qsf_session *s, const uint32_t *tokens);

/* Makes `to` hold the first n_tokens of what `from` holds, with their logits if these are all its
 * tokens. Both hold the same KV memory, until one evaluates after them: then it takes a copy of at
 * most 32 positions. Both are sessions of one model. No other call may use either meanwhile.
 * QSF_ERR_ARG: `from` holds fewer, or could not be rewound to them; `to` has not changed. Keys and
 * values in the file of a session (qsf_options.kv_folder) are copied: QSF_ERR_IO or QSF_ERR_DAMAGED
 * if they cannot be, and `to` holds nothing. */
QSF_API qsf_status qsf_session_copy(qsf_session *to, const qsf_session *from, size_t n_tokens);

/* ---- cdef end ---- */

#ifdef __cplusplus
}
#endif

#endif
