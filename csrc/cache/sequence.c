/* sequence.c - calls every cache of a sequence. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/sequence.h"

#include <string.h>

#include "base/status.h"

void qsf_sequence_pools_layout(qsf_sequence_pools *pools, qsf_arena *a, const qsf_config *c,
                               const qsf_sequence_form *form)
{
    const size_t used_bytes = a->used_bytes;
    qsf_kv_pool_layout(&pools->kv, a, c, &form->sizes, &form->kv);
    const qsf_state_sizes sizes = {
        .ctx_tokens = form->sizes.ctx_tokens,
        .n_sessions = form->sizes.n_sessions,
        .n_drafts = form->n_drafts,
        .snapshots_bytes = (a->used_bytes - used_bytes) / form->sizes.n_sessions,
    };
    qsf_state_pool_layout(&pools->states, a, c, form->describe, &sizes);
    const bool keeps_hidden = form->keeps_hidden || c->n_trunk_layers < c->n_layers;
    pools->most_hidden = keeps_hidden ? form->n_drafts + 1 : 0;
    pools->hidden_stride = qsf_stride(c->dim);
}

void qsf_sequence_layout(qsf_sequence *q, qsf_arena *a, qsf_sequence_pools *pools, uint32_t home)
{
    qsf_kvcache_layout(&q->kv, a, &pools->kv, home);
    qsf_statecache_layout(&q->states, a, &pools->states);
    q->most_hidden = pools->most_hidden;
    q->hidden = qsf_arena_push(a, q->most_hidden * pools->hidden_stride, sizeof *q->hidden);
}

qsf_status qsf_sequence_open_cold(qsf_sequence *q, const char *folder)
{
    return q->kv.pool->n_cold_records != 0 ? qsf_kv_cold_open(&q->kv.cold, folder) : QSF_OK;
}

void qsf_sequence_close(qsf_sequence *q)
{
    qsf_sequence_trim(q, 0);
    qsf_file_close(&q->kv.cold.file);
}

uint32_t qsf_sequence_nearest(const qsf_sequence *q, uint32_t position)
{
    const uint32_t nearest = qsf_statecache_nearest(&q->states, position);
    return qsf_kvcache_holds(&q->kv, nearest) ? nearest : 0;
}

bool qsf_sequence_can_return(const qsf_sequence *q, uint32_t position)
{
    return qsf_kvcache_holds(&q->kv, qsf_statecache_nearest(&q->states, position));
}

qsf_status qsf_sequence_begin(qsf_sequence *q, uint32_t begin, uint32_t end, uint32_t n_drafts)
{
    QSF_TRY(qsf_kvcache_reserve(&q->kv, begin, end));
    qsf_statecache_begin(&q->states, begin, end - n_drafts, n_drafts);
    return QSF_OK;
}

void qsf_sequence_commit(qsf_sequence *q)
{
    qsf_statecache_commit(&q->states);
}

void qsf_sequence_abandon(qsf_sequence *q)
{
    qsf_statecache_abandon(&q->states);
}

void qsf_sequence_trim(qsf_sequence *q, uint32_t n_tokens)
{
    qsf_kvcache_trim(&q->kv, n_tokens);
    qsf_statecache_trim(&q->states, n_tokens);
}

qsf_status qsf_sequence_share(qsf_sequence *q, qsf_sequence *from, uint32_t position)
{
    qsf_statecache_share(&q->states, &from->states, position);
    q->mtp_begin = from->mtp_begin;
    q->n_hidden = 0;
    return qsf_kvcache_share(&q->kv, &from->kv, position);
}

uint64_t qsf_sequence_image_bytes(const qsf_sequence *q, uint32_t position)
{
    return qsf_statecache_image_bytes(&q->states, position) +
           qsf_kvcache_image_bytes(&q->kv, position);
}

/* Returns how many of n_bytes at `offset` belong to the states, which come first. */
static size_t count_of_states(uint64_t states_bytes, uint64_t offset, size_t n_bytes)
{
    const uint64_t n_left = offset < states_bytes ? states_bytes - offset : 0;
    return n_left < n_bytes ? (size_t)n_left : n_bytes;
}

qsf_status qsf_sequence_save(qsf_sequence *q, uint32_t position, uint64_t offset, void *dst,
                             size_t n_bytes)
{
    const uint64_t states_bytes = qsf_statecache_image_bytes(&q->states, position);
    const size_t n = count_of_states(states_bytes, offset, n_bytes);
    if (n > 0)
        qsf_statecache_read_image(&q->states, position, offset, dst, n);
    return n == n_bytes ? QSF_OK
                        : qsf_kvcache_read_image(&q->kv, position, offset + n - states_bytes,
                                                 (char *)dst + n, n_bytes - n);
}

qsf_status qsf_sequence_begin_load(qsf_sequence *q, uint32_t position)
{
    qsf_sequence_trim(q, 0);
    QSF_TRY(qsf_kvcache_reserve(&q->kv, 0, position));
    qsf_statecache_begin_image(&q->states, position);
    q->mtp_begin = position + 1;
    q->n_hidden = 0;
    return QSF_OK;
}

qsf_status qsf_sequence_load(qsf_sequence *q, uint32_t position, uint64_t offset, const void *src,
                             size_t n_bytes)
{
    const uint64_t states_bytes = qsf_statecache_image_bytes(&q->states, position);
    const size_t n = count_of_states(states_bytes, offset, n_bytes);
    if (n > 0)
        qsf_statecache_write_image(&q->states, offset, src, n);
    return n == n_bytes ? QSF_OK
                        : qsf_kvcache_write_image(&q->kv, position, offset + n - states_bytes,
                                                  (const char *)src + n, n_bytes - n);
}

void qsf_sequence_adopt(qsf_sequence *q, uint32_t position)
{
    qsf_kvcache_adopt(&q->kv, position);
    qsf_statecache_adopt(&q->states);
}

uint64_t qsf_sequence_used_bytes(const qsf_sequence *q, uint32_t n_tokens)
{
    const uint64_t n_slots = q->states.n_snapshots + (uint64_t)(n_tokens != 0);
    return qsf_kvcache_used_bytes(&q->kv, n_tokens) +
           n_slots * q->states.pool->slot_floats * sizeof(float);
}

void qsf_sequence_keep_hidden(qsf_sequence *q, uint32_t end, const float *rows, uint32_t n_rows,
                              size_t stride)
{
    q->n_hidden = n_rows < q->most_hidden ? n_rows : q->most_hidden;
    q->hidden_end = end;
    for (uint32_t i = 1; i <= q->n_hidden; i++)
        memcpy(q->hidden + (end - i) % q->most_hidden * stride, rows + (n_rows - i) * stride,
               stride * sizeof *rows);
}

const float *qsf_sequence_hidden(const qsf_sequence *q, uint32_t position, size_t stride)
{
    if (position >= q->hidden_end || q->hidden_end - position > q->n_hidden)
        return NULL;
    return q->hidden + position % q->most_hidden * stride;
}
