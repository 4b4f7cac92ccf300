/* crc32.c - the checksum: the plain way, the choice among the ways, and joining.
 *
 * The plain way takes sixteen bytes at a time ("slicing"): sixteen tables say what each of
 * them does to the register once the bytes after it have been shifted in, so the lookups do
 * not wait for each other.
 *
 * How the levels of QSF_ISA map: scalar is the tables; avx2 and avxvnni may use carry-less
 * products of 128 bits, avx512 and amx also those of 512; neon and dotprod may use the checksum
 * instructions of ARM. Each only where the processor has it, which is asked for by itself,
 * since no level says so; where it does not, the next slower way. Without QSF_ISA all that the
 * processor has is allowed, also 128 bits on one without AVX2. A level that is unknown or
 * absent counts as not set: whoever opens a model is told of it there.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "checksum/crc32.h"

#include <stdatomic.h>

#include "base/bytes.h"
#include "checksum/crc32_tables.h"
#include "checksum/crc32_ways.h"

/* What the four bytes of `word` contribute, `first` being the table of its last byte. */
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

/* No default: the compiler names the way that is missing here. */
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
    /* Threads that come first together choose the same; nothing else is published by it. */
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
