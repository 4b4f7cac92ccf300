/* kinds.h - the sections ROPE and KIND: what each layer computes. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"

/* Read ROPE, then KIND, into the reader, which has header, ARCH and units. Without KIND there is
 * one kind, of the defaults. QSF_ERR_FORMAT, _UNSUPPORTED, _NOMEM, _IO. */
qsf_status qsf_rope_read(qsf_reader *r);
qsf_status qsf_kinds_read(qsf_reader *r);
