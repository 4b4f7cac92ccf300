/* codec.h - decodes one compressed block, in memory that the caller gives.
 *
 * Knows nothing of files or units. Hostile input is refused, never trusted.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_STREAM_CODEC_H
#define QSF_STREAM_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"

/* What qsf_codec_decode needs besides source and target: a multiple of 64, maybe 0. */
size_t qsf_codec_workspace_bytes(uint32_t compression);

/* Decodes src into exactly dst_bytes (at most QSF_COMPRESSED_BLOCK_BYTES). workspace is
 * 64-byte aligned, of at least qsf_codec_workspace_bytes(). Allocates nothing.
 * compression is not QSF_COMPRESSION_NONE. QSF_ERR_FORMAT: not such a block. */
qsf_status qsf_codec_decode(uint32_t compression, void *workspace, size_t workspace_bytes,
                            const unsigned char *src, size_t src_bytes, unsigned char *dst,
                            size_t dst_bytes);

#endif
