/* sequence.c - asks every cache of a sequence. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/sequence.h"

void qsf_sequence_layout(qsf_sequence *q, qsf_arena *a, qsf_kv_pool *pool, uint32_t home)
{
    qsf_kvcache_layout(&q->kv, a, pool, home);
}

qsf_status qsf_sequence_open_cold(qsf_sequence *q, const char *folder)
{
    return q->kv.pool->n_cold_records != 0 ? qsf_kv_cold_open(&q->kv.cold, folder) : QSF_OK;
}

void qsf_sequence_close(qsf_sequence *q)
{
    qsf_kvcache_trim(&q->kv, 0);
    qsf_file_close(&q->kv.cold.file);
}

uint32_t qsf_sequence_nearest(const qsf_sequence *q, uint32_t position)
{
    return qsf_kvcache_holds(&q->kv, position) ? position : 0;
}

qsf_status qsf_sequence_reserve(qsf_sequence *q, uint32_t begin, uint32_t end)
{
    return qsf_kvcache_reserve(&q->kv, begin, end);
}

void qsf_sequence_trim(qsf_sequence *q, uint32_t n_tokens)
{
    qsf_kvcache_trim(&q->kv, n_tokens);
}

qsf_status qsf_sequence_share(qsf_sequence *q, qsf_sequence *from, uint32_t position)
{
    return qsf_kvcache_share(&q->kv, &from->kv, position);
}

uint64_t qsf_sequence_image_bytes(const qsf_sequence *q, uint32_t position)
{
    return qsf_kvcache_image_bytes(&q->kv, position);
}

qsf_status qsf_sequence_save(qsf_sequence *q, uint32_t position, uint64_t offset, void *dst,
                             size_t n_bytes)
{
    return qsf_kvcache_read_image(&q->kv, position, offset, dst, n_bytes);
}

qsf_status qsf_sequence_load(qsf_sequence *q, uint32_t position, uint64_t offset, const void *src,
                             size_t n_bytes)
{
    return qsf_kvcache_write_image(&q->kv, position, offset, src, n_bytes);
}

void qsf_sequence_adopt(qsf_sequence *q, uint32_t position)
{
    qsf_kvcache_adopt(&q->kv, position);
}

uint64_t qsf_sequence_used_bytes(const qsf_sequence *q, uint32_t n_tokens)
{
    return qsf_kvcache_used_bytes(&q->kv, n_tokens);
}
