/* repair.h - makes the checksums of a changed .qsf file in memory right again, so that a test
 * or a fuzzer reaches the rules behind them.
 *
 * Written from docs/format.md and independent of the reader; of hostile input it repairs what
 * is inside the buffer and leaves the rest.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_REPAIR_H
#define QSF_TESTS_REPAIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/bytes.h"
#include "types/dtype.h"
#include "checksum/crc32.h"
#include "format/layout.h"

static inline bool repair_is_inside(uint64_t off, uint64_t n_bytes, size_t file_bytes)
{
    return off <= file_bytes && n_bytes <= file_bytes - off;
}

/* The directory entry of a tag; NULL: none inside the file. */
static inline unsigned char *repair_find(unsigned char *file, size_t file_bytes, const char *tag)
{
    const uint64_t off = qsf_load_u64(file + 100);
    const uint32_t n_sections = qsf_load_u32(file + 108);
    if (n_sections > QSF_MAX_SECTIONS ||
        !repair_is_inside(off, (uint64_t)n_sections * QSF_DIRECTORY_ENTRY_BYTES, file_bytes))
        return NULL;
    for (uint32_t i = 0; i < n_sections; i++) {
        unsigned char *const entry = file + off + (size_t)i * QSF_DIRECTORY_ENTRY_BYTES;
        if (memcmp(entry, tag, 4) == 0)
            return repair_is_inside(qsf_load_u64(entry + 8), qsf_load_u64(entry + 16), file_bytes)
                       ? entry
                       : NULL;
    }
    return NULL;
}

/* An entry of UNIT; NULL: there is none inside the file. */
static inline unsigned char *repair_unit(unsigned char *file, size_t file_bytes, uint32_t unit_idx)
{
    const unsigned char *const index = repair_find(file, file_bytes, "UNIT");
    if (index == NULL || unit_idx >= qsf_load_u64(index + 16) / QSF_UNIT_ENTRY_BYTES)
        return NULL;
    return file + qsf_load_u64(index + 8) + (size_t)unit_idx * QSF_UNIT_ENTRY_BYTES;
}

/* EBND from the bytes of the embedding, whose type is in the first entry of TENS. */
static inline void repair_bands(unsigned char *file, size_t file_bytes)
{
    const unsigned char *const embd = repair_unit(file, file_bytes, 0);
    const unsigned char *const ebnd = repair_find(file, file_bytes, "EBND");
    const unsigned char *const tens = repair_find(file, file_bytes, "TENS");
    if (embd == NULL || ebnd == NULL || tens == NULL || qsf_load_u64(tens + 16) < 32 ||
        !repair_is_inside(qsf_load_u64(embd), qsf_load_u64(embd + 8), file_bytes))
        return;
    const uint64_t row_bytes = ((uint64_t)qsf_load_u32(file + 20) + 63) / 64 *
                               qsf_dtype_tile_bytes(file[qsf_load_u64(tens + 8) + 16]);
    const uint64_t n_bands = qsf_load_u64(ebnd + 16) / 4;
    for (uint64_t i = 0; i < n_bands && row_bytes > 0; i++) {
        const uint64_t off = QSF_TENSOR_HEADER_BYTES + i * row_bytes;
        if (!repair_is_inside(off, row_bytes, (size_t)qsf_load_u64(embd + 8)))
            return;
        qsf_store_u32(file + qsf_load_u64(ebnd + 8) + i * 4,
                      qsf_crc32(0, file + qsf_load_u64(embd) + off, (size_t)row_bytes));
    }
}

static inline void repair_units(unsigned char *file, size_t file_bytes)
{
    unsigned char *entry = NULL;
    for (uint32_t i = 0; (entry = repair_unit(file, file_bytes, i)) != NULL; i++) {
        const uint64_t off = qsf_load_u64(entry);
        const uint64_t n_bytes = qsf_load_u64(entry + 8);
        if (repair_is_inside(off, n_bytes, file_bytes))
            qsf_store_u32(entry + 24, qsf_crc32(0, file + off, (size_t)n_bytes));
    }
}

/* Sections, directory and header. */
static inline void repair_sections(unsigned char *file, size_t file_bytes)
{
    const uint64_t off = qsf_load_u64(file + 100);
    const uint32_t n_sections = qsf_load_u32(file + 108);
    if (n_sections <= QSF_MAX_SECTIONS &&
        repair_is_inside(off, (uint64_t)n_sections * QSF_DIRECTORY_ENTRY_BYTES, file_bytes)) {
        for (uint32_t i = 0; i < n_sections; i++) {
            unsigned char *const entry = file + off + (size_t)i * QSF_DIRECTORY_ENTRY_BYTES;
            const uint64_t section_off = qsf_load_u64(entry + 8);
            const uint64_t n_bytes = qsf_load_u64(entry + 16);
            if (repair_is_inside(section_off, n_bytes, file_bytes))
                qsf_store_u32(entry + 24, qsf_crc32(0, file + section_off, (size_t)n_bytes));
            if (memcmp(entry, "UNIT", 4) == 0)
                qsf_store_u32(file + 120, qsf_load_u32(entry + 24));
        }
        qsf_store_u32(file + 112, qsf_crc32(0, file + off, (size_t)n_sections * 32));
    }
    qsf_store_u32(file + 92, (uint32_t)(file_bytes & 0xFFFFFFFF));
    qsf_store_u32(file + 96, qsf_crc32(0, file, 96));
    qsf_store_u32(file + 124, qsf_crc32(0, file + 100, 24));
}

/* From the inside out. */
static inline void repair_checksums(unsigned char *file, size_t file_bytes)
{
    if (file_bytes < QSF_HEADER_BYTES)
        return;
    repair_bands(file, file_bytes);
    repair_units(file, file_bytes);
    repair_sections(file, file_bytes);
}

#endif
