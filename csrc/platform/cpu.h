/* cpu.h - the instruction sets of this machine, the choice of one, and how to compile a function
 * for one.
 *
 * A level is a set of extensions: avx2 includes FMA and F16C; avxvnni is the 256-bit form; avx512
 * is F, BW, VL, DQ and VNNI; amx is int8 tiles, which the operating system must grant; neon is
 * every 64-bit ARM; dotprod adds SDOT, i8mm SMMLA. The environment variable QSF_ISA forces a level.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

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

/* Compiles the functions between begin and end for an instruction set, so that no source file needs
 * its own compiler flags. */
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

/* In order of speed on each architecture. A level includes the lower ones, with one exception: a
 * machine may have avx512 without avxvnni. */
typedef enum qsf_isa {
    QSF_ISA_SCALAR = 0,
    QSF_ISA_AVX2 = 1,
    QSF_ISA_AVXVNNI = 2,
    QSF_ISA_AVX512 = 3,
    QSF_ISA_AMX = 4,
    QSF_ISA_NEON = 5,
    QSF_ISA_DOTPROD = 6,
    QSF_ISA_I8MM = 7,
    QSF_ISA_COUNT = 8
} qsf_isa;

/* Never NULL: "scalar", "avx2", "avxvnni", "avx512", "amx", "neon", "dotprod", "i8mm". */
const char *qsf_isa_name(qsf_isa isa);

/* True if processor and operating system support the level. */
bool qsf_isa_has(qsf_isa isa);

/* The highest level of this machine. */
qsf_isa qsf_isa_detect(void);

/* Writes the levels of this machine, such as "scalar avx2", truncated to cap_bytes. */
void qsf_isa_list(char *text, size_t cap_bytes);

/* Returns the level of QSF_ISA if it is set, else the detected one. QSF_ERR_ARG if QSF_ISA names an
 * unknown level or one that this machine lacks; the text lists the available levels. */
qsf_status qsf_isa_choose(qsf_isa *out);

/* The level that QSF_ISA names, even if this machine lacks it. QSF_ISA_COUNT, the highest value, if
 * QSF_ISA is not set or unknown. Does not query the processor. */
qsf_isa qsf_isa_limit(void);

/* Extensions that only the checksum uses and no level includes: 128-bit carry-less products (with
 * SSE4.1), 512-bit ones (with all of avx512), the CRC32 instructions of ARM. */
#if QSF_ARCH_X86
bool qsf_cpu_has_clmul(void);
bool qsf_cpu_has_clmul512(void);
#endif
#if QSF_ARCH_ARM
bool qsf_cpu_has_crc32(void);
#endif

/* Returns the number of physical cores that this process may use; 0 if the system does not report
 * it. Writes one processor of each of the first `cap` cores to cpus. */
uint32_t qsf_cpu_list_cores(uint32_t *cpus, uint32_t cap);

/* ---- facts that only the operating system reports ---- */

/* Requests the state of AMX tiles for this process; false if the system does not grant it. */
bool qsf_cpu_request_tiles(void);

/* Logical processors that are online; at least 1. */
uint32_t qsf_cpu_count_online(void);

#if QSF_ARCH_ARM
typedef struct qsf_arm_features {
    bool has_dotprod;
    bool has_i8mm;
    bool has_crc32;
} qsf_arm_features;

qsf_arm_features qsf_cpu_arm_features(void);
#endif
