/* stream_sizes.c - how much memory a stream takes, for plans and for the stream itself. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/checked.h"
#include "types/dtype.h"
#include "stream/codec.h"
#include "stream/stream.h"

/* Bytes needed at once: a row of tiles or a whole vector. Sparse outliers are copied in pieces. */
static size_t tensor_range_bytes(const qsf_tensor *t)
{
    if (t->layout == QSF_LAYOUT_OUTLIERS)
        return QSF_DATA_ALIGN;
    return t->layout == QSF_LAYOUT_VECTOR
               ? (size_t)t->data_bytes
               : qsf_ceil_div(t->n_cols, QSF_BLOCK) * qsf_dtype_tile_bytes(t->dtype);
}

static size_t unit_range_bytes(const qsf_reader *r, const qsf_unit *u)
{
    size_t range_bytes = 0;
    for (uint32_t i = 0; i < u->n_tensors; i++) {
        const size_t n = tensor_range_bytes(&r->tensors[u->first_tensor + i]);
        if (n > range_bytes)
            range_bytes = n;
    }
    return qsf_round_up(range_bytes, QSF_DATA_ALIGN);
}

static void raise_to(size_t *most, size_t n)
{
    if (n > *most)
        *most = n;
}

/* Raises the sizes to those needed for streaming this unit. */
static void add_streamed(const qsf_reader *r, const qsf_unit *u, qsf_stream_sizes *sizes)
{
    const size_t range_bytes = unit_range_bytes(r, u);
    if (u->compression == QSF_COMPRESSION_NONE) {
        raise_to(&sizes->range_bytes, range_bytes);
    } else {
        /* A block is taken and decoded as a whole, even if only one byte of it is needed; the
         * decode buffer begins at a multiple of 64. */
        raise_to(&sizes->range_bytes, QSF_COMPRESSED_BLOCK_BYTES);
        raise_to(&sizes->decode_bytes, range_bytes + QSF_DATA_ALIGN + QSF_COMPRESSED_BLOCK_BYTES);
        raise_to(&sizes->codec_bytes, qsf_codec_workspace_bytes(u->compression));
    }
    raise_to(&sizes->ring_bytes, qsf_ring_least_bytes(sizes->range_bytes));
}

/* Raises the sizes to those needed for loading this unit, block by block. */
static void add_loaded(const qsf_unit *u, qsf_stream_sizes *sizes)
{
    if (u->compression == QSF_COMPRESSION_NONE) {
        raise_to(&sizes->range_bytes, QSF_DATA_ALIGN);
    } else {
        raise_to(&sizes->range_bytes, QSF_COMPRESSED_BLOCK_BYTES);
        raise_to(&sizes->codec_bytes, qsf_codec_workspace_bytes(u->compression));
    }
    raise_to(&sizes->ring_bytes, qsf_ring_least_bytes(sizes->range_bytes));
}

bool qsf_stream_passes_ring(const qsf_reader *r, uint32_t unit_idx)
{
    return unit_idx != r->embedding_unit || r->arch.tied_head;
}

void qsf_stream_load_sizes(const qsf_reader *r, const bool *is_resident, qsf_stream_sizes *out)
{
    *out = (qsf_stream_sizes){0};
    for (uint32_t i = 0; i < r->n_pass_units; i++)
        if (is_resident[r->pass_units[i]])
            add_loaded(&r->units[r->pass_units[i]], out);
}

void qsf_stream_least(const qsf_reader *r, const bool *is_resident, qsf_stream_sizes *out)
{
    *out = (qsf_stream_sizes){0};
    for (uint32_t i = 0; i < r->n_pass_units; i++) {
        const uint32_t unit_idx = r->pass_units[i];
        if (!is_resident[unit_idx] && qsf_stream_passes_ring(r, unit_idx))
            add_streamed(r, &r->units[unit_idx], out);
    }
    qsf_stream_sizes load;
    qsf_stream_load_sizes(r, is_resident, &load);
    if (out->ring_bytes != 0) { /* resident units load through the ring of the streamed ones */
        raise_to(&out->range_bytes, load.range_bytes);
        raise_to(&out->codec_bytes, load.codec_bytes);
        raise_to(&out->ring_bytes, qsf_ring_least_bytes(out->range_bytes));
    } else {
        out->load_bytes = qsf_stream_buffer_bytes(r, &load, load.ring_bytes);
    }
    if (r->own_table_unit != 0)
        out->own_band_bytes = qsf_round_up(
            tensor_range_bytes(qsf_reader_tensor(r, r->own_table_unit, QSF_TENSOR_OWN_TABLE)),
            QSF_DATA_ALIGN);
    if (!is_resident[r->embedding_unit])
        out->band_bytes = qsf_round_up(
            tensor_range_bytes(qsf_reader_tensor(r, r->embedding_unit, QSF_TENSOR_EMBEDDING)),
            QSF_DATA_ALIGN);
}

size_t qsf_stream_buffer_bytes(const qsf_reader *r, const qsf_stream_sizes *sizes,
                               size_t ring_bytes)
{
    if (sizes->ring_bytes == 0)
        return 0;
    return qsf_ring_bytes(ring_bytes, sizes->range_bytes, r) + sizes->decode_bytes +
           sizes->codec_bytes;
}

size_t qsf_stream_unit_buffer_bytes(const qsf_reader *r, uint32_t unit_idx)
{
    qsf_stream_sizes sizes = {0};
    if (!qsf_stream_passes_ring(r, unit_idx))
        return 0;
    add_streamed(r, &r->units[unit_idx], &sizes);
    return qsf_stream_buffer_bytes(r, &sizes, sizes.ring_bytes);
}

size_t qsf_stream_table_bytes(const qsf_reader *r)
{
    return r->n_stream_units *
           (sizeof(unsigned char *) + sizeof(qsf_unit_time) + sizeof(uint32_t) + sizeof(bool));
}
