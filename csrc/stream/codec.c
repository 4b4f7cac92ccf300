/* codec.c - LZ4 and ZSTD blocks through the system's liblz4 and libzstd. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/unit_source.h"

#include <assert.h>
#include <limits.h>
#include <lz4.h>
#include <lz4hc.h>
/* For decompression in memory of the caller; the normal interface allocates memory that the ledger
 * does not count. */
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>

#include "base/checked.h"
#include "base/status.h"
#include "format/layout.h"

size_t qsf_codec_workspace_bytes(uint32_t compression)
{
    return compression == QSF_COMPRESSION_ZSTD ? qsf_round_up(ZSTD_estimateDCtxSize(), 64) : 0;
}

size_t qsf_lz4_pack(const void *raw, size_t raw_bytes, int32_t level, void *packed,
                    size_t cap_bytes)
{
    if (raw_bytes > LZ4_MAX_INPUT_SIZE)
        return 0;
    const int cap = cap_bytes < INT_MAX ? (int)cap_bytes : INT_MAX;
    return (size_t)(level > 0 ? LZ4_compress_HC(raw, packed, (int)raw_bytes, cap, level)
                              : LZ4_compress_default(raw, packed, (int)raw_bytes, cap));
}

qsf_status qsf_lz4_unpack(const void *packed, size_t packed_bytes, void *raw, size_t raw_bytes)
{
    const int got = packed_bytes > INT_MAX || raw_bytes > INT_MAX
                        ? -1
                        : LZ4_decompress_safe(packed, raw, (int)packed_bytes, (int)raw_bytes);
    QSF_FAIL_IF(got < 0 || (size_t)got != raw_bytes, FORMAT,
                "damaged LZ4 block: %zu bytes decode to %d, %zu were announced", packed_bytes, got,
                raw_bytes);
    return QSF_OK;
}

static qsf_status decode_zstd(void *workspace, size_t workspace_bytes, const unsigned char *src,
                              size_t src_bytes, unsigned char *dst, size_t dst_bytes)
{
    /* Exactly one frame that states its size. */
    QSF_FAIL_IF(ZSTD_getFrameContentSize(src, src_bytes) != dst_bytes ||
                    ZSTD_findFrameCompressedSize(src, src_bytes) != src_bytes,
                FORMAT, "damaged ZSTD block: %zu bytes are not one frame of %zu bytes", src_bytes,
                dst_bytes);
    ZSTD_DCtx *const context = ZSTD_initStaticDCtx(workspace, workspace_bytes);
    QSF_FAIL_IF(context == NULL, NOMEM,
                "internal error: a ZSTD workspace of %zu bytes is too small", workspace_bytes);
    const size_t got = ZSTD_decompressDCtx(context, dst, dst_bytes, src, src_bytes);
    QSF_FAIL_IF(ZSTD_isError(got), FORMAT, "damaged ZSTD block of %zu bytes: %s", src_bytes,
                ZSTD_getErrorName(got));
    QSF_FAIL_IF(got != dst_bytes, FORMAT,
                "damaged ZSTD block: %zu bytes decode to %zu, %zu were announced", src_bytes, got,
                dst_bytes);
    return QSF_OK;
}

qsf_status qsf_codec_decode(uint32_t compression, void *workspace, size_t workspace_bytes,
                            const unsigned char *src, size_t src_bytes, unsigned char *dst,
                            size_t dst_bytes)
{
    assert(src_bytes <= QSF_COMPRESSED_BLOCK_BYTES && dst_bytes <= QSF_COMPRESSED_BLOCK_BYTES);
    if (compression == QSF_COMPRESSION_ZSTD)
        return decode_zstd(workspace, workspace_bytes, src, src_bytes, dst, dst_bytes);
    assert(compression == QSF_COMPRESSION_LZ4 || compression == QSF_COMPRESSION_LZ4HC);
    return qsf_lz4_unpack(src, src_bytes, dst, dst_bytes);
}
