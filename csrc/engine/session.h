/* session.h - one token sequence and its KV cache: sync to a token list, step, rewind.
 *
 * Sessions of a model take turns: a call holds the model's lock while it evaluates one
 * chunk. A failed or cancelled chunk leaves the session as it was before the chunk.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_SESSION_H
#define QSF_ENGINE_SESSION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/session_buffers.h"
#include "include/qsf.h"
#include "platform/stopwatch.h"

struct qsf_session {
    qsf_model *model;
    qsf_session_buffers buffers;
    uint32_t n_tokens; /* evaluated */
    bool has_logits;
    atomic_bool cancelled; /* set by any thread */
    uint64_t prompt_tokens;
    uint64_t prompt_ns;
    uint64_t step_tokens;
    uint64_t step_ns;
    qsf_stopwatch stopwatch;         /* of the running call, and the latest */
    uint64_t phase_ns[QSF_N_PHASES]; /* of the calls that went well */
    uint64_t sample_ns;
    uint64_t n_samples;
    void *block; /* of the buffers */
    size_t block_bytes;
};

/* Bytes of the session's own record, which the plan counts among the tables. */
size_t qsf_session_record_bytes(void);

qsf_status qsf_session_begin(qsf_model *m, qsf_session **out);
void qsf_session_end(qsf_session *s);

/* scores: [n_tokens - first_row, n_vocab] or NULL. See qsf_session_sync and qsf_session_score. */
qsf_status qsf_session_advance(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                               size_t first_row, float *scores, size_t *n_done);
qsf_status qsf_session_append(qsf_session *s, uint32_t token);
qsf_status qsf_session_truncate(qsf_session *s, size_t n_tokens);
qsf_status qsf_session_copy_logits(const qsf_session *s, float *out, size_t cap_floats);
qsf_status qsf_session_choose(qsf_session *s, const qsf_sampling *how, const uint32_t *recent,
                              size_t n_recent, uint64_t *random_state, uint32_t *token);
void qsf_session_report(const qsf_session *s, qsf_stats *out);

#endif
