/* crc32.c - the choice of the fastest way to compute the checksum, and combining checksums.
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

#include "checksum/crc32_ways.h"

const char *qsf_crc32_way_name(qsf_crc32_way way)
{
    static const char *const names[QSF_CRC32_WAY_COUNT] = {
        [QSF_CRC32_TABLES_WAY] = "tables",
        [QSF_CRC32_CLMUL] = "clmul",
        [QSF_CRC32_CLMUL512] = "clmul512",
        [QSF_CRC32_ARM] = "arm",
    };
    return way < QSF_CRC32_WAY_COUNT ? names[way] : "unknown";
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
