/* crc32_ways.h - the ways to compute the checksum, for crc32.c to choose from.
 *
 * All ways give the same result; they differ in speed and in the extension that they need. They
 * work on the register, which is the complement of the checksum.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "platform/cpu.h"

/* The register after these bytes; any length, any alignment. */
typedef uint32_t qsf_crc32_fn(uint32_t state, const unsigned char *p, size_t n_bytes);

typedef enum qsf_crc32_way {
    QSF_CRC32_TABLES_WAY = 0, /* lookups, 16 bytes at a time */
    QSF_CRC32_CLMUL = 1,      /* x86: carry-less products of 128 bits */
    QSF_CRC32_CLMUL512 = 2,   /* x86: four of them to a register */
    QSF_CRC32_ARM = 3,        /* ARM: its checksum instructions */
    QSF_CRC32_WAY_COUNT = 4
} qsf_crc32_way;

/* Never NULL: "tables", "clmul", "clmul512", "arm". */
const char *qsf_crc32_way_name(qsf_crc32_way way);

/* NULL if the processor or this build lacks it. */
qsf_crc32_fn *qsf_crc32_way_fn(qsf_crc32_way way);

/* The fastest implementation for this processor that the current QSF_ISA allows. */
qsf_crc32_way qsf_crc32_choose(void);

/* a * b modulo the polynomial; bit 31 is the coefficient of x^0. */
uint32_t qsf_crc32_multiply(uint32_t a, uint32_t b);

qsf_crc32_fn qsf_crc32_by_tables;
#if QSF_ARCH_X86
qsf_crc32_fn qsf_crc32_by_clmul;
qsf_crc32_fn qsf_crc32_by_clmul512;
#endif
#if QSF_ARCH_ARM
qsf_crc32_fn *qsf_crc32_arm_fn(void); /* NULL when the compiler does not offer them */
#endif

#define QSF_CRC32_POWERS 32

extern const uint32_t qsf_crc32_powers[QSF_CRC32_POWERS];
