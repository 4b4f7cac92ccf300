/* crc32_x86.c - the checksum by carry-less multiplication.
 *
 * After Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
 * Instruction", Intel 2009. A piece of 128 bits that stands D bits before another is folded
 * onto it: as polynomials, upper * x^(D + 64) + lower * x^D, with the powers taken modulo P, so
 * that each product fits 128 bits. What remains at the end is 16 bytes with the checksum
 * of all: the tables finish them.
 *
 * Bits are reflected here as in the register: the first byte holds the highest powers, and the
 * product of two reflected 64-bit numbers comes out one bit too low. So the constants are
 * x^(D + 32) for the lower half (the earlier bytes) and x^(D - 32) for the upper, modulo
 * P = 0x104C11DB7, their 32 bits reversed, shifted left by one.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "checksum/crc32_ways.h"

#if QSF_ARCH_X86

#include <immintrin.h>

#define FOLD_128_LOW 0x1751997D0   /* x^160 */
#define FOLD_128_HIGH 0xCCAA009E   /* x^96 */
#define FOLD_512_LOW 0x154442BD4   /* x^544 */
#define FOLD_512_HIGH 0x1C6E41596  /* x^480 */
#define FOLD_2048_LOW 0x11542778A  /* x^2080 */
#define FOLD_2048_HIGH 0x1322D1430 /* x^2016 */

QSF_TARGET_BEGIN("sse4.1,pclmul")

static inline __m128i load(const unsigned char *p)
{
    return _mm_loadu_si128((const void *)p);
}

/* `next` after folding `sum`, which precedes it, into it. */
static inline __m128i fold(__m128i sum, __m128i by, __m128i next)
{
    return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(sum, by, 0x00),
                                             _mm_clmulepi64_si128(sum, by, 0x11)));
}

/* Four pieces that follow each other become one; then the rest of the bytes. */
static inline uint32_t finish(const __m128i sums[4], const unsigned char *p, size_t n_bytes)
{
    const __m128i by = _mm_set_epi64x(FOLD_128_HIGH, FOLD_128_LOW);
    __m128i sum = sums[0];
    for (size_t k = 1; k < 4; k++)
        sum = fold(sum, by, sums[k]);
    for (; n_bytes >= 16; n_bytes -= 16, p += 16)
        sum = fold(sum, by, load(p));
    unsigned char bytes[16];
    _mm_storeu_si128((void *)bytes, sum);
    return qsf_crc32_by_tables(qsf_crc32_by_tables(0, bytes, sizeof bytes), p, n_bytes);
}

uint32_t qsf_crc32_by_clmul(uint32_t state, const unsigned char *p, size_t n_bytes)
{
    if (n_bytes < 64)
        return qsf_crc32_by_tables(state, p, n_bytes);
    const __m128i by = _mm_set_epi64x(FOLD_512_HIGH, FOLD_512_LOW);
    __m128i sums[4];
    for (size_t k = 0; k < 4; k++)
        sums[k] = load(p + 16 * k);
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128((int)state));
    for (p += 64, n_bytes -= 64; n_bytes >= 64; p += 64, n_bytes -= 64)
        for (size_t k = 0; k < 4; k++)
            sums[k] = fold(sums[k], by, load(p + 16 * k));
    return finish(sums, p, n_bytes);
}

QSF_TARGET_END

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,vpclmulqdq,pclmul,avx2")

static inline __m512i fold512(__m512i sum, __m512i by, __m512i next)
{
    /* 0x96: the exclusive or of all three; clang wants a literal. */
    return _mm512_ternarylogic_epi64(next, _mm512_clmulepi64_epi128(sum, by, 0x00),
                                     _mm512_clmulepi64_epi128(sum, by, 0x11), 0x96);
}

/* Both constants in each of the four lanes. */
static inline __m512i constants512(long long high, long long low)
{
    return _mm512_set4_epi64(high, low, high, low);
}

uint32_t qsf_crc32_by_clmul512(uint32_t state, const unsigned char *p, size_t n_bytes)
{
    if (n_bytes < 256)
        return qsf_crc32_by_clmul(state, p, n_bytes);
    __m512i sums[4];
    for (size_t k = 0; k < 4; k++)
        sums[k] = _mm512_loadu_si512(p + 64 * k);
    sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    const __m512i by_2048 = constants512(FOLD_2048_HIGH, FOLD_2048_LOW);
    for (p += 256, n_bytes -= 256; n_bytes >= 256; p += 256, n_bytes -= 256)
        for (size_t k = 0; k < 4; k++)
            sums[k] = fold512(sums[k], by_2048, _mm512_loadu_si512(p + 64 * k));
    const __m512i by_512 = constants512(FOLD_512_HIGH, FOLD_512_LOW);
    __m512i sum = sums[0];
    for (size_t k = 1; k < 4; k++)
        sum = fold512(sum, by_512, sums[k]);
    for (; n_bytes >= 64; p += 64, n_bytes -= 64)
        sum = fold512(sum, by_512, _mm512_loadu_si512(p));
    /* In memory, because functions for different instruction sets cannot be inlined. */
    unsigned char bytes[64];
    _mm512_storeu_si512(bytes, sum);
    state = qsf_crc32_by_clmul(0, bytes, sizeof bytes);
    return qsf_crc32_by_tables(state, p, n_bytes);
}

QSF_TARGET_END

#endif
