/* crc32.c - the checksum, sixteen bytes at a time ("slicing").
 *
 * Sixteen tables say what each of sixteen bytes does to the register once the
 * bytes after it have been shifted in, so the lookups do not wait for each other.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/crc32.h"

#include "base/bytes.h"
#include "format/crc32_tables.h"

/* What the four bytes of `word` contribute, `first` being the table of its last byte. */
static inline uint32_t slice(uint32_t word, unsigned first)
{
    return qsf_crc32_tables[first + 3][word & 0xFF] ^
           qsf_crc32_tables[first + 2][word >> 8 & 0xFF] ^
           qsf_crc32_tables[first + 1][word >> 16 & 0xFF] ^ qsf_crc32_tables[first][word >> 24];
}

uint32_t qsf_crc32(uint32_t crc, const void *data, size_t n_bytes)
{
    const unsigned char *p = data;
    uint32_t state = ~crc;
    for (; n_bytes >= 16; n_bytes -= 16, p += 16)
        state = slice(qsf_load_u32(p) ^ state, 12) ^ slice(qsf_load_u32(p + 4), 8) ^
                slice(qsf_load_u32(p + 8), 4) ^ slice(qsf_load_u32(p + 12), 0);
    for (; n_bytes > 0; n_bytes--, p++)
        state = state >> 8 ^ qsf_crc32_tables[0][(state ^ *p) & 0xFF];
    return ~state;
}
