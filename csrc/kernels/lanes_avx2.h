/* lanes_avx2.h - the operations of lanes_scalar.h on two 256-bit registers.
 *
 * Included inside a target region, after <immintrin.h>.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_KERNELS_LANES_AVX2_H
#define QSF_KERNELS_LANES_AVX2_H

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

static inline void lanes_store_f16(unsigned char *p, lanes v)
{
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((void *)(p + 16), _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT));
}

static inline lanes lanes_add(lanes a, lanes b)
{
    return (lanes){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}

static inline lanes lanes_sub(lanes a, lanes b)
{
    return (lanes){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}

static inline lanes lanes_mul(lanes a, lanes b)
{
    return (lanes){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

static inline lanes lanes_div(lanes a, lanes b)
{
    return (lanes){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

static inline lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return (lanes){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

static inline lanes lanes_max(lanes a, lanes b)
{
    return (lanes){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}

static inline lanes lanes_min(lanes a, lanes b)
{
    return (lanes){_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
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

static inline lanes lanes_times_pow2(lanes v, lanes shifted)
{
    return (lanes){times_pow2_8(v.lo, shifted.lo), times_pow2_8(v.hi, shifted.hi)};
}

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

static inline lanes lanes_larger_magnitude(lanes a, lanes b)
{
    return (lanes){larger_magnitude8(a.lo, b.lo), larger_magnitude8(a.hi, b.hi)};
}

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

static inline __m256 load_bytes8(const unsigned char *p, unsigned shift, unsigned mask)
{
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
    return _mm256_cvtepi32_ps(
        _mm256_and_si256(_mm256_srli_epi32(bytes, (int)shift), _mm256_set1_epi32((int)mask)));
}

static inline lanes lanes_load_bytes(const unsigned char *p, unsigned shift, unsigned mask)
{
    return (lanes){load_bytes8(p, shift, mask), load_bytes8(p + 8, shift, mask)};
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

#endif
