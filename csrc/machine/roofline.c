/* roofline.c - the speed of memory: the best of many passes of loops that only read. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "machine/machine.h"

#include <stdatomic.h>
#include <string.h>

#include "platform/clock.h"
#include "platform/thread.h"

#if QSF_ARCH_X86
#include <immintrin.h>
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

QSF_TARGET_END

QSF_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq")

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

/* ---- on all threads ---- */

#define STRETCH_BYTES ((size_t)512) /* read from one stream before the next */
#define AHEAD_BYTES ((size_t)1024)  /* prefetch distance; see bench/LOG.md */
#define LINE_BYTES 64
#define PART_ALIGN ((size_t)16384) /* divides into streams and stretches */

/* A pass over parts, one for each thread. */
typedef struct pass {
    size_t n_threads;
    atomic_size_t n_arrived;
    atomic_uint_least64_t digest; /* of the bytes read, so that the loop is not removed */
    qsf_roofline_read_fn *read;
    unsigned char *bytes; /* [n_threads, part_bytes] */
    size_t part_bytes;
    size_t n_streams; /* 0: one, by the plain loop alone */
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

/* Nanoseconds of a pass on all threads; at least 1. */
static uint64_t run(qsf_pool *pool, pass *p, qsf_pool_fn *fn)
{
    atomic_store(&p->n_arrived, 0);
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
