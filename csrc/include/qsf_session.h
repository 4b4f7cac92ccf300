/* qsf_session.h - part of qsf.h: sessions, logits, choosing tokens. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_SESSION_H
#define QSF_SESSION_H

#include "qsf_library.h"

QSF_C_BEGIN

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

/* Creates a session without tokens. QSF_ERR_NOMEM if max_sessions are open already. */
QSF_API qsf_status qsf_session_create(qsf_model *m, qsf_session **out);
QSF_API void qsf_session_destroy(qsf_session *s);

/* Sets by which scales the adapters that the model was opened with change this session: scales
 * [n_scales], finite, 0: not at all. At first they are those of qsf_options. A session whose scales
 * change holds no tokens afterwards. QSF_ERR_ARG: n_scales is not the model's n_adapters, a product
 * is not finite, or the model is a stage, whose rows come from a process that does not know them.
 */
QSF_API qsf_status qsf_session_set_adapters(qsf_session *s, const float *scales, uint32_t n_scales);

/* Brings the session one step closer to holding exactly tokens [n_tokens], n_tokens >= 1: drops
 * the tokens after the common prefix, then evaluates at most one chunk of the missing ones.
 * *n_done becomes the number of tokens that are evaluated. Call again until it equals n_tokens.
 * The last token is always evaluated again, so that its logits are available.
 * QSF_ERR_ARG: a token is outside the vocabulary, or n_tokens > ctx_tokens. QSF_ERR_NOMEM, also
 * for score, step and qsf_model_pass(): the KV pool is full; nothing was evaluated. After
 * QSF_ERR_CANCELLED, QSF_ERR_IO, QSF_ERR_FORMAT or QSF_ERR_DAMAGED the session holds the tokens
 * that it held before the chunk and can be used again. */
QSF_API qsf_status qsf_session_sync(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                                    size_t *n_done);

/* Like qsf_session_sync(), and writes the logits of each evaluated token to
 * logits [n_tokens - first_row, n_vocab]: row i belongs to tokens[first_row + i]. Tokens before
 * first_row get no logits and are evaluated only if the session does not hold them. Set *n_done
 * to 0 before the first call, then call again until it equals n_tokens. */
QSF_API qsf_status qsf_session_score(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                                     size_t first_row, float *logits, size_t cap_floats,
                                     size_t *n_done);

/* Evaluates one token and appends it to the session. Allocates no memory.
 * If the model was opened with draft_rows, the pass also evaluates drafts of the following tokens,
 * if that promises to save time; a later step with such a token needs no pass. Tokens, logits and
 * errors are the same with and without drafts. Drafts are dropped when another session's pass
 * evaluates some, and by every other call that evaluates tokens. */
QSF_API qsf_status qsf_session_step(qsf_session *s, uint32_t token);

/* Makes the next pass of a step of this session evaluate these drafts instead of its own: tokens
 * [n_tokens] after the token of the step, or as many as fit. 0: the engine's own drafts again.
 * QSF_ERR_ARG: a token is outside the vocabulary, or n_tokens > draft_rows of the plan. */
QSF_API qsf_status qsf_session_draft(qsf_session *s, const uint32_t *tokens, size_t n_tokens);

/* Returns the number of tokens that the session holds. */
QSF_API size_t qsf_session_position(const qsf_session *s);

/* Copies the first min(n_tokens, position) tokens that the session holds to out [n_tokens]. */
QSF_API void qsf_session_tokens(const qsf_session *s, uint32_t *out, size_t n_tokens);

/* Returns how many of tokens [n_tokens] the session holds from its beginning on. */
QSF_API size_t qsf_session_common(const qsf_session *s, const uint32_t *tokens, size_t n_tokens);

/* Drops all tokens after the first n_tokens. There are no logits until the next step or sync.
 * QSF_ERR_ARG if fewer are held, or if a layer with a window no longer holds positions that token
 * n_tokens would see: such a layer keeps its window and a chunk. qsf_session_sync then evaluates
 * from the start. */
QSF_API qsf_status qsf_session_rewind(qsf_session *s, size_t n_tokens);

/* Makes the running sync, score or step of this session return QSF_ERR_CANCELLED before its next
 * layer. If none is running, the next call returns it. Other threads and signal handlers may call
 * this function at any time. */
QSF_API void qsf_session_cancel(qsf_session *s);

/* ---- results ---- */

/* Copies the logits of the last token to out [n_vocab]. QSF_ERR_ARG if there are no logits
 * (nothing was evaluated, or the session was rewound) or cap_floats < n_vocab. */
QSF_API qsf_status qsf_session_logits(const qsf_session *s, float *out, size_t cap_floats);

/* How to choose a token. The engine applies the penalties, then the other fields in this order. */
typedef struct qsf_sampling {
    float repetition_penalty; /* > 0; 1: off. Divides positive logits, multiplies negative ones */
    float temperature;        /* >= 0; 0: the largest logit, of equal ones the lowest id */
    uint32_t top_k;           /* 0: off */
    float top_p;              /* (0, 1]; 1: off */
    float min_p;              /* [0, 1]; 0: off. Relative to the most probable token */
    float frequency_penalty;  /* -1e6 .. 1e6; 0: off. Subtracted for each time a token occurs */
    float presence_penalty;   /* the same, subtracted once for a token that occurs */
} qsf_sampling;

/* Sets temperature 0.7, top_k 40, top_p 0.9 and turns the rest off. */
QSF_API void qsf_sampling_default(qsf_sampling *out);

/* Chooses the next token from the session's logits, which do not change.
 * recent [n_recent] are the tokens that the penalties apply to. *random_state is the
 * state of the random generator; a call draws once unless temperature is 0. The same logits,
 * parameters and state give the same token on every machine. The remaining tokens race: each gets
 * a random time that depends on the state and its id, and the first one wins. So similar logits
 * mostly give the same token, and a draft model can guess with this session's latest parameters
 * and state, from here or qsf_model_choose(). QSF_ERR_NUMERIC: a logit is NaN or infinite. */
QSF_API qsf_status qsf_session_sample(qsf_session *s, const qsf_sampling *how,
                                      const uint32_t *recent, size_t n_recent,
                                      uint64_t *random_state, uint32_t *token);

/* Computes natural log-probabilities of the next token from the session's logits: without penalty,
 * temperature or limits, and the same on every machine. tokens[0] is the caller's; tokens[1 ..
 * n_tokens - 1] become the most probable ones, best first. Fills logprobs [n_tokens]. QSF_ERR_ARG:
 * tokens[0] is outside the vocabulary, or n_tokens is 0 or above n_vocab + 1. */
QSF_API qsf_status qsf_session_logprobs(qsf_session *s, uint32_t *tokens, float *logprobs,
                                        size_t n_tokens);

/* ---- cdef end ---- */

QSF_C_END

#endif
