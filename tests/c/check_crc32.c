/* check_crc32.c - the checksum against its definition, at every length and alignment. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "format/crc32.h"

#define N_BYTES 600

/* Bit by bit, from the polynomial. */
static uint32_t crc32_by_definition(const unsigned char *p, size_t n_bytes)
{
    uint32_t state = 0xFFFFFFFF;
    for (size_t i = 0; i < n_bytes; i++) {
        state ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ ((state & 1) != 0 ? 0xEDB88320U : 0U);
    }
    return ~state;
}

int main(void)
{
    unsigned char bytes[N_BYTES + 16];
    uint32_t noise = 1;
    for (size_t i = 0; i < sizeof bytes; i++) {
        noise = noise * 1664525U + 1013904223U;
        bytes[i] = (unsigned char)(noise >> 24);
    }
    CHECK_EQ_U64(qsf_crc32(0, "123456789", 9), 0xCBF43926);
    CHECK_EQ_U64(qsf_crc32(0, bytes, 0), 0);
    for (size_t start = 0; start < 16; start++)
        for (size_t n = 0; n <= 100; n++)
            CHECK_EQ_U64(qsf_crc32(0, bytes + start, n), crc32_by_definition(bytes + start, n));
    const uint32_t whole = crc32_by_definition(bytes, N_BYTES);
    for (size_t split = 0; split <= N_BYTES; split++)
        CHECK_EQ_U64(qsf_crc32(qsf_crc32(0, bytes, split), bytes + split, N_BYTES - split), whole);
    return check_report("check_crc32");
}
