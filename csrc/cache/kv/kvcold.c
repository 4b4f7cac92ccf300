/* kvcold.c - writes and reads cold pages. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/kv/kvcache.h"

#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "checksum/crc32.h"

/* Size of one read: a memory control group locks pages while they are read. */
#define READ_BYTES ((size_t)1 << 18)
#define STEP_BYTES 4096

void qsf_kv_cold_layout(qsf_kv_cold *cold, qsf_arena *a, const qsf_kv_pool *pool)
{
    *cold = (qsf_kv_cold){.file = {.handle = -1}};
    cold->checksums = qsf_arena_push(a, pool->n_cold_pages, sizeof *cold->checksums);
}

/* Returns `status`, and adds to the latest error text which file it is about. */
static qsf_status explain(const qsf_kv_cold *cold, qsf_status status)
{
    char detail[256];
    snprintf(detail, sizeof detail, "%s", qsf_error_detail());
    return qsf_fail(status, "the file of %.1f MB of keys and values in %s: %s",
                    qsf_mb(cold->written_bytes), cold->folder, detail);
}

qsf_status qsf_kv_cold_open(qsf_kv_cold *cold, const char *folder)
{
    cold->folder = folder;
    return qsf_file_create_unnamed(&cold->file, folder);
}

static uint64_t offset_of(const qsf_kv_cold_page *p)
{
    const qsf_kv_layer *const l = p->layer;
    return l->cold_off + (uint64_t)p->record * qsf_kv_record_bytes(l) +
           p->kv_head * (l->k_page_bytes + l->v_page_bytes) + (p->is_key ? 0 : l->k_page_bytes);
}

static uint32_t *checksum_of(const qsf_kv_cold *cold, const qsf_kv_cold_page *p)
{
    const qsf_kv_layer *const l = p->layer;
    return &cold->checksums[l->first_cold + ((size_t)p->record * l->n_kv_heads + p->kv_head) * 2 +
                            !p->is_key];
}

static qsf_status damaged(const qsf_kv_cold_page *p)
{
    return QSF_FAIL(DAMAGED,
                    "keys and values of positions %u to %u do not have their checksum: the disk "
                    "has changed them; rewind the session to before them",
                    p->record * QSF_KV_PAGE_TOKENS, (p->record + 1) * QSF_KV_PAGE_TOKENS - 1);
}

qsf_status qsf_kv_cold_write(qsf_kv_cold *cold, const qsf_kv_cold_page *page, size_t from,
                             size_t to, const void *src)
{
    uint32_t *const crc = checksum_of(cold, page);
    const qsf_status status =
        qsf_file_write_at(&cold->file, offset_of(page) + from, src, to - from);
    if (status != QSF_OK)
        return explain(cold, status);
    *crc = qsf_crc32(from == 0 ? 0 : *crc, src, to - from);
    cold->written_bytes += to - from;
    return QSF_OK;
}

static qsf_status read_at(qsf_kv_cold *cold, uint64_t offset, void *dst, size_t n_bytes)
{
    const qsf_status status = qsf_file_read_at(&cold->file, offset, dst, n_bytes);
    return status == QSF_OK ? QSF_OK : explain(cold, status);
}

qsf_status qsf_kv_cold_read(qsf_kv_cold *cold, const qsf_kv_cold_page *page, size_t from, size_t to,
                            void *dst)
{
    unsigned char step[STEP_BYTES];
    const size_t n_bytes = qsf_kv_cold_page_bytes(page);
    uint32_t crc = 0;
    for (size_t at = 0; at < n_bytes; at += sizeof step) {
        const size_t end = n_bytes - at < sizeof step ? n_bytes : at + sizeof step;
        const size_t begin_here = from > at ? from : at;
        const size_t end_here = to < end ? to : end;
        QSF_TRY(read_at(cold, offset_of(page) + at, step, end - at));
        crc = qsf_crc32(crc, step, end - at);
        if (begin_here < end_here)
            memcpy((unsigned char *)dst + (begin_here - from), step + (begin_here - at),
                   end_here - begin_here);
    }
    cold->read_bytes += n_bytes;
    return crc == *checksum_of(cold, page) ? QSF_OK : damaged(page);
}

qsf_status qsf_kv_cold_read_records(qsf_kv_cold *cold, const qsf_kv_layer *layer, uint32_t first,
                                    uint32_t end, unsigned char *dst)
{
    const size_t n_bytes = (end - first) * qsf_kv_record_bytes(layer);
    const uint64_t offset = layer->cold_off + (uint64_t)first * qsf_kv_record_bytes(layer);
    for (size_t at = 0; at < n_bytes; at += READ_BYTES)
        QSF_TRY(read_at(cold, offset + at, dst + at,
                        n_bytes - at < READ_BYTES ? n_bytes - at : READ_BYTES));
    cold->read_bytes += n_bytes;
    for (uint32_t record = first; record < end; record++)
        for (uint32_t part = 0; part < qsf_kv_part_count(layer); part++) {
            const qsf_kv_cold_page p = qsf_kv_cold_part(layer, record, part);
            if (qsf_crc32(0, dst, qsf_kv_cold_page_bytes(&p)) != *checksum_of(cold, &p))
                return damaged(&p);
            dst += qsf_kv_cold_page_bytes(&p);
        }
    return QSF_OK;
}
