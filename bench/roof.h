/* roof.h - what a machine can do at most: bytes read from memory and multiply-adds of
 * integers, measured with the plainest loops there are.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_BENCH_ROOF_H
#define QSF_BENCH_ROOF_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "platform/cpu.h"

#if QSF_ARCH_X86
#include <immintrin.h>
#endif

/* Where the loops leave their results, so that they are not optimised away. */
static volatile uint64_t roof_sink;

/* Reads n_bytes (a multiple of 512) once, in ascending order. */
typedef void roof_read_fn(const unsigned char *p, size_t n_bytes);

static inline void roof_read_words(const unsigned char *p, size_t n_bytes)
{
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < n_bytes; i += sizeof sum) {
        uint64_t words[8];
        memcpy(words, p + i, sizeof words);
        for (size_t k = 0; k < 8; k++)
            sum[k] ^= words[k];
    }
    roof_sink = sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

/* n_rounds rounds of independent multiply-adds of bytes; returns how many of these there were. */
typedef double roof_madds_fn(size_t n_rounds);

#if QSF_ARCH_X86

QSF_TARGET_BEGIN("avx2")

static inline void roof_read_avx2(const unsigned char *p, size_t n_bytes)
{
    __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                      _mm256_setzero_si256()};
    for (size_t i = 0; i < n_bytes; i += 128)
        for (size_t k = 0; k < 4; k++)
            sum[k] = _mm256_xor_si256(sum[k], _mm256_loadu_si256((const void *)(p + i + 32 * k)));
    uint64_t out[4];
    _mm256_storeu_si256((void *)out, _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]),
                                                      _mm256_xor_si256(sum[2], sum[3])));
    roof_sink = out[0];
}

/* Each multiply-add of bytes in AVX2 is a vpmaddubsw and its share of the sums. */
static inline double roof_madds_avx2(size_t n_rounds)
{
    __m256i sum[10];
    for (size_t k = 0; k < 10; k++)
        sum[k] = _mm256_set1_epi8((char)k);
    __m256i x = _mm256_set1_epi8(1);
    for (size_t i = 0; i < n_rounds; i++)
        for (size_t k = 0; k < 10; k++) {
            __asm__ volatile("" : "+x"(x));
            sum[k] = _mm256_maddubs_epi16(sum[k], x);
        }
    for (size_t k = 0; k < 10; k++)
        roof_sink = (uint64_t)_mm256_extract_epi64(sum[k], 0);
    return (double)n_rounds * 10 * 32;
}

QSF_TARGET_END

/* As assembly, because "avxvnni" is unknown to older compilers and changes nothing else. */
static inline double roof_madds_avxvnni(size_t n_rounds)
{
    for (size_t i = 0; i < n_rounds; i++)
        __asm__ volatile("%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm0\n\t"
                         "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm1\n\t"
                         "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm2\n\t"
                         "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm3\n\t"
                         "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm4\n\t"
                         "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm5\n\t"
                         "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm6\n\t"
                         "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm7\n\t"
                         "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm8\n\t"
                         "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm9"
                         :
                         :
                         : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                           "xmm9", "xmm15");
    return (double)n_rounds * 10 * 32;
}

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

static inline void roof_read_avx512(const unsigned char *p, size_t n_bytes)
{
    __m512i sum[8];
    for (size_t k = 0; k < 8; k++)
        sum[k] = _mm512_setzero_si512();
    for (size_t i = 0; i < n_bytes; i += 512)
        for (size_t k = 0; k < 8; k++)
            sum[k] = _mm512_xor_si512(sum[k], _mm512_loadu_si512((const void *)(p + i + 64 * k)));
    for (size_t k = 1; k < 8; k++)
        sum[0] = _mm512_xor_si512(sum[0], sum[k]);
    roof_sink = (uint64_t)_mm512_reduce_add_epi64(sum[0]);
}

static inline double roof_madds_avx512(size_t n_rounds)
{
    __m512i sum[12];
    for (size_t k = 0; k < 12; k++)
        sum[k] = _mm512_setzero_si512();
    __m512i x = _mm512_set1_epi8(1);
    for (size_t i = 0; i < n_rounds; i++)
        for (size_t k = 0; k < 12; k++) {
            __asm__ volatile("" : "+v"(x));
            sum[k] = _mm512_dpbusd_epi32(sum[k], x, x);
        }
    for (size_t k = 0; k < 12; k++)
        roof_sink = (uint64_t)_mm512_reduce_add_epi32(sum[k]);
    return (double)n_rounds * 12 * 64;
}

QSF_TARGET_END

typedef struct roof_tiles {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} roof_tiles;

QSF_TARGET_BEGIN("amx-tile,amx-int8")

static inline double roof_madds_amx(size_t n_rounds)
{
    roof_tiles config = {.palette = 1};
    for (size_t i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.n_rows[i] = 16;
    }
    /* gcc believes that ldtilecfg reads 8 bytes of it. */
    __asm__ volatile("" : : "m"(config) : "memory");
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (size_t i = 0; i < n_rounds; i++) {
        _tile_dpbsud(0, 4, 5);
        _tile_dpbsud(1, 4, 5);
        _tile_dpbsud(2, 4, 5);
        _tile_dpbsud(3, 4, 5);
    }
    _tile_release();
    return (double)n_rounds * 4 * 16 * 16 * 64;
}

QSF_TARGET_END

#endif

/* The widest loads that this machine has. */
static inline roof_read_fn *roof_reader(void)
{
#if QSF_ARCH_X86
    if (qsf_isa_has(QSF_ISA_AVX512))
        return roof_read_avx512;
    if (qsf_isa_has(QSF_ISA_AVX2))
        return roof_read_avx2;
#endif
    return roof_read_words;
}

/* The multiply-adds of a level that this machine has; NULL where there is no such loop. */
static inline roof_madds_fn *roof_madds(qsf_isa isa)
{
#if QSF_ARCH_X86
    if (isa == QSF_ISA_AVX2)
        return roof_madds_avx2;
    if (isa == QSF_ISA_AVXVNNI)
        return roof_madds_avxvnni;
    if (isa == QSF_ISA_AVX512)
        return roof_madds_avx512;
    if (isa == QSF_ISA_AMX)
        return roof_madds_amx;
#endif
    (void)isa;
    return NULL;
}

#endif
