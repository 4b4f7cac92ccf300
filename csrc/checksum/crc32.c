/* crc32.c - the checksum by tables, the choice of the fastest way, and combining checksums.
 *
 * The tables process 16 bytes at a time ("slicing by 16"): table k gives the effect of a byte that
 * k other bytes follow, so the lookups are independent.
 *
 * QSF_ISA limits the choice: scalar allows tables; avx2 and avxvnni also 128-bit carry-less
 * products; avx512 and amx also 512-bit ones; neon, dotprod and i8mm also the CRC32 instructions of
 * ARM. The processor must have the extension, which no level includes; else the next slower way is
 * used. Without QSF_ISA, or if it is unknown, all ways of the processor are allowed; opening a
 * model reports an unknown level.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "checksum/crc32.h"

#include <stdatomic.h>

#include "base/bytes.h"
#include "checksum/crc32_tables.h"
#include "checksum/crc32_ways.h"

/* The effect of the four bytes of `word`; `first` is the table of its last byte. */
static inline uint32_t slice(uint32_t word, unsigned first)
{
    return qsf_crc32_tables[first + 3][word & 0xFF] ^
           qsf_crc32_tables[first + 2][word >> 8 & 0xFF] ^
           qsf_crc32_tables[first + 1][word >> 16 & 0xFF] ^ qsf_crc32_tables[first][word >> 24];
}

uint32_t qsf_crc32_by_tables(uint32_t state, const unsigned char *p, size_t n_bytes)
{
    for (; n_bytes >= 16; n_bytes -= 16, p += 16)
        state = slice(qsf_load_u32(p) ^ state, 12) ^ slice(qsf_load_u32(p + 4), 8) ^
                slice(qsf_load_u32(p + 8), 4) ^ slice(qsf_load_u32(p + 12), 0);
    for (; n_bytes > 0; n_bytes--, p++)
        state = state >> 8 ^ qsf_crc32_tables[0][(state ^ *p) & 0xFF];
    return state;
}

/* No default, so that the compiler warns about a missing way. */
const char *qsf_crc32_way_name(qsf_crc32_way way)
{
    switch (way) {
    case QSF_CRC32_TABLES_WAY:
        return "tables";
    case QSF_CRC32_CLMUL:
        return "clmul";
    case QSF_CRC32_CLMUL512:
        return "clmul512";
    case QSF_CRC32_ARM:
        return "arm";
    case QSF_CRC32_WAY_COUNT:
        break;
    }
    return "unknown";
}

qsf_crc32_fn *qsf_crc32_way_fn(qsf_crc32_way way)
{
    if (way == QSF_CRC32_TABLES_WAY)
        return qsf_crc32_by_tables;
#if QSF_ARCH_X86
    if (way == QSF_CRC32_CLMUL && qsf_cpu_has_clmul())
        return qsf_crc32_by_clmul;
    if (way == QSF_CRC32_CLMUL512 && qsf_cpu_has_clmul512())
        return qsf_crc32_by_clmul512;
#endif
#if QSF_ARCH_ARM
    if (way == QSF_CRC32_ARM && qsf_cpu_has_crc32())
        return qsf_crc32_arm_fn();
#endif
    return NULL;
}

qsf_crc32_way qsf_crc32_choose(void)
{
    const qsf_isa most = qsf_isa_limit();
    if (most == QSF_ISA_SCALAR)
        return QSF_CRC32_TABLES_WAY;
    int way = QSF_CRC32_WAY_COUNT - 1;
    while (qsf_crc32_way_fn((qsf_crc32_way)way) == NULL ||
           (way == QSF_CRC32_CLMUL512 && most < QSF_ISA_AVX512))
        way--;
    return (qsf_crc32_way)way;
}

uint32_t qsf_crc32(uint32_t crc, const void *data, size_t n_bytes)
{
    /* Relaxed order is enough: all threads choose the same function, and it publishes no data. */
    static _Atomic(qsf_crc32_fn *) chosen;
    qsf_crc32_fn *fn = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (fn == NULL) {
        fn = qsf_crc32_way_fn(qsf_crc32_choose());
        atomic_store_explicit(&chosen, fn, memory_order_relaxed);
    }
    return ~fn(~crc, data, n_bytes);
}

/* The plain product has x^0 in bit 62; moved to bit 63, its upper half is what is left of it
 * and its lower half has to pass through the register, which is four zero bytes. */
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

uint32_t qsf_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_bytes_b)
{
    /* Appending n bytes multiplies the register by x^(8 n). The polynomial is primitive, so
     * that x^(2^32 - 1) is 1 and the exponent may be reduced: at most 32 products. */
    const uint64_t period = UINT32_MAX;
    const uint64_t exponent = n_bytes_b % period * 8 % period;
    for (unsigned k = 0; k < QSF_CRC32_POWERS; k++)
        if ((exponent >> k & 1) != 0)
            crc_a = qsf_crc32_multiply(crc_a, qsf_crc32_powers[k]);
    return crc_a ^ crc_b;
}
