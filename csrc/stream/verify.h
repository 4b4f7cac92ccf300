/* verify.h - checks every byte of a file. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/extents.h"
#include "format/records.h"

#define QSF_VERIFY_BUFFER_BYTES ((size_t)1 << 20)

/* Reads the whole file through `buffer` [buffer_bytes >= 64 KiB] and checks the checksum of every
 * extent and band, tensor headers, sparse outliers and zero padding. */
qsf_status qsf_reader_verify(qsf_reader *r, void *buffer, size_t buffer_bytes);

/* Checks extent i, the padding before it, and after the last one the padding at the end of the
 * file. buffer: as for qsf_reader_verify. */
qsf_status qsf_reader_verify_part(qsf_reader *r, const qsf_extent *extents, size_t n_extents,
                                  size_t i, void *buffer, size_t buffer_bytes);
