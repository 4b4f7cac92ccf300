/* directory.h - the section directory and the layer index: where everything is. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_FORMAT_DIRECTORY_H
#define QSF_FORMAT_DIRECTORY_H

#include "format/header.h"
#include "format/records.h"

/* Fills r->sections from the directory, whose header fields are checked. */
qsf_status qsf_directory_read(qsf_reader *r, const qsf_header_links *links);

/* Fills r->units from LAYR, EMBD and FINL, all but their tensors; then no two extents of
 * the file overlap. */
qsf_status qsf_directory_read_units(qsf_reader *r);

#endif
