/* session_buffers.h - the memory of a session, for the plan and for the session itself. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_SESSION_BUFFERS_H
#define QSF_ENGINE_SESSION_BUFFERS_H

#include <stdint.h>

#include "engine/sample.h"
#include "memory/arena.h"
#include "model/kvcache.h"

typedef struct qsf_session_buffers {
    qsf_kvcache kv;
    uint32_t *tokens; /* [ctx_tokens] */
    float *logits;    /* [n_vocab] after the last token */
    qsf_sampler sampler;
} qsf_session_buffers;

/* Call once on a measuring arena and once on the real one, whose memory is zeroed. */
void qsf_session_layout(qsf_session_buffers *b, qsf_arena *a, const qsf_config *c,
                        uint32_t ctx_tokens, uint32_t chunk_tokens, const qsf_kv_form *kv_form);

#endif
