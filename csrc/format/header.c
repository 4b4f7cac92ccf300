/* header.c - reads and checks the first 128 bytes: docs/format.md, section 1. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sections.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "types/dtype.h"
#include "base/status.h"
#include "checksum/crc32.h"

static qsf_status check_range(const char *field, uint32_t value, uint32_t least, uint32_t most)
{
    if (value < least || value > most)
        return QSF_FAIL(QSF_ERR_FORMAT, "header: %s is %u, allowed: %u .. %u", field, value, least,
                        most);
    return QSF_OK;
}

static qsf_status check_token(const char *field, uint32_t id, uint32_t n_vocab)
{
    if (id != QSF_TOKEN_NONE && id >= n_vocab)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "header: %s is %u, allowed: below the vocabulary of %u, or none", field, id,
                        n_vocab);
    return QSF_OK;
}

/* Checks magic, version, size and checksums before any other field is used. */
static qsf_status check_identity(const unsigned char *bytes, uint64_t file_bytes)
{
    if (memcmp(bytes, "QSF1", 4) != 0)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "not a QSF file: it begins with %02x %02x %02x %02x, not with \"QSF1\"",
                        bytes[0], bytes[1], bytes[2], bytes[3]);
    const uint32_t version = qsf_load_u32(bytes + 4);
    if (version != QSF_FILE_VERSION)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED, "file version %u, this build reads version %d: %s",
                        version, QSF_FILE_VERSION,
                        version < QSF_FILE_VERSION
                            ? "`qsf convert MODEL FILE` makes it again from the original model"
                            : "`pip install --upgrade qsf` gets a newer one");
    const uint32_t header_bytes = qsf_load_u32(bytes + 8);
    if (header_bytes != QSF_HEADER_BYTES)
        return QSF_FAIL(QSF_ERR_FORMAT, "header: size is %u, allowed: %d", header_bytes,
                        QSF_HEADER_BYTES);
    const uint32_t stored[2] = {qsf_load_u32(bytes + 96), qsf_load_u32(bytes + 124)};
    const uint32_t real[2] = {qsf_crc32(0, bytes, 96), qsf_crc32(0, bytes + 100, 24)};
    for (int i = 0; i < 2; i++)
        if (stored[i] != real[i])
            return QSF_FAIL(QSF_ERR_DAMAGED, "header: checksum of bytes %s is %08x, stored is %08x",
                            i == 0 ? "0..95" : "100..123", real[i], stored[i]);
    const uint32_t low_bytes = qsf_load_u32(bytes + 92);
    if (low_bytes != (file_bytes & 0xFFFFFFFF))
        return QSF_FAIL(
            QSF_ERR_DAMAGED,
            "the file has %" PRIu64
            " bytes, but its header was written for one of %u (mod 2^32): truncated or extended",
            file_bytes, low_bytes);
    return QSF_OK;
}

static qsf_status check_dimensions(const qsf_header *h)
{
    if (h->architecture >= QSF_ARCHITECTURE_COUNT)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED, "architecture %u, this build reads 0 .. %d",
                        h->architecture, QSF_ARCHITECTURE_COUNT - 1);
    QSF_TRY(check_range("number of layers", h->n_layers, 1, QSF_MAX_LAYERS));
    QSF_TRY(check_range("hidden dimension", h->dim, 1, QSF_MAX_DIM));
    QSF_TRY(check_range("number of attention heads", h->n_heads, 1, QSF_MAX_HEADS));
    QSF_TRY(check_range("number of KV heads", h->n_kv_heads, 1, h->n_heads));
    if (h->n_heads % h->n_kv_heads != 0)
        return QSF_FAIL(QSF_ERR_FORMAT, "header: %u KV heads do not divide %u attention heads",
                        h->n_kv_heads, h->n_heads);
    QSF_TRY(check_range("vocabulary", h->n_vocab, 1, QSF_MAX_VOCAB));
    QSF_TRY(check_range("maximum sequence length", h->max_tokens, 1, QSF_MAX_TOKENS));
    QSF_TRY(check_range("FFN dimension", h->ffn_dim, 1, QSF_MAX_FFN_DIM));
    return check_range("head dimension", h->head_dim, 1, QSF_MAX_HEAD_DIM);
}

qsf_status qsf_header_check(const qsf_header *h)
{
    QSF_TRY(check_dimensions(h));
    QSF_TRY(check_range("quantisation type", h->dtype, 0, QSF_DTYPE_COUNT - 1));
    QSF_TRY(check_range("activation", h->activation, 0, QSF_ACTIVATION_HEADER_COUNT - 1));
    QSF_TRY(check_range("normalisation", h->norm, 0, QSF_NORM_COUNT - 1));
    QSF_TRY(check_range("positions", h->positions, 0, QSF_POSITIONS_COUNT - 1));
    if (h->positions == QSF_POSITIONS_ROPE) {
        if (!isfinite(h->rope_theta) || !(h->rope_theta > 0.0F))
            return QSF_FAIL(QSF_ERR_FORMAT,
                            "header: RoPE theta is %g, allowed with RoPE: finite and above 0",
                            (double)h->rope_theta);
    } else if (!(h->rope_theta == 0.0F)) {
        return QSF_FAIL(QSF_ERR_FORMAT, "header: RoPE theta is %g, allowed without RoPE: 0",
                        (double)h->rope_theta);
    }
    QSF_TRY(check_token("BOS id", h->bos_id, h->n_vocab));
    QSF_TRY(check_token("EOS id", h->eos_id, h->n_vocab));
    return check_token("PAD id", h->pad_id, h->n_vocab);
}

static qsf_status check_links(const unsigned char *bytes, const qsf_header_links *links)
{
    if (links->directory_off % 8 != 0)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "header: directory offset is %" PRIu64 ", allowed: multiples of 8",
                        links->directory_off);
    QSF_TRY(check_range("number of directory entries", links->n_sections, 1, QSF_MAX_SECTIONS));
    QSF_TRY(check_range("block size", qsf_load_u16(bytes + 116), QSF_BLOCK, QSF_BLOCK));
    QSF_TRY(check_range("rows per tile", bytes[118], QSF_TILE_ROWS, QSF_TILE_ROWS));
    return check_range("flags (reserved)", bytes[119], 0, 0);
}

qsf_status qsf_header_parse(const unsigned char *bytes, uint64_t file_bytes, qsf_header *h,
                            qsf_header_links *links)
{
    QSF_TRY(check_identity(bytes, file_bytes));
    *h = (qsf_header){
        .architecture = qsf_load_u32(bytes + 12),
        .n_layers = qsf_load_u32(bytes + 16),
        .dim = qsf_load_u32(bytes + 20),
        .n_heads = qsf_load_u32(bytes + 24),
        .n_kv_heads = qsf_load_u32(bytes + 28),
        .n_vocab = qsf_load_u32(bytes + 32),
        .max_tokens = qsf_load_u32(bytes + 36),
        .ffn_dim = qsf_load_u32(bytes + 40),
        .head_dim = qsf_load_u32(bytes + 44),
        .dtype = bytes[48],
        .activation = bytes[49],
        .norm = bytes[50],
        .positions = bytes[51],
        .rope_theta = qsf_load_f32(bytes + 52),
        .bos_id = qsf_load_u32(bytes + 80),
        .eos_id = qsf_load_u32(bytes + 84),
        .pad_id = qsf_load_u32(bytes + 88),
    };
    if (h->n_kv_heads == 0)
        h->n_kv_heads = h->n_heads;
    *links = (qsf_header_links){
        .unit_index_off = qsf_load_u64(bytes + 56),
        .embedding_off = qsf_load_u64(bytes + 64),
        .final_off = qsf_load_u64(bytes + 72),
        .directory_off = qsf_load_u64(bytes + 100),
        .n_sections = qsf_load_u32(bytes + 108),
        .directory_crc32 = qsf_load_u32(bytes + 112),
        .unit_index_crc32 = qsf_load_u32(bytes + 120),
    };
    QSF_TRY(qsf_header_check(h));
    return check_links(bytes, links);
}
