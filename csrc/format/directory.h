/* directory.h - the section directory and the layer index: the offsets of sections and units. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_FORMAT_DIRECTORY_H
#define QSF_FORMAT_DIRECTORY_H

#include "format/header.h"
#include "format/records.h"

/* Reads the directory into r->sections. The caller has checked the header. */
qsf_status qsf_directory_read(qsf_reader *r, const qsf_header_links *links);

/* Fills r->units, without their tensors, from LAYR, EMBD and FINL. Checks that no two extents of
 * the file overlap. */
qsf_status qsf_directory_read_units(qsf_reader *r);

#endif
