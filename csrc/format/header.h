/* header.h - the first 128 bytes of a .qsf file as checked numbers. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

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

/* Parses and checks bytes [QSF_HEADER_BYTES]. file_bytes: size of the file. QSF_ERR_FORMAT,
 * QSF_ERR_UNSUPPORTED. */
qsf_status qsf_header_parse(const unsigned char *bytes, uint64_t file_bytes, qsf_header *h,
                            qsf_header_links *links);
