/* unit_pass.h - goes through a stream as a forward pass would: tile row by tile row. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_UNIT_PASS_H
#define QSF_TESTS_UNIT_PASS_H

#include <stddef.h>
#include <stdint.h>

#include "types/dtype.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "stream/stream.h"

/* Bytes that are asked for at once, and how often. */
static inline size_t pass_row_bytes(const qsf_tensor *t)
{
    if (t->layout == QSF_LAYOUT_VECTOR)
        return (size_t)t->data_bytes;
    if (t->layout == QSF_LAYOUT_OUTLIERS)
        return QSF_DATA_ALIGN;
    return ((size_t)t->n_cols + 63) / 64 * qsf_dtype_tile_bytes(t->dtype);
}

/* The checksum of all embedding bands, each read by itself. */
static inline qsf_status pass_bands(qsf_stream *s, uint32_t *digest)
{
    const qsf_tensor *const table = &s->reader->tensors[0];
    const size_t row_bytes = pass_row_bytes(table);
    uint32_t crc = 0;
    for (uint32_t b = 0; b < s->reader->n_bands; b++) {
        const unsigned char *band = NULL;
        QSF_TRY(qsf_stream_table_band(s, table, b, &band));
        crc = qsf_crc32(crc, band, row_bytes);
    }
    *digest = crc;
    return QSF_OK;
}

/* The checksum of all tensor data of a unit goes to *digest; max_rows tile rows at once. */
static inline qsf_status pass_unit(qsf_stream *s, uint32_t unit_idx, size_t max_rows,
                                   uint32_t *digest)
{
    const qsf_reader *const r = s->reader;
    const qsf_unit *const u = &r->units[unit_idx];
    uint32_t crc = 0;
    if (!qsf_stream_is_resident(s, unit_idx) && !qsf_stream_passes_ring(r, unit_idx))
        return pass_bands(s, digest);
    QSF_TRY(qsf_stream_begin_unit(s, unit_idx));
    for (uint32_t i = 0; i < u->n_tensors; i++) {
        const qsf_tensor *const t = &r->tensors[u->first_tensor + i];
        const size_t row_bytes = pass_row_bytes(t);
        uint64_t left_bytes = t->data_bytes;
        while (left_bytes > 0) {
            const uint64_t off = t->data_off + t->data_bytes - left_bytes;
            const size_t range_bytes = qsf_stream_range_bytes(s, unit_idx, off);
            uint64_t n_bytes = row_bytes * (uint64_t)max_rows;
            if (n_bytes > range_bytes)
                n_bytes = range_bytes / row_bytes * row_bytes;
            if (n_bytes > left_bytes)
                n_bytes = left_bytes;
            const unsigned char *data = NULL;
            QSF_TRY(qsf_stream_acquire(s, off, (size_t)n_bytes, &data));
            if ((uintptr_t)data % 64 != off % 64)
                return QSF_FAIL(ARG, "a span lies otherwise in memory than in its unit");
            crc = qsf_crc32(crc, data, (size_t)n_bytes);
            left_bytes -= n_bytes;
        }
    }
    QSF_TRY(qsf_stream_end_unit(s));
    *digest = crc;
    return QSF_OK;
}

/* All units and all embedding bands. */
static inline qsf_status pass_all(qsf_stream *s, size_t max_rows, uint32_t *digest)
{
    uint32_t crc = 0;
    qsf_stream_begin_pass(s, true, NULL, NULL);
    for (uint32_t u = 0; u < s->reader->n_stream_units; u++) {
        uint32_t of_unit = 0;
        QSF_TRY(pass_unit(s, u, max_rows, &of_unit));
        crc = qsf_crc32(crc, &of_unit, sizeof of_unit);
    }
    uint32_t of_bands = 0;
    QSF_TRY(pass_bands(s, &of_bands));
    crc = qsf_crc32(crc, &of_bands, sizeof of_bands);
    *digest = crc;
    return QSF_OK;
}

/* A stream over an open file with the least buffers and extra_bytes more in the ring. */
typedef struct pass_stream {
    qsf_io io;
    qsf_stream stream;
} pass_stream;

static inline qsf_status pass_open(pass_stream *p, qsf_reader *r, qsf_ledger *ledger,
                                   const bool *is_resident, size_t extra_bytes)
{
    qsf_stream_sizes sizes;
    qsf_stream_least(r, is_resident, &sizes);
    QSF_TRY(qsf_io_open(&p->io, &r->file, QSF_IO_BUFFERED));
    const qsf_stream_options options = {
        .is_resident = is_resident,
        .ring_bytes = sizes.ring_bytes + extra_bytes / QSF_IO_ALIGN * QSF_IO_ALIGN,
        .io = &p->io,
        .setup = {QSF_IO_BUFFERED, 2, false},
    };
    const qsf_status status = qsf_stream_init(&p->stream, r, ledger, &options);
    if (status != QSF_OK)
        qsf_io_close(&p->io);
    return status;
}

static inline void pass_close(pass_stream *p)
{
    qsf_stream_destroy(&p->stream);
    qsf_io_close(&p->io);
}

/* A file with its stream */
typedef struct pass_file {
    qsf_ledger ledger;
    qsf_reader reader;
    pass_stream pass;
} pass_file;

#define PASS_CEILING_BYTES (UINT64_C(64) << 20)

/* Unit i is resident if bit i is set. The N-th read and the N-th grant fail; -1: none. */
static inline qsf_status pass_open_failing(pass_file *f, const char *path, uint32_t resident_bits,
                                           size_t extra_bytes, int64_t reads, int64_t grants)
{
    bool is_resident[32];
    for (uint32_t i = 0; i < 32; i++)
        is_resident[i] = (resident_bits >> i & 1) != 0;
    qsf_ledger_init(&f->ledger, PASS_CEILING_BYTES);
    f->ledger.grants_until_fault = grants;
    QSF_TRY(qsf_reader_open(&f->reader, &f->ledger, path, reads));
    const qsf_status status = pass_open(&f->pass, &f->reader, &f->ledger, is_resident, extra_bytes);
    if (status != QSF_OK)
        qsf_reader_close(&f->reader);
    return status;
}

static inline qsf_status pass_open_file(pass_file *f, const char *path, uint32_t resident_bits,
                                        size_t extra_bytes)
{
    return pass_open_failing(f, path, resident_bits, extra_bytes, -1, -1);
}

/* Returns the bytes that are still held: none. */
static inline uint64_t pass_close_file(pass_file *f)
{
    pass_close(&f->pass);
    qsf_reader_close(&f->reader);
    return f->ledger.held_bytes;
}

#endif
