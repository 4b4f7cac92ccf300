/* contents.h - an open file for the tools of the Python package: its records, its sections, and a
 * check of every byte. Exported, but not in the public API, which opens models.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"

/* ---- cdef begin ---- (cffi reads this part too) */

/* The records of an open file, as in qsf_reader; valid until it is closed. */
typedef struct qsf_contents {
    uint64_t file_bytes;
    const qsf_header *header;
    const qsf_arch *arch;
    const qsf_layer_kind *kinds; /* [n_kinds] */
    const qsf_rope_set *rope_sets;
    const qsf_section *sections;
    const qsf_unit *units;
    const qsf_tensor *tensors;
    uint32_t n_kinds;
    uint32_t n_rope_sets;
    uint32_t n_sections;
    uint32_t n_units;
    uint32_t n_tensors;
    uint32_t n_extents; /* header, directory, sections and units */
} qsf_contents;

/* Opens a file and checks its records. The caller closes *out, which is NULL after an error. */
QSF_API qsf_status qsf_contents_open(const char *path, qsf_contents **out);
QSF_API void qsf_contents_close(qsf_contents *c);

/* Reads section i into dst [its n_bytes] and verifies its checksum. */
QSF_API qsf_status qsf_contents_read(qsf_contents *c, uint32_t i, void *dst);

/* Checks extent i in file order, and the padding around it. Sets *end to where it ends. */
QSF_API qsf_status qsf_contents_verify(qsf_contents *c, uint32_t i, uint64_t *end);

/* Checks a header, and ARCH, ROPE and KIND beside it, as qsf_contents_open does; a table without
 * bytes is a section that the file lacks. May change the order of bytes. For writers. */
QSF_API qsf_status qsf_contents_check(const qsf_header *header, const qsf_table *arch,
                                      const qsf_table *rope, const qsf_table *kind);

/* ---- cdef end ---- */

#define QSF_VERIFY_BUFFER_BYTES ((size_t)1 << 20)

/* Reads the whole file through `buffer` [buffer_bytes >= 64 KiB] and checks the checksum of every
 * extent and band, tensor headers, sparse outliers and zero padding. */
qsf_status qsf_reader_verify(qsf_reader *r, void *buffer, size_t buffer_bytes);

/* Checks extent i, the padding before it, and after the last one the padding at the end of the
 * file. buffer: as for qsf_reader_verify. */
qsf_status qsf_reader_verify_part(qsf_reader *r, const qsf_extent *extents, size_t n_extents,
                                  size_t i, void *buffer, size_t buffer_bytes);
