/* unit_source.h - produces the raw bytes of one unit from front to back, copied or decoded.
 *
 * Uncompressed bytes come in pieces of any size, compressed ones block by block. The caller gives
 * the stored bytes, verifies their checksum and gives the memory for the raw bytes.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"
#include "include/qsf.h"
#include "platform/clock.h"

/* ---- decompression ---- */

/* Bytes of workspace that qsf_codec_decode needs: a multiple of 64, or 0. */
size_t qsf_codec_workspace_bytes(uint32_t compression);

/* Decodes src into exactly dst_bytes (at most QSF_COMPRESSED_BLOCK_BYTES). workspace is aligned to
 * 64 bytes and has at least qsf_codec_workspace_bytes(). compression is not QSF_COMPRESSION_NONE.
 * Allocates nothing. QSF_ERR_FORMAT: the block is damaged. */
qsf_status qsf_codec_decode(uint32_t compression, void *workspace, size_t workspace_bytes,
                            const unsigned char *src, size_t src_bytes, unsigned char *dst,
                            size_t dst_bytes);

/* Makes stored bytes [off, off + n_bytes) of the unit readable until the next call. Offsets ascend
 * without gaps; n_bytes is at most one block or cap_bytes of qsf_unit_source_next(). */
typedef qsf_status qsf_take_fn(void *arg, uint64_t off, size_t n_bytes, const unsigned char **out);

typedef struct qsf_unit_source {
    const qsf_reader *reader; /* borrowed */
    qsf_take_fn *take;
    void *take_arg;
    unsigned char *codec; /* borrowed [codec_bytes]: workspace of the unit's compression */
    size_t codec_bytes;
    uint32_t unit_idx;
    uint64_t stored_done_bytes; /* taken so far */
    uint64_t raw_done_bytes;    /* produced so far */
    uint64_t decompress_ns;     /* time of all units, for statistics */
    qsf_stopwatch *stopwatch;   /* borrowed, or NULL; counts the same time */
} qsf_unit_source;

void qsf_unit_source_begin(qsf_unit_source *s, uint32_t unit_idx);

/* Writes the next raw bytes to dst: up to cap_bytes of an uncompressed unit, or one block of a
 * compressed one; cap_bytes is then at least QSF_COMPRESSED_BLOCK_BYTES or the rest of the unit.
 * Do not call it at the end of the unit. QSF_ERR_FORMAT, and errors of `take`. */
qsf_status qsf_unit_source_next(qsf_unit_source *s, unsigned char *dst, size_t cap_bytes,
                                size_t *n_bytes);

/* Raw bytes that have not been produced. */
uint64_t qsf_unit_source_left_bytes(const qsf_unit_source *s);

/* After the last raw byte: QSF_ERR_FORMAT if stored bytes are left. */
qsf_status qsf_unit_source_finish(const qsf_unit_source *s);
