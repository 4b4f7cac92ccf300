/* tensor_table.h - the TENS section: every tensor of every unit. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_FORMAT_TENSOR_TABLE_H
#define QSF_FORMAT_TENSOR_TABLE_H

#include "format/records.h"

/* Fills r->tensors and the tensors of r->units, after header, arch and units have been read. */
qsf_status qsf_tensor_table_read(qsf_reader *r);

#endif
