/* adapter.c - reads and checks adapters; each step uses only numbers that earlier ones checked. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/adapter.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/status.h"
#include "checksum/crc32.h"

#define NAME_OFF 48
#define NAME_BYTES 76
#define CRC_OFF 124

/* The tensor types that an adapter may change, and their matrices of a layer */
static const struct {
    uint32_t type;
    qsf_layer_tensor tensor;
} changeable[] = {
    {QSF_TENSOR_Q, QSF_LAYER_Q},
    {QSF_TENSOR_K, QSF_LAYER_K},
    {QSF_TENSOR_V, QSF_LAYER_V},
    {QSF_TENSOR_ATTN_OUT, QSF_LAYER_ATTN_OUT},
    {QSF_TENSOR_FFN_GATE, QSF_LAYER_FFN_GATE},
    {QSF_TENSOR_FFN_UP, QSF_LAYER_FFN_UP},
    {QSF_TENSOR_FFN_DOWN, QSF_LAYER_FFN_DOWN},
};

/* The name of the base is text that an error may show: without control characters, and zeros
 * behind it. */
static bool is_name(const unsigned char *name)
{
    size_t n = 0;
    while (n < NAME_BYTES && name[n] >= ' ' && name[n] != 0x7F)
        n++;
    for (size_t i = n; i < NAME_BYTES; i++)
        if (name[i] != 0)
            return false;
    return n > 0 && n < NAME_BYTES;
}

/* The checksums of the base's header, which has those of its directory, and so of all the file */
static qsf_status check_base(const unsigned char *header, qsf_reader *r, const char *base_path)
{
    unsigned char base[QSF_HEADER_BYTES];
    QSF_TRY(qsf_file_read_at(&r->file, 0, base, sizeof base));
    const bool is_it = qsf_load_u64(header + 16) == r->file.n_bytes &&
                       qsf_load_u32(header + 24) == qsf_crc32(0, base, 64) &&
                       qsf_load_u32(header + 28) == qsf_crc32(0, base + 64, sizeof base - 64);
    QSF_FAIL_IF(!is_it, ARG,
                "it was made for another file (%s) than %s: make it again with qsf convert --lora "
                "ADAPTER --for %s",
                (const char *)header + NAME_OFF, base_path, base_path);
    return QSF_OK;
}

static qsf_status parse_header(qsf_adapter *a, const unsigned char *h)
{
    QSF_FAIL_IF(memcmp(h, "QSFA", 4) != 0, FORMAT,
                "it is none of qsf convert --lora ADAPTER --for BASE");
    QSF_FAIL_IF(qsf_load_u32(h + 4) != 2, UNSUPPORTED,
                "it has version %u, and this release reads 2: make it again", qsf_load_u32(h + 4));
    a->crc32[0] = qsf_load_u32(h + CRC_OFF);
    a->crc32[1] = qsf_load_u32(h + 44);
    QSF_FAIL_IF(qsf_crc32(0, h, CRC_OFF) != a->crc32[0], DAMAGED,
                "its header does not have its checksum");
    a->n_matrices = qsf_load_u32(h + 32);
    a->most_rank = qsf_load_u32(h + 36);
    a->dtype = qsf_load_u32(h + 40);
    const size_t n_table = (size_t)a->n_matrices * QSF_ADAPTER_ENTRY_BYTES;
    const bool is_valid = qsf_load_u64(h + 8) == a->file.n_bytes && a->n_matrices >= 1 &&
                          a->n_matrices <= QSF_MAX_LAYERS * QSF_LAYER_MATRICES &&
                          a->most_rank >= 1 && a->most_rank <= QSF_MAX_RANK &&
                          (a->dtype == QSF_DTYPE_F16 || a->dtype == QSF_DTYPE_Q8_0) &&
                          a->file.n_bytes >= QSF_ADAPTER_HEADER_BYTES + n_table &&
                          a->file.n_bytes <= UINT32_MAX / 2 && is_name(h + NAME_OFF);
    QSF_FAIL_IF(!is_valid, FORMAT,
                "%" PRIu64 " bytes, %u matrices of rank %u at most, type %u, or the name of its "
                "base are not what its header may say",
                a->file.n_bytes, a->n_matrices, a->most_rank, a->dtype);
    return QSF_OK;
}

qsf_status qsf_adapter_open(qsf_adapter *a, const char *path, qsf_reader *r, const char *base_path)
{
    unsigned char header[QSF_ADAPTER_HEADER_BYTES];
    *a = (qsf_adapter){.file.handle = -1};
    QSF_TRY(qsf_file_open(&a->file, path));
    a->file.reads_until_fault = -1;
    qsf_status status = a->file.n_bytes < sizeof header
                            ? QSF_FAIL(FORMAT, "%" PRIu64 " bytes are none", a->file.n_bytes)
                            : qsf_file_read_at(&a->file, 0, header, sizeof header);
    if (status == QSF_OK)
        status = parse_header(a, header);
    if (status == QSF_OK)
        status = check_base(header, r, base_path);
    if (status != QSF_OK)
        qsf_adapter_close(a);
    return status;
}

static size_t file_bytes(const qsf_adapter *a)
{
    return qsf_round_up((size_t)a->file.n_bytes, QSF_DATA_ALIGN);
}

size_t qsf_adapter_bytes(const qsf_adapter *a)
{
    return file_bytes(a) + a->n_matrices * sizeof *a->matrices;
}

/* Returns the matrix of type `type` in the layer, or QSF_LAYER_MATRICES. */
static qsf_layer_tensor find_matrix(uint32_t type)
{
    for (size_t i = 0; i < sizeof changeable / sizeof changeable[0]; i++)
        if (changeable[i].type == type)
            return changeable[i].tensor;
    return QSF_LAYER_MATRICES;
}

/* Adds a matrix to all visits of its layer; a layer that is left out has none. */
static void add_to_layer(qsf_low_rank *matrix, uint32_t layer, qsf_layer_tensor tensor,
                         const qsf_reader *r, const qsf_config *c, qsf_layer *layers)
{
    for (uint32_t i = 0; i < c->n_layers; i++) {
        if (qsf_reader_layer(r, layers[i].pass_idx)->layer != layer)
            continue;
        if (layers[i].low_rank[tensor] != matrix)
            matrix->next = layers[i].low_rank[tensor];
        layers[i].low_rank[tensor] = matrix;
    }
}

/* Checks entry `e` of the table, whose matrix begins at *off, which moves behind it; *last: the
 * place of the entry before it. */
static qsf_status parse_matrix(const qsf_adapter *a, const unsigned char *e, const qsf_reader *r,
                               uint64_t *off, uint64_t *last, qsf_low_rank *out)
{
    const uint32_t layer = qsf_load_u32(e);
    const uint32_t type = qsf_load_u32(e + 4);
    const uint64_t place = ((uint64_t)layer << 32 | type) + 1;
    const bool is_there = layer < r->header.n_layers && find_matrix(type) != QSF_LAYER_MATRICES;
    const qsf_tensor *const t = /* units begin with the embedding, then the layers */
        is_there ? qsf_reader_tensor(r, 1 + layer, type) : NULL;
    *out = (qsf_low_rank){
        .dtype = a->dtype, .rank = qsf_load_u32(e + 16), .factor = qsf_load_f32(e + 20)};
    QSF_FAIL_IF(t == NULL || t->layout != QSF_LAYOUT_TILES || place <= *last ||
                    qsf_load_u32(e + 8) != t->n_rows || qsf_load_u32(e + 12) != t->n_cols ||
                    out->rank < 1 || out->rank > a->most_rank || !isfinite(out->factor) ||
                    qsf_load_u64(e + 24) != 0,
                FORMAT,
                "its matrix of layer %u, type %u, [%u, %u], rank %u, factor %g does not fit the "
                "file that it was made for, or its place",
                layer, type, qsf_load_u32(e + 8), qsf_load_u32(e + 12), out->rank,
                (double)out->factor);
    const uint64_t a_bytes = (uint64_t)qsf_ceil_div(out->rank, QSF_TILE_ROWS) *
                             qsf_ceil_div(t->n_cols, QSF_BLOCK) * qsf_dtype_tile_bytes(a->dtype);
    const uint64_t b_bytes =
        (uint64_t)qsf_ceil_div(t->n_rows, QSF_TILE_ROWS) * qsf_low_rank_b_bytes(out);
    QSF_FAIL_IF(a_bytes + b_bytes > a->file.n_bytes - *off, FORMAT,
                "it ends inside its matrix of layer %u, type %u", layer, type);
    out->a = a->bytes + *off;
    out->b = out->a + a_bytes;
    *off += a_bytes + b_bytes;
    *last = place;
    return QSF_OK;
}

static qsf_status parse_matrices(qsf_adapter *a, uint32_t idx, const qsf_reader *r,
                                 const qsf_config *c, qsf_layer *layers)
{
    const unsigned char *e = a->bytes + QSF_ADAPTER_HEADER_BYTES;
    uint64_t off = QSF_ADAPTER_HEADER_BYTES + (uint64_t)a->n_matrices * QSF_ADAPTER_ENTRY_BYTES;
    uint64_t last = 0;
    for (uint32_t i = 0; i < a->n_matrices; i++, e += QSF_ADAPTER_ENTRY_BYTES) {
        qsf_low_rank *const matrix = &a->matrices[i];
        QSF_TRY(parse_matrix(a, e, r, &off, &last, matrix));
        matrix->adapter_idx = idx;
        add_to_layer(matrix, qsf_load_u32(e), find_matrix(qsf_load_u32(e + 4)), r, c, layers);
    }
    QSF_FAIL_IF(off != a->file.n_bytes, FORMAT, "it has bytes behind its last matrix");
    return qsf_adapter_check_scale(a, a->scale);
}

qsf_status qsf_adapter_check_scale(const qsf_adapter *a, float scale)
{
    for (uint32_t i = 0; i < a->n_matrices; i++)
        QSF_FAIL_IF(!isfinite(a->matrices[i].factor * scale), ARG,
                    "its factor times the scale %g is not finite", (double)scale);
    return QSF_OK;
}

qsf_status qsf_adapter_load(qsf_adapter *a, uint32_t idx, void *memory, const qsf_reader *r,
                            const qsf_config *c, qsf_layer *layers)
{
    const size_t n_bytes = (size_t)a->file.n_bytes;
    a->bytes = memory;
    a->matrices = (qsf_low_rank *)(void *)(a->bytes + file_bytes(a));
    QSF_TRY(qsf_file_read_at(&a->file, 0, a->bytes, n_bytes));
    const uint32_t crc32 =
        qsf_crc32(0, a->bytes + QSF_ADAPTER_HEADER_BYTES, n_bytes - QSF_ADAPTER_HEADER_BYTES);
    QSF_FAIL_IF(crc32 != a->crc32[1] || qsf_load_u32(a->bytes + CRC_OFF) != a->crc32[0], DAMAGED,
                "its matrices do not have their checksum");
    qsf_adapter_close(a);
    return parse_matrices(a, idx, r, c, layers);
}

void qsf_adapter_close(qsf_adapter *a)
{
    qsf_file_close(&a->file);
}
