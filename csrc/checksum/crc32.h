/* crc32.h - the IEEE 802.3 checksum of docs/format.md, as zlib computes it.
 *
 * For data in parts: begin with crc 0 and pass each result to the next call.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

uint32_t qsf_crc32(uint32_t crc, const void *data, size_t n_bytes);

/* The checksum of a followed by b, computed from both checksums; b has n_bytes_b bytes. */
uint32_t qsf_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_bytes_b);
