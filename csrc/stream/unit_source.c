/* unit_source.c - copies or decodes the stored bytes of one unit. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/unit_source.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "base/bytes.h"
#include "base/status.h"
#include "platform/clock.h"

#define BLOCK_HEAD_BYTES 8U /* u32 stored size, u32 raw size */

void qsf_unit_source_begin(qsf_unit_source *s, uint32_t unit_idx)
{
    assert(unit_idx < s->reader->n_units);
    s->unit_idx = unit_idx;
    s->stored_done_bytes = 0;
    s->raw_done_bytes = 0;
}

uint64_t qsf_unit_source_left_bytes(const qsf_unit_source *s)
{
    return s->reader->units[s->unit_idx].raw_bytes - s->raw_done_bytes;
}

/* Takes the next n_bytes stored bytes; the caller has checked that the unit has them. */
static qsf_status take(qsf_unit_source *s, size_t n_bytes, const unsigned char **out)
{
    QSF_TRY(s->take(s->take_arg, s->stored_done_bytes, n_bytes, out));
    s->stored_done_bytes += n_bytes;
    return QSF_OK;
}

static qsf_status next_bytes(qsf_unit_source *s, unsigned char *dst, size_t cap_bytes,
                             size_t *n_bytes)
{
    const uint64_t left_bytes = qsf_unit_source_left_bytes(s);
    const size_t n = left_bytes < cap_bytes ? (size_t)left_bytes : cap_bytes;
    const unsigned char *bytes;
    QSF_TRY(take(s, n, &bytes));
    memcpy(dst, bytes, n);
    *n_bytes = n;
    return QSF_OK;
}

static qsf_status decode(qsf_unit_source *s, const unsigned char *block, size_t stored_bytes,
                         unsigned char *dst, size_t raw_bytes)
{
    if (stored_bytes == raw_bytes) {
        memcpy(dst, block, raw_bytes);
        return QSF_OK;
    }
    const uint64_t start_ns = qsf_clock_ns();
    const uint32_t compression = s->reader->units[s->unit_idx].compression;
    const qsf_status status = qsf_codec_decode(compression, s->codec, s->codec_bytes, block,
                                               stored_bytes, dst, raw_bytes);
    const uint64_t end_ns = qsf_clock_ns();
    s->decompress_ns += end_ns - start_ns;
    qsf_stopwatch_set_aside(s->stopwatch, QSF_PHASE_DECOMPRESS, start_ns, end_ns);
    return status;
}

static qsf_status next_block(qsf_unit_source *s, unsigned char *dst, size_t cap_bytes,
                             size_t *n_bytes)
{
    const qsf_unit *const u = &s->reader->units[s->unit_idx];
    const uint64_t raw_left_bytes = qsf_unit_source_left_bytes(s);
    const uint64_t stored_left_bytes = u->stored_bytes - s->stored_done_bytes;
    QSF_FAIL_IF(stored_left_bytes < BLOCK_HEAD_BYTES, FORMAT,
                "unit %u: %" PRIu64 " stored bytes left for %" PRIu64 " raw ones", s->unit_idx,
                stored_left_bytes, raw_left_bytes);
    const unsigned char *bytes;
    QSF_TRY(take(s, BLOCK_HEAD_BYTES, &bytes));
    const uint32_t stored_bytes = qsf_load_u32(bytes);
    const uint32_t raw_bytes = qsf_load_u32(bytes + 4);
    QSF_FAIL_IF(raw_bytes < 1 || raw_bytes > QSF_COMPRESSED_BLOCK_BYTES ||
                    raw_bytes > raw_left_bytes || stored_bytes < 1 || stored_bytes > raw_bytes ||
                    stored_bytes > stored_left_bytes - BLOCK_HEAD_BYTES,
                FORMAT,
                "unit %u: a block of %u stored and %u raw bytes, allowed: raw 1 .. %u, stored 1 .. "
                "raw; left are %" PRIu64 " and %" PRIu64,
                s->unit_idx, stored_bytes, raw_bytes, QSF_COMPRESSED_BLOCK_BYTES,
                stored_left_bytes - BLOCK_HEAD_BYTES, raw_left_bytes);
    assert(raw_bytes <= cap_bytes);
    (void)cap_bytes;
    QSF_TRY(take(s, stored_bytes, &bytes));
    QSF_TRY(decode(s, bytes, stored_bytes, dst, raw_bytes));
    *n_bytes = raw_bytes;
    return QSF_OK;
}

qsf_status qsf_unit_source_next(qsf_unit_source *s, unsigned char *dst, size_t cap_bytes,
                                size_t *n_bytes)
{
    assert(qsf_unit_source_left_bytes(s) > 0 && cap_bytes > 0);
    if (s->reader->units[s->unit_idx].compression != QSF_COMPRESSION_NONE)
        QSF_TRY(next_block(s, dst, cap_bytes, n_bytes));
    else
        QSF_TRY(next_bytes(s, dst, cap_bytes, n_bytes));
    s->raw_done_bytes += *n_bytes;
    return QSF_OK;
}

qsf_status qsf_unit_source_finish(const qsf_unit_source *s)
{
    const uint64_t stored_bytes = s->reader->units[s->unit_idx].stored_bytes;
    assert(qsf_unit_source_left_bytes(s) == 0);
    QSF_FAIL_IF(s->stored_done_bytes != stored_bytes, FORMAT,
                "unit %u: %" PRIu64 " stored bytes are left after its last block", s->unit_idx,
                stored_bytes - s->stored_done_bytes);
    return QSF_OK;
}
