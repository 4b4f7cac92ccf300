/* sections.h - the steps in which qsf_reader_open reads a file, in their order: a source each. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"

/* Offsets of other parts of the file, as the header states them; not checked here. */
typedef struct qsf_header_links {
    uint64_t unit_index_off;
    uint64_t embedding_off;
    uint64_t final_off;
    uint64_t directory_off;
    uint32_t n_sections;
    uint32_t directory_crc32;
    uint32_t unit_index_crc32;
} qsf_header_links;

/* The first 128 bytes: parses and checks bytes [QSF_HEADER_BYTES]. file_bytes: size of the file.
 * QSF_ERR_FORMAT, QSF_ERR_UNSUPPORTED. */
qsf_status qsf_header_parse(const unsigned char *bytes, uint64_t file_bytes, qsf_header *h,
                            qsf_header_links *links);

/* Reads the directory into r->sections. The caller has checked the header. */
qsf_status qsf_directory_read(qsf_reader *r, const qsf_header_links *links);

/* UNIT: fills r->units, without their tensors, and the units of a pass. Checks them against the
 * header's links, and that no two extents of the file overlap. The caller has read the directory.
 */
qsf_status qsf_index_read(qsf_reader *r, const qsf_header_links *links);

/* Gives the layers their experts. The caller has read the kinds. */
qsf_status qsf_index_link_experts(qsf_reader *r);

/* Parses all of ARCH. Absent keys get defaults, which depend on the header. QSF_ERR_FORMAT;
 * QSF_ERR_UNSUPPORTED: an unknown key that a reader must not skip. */
qsf_status qsf_arch_parse(unsigned char *bytes, size_t n_bytes, const qsf_header *h, qsf_arch *out);

/* Read ROPE, then KIND, into the reader, which has header, ARCH and units. Without KIND there is
 * one kind, of the defaults. QSF_ERR_FORMAT, _UNSUPPORTED, _NOMEM, _IO. */
qsf_status qsf_rope_read(qsf_reader *r);
qsf_status qsf_kinds_read(qsf_reader *r);

/* TENS: fills r->tensors and the tensors of r->units, after header, arch and units have been read.
 */
qsf_status qsf_tensor_table_read(qsf_reader *r);
