/* qsf_state.h - part of qsf.h: the state of a session as bytes, and what two sessions share.
 *
 * The state contains all that continuing a session needs: the logits of its last token, if it has
 * them, and its KV cache. With the state and the tokens another process can continue the session
 * with the same bits, without evaluating a token again. The state does not depend on threads,
 * instruction set, budget, chunk or context. docs/sessions.md describes the file that Python makes
 * of it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_STATE_H
#define QSF_STATE_H

#include "qsf_session.h"

QSF_C_BEGIN

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

#define QSF_STATE_KEY_BYTES 32

/* Writes a key [QSF_STATE_KEY_BYTES], a digest of all that decides the bits of a state: the file's
 * contents by its checksums, layers that are skipped, how keys and values are stored, `exact`,
 * RoPE, the release, and the C library's functions; of adapters the scales of qsf_options, so that
 * those of a session (qsf_session_set_adapters) must be kept beside its state, and set before it
 * is restored. Only a model with the same key can restore a state. The key does not protect
 * against forgery. QSF_ERR_IO: the file cannot be read. */
QSF_API qsf_status qsf_model_state_key(qsf_model *m, unsigned char *key);

typedef struct qsf_state {
    uint32_t n_tokens;
    uint32_t has_logits; /* 0 or 1 */
    uint64_t n_bytes;    /* logits f32 [n_vocab], little end first, then the cache */
} qsf_state;

/* Describes the state of the session. A session that cannot continue at its position, because a
 * layer with a window has dropped positions that the next token sees, is described as empty. A
 * session whose recurrent states lag after a rewind is described as of its last snapshot. */
QSF_API qsf_status qsf_session_describe_state(const qsf_session *s, qsf_state *out);

/* Copies n_bytes of the state from `offset` on to dst; *crc32 becomes their checksum (IEEE 802.3).
 * QSF_ERR_ARG: the range is outside of the state. */
QSF_API qsf_status qsf_session_read_state(const qsf_session *s, uint64_t offset, void *dst,
                                          size_t n_bytes, uint32_t *crc32);

/* Restores n_bytes of a state, which replaces the session's contents; the first call empties the
 * session. `offset` begins at 0 and continues where the call before ended. QSF_ERR_DAMAGED: the
 * checksum does not match. QSF_ERR_ARG: the state does not fit this model or its context, or
 * `offset` is not the next one. After an error begin again. */
QSF_API qsf_status qsf_session_write_state(qsf_session *s, const qsf_state *state, uint64_t offset,
                                           const void *src, size_t n_bytes, uint32_t crc32);

/* Makes the session hold tokens [n_tokens of the state], whose state was restored completely.
 * QSF_ERR_ARG: it was not, or a token is outside the vocabulary. */
QSF_API qsf_status qsf_session_adopt_state(qsf_session *s, const uint32_t *tokens);

/* Makes `to` hold the first n_tokens of `from`, with its logits if these are all its tokens, and
 * the scales of its adapters. Both share the KV memory until one evaluates further tokens: then it
 * copies at most 32 positions. Both are sessions of one model. No other call may use either
 * meanwhile. QSF_ERR_ARG: `from` holds fewer tokens, or could not be rewound to them; `to` is
 * unchanged. Keys and values in the file of a session (qsf_options.kv_folder) are copied:
 * QSF_ERR_IO or QSF_ERR_DAMAGED if that fails; `to` is empty then. */
QSF_API qsf_status qsf_session_copy(qsf_session *to, const qsf_session *from, size_t n_tokens);

/* ---- cdef end ---- */

QSF_C_END

#endif
