/* unit_source.c - reads, checksums and decodes the stored bytes of one unit. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/unit_source.h"

#include <assert.h>
#include <inttypes.h>

#include "base/bytes.h"
#include "base/status.h"
#include "format/codec.h"
#include "format/crc32.h"
#include "platform/clock.h"

#define BLOCK_HEAD_BYTES 8U /* u32 stored size, u32 raw size */

size_t qsf_unit_source_stored_bytes(uint32_t compression)
{
    return compression == QSF_COMPRESSION_NONE
               ? 0
               : qsf_codec_workspace_bytes(compression) + QSF_COMPRESSED_BLOCK_BYTES;
}

void qsf_unit_source_init(qsf_unit_source *s, qsf_reader *r, unsigned char *stored,
                          size_t stored_bytes)
{
    *s = (qsf_unit_source){.reader = r, .stored = stored, .stored_bytes = stored_bytes};
}

void qsf_unit_source_begin(qsf_unit_source *s, uint32_t unit_idx)
{
    assert(unit_idx < s->reader->n_units);
    s->unit_idx = unit_idx;
    s->file_done_bytes = 0;
    s->raw_done_bytes = 0;
    s->running_crc32 = 0;
}

uint64_t qsf_unit_source_left_bytes(const qsf_unit_source *s)
{
    return s->reader->units[s->unit_idx].raw_bytes - s->raw_done_bytes;
}

/* Reads the next n_bytes of the unit as they are stored; the caller has checked that the
 * unit has that many. */
static qsf_status read_stored(qsf_unit_source *s, unsigned char *dst, size_t n_bytes)
{
    const uint64_t off = s->reader->units[s->unit_idx].off + s->file_done_bytes;
    const uint64_t start_ns = qsf_clock_ns();
    const qsf_status status = qsf_file_read_at(&s->reader->file, off, dst, n_bytes);
    s->read_ns += qsf_clock_ns() - start_ns;
    QSF_TRY(status);
    s->read_bytes += n_bytes;
    s->file_done_bytes += n_bytes;
    s->running_crc32 = qsf_crc32(s->running_crc32, dst, n_bytes);
    return QSF_OK;
}

static qsf_status next_block(qsf_unit_source *s, unsigned char *dst, size_t cap_bytes,
                             size_t *n_bytes)
{
    const qsf_unit *const u = &s->reader->units[s->unit_idx];
    const uint64_t raw_left_bytes = qsf_unit_source_left_bytes(s);
    const uint64_t file_left_bytes = u->stored_bytes - s->file_done_bytes;
    if (file_left_bytes < BLOCK_HEAD_BYTES)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "unit %" PRIu32 ": %" PRIu64 " stored bytes left for %" PRIu64 " raw ones",
                        s->unit_idx, file_left_bytes, raw_left_bytes);
    unsigned char head[BLOCK_HEAD_BYTES];
    QSF_TRY(read_stored(s, head, sizeof head));
    const uint32_t stored_bytes = qsf_load_u32(head);
    const uint32_t raw_bytes = qsf_load_u32(head + 4);
    if (raw_bytes < 1 || raw_bytes > QSF_COMPRESSED_BLOCK_BYTES || raw_bytes > raw_left_bytes ||
        stored_bytes < 1 || stored_bytes > raw_bytes ||
        stored_bytes > file_left_bytes - BLOCK_HEAD_BYTES)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "unit %" PRIu32 ": a block of %" PRIu32 " stored and %" PRIu32
                        " raw bytes, allowed: raw 1 .. %u, stored 1 .. raw; left are %" PRIu64
                        " and %" PRIu64,
                        s->unit_idx, stored_bytes, raw_bytes, QSF_COMPRESSED_BLOCK_BYTES,
                        file_left_bytes - BLOCK_HEAD_BYTES, raw_left_bytes);
    assert(raw_bytes <= cap_bytes);
    (void)cap_bytes;
    if (stored_bytes == raw_bytes) {
        QSF_TRY(read_stored(s, dst, raw_bytes));
    } else {
        const size_t workspace_bytes = qsf_codec_workspace_bytes(u->compression);
        assert(s->stored_bytes >= workspace_bytes + stored_bytes);
        unsigned char *const block = s->stored + workspace_bytes;
        QSF_TRY(read_stored(s, block, stored_bytes));
        QSF_TRY(qsf_codec_decode(u->compression, s->stored, workspace_bytes, block, stored_bytes,
                                 dst, raw_bytes));
    }
    *n_bytes = raw_bytes;
    return QSF_OK;
}

qsf_status qsf_unit_source_next(qsf_unit_source *s, unsigned char *dst, size_t cap_bytes,
                                size_t *n_bytes)
{
    const uint64_t left_bytes = qsf_unit_source_left_bytes(s);
    assert(left_bytes > 0 && cap_bytes > 0);
    if (s->reader->units[s->unit_idx].compression != QSF_COMPRESSION_NONE) {
        QSF_TRY(next_block(s, dst, cap_bytes, n_bytes));
    } else {
        *n_bytes = left_bytes < cap_bytes ? (size_t)left_bytes : cap_bytes;
        QSF_TRY(read_stored(s, dst, *n_bytes));
    }
    s->raw_done_bytes += *n_bytes;
    return QSF_OK;
}

qsf_status qsf_unit_source_finish(const qsf_unit_source *s)
{
    const qsf_unit *const u = &s->reader->units[s->unit_idx];
    assert(qsf_unit_source_left_bytes(s) == 0);
    if (s->file_done_bytes != u->stored_bytes)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "unit %" PRIu32 ": %" PRIu64 " stored bytes are left after its last block",
                        s->unit_idx, u->stored_bytes - s->file_done_bytes);
    if (s->running_crc32 != u->crc32)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "unit %" PRIu32 " (%" PRIu64 " bytes at %" PRIu64
                        "): checksum is %08" PRIx32 ", stored is %08" PRIx32,
                        s->unit_idx, u->stored_bytes, u->off, s->running_crc32, u->crc32);
    return QSF_OK;
}
