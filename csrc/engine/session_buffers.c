/* session_buffers.c - lays out the memory of a session. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/session_buffers.h"

void qsf_session_layout(qsf_session_buffers *b, qsf_arena *a, const qsf_config *c,
                        uint32_t ctx_tokens, uint32_t chunk_tokens, const qsf_kv_form *kv_form)
{
    qsf_kvcache_layout(&b->kv, a, c, ctx_tokens, chunk_tokens, kv_form);
    b->tokens = qsf_arena_push(a, ctx_tokens, sizeof *b->tokens);
    b->logits = qsf_arena_push(a, c->n_vocab, sizeof *b->logits);
    qsf_sampler_layout(&b->sampler, a, c->n_vocab);
}
