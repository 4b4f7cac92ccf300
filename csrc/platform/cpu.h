/* cpu.h - which instruction sets this machine has, which one to use, and how to
 * compile a function for one of them.
 *
 * Levels exist in the world as bundles: avx2 is with FMA and F16C; avxvnni is 256 bits
 * wide; avx512 is F, BW, VL, DQ and VNNI; amx is tiles of int8, granted by the operating
 * system; neon is every 64-bit ARM, dotprod its SDOT. The environment variable QSF_ISA
 * forces a level.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_CPU_H
#define QSF_PLATFORM_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"

#if defined(__x86_64__) || defined(_M_X64)
#define QSF_ARCH_X86 1
#else
#define QSF_ARCH_X86 0
#endif

#if defined(__aarch64__)
#define QSF_ARCH_ARM 1
#else
#define QSF_ARCH_ARM 0
#endif

/* Compiles the functions between begin and end for a given instruction set, so
 * that no source file needs compiler flags of its own. */
#if defined(__clang__)
#define QSF_PRAGMA(x) _Pragma(#x)
#define QSF_TARGET_BEGIN(isa) \
    QSF_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define QSF_TARGET_END _Pragma("clang attribute pop")
#elif defined(__GNUC__)
#define QSF_PRAGMA(x) _Pragma(#x)
#define QSF_TARGET_BEGIN(isa) _Pragma("GCC push_options") QSF_PRAGMA(GCC target(isa))
#define QSF_TARGET_END _Pragma("GCC pop_options")
#endif

/* Ascending in speed on each architecture. A level includes those below it, but avxvnni
 * is only beside avx512: a machine may have either without the other. */
typedef enum qsf_isa {
    QSF_ISA_SCALAR = 0,
    QSF_ISA_AVX2 = 1,
    QSF_ISA_AVXVNNI = 2,
    QSF_ISA_AVX512 = 3,
    QSF_ISA_AMX = 4,
    QSF_ISA_NEON = 5,
    QSF_ISA_DOTPROD = 6,
    QSF_ISA_COUNT = 7
} qsf_isa;

/* Never NULL: "scalar", "avx2", "avxvnni", "avx512", "amx", "neon", "dotprod". */
const char *qsf_isa_name(qsf_isa isa);

/* Does this machine have a level, operating system support included? */
bool qsf_isa_has(qsf_isa isa);

/* The highest level of this machine. */
qsf_isa qsf_isa_detect(void);

/* "scalar avx2 ...": the levels of this machine, cut short at cap_bytes. */
void qsf_isa_list(char *text, size_t cap_bytes);

/* The level to use: QSF_ISA if set, else the detected one. QSF_ERR_ARG when QSF_ISA
 * names an unknown level or one this machine lacks; the text lists those it has. */
qsf_status qsf_isa_choose(qsf_isa *out);

/* The level that QSF_ISA names, whether or not this machine has it; QSF_ISA_COUNT, above all, when
 * it is not set or names none. Asks the system for nothing, unlike choose(). */
qsf_isa qsf_isa_limit(void);

/* What no level includes, and only the checksum needs: carry-less products of 128 bits (with
 * SSE4.1); of 512 bits (with all of avx512); the CRC32 instructions of ARM. */
bool qsf_cpu_has_clmul(void);
bool qsf_cpu_has_clmul512(void);
bool qsf_cpu_has_crc32(void);

/* Returns the number of physical cores this process may run on, 0 when the system does not say.
 * Writes one processor of each of the first `cap` of them to cpus. */
uint32_t qsf_cpu_list_cores(uint32_t *cpus, uint32_t cap);

#endif
