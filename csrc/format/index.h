/* index.h - the section UNIT: the units of the file, and where they are. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/header.h"
#include "format/records.h"

/* Fills r->units, without their tensors, and the units of a pass. Checks them against the header's
 * links, and that no two extents of the file overlap. The caller has read the directory. */
qsf_status qsf_index_read(qsf_reader *r, const qsf_header_links *links);

/* Gives the layers their experts. The caller has read the kinds. */
qsf_status qsf_index_link_experts(qsf_reader *r);
