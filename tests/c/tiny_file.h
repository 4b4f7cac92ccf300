/* tiny_file.h - builds a small valid .qsf file in memory, by docs/format.md and nothing else.
 *
 * Two layers of tensors that no transformer has, chosen for their shapes: sizes that need
 * padding, matrices of several tile rows, vectors of both types. The weights are arbitrary.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_TINY_FILE_H
#define QSF_TESTS_TINY_FILE_H

#include <assert.h>
#include <lz4.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "base/bytes.h"
#include "types/dtype.h"
#include "format/layout.h"
#include "repair.h"
#include "system.h"

#ifndef TINY_CAP_BYTES /* a test that includes this file may ask for other sizes */
#define TINY_CAP_BYTES 65536
#endif
#define TINY_DIM 64
#define TINY_VOCAB 40
#ifndef TINY_LAYERS
#define TINY_LAYERS 2
#endif
#define TINY_TOKENS 4
#define TINY_BLOCK_BYTES 1000 /* raw bytes of a compressed block: no multiple of 64 */
#define TINY_TABLES_OFF 128   /* where the directory is */

typedef struct tiny_options {
    uint8_t compression[TINY_LAYERS]; /* qsf_compression */
    bool is_tied;
    bool is_learned;
} tiny_options;

typedef struct tiny_file {
    unsigned char bytes[TINY_CAP_BYTES];
    size_t n_bytes;
    uint32_t n_sections;
    unsigned char tens[20 * TINY_LAYERS * QSF_TENSOR_ENTRY_BYTES];
    uint32_t n_tensors;
    unsigned char index[(TINY_LAYERS + 2) * QSF_UNIT_ENTRY_BYTES]; /* the section UNIT */
    uint32_t n_units;
    uint32_t n_indexed;                 /* tensors of the units so far */
    unsigned char unit[TINY_CAP_BYTES]; /* raw bytes of the unit that is being built */
    size_t unit_bytes;
    uint32_t noise; /* state of the arbitrary weights */
} tiny_file;

static inline size_t tiny_align(size_t n, size_t align)
{
    return (n + align - 1) / align * align;
}

static inline void tiny_add_tensor(tiny_file *f, uint32_t unit_idx, uint32_t type, uint32_t n_rows,
                                   uint32_t n_cols, uint8_t dtype, uint8_t layout)
{
    const size_t n_data = layout == QSF_LAYOUT_VECTOR
                              ? n_cols * qsf_dtype_scalar_bytes(dtype)
                              : tiny_align(n_rows, 16) / 16 * (tiny_align(n_cols, 64) / 64) *
                                    qsf_dtype_tile_bytes(dtype);
    unsigned char *const header = f->unit + f->unit_bytes;
    qsf_store_u32(header, type);
    qsf_store_u32(header + 4, n_rows);
    qsf_store_u32(header + 8, n_cols);
    header[12] = dtype;
    header[13] = layout;
    unsigned char *const entry = f->tens + (size_t)f->n_tensors++ * QSF_TENSOR_ENTRY_BYTES;
    qsf_store_u32(entry, unit_idx);
    memcpy(entry + 4, header, 16);
    qsf_store_u64(entry + 24, f->unit_bytes + 64);
    for (size_t i = 0; i < n_data; i++) {
        /* Runs of equal bytes, so that the codecs find something, and noise between. */
        if (i % 8 == 0 || i % 512 < 64)
            f->noise = f->noise * 1664525U + 1013904223U;
        header[64 + i] = (unsigned char)(f->noise >> 24);
    }
    f->unit_bytes += 64 + tiny_align(n_data, 64);
}

/* A side table of an entry in every `stride` positions (100 or more) of each tile row. Returns
 * the number of entries. */
static inline uint32_t tiny_add_outliers(tiny_file *f, uint32_t unit_idx, uint32_t type,
                                         uint32_t n_rows, uint32_t n_cols, uint32_t stride)
{
    const uint32_t n_tile_rows = (n_rows + 15) / 16;
    unsigned char *const header = f->unit + f->unit_bytes;
    unsigned char *const first = header + 64;
    unsigned char *const entries = first + 4 * (size_t)(n_tile_rows + 1);
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_tile_rows; i++) {
        uint32_t end = 0; /* behind the last position */
        for (uint32_t p = 3 + i; p < 16 * n_cols; p += stride) {
            if (i * 16 + p % 16 >= n_rows)
                continue;
            qsf_store_u16(entries + 4 * (size_t)n, (uint16_t)(p + 1 - end));
            qsf_store_u16(entries + 4 * (size_t)n + 2,
                          (uint16_t)(0x3400 + 37 * (n % 400))); /* 2^-2 .. */
            end = p + 1;
            n++;
        }
        qsf_store_u32(first + 4 * (size_t)(i + 1), n);
    }
    qsf_store_u32(header, type);
    qsf_store_u32(header + 4, n_rows);
    qsf_store_u32(header + 8, n_cols);
    header[12] = QSF_DTYPE_F16;
    header[13] = QSF_LAYOUT_OUTLIERS;
    qsf_store_u32(header + 16, n);
    unsigned char *const entry = f->tens + (size_t)f->n_tensors++ * QSF_TENSOR_ENTRY_BYTES;
    qsf_store_u32(entry, unit_idx);
    memcpy(entry + 4, header, 20);
    qsf_store_u64(entry + 24, f->unit_bytes + 64);
    f->unit_bytes += 64 + tiny_align(4 * (size_t)(n_tile_rows + 1 + n), 64);
    return n;
}

static inline void tiny_add_section(tiny_file *f, const char *tag, size_t align, const void *data,
                                    size_t n_bytes)
{
    f->n_bytes = tiny_align(f->n_bytes, align);
    unsigned char *const entry =
        f->bytes + TINY_TABLES_OFF + (size_t)f->n_sections++ * QSF_DIRECTORY_ENTRY_BYTES;
    memcpy(entry, tag, 4);
    qsf_store_u64(entry + 8, f->n_bytes);
    qsf_store_u64(entry + 16, n_bytes);
    memcpy(f->bytes + f->n_bytes, data, n_bytes);
    f->n_bytes += n_bytes;
}

/* Appends f->unit as blocks; returns the stored size. */
static inline size_t tiny_add_blocks(tiny_file *f, uint8_t compression)
{
    const size_t start = f->n_bytes;
    for (size_t at = 0; at < f->unit_bytes; at += TINY_BLOCK_BYTES) {
        const size_t n_left = f->unit_bytes - at;
        const size_t n_raw = n_left < TINY_BLOCK_BYTES ? n_left : TINY_BLOCK_BYTES;
        char packed[2 * TINY_BLOCK_BYTES];
        const unsigned char *const raw = f->unit + at;
        size_t n_stored = compression == QSF_COMPRESSION_ZSTD
                              ? ZSTD_compress(packed, sizeof packed, raw, n_raw, 3)
                              : (size_t)LZ4_compress_default((const char *)raw, packed, (int)n_raw,
                                                             (int)sizeof packed);
        /* One block in four is stored as it is, which a writer may do with any. */
        const bool is_plain = n_stored >= n_raw || at / TINY_BLOCK_BYTES % 4 == 2;
        if (is_plain)
            n_stored = n_raw;
        qsf_store_u32(f->bytes + f->n_bytes, (uint32_t)n_stored);
        qsf_store_u32(f->bytes + f->n_bytes + 4, (uint32_t)n_raw);
        memcpy(f->bytes + f->n_bytes + 8, is_plain ? (const char *)raw : packed, n_stored);
        f->n_bytes += 8 + n_stored;
    }
    return f->n_bytes - start;
}

/* Appends f->unit, whose tensors are those added since the last one, and its entry of UNIT. */
static inline void tiny_end_unit(tiny_file *f, qsf_unit_role role, uint8_t compression)
{
    f->n_bytes = tiny_align(f->n_bytes, QSF_UNIT_ALIGN);
    unsigned char *const entry = f->index + (size_t)f->n_units * QSF_UNIT_ENTRY_BYTES;
    qsf_store_u64(entry, f->n_bytes);
    size_t n_stored = f->unit_bytes;
    if (compression == QSF_COMPRESSION_NONE) {
        memcpy(f->bytes + f->n_bytes, f->unit, f->unit_bytes);
        f->n_bytes += f->unit_bytes;
    } else {
        n_stored = tiny_add_blocks(f, compression);
    }
    qsf_store_u64(entry + 8, n_stored);
    qsf_store_u64(entry + 16, f->unit_bytes);
    qsf_store_f32(entry + 28, 0.5F);
    entry[32] = (unsigned char)role;
    entry[33] = role == QSF_UNIT_LAYER ? QSF_DTYPE_MIXED : QSF_DTYPE_8BIT;
    entry[34] = compression;
    if (role == QSF_UNIT_LAYER)
        qsf_store_u16(entry + 36, (uint16_t)(f->n_units - 1)); /* behind the embedding */
    qsf_store_u32(entry + 40, f->n_tensors - f->n_indexed);
    qsf_store_u32(entry + 44, f->n_units);
    f->n_indexed = f->n_tensors;
    f->n_units++;
    memset(f->unit, 0, sizeof f->unit);
    f->unit_bytes = 0;
}

/* The directory is whole then. */
static inline void tiny_add_tables(tiny_file *f)
{
    tiny_add_section(f, "TENS", 8, f->tens, (size_t)f->n_tensors * QSF_TENSOR_ENTRY_BYTES);
    tiny_add_section(f, "UNIT", 8, f->index, (size_t)f->n_units * QSF_UNIT_ENTRY_BYTES);
    assert(f->n_bytes <= TINY_CAP_BYTES && f->n_sections <= 10);
    qsf_store_u64(f->bytes + 100, TINY_TABLES_OFF);
    qsf_store_u32(f->bytes + 108, f->n_sections);
}

static inline void tiny_add_arch(tiny_file *f, const tiny_options *o)
{
    unsigned char arch[40] = {0};
    size_t n = 0;
    qsf_store_u16(arch, 1); /* norm epsilon */
    arch[2] = 2;
    qsf_store_f32(arch + 4, 1e-6F);
    n += 8;
    qsf_store_u16(arch + n, 7); /* rotary dimensions */
    arch[n + 2] = 1;
    qsf_store_u32(arch + n + 4, 16);
    n += 8;
    qsf_store_u16(arch + n, 9); /* tied head */
    arch[n + 2] = 1;
    qsf_store_u32(arch + n + 4, o->is_tied);
    n += 8;
    qsf_store_u16(arch + n, 0x8001); /* an optional key that no reader knows: two floats */
    arch[n + 2] = 3;
    qsf_store_u32(arch + n + 4, 2);
    n += 16;
    tiny_add_section(f, "ARCH", 8, arch, n);
}

static inline void tiny_fill_header(tiny_file *f, const tiny_options *o)
{
    unsigned char *const h = f->bytes;
    memcpy(h, "QSF1", 4);
    const uint32_t numbers[11] = {QSF_FILE_VERSION,
                                  QSF_HEADER_BYTES,
                                  QSF_ARCHITECTURE_LLAMA,
                                  TINY_LAYERS,
                                  TINY_DIM,
                                  2,
                                  1,
                                  TINY_VOCAB,
                                  TINY_TOKENS,
                                  96,
                                  32};
    for (size_t i = 0; i < 11; i++)
        qsf_store_u32(h + 4 + 4 * i, numbers[i]);
    h[48] = QSF_DTYPE_8BIT;
    h[49] = QSF_ACTIVATION_SILU;
    h[50] = QSF_NORM_RMS;
    h[51] = o->is_learned ? QSF_POSITIONS_LEARNED : QSF_POSITIONS_ROPE;
    qsf_store_f32(h + 52, o->is_learned ? 0.0F : 10000.0F);
    qsf_store_u64(h + 56, qsf_load_u64(repair_find(h, f->n_bytes, "UNIT") + 8));
    qsf_store_u64(h + 64, qsf_load_u64(f->index));
    qsf_store_u64(h + 72, qsf_load_u64(f->index + (f->n_units - 1) * QSF_UNIT_ENTRY_BYTES));
    qsf_store_u32(h + 80, 1);
    qsf_store_u32(h + 84, 2);
    qsf_store_u32(h + 88, 0xFFFFFFFF);
    qsf_store_u16(h + 116, QSF_BLOCK);
    h[118] = QSF_TILE_ROWS;
}

static inline void tiny_build(tiny_file *f, const tiny_options *o)
{
    memset(f, 0, sizeof *f);
    f->n_bytes = TINY_TABLES_OFF + 10 * QSF_DIRECTORY_ENTRY_BYTES;
    tiny_add_arch(f, o);
    tiny_add_section(f, "META", 8, "{\"source\": \"none\"}", 18);
    const unsigned char ebnd[(TINY_VOCAB + 15) / 16 * 4] = {0};
    tiny_add_section(f, "EBND", 8, ebnd, sizeof ebnd);
    const unsigned char wpos[TINY_TOKENS * TINY_DIM * 2] = {0, 60};
    if (o->is_learned)
        tiny_add_section(f, "WPOS", 64, wpos, sizeof wpos);

    tiny_add_tensor(f, 0, QSF_TENSOR_EMBEDDING, TINY_VOCAB, TINY_DIM, QSF_DTYPE_8BIT, 1);
    tiny_end_unit(f, QSF_UNIT_EMBEDDING, 0);
    tiny_add_tensor(f, 1, QSF_TENSOR_ATTN_NORM, 1, TINY_DIM, QSF_DTYPE_F32, 0);
    tiny_add_tensor(f, 1, QSF_TENSOR_Q, 20, TINY_DIM, QSF_DTYPE_8BIT, 1);
    tiny_add_tensor(f, 1, QSF_TENSOR_K, 16, 100, QSF_DTYPE_4BIT, 1);
    tiny_end_unit(f, QSF_UNIT_LAYER, o->compression[0]);
    tiny_add_tensor(f, 2, QSF_TENSOR_FFN_NORM, 1, 33, QSF_DTYPE_F16, 0);
    tiny_add_tensor(f, 2, QSF_TENSOR_FFN_UP, 10, 64, QSF_DTYPE_8BIT, 1);
    tiny_add_tensor(f, 2, QSF_TENSOR_FFN_DOWN, 1, 1, QSF_DTYPE_F16, 1);
    tiny_add_tensor(f, 2, QSF_TENSOR_FFN_GATE, 40, 1, QSF_DTYPE_4BIT, 1);
    tiny_end_unit(f, QSF_UNIT_LAYER, o->compression[1]);
    const uint32_t final_idx = TINY_LAYERS + 1;
    tiny_add_tensor(f, final_idx, QSF_TENSOR_FINAL_NORM, 1, TINY_DIM, QSF_DTYPE_F32, 0);
    tiny_add_tensor(f, final_idx, QSF_TENSOR_FINAL_NORM_BIAS, 1, TINY_DIM, QSF_DTYPE_F16, 0);
    if (!o->is_tied)
        tiny_add_tensor(f, final_idx, QSF_TENSOR_HEAD, TINY_VOCAB, TINY_DIM, QSF_DTYPE_4BIT, 1);
    tiny_end_unit(f, QSF_UNIT_FINAL, 0);
    tiny_add_tables(f);
    tiny_fill_header(f, o);
    repair_checksums(f->bytes, f->n_bytes);
}

/* Never truncates the file to nothing first: some file systems then write it to the disk at once
 * when it is closed, which takes milliseconds. */
static inline bool tiny_write(const char *path, const unsigned char *bytes, size_t n_bytes)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return false;
    FILE *const file = fdopen(fd, "wb");
    const bool is_written = fwrite(bytes, 1, n_bytes, file) == n_bytes && fflush(file) == 0 &&
                            ftruncate(fd, (off_t)n_bytes) == 0;
    return fclose(file) == 0 && is_written;
}

#endif
