/* codec.h - decodes one compressed block in memory of the caller; safe for hostile input.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"

/* Bytes of workspace that qsf_codec_decode needs: a multiple of 64, or 0. */
size_t qsf_codec_workspace_bytes(uint32_t compression);

/* Decodes src into exactly dst_bytes (at most QSF_COMPRESSED_BLOCK_BYTES). workspace is aligned to
 * 64 bytes and has at least qsf_codec_workspace_bytes(). compression is not QSF_COMPRESSION_NONE.
 * Allocates nothing. QSF_ERR_FORMAT: the block is damaged. */
qsf_status qsf_codec_decode(uint32_t compression, void *workspace, size_t workspace_bytes,
                            const unsigned char *src, size_t src_bytes, unsigned char *dst,
                            size_t dst_bytes);
