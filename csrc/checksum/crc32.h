/* crc32.h - the IEEE 802.3 checksum of docs/format.md, as zlib computes it.
 *
 * Running form: start from 0 and pass each result on.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_CHECKSUM_CRC32_H
#define QSF_CHECKSUM_CRC32_H

#include <stddef.h>
#include <stdint.h>

uint32_t qsf_crc32(uint32_t crc, const void *data, size_t n_bytes);

/* The checksum of a followed by b, from that of a and that of b alone [n_bytes_b]. */
uint32_t qsf_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_bytes_b);

#endif
