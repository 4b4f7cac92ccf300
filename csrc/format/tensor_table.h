/* tensor_table.h - the TENS section: every tensor of every unit. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"

/* Fills r->tensors and the tensors of r->units, after header, arch and units have been read. */
qsf_status qsf_tensor_table_read(qsf_reader *r);
