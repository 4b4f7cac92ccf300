/* arch.h - the ARCH section: architecture key-values. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "format/records.h"

/* Parses a whole section. Absent keys get defaults, which depend on the header. QSF_ERR_FORMAT;
 * QSF_ERR_UNSUPPORTED: an unknown key that a reader must not skip. */
qsf_status qsf_arch_parse(unsigned char *bytes, size_t n_bytes, const qsf_header *h, qsf_arch *out);
