/* crc32_tables.c - the checksum by tables, which the preprocessor computes.
 *
 * Table k holds the checksum of byte i followed by k zero bytes. It is the sum of the values of the
 * byte's bits, and these are powers: bit 7 of table k gives x^(32 + 8k), bit 0 x^(39 + 8k), modulo
 * the polynomial. Power k of the second table is x^(2^k). The tables process 16 bytes at a time
 * ("slicing by 16"): table k gives the effect of a byte that k other bytes follow, so the lookups
 * are independent.
 */
/* SPDX-License-Identifier: Apache-2.0 */

#include "base/bytes.h"
#include "checksum/crc32_ways.h"

#define N_TABLES 16

/* clang-format off */
#define BIT(i, bit, value) (((i) >> (bit) & 1) != 0 ? 0x##value##U : 0U)
#define BYTE(i, b7, b6, b5, b4, b3, b2, b1, b0) \
    BIT(i, 7, b7) ^ BIT(i, 6, b6) ^ BIT(i, 5, b5) ^ BIT(i, 4, b4) ^ \
    BIT(i, 3, b3) ^ BIT(i, 2, b2) ^ BIT(i, 1, b1) ^ BIT(i, 0, b0)
#define FOUR(i, ...) \
    BYTE(i, __VA_ARGS__), BYTE((i) + 1, __VA_ARGS__), \
    BYTE((i) + 2, __VA_ARGS__), BYTE((i) + 3, __VA_ARGS__)
#define SIXTEEN(i, ...) \
    FOUR(i, __VA_ARGS__), FOUR((i) + 4, __VA_ARGS__), \
    FOUR((i) + 8, __VA_ARGS__), FOUR((i) + 12, __VA_ARGS__)
#define SIXTY_FOUR(i, ...) \
    SIXTEEN(i, __VA_ARGS__), SIXTEEN((i) + 16, __VA_ARGS__), \
    SIXTEEN((i) + 32, __VA_ARGS__), SIXTEEN((i) + 48, __VA_ARGS__)
#define TABLE(...) { \
    SIXTY_FOUR(0, __VA_ARGS__), SIXTY_FOUR(64, __VA_ARGS__), \
    SIXTY_FOUR(128, __VA_ARGS__), SIXTY_FOUR(192, __VA_ARGS__)}

static const uint32_t tables[N_TABLES][256] = {
    TABLE(EDB88320, 76DC4190, 3B6E20C8, 1DB71064, 0EDB8832, 076DC419, EE0E612C, 77073096),
    TABLE(3B83984B, F0794F05, 958424A2, 4AC21251, C8D98A08, 646CC504, 32366282, 191B3141),
    TABLE(E1351B80, 709A8DC0, 384D46E0, 1C26A370, 0E1351B8, 0709A8DC, 0384D46E, 01C26A37),
    TABLE(ED59B63B, 9B14583D, A032AF3E, 5019579F, C5B428EF, 8F629757, AA09C88B, B8BC6765),
    TABLE(B1E6B092, 58F35849, C1C12F04, 60E09782, 30704BC1, F580A6C0, 7AC05360, 3D6029B0),
    TABLE(1EB014D8, 0F580A6C, 07AC0536, 03D6029B, EC53826D, 9B914216, 4DC8A10B, CB5CD3A5),
    TABLE(8816EAF2, 440B7579, CFBD399C, 67DE9CCE, 33EF4E67, F44F2413, 979F1129, A6770BB4),
    TABLE(533B85DA, 299DC2ED, F9766256, 7CBB312B, D3E51BB5, 844A0EFA, 4225077D, CCAA009E),
    TABLE(6655004F, DE920307, 82F182A3, ACC04271, BBD8A218, 5DEC510C, 2EF62886, 177B1443),
    TABLE(E6050901, 9EBA07A0, 4F5D03D0, 27AE81E8, 13D740F4, 09EBA07A, 04F5D03D, EFC26B3E),
    TABLE(77E1359F, D64819EF, 869C8FD7, AEF6C4CB, BAC3E145, B0D97382, 586CB9C1, C18EDFC0),
    TABLE(60C76FE0, 3063B7F0, 1831DBF8, 0C18EDFC, 060C76FE, 03063B7F, EC3B9E9F, 9BA54C6F),
    TABLE(A06A2517, BD8D91AB, B37E4BF5, B407A6DA, 5A03D36D, C0B96A96, 605CB54B, DD96D985),
    TABLE(8373EFE2, 41B9F7F1, CD6478D8, 66B23C6C, 33591E36, 19AC8F1B, E16EC4AD, 9D0FE176),
    TABLE(4E87F0BB, CAFB7B7D, 88C53E9E, 44629F4F, CF89CC87, 8A7C6563, A886B191, B9FBDBE8),
    TABLE(5CFDEDF4, 2E7EF6FA, 173F7B7D, E6273E9E, 73139F4F, D4314C87, 87A02563, AE689191),
};
/* clang-format on */

const uint32_t qsf_crc32_powers[QSF_CRC32_POWERS] = {
    0x40000000, 0x20000000, 0x08000000, 0x00800000, 0x00008000, 0xEDB88320, 0xB1E6B092, 0xA06A2517,
    0xED627DAE, 0x88D14467, 0xD7BBFE6A, 0xEC447F11, 0x8E7EA170, 0x6427800E, 0x4D47BAE0, 0x09FE548F,
    0x83852D0F, 0x30362F1A, 0x7B5A9CC3, 0x31FEC169, 0x9FEC022A, 0x6C8DEDC4, 0x15D6874D, 0x5FDE7A4E,
    0xBAD90E37, 0x2E4E5EEF, 0x4EABA214, 0xA8A472C0, 0x429A969E, 0x148D302A, 0xC40BA6D0, 0xC4E22C3C,
};

/* Combines the table entries of the four bytes of `word`: table `first` is for the last byte,
 * the next tables are for the bytes before it. */
static inline uint32_t slice(uint32_t word, unsigned first)
{
    return tables[first + 3][word & 0xFF] ^ tables[first + 2][word >> 8 & 0xFF] ^
           tables[first + 1][word >> 16 & 0xFF] ^ tables[first][word >> 24];
}

uint32_t qsf_crc32_by_tables(uint32_t state, const unsigned char *p, size_t n_bytes)
{
    for (; n_bytes >= 16; n_bytes -= 16, p += 16)
        state = slice(qsf_load_u32(p) ^ state, 12) ^ slice(qsf_load_u32(p + 4), 8) ^
                slice(qsf_load_u32(p + 8), 4) ^ slice(qsf_load_u32(p + 12), 0);
    for (; n_bytes > 0; n_bytes--, p++)
        state = state >> 8 ^ tables[0][(state ^ *p) & 0xFF];
    return state;
}

/* The plain product has x^0 in bit 62. Shifted to bit 63, its upper half remains, and its lower
 * half must pass through the register like four zero bytes. */
uint32_t qsf_crc32_multiply(uint32_t a, uint32_t b)
{
    uint64_t multiples[16]; /* of b, by polynomials of four bits */
    multiples[0] = 0;
    multiples[1] = b;
    for (unsigned i = 2; i < 16; i += 2) {
        multiples[i] = multiples[i / 2] << 1;
        multiples[i + 1] = multiples[i] ^ b;
    }
    uint64_t product = 0;
    for (unsigned done = 0; done < 32; done += 4, a <<= 4)
        product = product << 4 ^ multiples[a >> 28];
    product <<= 1;
    return (uint32_t)(product >> 32) ^ slice((uint32_t)(product & UINT32_MAX), 0);
}
