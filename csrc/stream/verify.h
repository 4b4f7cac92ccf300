/* verify.h - checks every byte of a file. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_STREAM_VERIFY_H
#define QSF_STREAM_VERIFY_H

#include "format/records.h"

/* Reads the whole file through `buffer` [buffer_bytes >= 64 KiB] and checks the checksum of every
 * extent and band, tensor headers, sparse outliers and zero padding. */
qsf_status qsf_reader_verify(qsf_reader *r, void *buffer, size_t buffer_bytes);

#endif
