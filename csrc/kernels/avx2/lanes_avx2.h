/* lanes_avx2.h - the operations of lanes_scalar.h on two 256-bit registers.
 *
 * Included inside a target region, after <immintrin.h>.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define QSF_LANES 16

typedef struct lanes {
    __m256 lo; /* lanes 0..7 */
    __m256 hi; /* lanes 8..15 */
} lanes;

/* Returns all ones in those of the lanes offset + 0 .. offset + 7 that are below n. */
static inline __m256i lanes_mask(size_t n, int offset)
{
    const __m256i idx =
        _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(offset));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), idx);
}

static inline lanes lanes_set(float value)
{
    return (lanes){_mm256_set1_ps(value), _mm256_set1_ps(value)};
}

static inline lanes lanes_load(const float *p)
{
    return (lanes){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

static inline lanes lanes_load_part(const float *p, size_t n)
{
    if (n <= 8) /* p + 8 may be outside the object */
        return (lanes){_mm256_maskload_ps(p, lanes_mask(n, 0)), _mm256_setzero_ps()};
    return (lanes){_mm256_loadu_ps(p), _mm256_maskload_ps(p + 8, lanes_mask(n, 8))};
}

static inline void lanes_store(float *p, lanes v)
{
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}

static inline void lanes_store_part(float *p, lanes v, size_t n)
{
    _mm256_maskstore_ps(p, lanes_mask(n, 0), v.lo);
    if (n > 8)
        _mm256_maskstore_ps(p + 8, lanes_mask(n, 8), v.hi);
}

static inline lanes lanes_load_f16(const unsigned char *p)
{
    return (lanes){_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 16)))};
}

/* 16 bytes */
static inline lanes lanes_load_u8(const unsigned char *p)
{
    return (lanes){
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p))),
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(p + 8))))};
}

static inline void lanes_store_f16(unsigned char *p, lanes v)
{
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((void *)(p + 16), _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT));
}

/* An operation on both registers alike */
#define LANES_OF_2(name, op)                            \
    static inline lanes name(lanes a, lanes b)          \
    {                                                   \
        return (lanes){op(a.lo, b.lo), op(a.hi, b.hi)}; \
    }

LANES_OF_2(lanes_add, _mm256_add_ps)
LANES_OF_2(lanes_sub, _mm256_sub_ps)
LANES_OF_2(lanes_mul, _mm256_mul_ps)
LANES_OF_2(lanes_div, _mm256_div_ps)
LANES_OF_2(lanes_max, _mm256_max_ps)
LANES_OF_2(lanes_min, _mm256_min_ps)

static inline lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return (lanes){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

static inline lanes lanes_abs(lanes a)
{
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return (lanes){_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

static inline lanes lanes_where_less(lanes a, lanes b, lanes yes, lanes no)
{
    return (lanes){_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
                   _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}

static inline __m256 between8(size_t begin, size_t end, int offset, __m256 in, __m256 out)
{
    const __m256i chosen = _mm256_andnot_si256(lanes_mask(begin, offset), lanes_mask(end, offset));
    return _mm256_blendv_ps(out, in, _mm256_castsi256_ps(chosen));
}

static inline lanes lanes_between(size_t begin, size_t end, lanes in, lanes out)
{
    return (lanes){between8(begin, end, 0, in.lo, out.lo), between8(begin, end, 8, in.hi, out.hi)};
}

static inline __m256 times_pow2_8(__m256 v, __m256 shifted)
{
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4B400000));
    const __m256i half = _mm256_srai_epi32(n, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i factor0 = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i rest = _mm256_sub_epi32(n, half);
    const __m256i factor1 = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(v, _mm256_castsi256_ps(factor0)),
                         _mm256_castsi256_ps(factor1));
}

LANES_OF_2(lanes_times_pow2, times_pow2_8)

static inline float lanes_sum(lanes v)
{
    const __m256 by8 = _mm256_add_ps(v.lo, v.hi);
    const __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
    const __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)));
}

static inline float lanes_top(lanes v)
{
    const __m256 by8 = _mm256_max_ps(v.lo, v.hi);
    const __m128 by4 = _mm_max_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
    const __m128 by2 = _mm_max_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_max_ss(by2, _mm_movehdup_ps(by2)));
}

static inline __m256 larger_magnitude8(__m256 a, __m256 b)
{
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}

LANES_OF_2(lanes_larger_magnitude, larger_magnitude8)

static inline float lanes_top_magnitude(lanes v)
{
    const __m256i by8 = _mm256_max_epi32(_mm256_castps_si256(v.lo), _mm256_castps_si256(v.hi));
    const __m128i by4 =
        _mm_max_epi32(_mm256_castsi256_si128(by8), _mm256_extracti128_si256(by8, 1));
    const __m128i by2 = _mm_max_epi32(by4, _mm_shuffle_epi32(by4, 0x4E));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(by2, _mm_shuffle_epi32(by2, 0xB1))));
}

/* Writes two registers of 8 small integers as 16 bytes and adds them to *sum. */
static inline void store_i8x16(int8_t *to, __m256i lo, __m256i hi, lanes *sum)
{
    /* packs works in 128-bit halves: [lo0-3 hi0-3 | lo4-7 hi4-7]; this restores the order. */
    const __m256i mixed = _mm256_packs_epi32(lo, hi);
    const __m256i words = _mm256_permute4x64_epi64(mixed, 0xD8);
    _mm_storeu_si128((void *)to, _mm_packs_epi16(_mm256_castsi256_si128(words),
                                                 _mm256_extracti128_si256(words, 1)));
    *sum = lanes_add(*sum, (lanes){_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)});
}

static inline __m256i high_part8(__m256i fine)
{
    return _mm256_srai_epi32(_mm256_add_epi32(fine, _mm256_set1_epi32(128)), 8);
}

static inline void lanes_store_i8_pair(int8_t *q, int8_t *q_low, lanes v, lanes *sum,
                                       lanes *sum_low)
{
    const __m256i fine_lo = _mm256_cvtps_epi32(v.lo);
    const __m256i fine_hi = _mm256_cvtps_epi32(v.hi);
    const __m256i high_lo = high_part8(fine_lo);
    const __m256i high_hi = high_part8(fine_hi);
    store_i8x16(q, high_lo, high_hi, sum);
    store_i8x16(q_low, _mm256_sub_epi32(fine_lo, _mm256_slli_epi32(high_lo, 8)),
                _mm256_sub_epi32(fine_hi, _mm256_slli_epi32(high_hi, 8)), sum_low);
}

/* As lanes_store_fine, of x [32]; returns sums of four. */
static inline __m256i store_fine32(int8_t *q, int8_t *q_low, const float *x, __m256 factor)
{
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i fine[4];
    for (size_t i = 0; i < 4; i++)
        fine[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
    const __m256i words[2] = {_mm256_packs_epi32(fine[0], fine[1]),
                              _mm256_packs_epi32(fine[2], fine[3])};
    __m256i high[2];
    __m256i low[2];
    for (size_t i = 0; i < 2; i++) {
        high[i] = _mm256_srai_epi16(_mm256_add_epi16(words[i], _mm256_set1_epi16(128)), 8);
        low[i] = _mm256_and_si256(words[i], _mm256_set1_epi16(255));
    }
    _mm256_storeu_si256(
        (void *)q, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(high[0], high[1]), in_order));
    _mm256_storeu_si256((void *)q_low,
                        _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low[0], low[1]), in_order));
    return _mm256_add_epi32(_mm256_add_epi32(fine[0], fine[1]), _mm256_add_epi32(fine[2], fine[3]));
}

static inline void lanes_store_fine(int8_t *q, int8_t *q_low, const float *x, lanes factor,
                                    lanes *sum)
{
    const __m256i lo = store_fine32(q, q_low, x, factor.lo);
    const __m256i hi = store_fine32(q + 32, q_low + 32, x + 32, factor.lo);
    *sum = lanes_add(*sum, (lanes){_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)});
}

static inline __m256 load_codes8(const unsigned char *p, unsigned shift, uint32_t mask)
{
    const __m256i words = _mm256_loadu_si256((const void *)p);
    return _mm256_cvtepi32_ps(
        _mm256_and_si256(_mm256_srli_epi32(words, (int)shift), _mm256_set1_epi32((int)mask)));
}

static inline lanes lanes_load_codes(const unsigned char *p, unsigned shift, uint32_t mask)
{
    return (lanes){load_codes8(p, shift, mask), load_codes8(p + 32, shift, mask)};
}

/* Four rows of 4 bytes in each 16, from 16 bytes of four rows */
static inline void interleave4(const unsigned char *from, size_t stride, __m256i *first,
                               __m256i *last)
{
    __m128i row[4];
    for (size_t j = 0; j < 4; j++)
        row[j] = _mm_loadu_si128((const void *)(from + j * stride));
    const __m128i low01 = _mm_unpacklo_epi8(row[0], row[1]);
    const __m128i high01 = _mm_unpackhi_epi8(row[0], row[1]);
    const __m128i low23 = _mm_unpacklo_epi8(row[2], row[3]);
    const __m128i high23 = _mm_unpackhi_epi8(row[2], row[3]);
    *first = _mm256_set_m128i(_mm_unpackhi_epi16(low01, low23), _mm_unpacklo_epi16(low01, low23));
    *last =
        _mm256_set_m128i(_mm_unpackhi_epi16(high01, high23), _mm_unpacklo_epi16(high01, high23));
}

static inline void spread_codes8(__m256i four, size_t bits, size_t k, unsigned char *to)
{
    const __m256i mask = _mm256_set1_epi8((char)((1U << bits) - 1));
    const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(four, (int)(k * bits)), mask);
    _mm256_storeu_si256((void *)to,
                        bits == 8 ? four : _mm256_or_si256(codes, _mm256_set1_epi8(-128)));
}

static inline void lanes_spread_codes(const unsigned char *from, size_t stride, size_t bits,
                                      unsigned char *to, size_t step)
{
    __m256i first;
    __m256i last;
    interleave4(from, stride, &first, &last);
    for (size_t k = 0; k < 8 / bits; k++) {
        spread_codes8(first, bits, k, to + k * step);
        spread_codes8(last, bits, k, to + k * step + 32);
    }
}

static inline void lanes_turn_codes(const unsigned char *from, size_t bits, unsigned char *to,
                                    size_t step)
{
    const __m256i by_byte = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (size_t i = 0; i < 16; i += 2) {
        const unsigned char *const plane = from + i % 4 * 64 + i / 4 * 16;
        const __m256i two = _mm256_set_m128i(_mm_loadu_si128((const void *)(plane + 64)),
                                             _mm_loadu_si128((const void *)plane));
        const __m256i four = _mm256_shuffle_epi8(two, by_byte);
        for (size_t k = 0; k < 8 / bits; k++)
            spread_codes8(four, bits, k, to + k * step + 16 * i);
    }
}

static inline __m256 butterfly8(__m256 v, size_t h)
{
    const __m256 swapped = h == 4   ? _mm256_permute2f128_ps(v, v, 1)
                           : h == 2 ? _mm256_permute_ps(v, 0x4E)
                                    : _mm256_permute_ps(v, 0xB1);
    const __m256 sum = _mm256_add_ps(v, swapped);
    const __m256 difference = _mm256_sub_ps(swapped, v);
    return h == 4   ? _mm256_blend_ps(sum, difference, 0xF0)
           : h == 2 ? _mm256_blend_ps(sum, difference, 0xCC)
                    : _mm256_blend_ps(sum, difference, 0xAA);
}

static inline lanes lanes_butterfly(lanes v, size_t h)
{
    if (h == 8)
        return (lanes){_mm256_add_ps(v.lo, v.hi), _mm256_sub_ps(v.lo, v.hi)};
    return (lanes){butterfly8(v.lo, h), butterfly8(v.hi, h)};
}
