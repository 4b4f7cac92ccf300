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

/* Checks the model's numbers in a header, whose KV heads are resolved. */
qsf_status qsf_header_check(const qsf_header *h);

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

/* ---- keys and values of ARCH and KIND ---- */

enum qsf_value_type { QSF_VALUE_U32 = 1, QSF_VALUE_F32 = 2, QSF_VALUE_F32_ARRAY = 3 };

/* A key that this build knows. An f32 must be above 0, the values of an array 0 or more. */
typedef struct qsf_key {
    uint16_t number;
    uint8_t type;
    const char *name;
    size_t field_off; /* in the record: of the uint32_t, float or qsf_floats */
    uint32_t least;   /* of a u32 */
    uint32_t most;
} qsf_key;

/* Sets the fields of `record` to the values in bytes [n_bytes]; fields without a value keep theirs.
 * Arrays stay in `bytes`, aligned to 4, and are converted to the machine's byte order. `where`
 * names the section in error texts. QSF_ERR_FORMAT; QSF_ERR_UNSUPPORTED: an unknown key that a
 * reader must not skip. */
qsf_status qsf_keyvalues_parse(const char *where, unsigned char *bytes, size_t n_bytes,
                               const qsf_key *keys, size_t n_keys, void *record);

/* Turns n f32 values at a multiple of 4 into the machine's byte order. */
qsf_floats qsf_floats_in_place(unsigned char *bytes, uint32_t n);
