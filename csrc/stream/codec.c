/* codec.c - LZ4 and ZSTD blocks through the system's liblz4 and libzstd. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/codec.h"

#include <assert.h>
#include <lz4.h>
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

static qsf_status decode_lz4(const unsigned char *src, size_t src_bytes, unsigned char *dst,
                             size_t dst_bytes)
{
    const int got =
        LZ4_decompress_safe((const char *)src, (char *)dst, (int)src_bytes, (int)dst_bytes);
    if (got < 0 || (size_t)got != dst_bytes)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "damaged LZ4 block: %zu bytes decode to %d, %zu were announced", src_bytes,
                        got, dst_bytes);
    return QSF_OK;
}

static qsf_status decode_zstd(void *workspace, size_t workspace_bytes, const unsigned char *src,
                              size_t src_bytes, unsigned char *dst, size_t dst_bytes)
{
    /* Exactly one frame that states its size. */
    if (ZSTD_getFrameContentSize(src, src_bytes) != dst_bytes ||
        ZSTD_findFrameCompressedSize(src, src_bytes) != src_bytes)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "damaged ZSTD block: %zu bytes are not one frame of %zu bytes", src_bytes,
                        dst_bytes);
    ZSTD_DCtx *const context = ZSTD_initStaticDCtx(workspace, workspace_bytes);
    if (context == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "internal error: a ZSTD workspace of %zu bytes is too small",
                        workspace_bytes);
    const size_t got = ZSTD_decompressDCtx(context, dst, dst_bytes, src, src_bytes);
    if (ZSTD_isError(got))
        return QSF_FAIL(QSF_ERR_FORMAT, "damaged ZSTD block of %zu bytes: %s", src_bytes,
                        ZSTD_getErrorName(got));
    if (got != dst_bytes)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "damaged ZSTD block: %zu bytes decode to %zu, %zu were announced",
                        src_bytes, got, dst_bytes);
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
    return decode_lz4(src, src_bytes, dst, dst_bytes);
}
