/* index.h - the layer index and the index of experts: where the units of the file are. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_FORMAT_INDEX_H
#define QSF_FORMAT_INDEX_H

#include "format/records.h"

/* Fills r->units, without their tensors, from EMBD, LAYR, FINL and EXPT. Checks that no two extents
 * of the file overlap. The caller has read the directory. */
qsf_status qsf_index_read(qsf_reader *r);

/* Gives the layers their experts. The caller has read the kinds. */
qsf_status qsf_index_link_experts(qsf_reader *r);

#endif
