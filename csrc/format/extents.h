/* extents.h - the parts of a file (extents) in file order. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"

typedef struct qsf_extent {
    uint64_t off;
    uint64_t n_bytes;
    uint32_t crc32;    /* unused for the header and the directory */
    bool is_checked;   /* crc32 must match */
    uint32_t unit_idx; /* UINT32_MAX: not a unit */
    char name[12];     /* "header", "directory", the tag of a section, or the role of a unit */
} qsf_extent;

/* Acquires an array from the reader's ledger and fills it with header, directory, sections,
 * and units, sorted by offset. */
qsf_status qsf_extents_create(const qsf_reader *r, qsf_extent **out, size_t *n_extents);
void qsf_extents_destroy(const qsf_reader *r, qsf_extent *extents, size_t n_extents);

/* QSF_ERR_DAMAGED if 4 GiB or more follow the last extent. The header has only the low 32 bits
 * of the file's size; this check covers the others. */
qsf_status qsf_extents_check_end(const qsf_extent *extents, size_t n_extents, uint64_t file_bytes);

/* QSF_ERR_FORMAT if two extents overlap; the text names them. */
qsf_status qsf_extents_check_apart(const qsf_extent *extents, size_t n_extents);
