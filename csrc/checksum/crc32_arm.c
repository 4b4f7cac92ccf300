/* crc32_arm.c - the checksum by the CRC32 instructions of ARMv8.
 *
 * An instruction processes 8 bytes and takes two or three cycles, so three stretches of the bytes
 * are processed in parallel. To join a register with n bytes that follow, multiply it by x^(8 n).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "checksum/crc32_ways.h"

#if QSF_ARCH_ARM

/* Before version 16 clang offers the intrinsics only if the whole program is for a processor
 * that has them, as Apple's are. */
#if defined(__ARM_FEATURE_CRC32) || !defined(__clang__) || __clang_major__ >= 16

#include <arm_acle.h>

#include "base/bytes.h"

/* Length of a stretch for long and for short inputs in bytes; a multiple of 8. A join costs as
 * much as some hundred bytes. */
#define LONG_BYTES 8192
#define SHORT_BYTES 512
#define LONG_SHIFT 0x83852D0FU  /* x^(8 * LONG_BYTES) mod P, reflected */
#define SHORT_SHIFT 0x8E7EA170U /* x^(8 * SHORT_BYTES) */

#if defined(__clang__)
QSF_TARGET_BEGIN("crc")
#else
QSF_TARGET_BEGIN("arch=armv8-a+crc")
#endif

static inline uint32_t join(uint32_t first, uint32_t then, uint32_t shift)
{
    return qsf_crc32_multiply(first, shift) ^ then;
}

/* Three stretches of `n` bytes. */
static uint32_t take_three(uint32_t state, const unsigned char *p, size_t n, uint32_t shift)
{
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < n; i += 8) {
        state = __crc32d(state, qsf_load_u64(p + i));
        second = __crc32d(second, qsf_load_u64(p + n + i));
        third = __crc32d(third, qsf_load_u64(p + 2 * n + i));
    }
    return join(join(state, second, shift), third, shift);
}

static uint32_t by_instructions(uint32_t state, const unsigned char *p, size_t n_bytes)
{
    for (; n_bytes >= 3 * LONG_BYTES; n_bytes -= 3 * LONG_BYTES, p += 3 * LONG_BYTES)
        state = take_three(state, p, LONG_BYTES, LONG_SHIFT);
    for (; n_bytes >= 3 * SHORT_BYTES; n_bytes -= 3 * SHORT_BYTES, p += 3 * SHORT_BYTES)
        state = take_three(state, p, SHORT_BYTES, SHORT_SHIFT);
    for (; n_bytes >= 8; n_bytes -= 8, p += 8)
        state = __crc32d(state, qsf_load_u64(p));
    for (; n_bytes > 0; n_bytes--, p++)
        state = __crc32b(state, *p);
    return state;
}

QSF_TARGET_END

qsf_crc32_fn *qsf_crc32_arm_fn(void)
{
    return by_instructions;
}

#else

qsf_crc32_fn *qsf_crc32_arm_fn(void)
{
    return NULL;
}

#endif

#endif
