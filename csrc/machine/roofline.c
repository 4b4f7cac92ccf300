/* roofline.c - the simplest loops that read and multiply, and the best of many passes. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "machine/machine.h"

#include <stdatomic.h>
#include <string.h>

#include "platform/clock.h"
#include "platform/thread.h"

#if QSF_ARCH_X86
#include <immintrin.h>
#endif

/* As matmul_dotprod.c and matmul_i8mm.c: not every clang offers them. */
#if QSF_ARCH_ARM && (defined(__ARM_FEATURE_DOTPROD) || !defined(__clang__) || __clang_major__ >= 16)
#include <arm_neon.h>
#define HAS_SDOT 1
#else
#define HAS_SDOT 0
#endif
#if HAS_SDOT && (defined(__ARM_FEATURE_MATMUL_INT8) || !defined(__clang__) || __clang_major__ >= 16)
#define HAS_SMMLA 1
#else
#define HAS_SMMLA 0
#endif

/* ---- the loops ---- */

static uint64_t read_words(const unsigned char *p, size_t n_bytes)
{
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < n_bytes; i += sizeof sum) {
        uint64_t words[8];
        memcpy(words, p + i, sizeof words);
        for (size_t k = 0; k < 8; k++)
            sum[k] ^= words[k];
    }
    return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

#if QSF_ARCH_X86

QSF_TARGET_BEGIN("avx2")

static uint64_t read_avx2(const unsigned char *p, size_t n_bytes)
{
    __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                      _mm256_setzero_si256()};
    for (size_t i = 0; i < n_bytes; i += 128)
        for (size_t k = 0; k < 4; k++)
            sum[k] = _mm256_xor_si256(sum[k], _mm256_loadu_si256((const void *)(p + i + 32 * k)));
    uint64_t out[4];
    _mm256_storeu_si256((void *)out, _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]),
                                                      _mm256_xor_si256(sum[2], sum[3])));
    return out[0] ^ out[1] ^ out[2] ^ out[3];
}

/* One multiply-add of bytes in AVX2 is a vpmaddubsw and its share of the sums. These loops are
 * assembly, because gcc would copy every sum, and the copies would be measured. */
#define TEN(ADD) \
    ADD("0") ADD("1") ADD("2") ADD("3") ADD("4") ADD("5") ADD("6") ADD("7") ADD("8") ADD("9")
#define SUMS "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm15"

static double madds_avx2(size_t n_rounds)
{
#define ADD_PAIRS(i) "vpmaddubsw %%ymm15, %%ymm" i ", %%ymm" i "\n\t"
    for (size_t i = 0; i < n_rounds; i++)
        __asm__ volatile(TEN(ADD_PAIRS) : : : SUMS);
    return (double)n_rounds * 10 * 32;
}

QSF_TARGET_END

/* "avxvnni" is unknown to older compilers, and changes nothing else. */
static double madds_avxvnni(size_t n_rounds)
{
#define ADD_DOTS_256(i) "%{vex%} vpdpbusd %%ymm15, %%ymm15, %%ymm" i "\n\t"
    for (size_t i = 0; i < n_rounds; i++)
        __asm__ volatile(TEN(ADD_DOTS_256) : : : SUMS);
    return (double)n_rounds * 10 * 32;
}

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

static uint64_t read_avx512(const unsigned char *p, size_t n_bytes)
{
    __m512i sum[8];
    for (size_t k = 0; k < 8; k++)
        sum[k] = _mm512_setzero_si512();
    for (size_t i = 0; i < n_bytes; i += 512)
        for (size_t k = 0; k < 8; k++)
            sum[k] = _mm512_xor_si512(sum[k], _mm512_loadu_si512((const void *)(p + i + 64 * k)));
    for (size_t k = 1; k < 8; k++)
        sum[0] = _mm512_xor_si512(sum[0], sum[k]);
    return (uint64_t)_mm512_reduce_add_epi64(sum[0]);
}

static double madds_avx512(size_t n_rounds)
{
#define ADD_DOTS_512(i) "vpdpbusd %%zmm15, %%zmm15, %%zmm" i "\n\t"
    for (size_t i = 0; i < n_rounds; i++)
        __asm__ volatile(TEN(ADD_DOTS_512) ADD_DOTS_512("10") ADD_DOTS_512("11")
                         :
                         :
                         : SUMS, "xmm10", "xmm11");
    return (double)n_rounds * 12 * 64;
}

QSF_TARGET_END

typedef struct tile_sizes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} tile_sizes;

QSF_TARGET_BEGIN("amx-tile,amx-int8")

static double madds_amx(size_t n_rounds)
{
    tile_sizes config = {.palette = 1};
    for (size_t i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.n_rows[i] = 16;
    }
    /* gcc assumes that ldtilecfg reads only 8 bytes of it. */
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

/* A loop of a product of n_madds multiply-adds, on 16 sums */
#define MADDS(name, product, n_madds)             \
    static double name(size_t n_rounds)           \
    {                                             \
        int32x4_t sum[16];                        \
        for (size_t k = 0; k < 16; k++)           \
            sum[k] = vdupq_n_s32(0);              \
        int8x16_t x = vdupq_n_s8(1);              \
        for (size_t i = 0; i < n_rounds; i++)     \
            for (size_t k = 0; k < 16; k++) {     \
                __asm__ volatile("" : "+w"(x));   \
                sum[k] = product(sum[k], x, x);   \
            }                                     \
        for (size_t k = 0; k < 16; k++)           \
            __asm__ volatile("" : : "w"(sum[k])); \
        return (double)n_rounds * 16 * n_madds;   \
    }

#if HAS_SDOT

#if defined(__clang__)
QSF_TARGET_BEGIN("dotprod")
#else
QSF_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#endif

MADDS(madds_dotprod, vdotq_s32, 16)

QSF_TARGET_END

#endif

#if HAS_SMMLA

#if defined(__clang__)
QSF_TARGET_BEGIN("i8mm")
#else
QSF_TARGET_BEGIN("arch=armv8.2-a+i8mm")
#endif

MADDS(madds_i8mm, vmmlaq_s32, 32)

QSF_TARGET_END

#endif

qsf_roofline_read_fn *qsf_roofline_reader(void)
{
#if QSF_ARCH_X86
    if (qsf_isa_has(QSF_ISA_AVX512))
        return read_avx512;
    if (qsf_isa_has(QSF_ISA_AVX2))
        return read_avx2;
#endif
    return read_words;
}

qsf_roofline_madds_fn *qsf_roofline_madds(qsf_isa isa)
{
#if QSF_ARCH_X86
    if (isa == QSF_ISA_AVX2)
        return madds_avx2;
    if (isa == QSF_ISA_AVXVNNI)
        return madds_avxvnni;
    if (isa == QSF_ISA_AVX512)
        return madds_avx512;
    if (isa == QSF_ISA_AMX)
        return madds_amx;
#endif
#if HAS_SDOT
    if (isa == QSF_ISA_DOTPROD)
        return madds_dotprod;
#endif
#if HAS_SMMLA
    if (isa == QSF_ISA_I8MM)
        return madds_i8mm;
#endif
    (void)isa;
    return NULL;
}

/* ---- on all threads ---- */

#define STRETCH_BYTES ((size_t)512) /* read from one stream before the next */
#define AHEAD_BYTES ((size_t)1024)  /* prefetch distance; see bench/LOG.md */
#define LINE_BYTES 64
#define PART_ALIGN ((size_t)16384) /* divides into streams and stretches */
#define MADD_PASS_NS 2000000

/* A pass over parts, one for each thread. */
typedef struct pass {
    size_t n_threads;
    atomic_size_t n_arrived;
    atomic_uint_least64_t digest; /* of the bytes read, so that the loop is not removed */
    /* reading */
    qsf_roofline_read_fn *read;
    unsigned char *bytes; /* [n_threads, part_bytes] */
    size_t part_bytes;
    size_t n_streams; /* 0: one, by the plain loop alone */
    /* multiply-adds */
    qsf_roofline_madds_fn *madds;
    size_t n_rounds;
    atomic_uint_least64_t n_madds;
} pass;

/* Waits until every item is taken, so that each thread takes exactly one. */
static void gather(pass *p, size_t n_items)
{
    atomic_fetch_add(&p->n_arrived, n_items);
    while (atomic_load(&p->n_arrived) < p->n_threads)
        qsf_thread_yield();
}

static void touch_part(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    pass *const p = arg;
    gather(p, end - begin);
    for (size_t i = begin; i < end; i++) /* usually one item, the worker's own */
        memset(p->bytes + (end - begin == 1 ? worker_idx : i) * p->part_bytes, 0x5A, p->part_bytes);
}

static uint64_t read_streams(const pass *p, const unsigned char *part)
{
    const size_t stream_bytes = p->part_bytes / p->n_streams;
    uint64_t digest = 0;
    for (size_t off = 0; off < stream_bytes; off += STRETCH_BYTES)
        for (size_t i = 0; i < p->n_streams; i++) {
            const unsigned char *const at = part + i * stream_bytes + off;
            for (size_t k = 0; k < STRETCH_BYTES; k += LINE_BYTES)
                __builtin_prefetch(at + AHEAD_BYTES + k);
            digest ^= p->read(at, STRETCH_BYTES);
        }
    return digest;
}

static void read_part(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    pass *const p = arg;
    const unsigned char *const part = p->bytes + worker_idx * p->part_bytes;
    gather(p, end - begin);
    for (size_t i = begin; i < end; i++) {
        const uint64_t digest =
            p->n_streams == 0 ? p->read(part, p->part_bytes) : read_streams(p, part);
        atomic_fetch_xor(&p->digest, digest);
    }
}

static void multiply(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    pass *const p = arg;
    (void)worker_idx;
    gather(p, end - begin);
    for (size_t i = begin; i < end; i++)
        atomic_fetch_add(&p->n_madds, (uint64_t)p->madds(p->n_rounds));
}

/* Nanoseconds of a pass on all threads; at least 1. */
static uint64_t run(qsf_pool *pool, pass *p, qsf_pool_fn *fn)
{
    atomic_store(&p->n_arrived, 0);
    atomic_store(&p->n_madds, 0);
    const uint64_t start_ns = qsf_clock_ns();
    qsf_pool_run(pool, p->n_threads, 1, fn, p);
    return qsf_clock_ns() - start_ns + 1;
}

double qsf_roofline_read_rate(qsf_pool *pool, unsigned char *bytes, size_t n_bytes, uint32_t n_ms)
{
    static const size_t stream_counts[] = {0, 1, 2, 4};
    const size_t n_ways = sizeof stream_counts / sizeof stream_counts[0];
    const size_t n_threads = qsf_pool_thread_count(pool);
    pass p = {
        .n_threads = n_threads,
        .read = qsf_roofline_reader(),
        .bytes = bytes,
        .part_bytes = n_bytes / n_threads / PART_ALIGN * PART_ALIGN,
    };
    (void)run(pool, &p, touch_part);
    uint64_t best_ns = UINT64_MAX;
    const uint64_t end_ns = qsf_clock_ns() + (uint64_t)n_ms * 1000000;
    for (size_t i = 0; i < n_ways || qsf_clock_ns() < end_ns; i++) {
        p.n_streams = stream_counts[i % n_ways];
        const uint64_t ns = run(pool, &p, read_part);
        best_ns = ns < best_ns ? ns : best_ns;
    }
    return (double)(p.part_bytes * n_threads) * 1e9 / (double)best_ns;
}

double qsf_roofline_madd_rate(qsf_pool *pool, qsf_isa isa, uint32_t n_ms)
{
    pass p = {
        .n_threads = qsf_pool_thread_count(pool),
        .madds = qsf_roofline_madds(isa),
        .n_rounds = 1000,
    };
    double best = 0;
    if (p.madds == NULL)
        return 0;
    const uint64_t end_ns = qsf_clock_ns() + (uint64_t)n_ms * 1000000;
    do {
        const uint64_t ns = run(pool, &p, multiply);
        const double rate = (double)atomic_load(&p.n_madds) * 1e9 / (double)ns;
        best = rate > best ? rate : best;
        if (ns < MADD_PASS_NS)
            p.n_rounds *= 2;
    } while (qsf_clock_ns() < end_ns);
    return best;
}
