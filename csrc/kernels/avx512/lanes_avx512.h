/* lanes_avx512.h - the operations of lanes_scalar.h on one 512-bit register.
 *
 * Included inside a target region, after <immintrin.h>.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define QSF_LANES 16

typedef __m512 lanes;

static inline __mmask16 lanes_mask(size_t n)
{
    return (__mmask16)((1U << n) - 1);
}

static inline lanes lanes_set(float value)
{
    return _mm512_set1_ps(value);
}

static inline lanes lanes_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline lanes lanes_load_part(const float *p, size_t n)
{
    return _mm512_maskz_loadu_ps(lanes_mask(n), p);
}

static inline void lanes_store(float *p, lanes v)
{
    _mm512_storeu_ps(p, v);
}

static inline void lanes_store_part(float *p, lanes v, size_t n)
{
    _mm512_mask_storeu_ps(p, lanes_mask(n), v);
}

static inline lanes lanes_load_f16(const unsigned char *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
}

static inline lanes lanes_load_u8(const unsigned char *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)));
}

static inline void lanes_store_f16(unsigned char *p, lanes v)
{
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

/* An operation that is one instruction */
#define LANES_OF_2(name, op)                   \
    static inline lanes name(lanes a, lanes b) \
    {                                          \
        return op(a, b);                       \
    }

LANES_OF_2(lanes_add, _mm512_add_ps)
LANES_OF_2(lanes_sub, _mm512_sub_ps)
LANES_OF_2(lanes_mul, _mm512_mul_ps)
LANES_OF_2(lanes_div, _mm512_div_ps)
LANES_OF_2(lanes_max, _mm512_max_ps)
LANES_OF_2(lanes_min, _mm512_min_ps)

static inline lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline lanes lanes_abs(lanes a)
{
    return _mm512_abs_ps(a);
}

static inline lanes lanes_where_less(lanes a, lanes b, lanes yes, lanes no)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

static inline lanes lanes_between(size_t begin, size_t end, lanes in, lanes out)
{
    return _mm512_mask_blend_ps(lanes_mask(end) & (__mmask16)~lanes_mask(begin), out, in);
}

static inline lanes lanes_times_pow2(lanes v, lanes shifted)
{
    return _mm512_scalef_ps(v, _mm512_sub_ps(shifted, _mm512_set1_ps(0x1.8p23F)));
}

static inline float lanes_sum(lanes v)
{
    const __m256 by8 = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
    const __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)));
}

static inline float lanes_top(lanes v)
{
    const __m256 by8 = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 by4 = _mm_max_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
    const __m128 by2 = _mm_max_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_max_ss(by2, _mm_movehdup_ps(by2)));
}

static inline lanes lanes_larger_magnitude(lanes a, lanes b)
{
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

static inline float lanes_top_magnitude(lanes v)
{
    const __m512i bits = _mm512_castps_si512(v);
    const __m256i by8 =
        _mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti32x8_epi32(bits, 1));
    const __m128i by4 =
        _mm_max_epi32(_mm256_castsi256_si128(by8), _mm256_extracti128_si256(by8, 1));
    const __m128i by2 = _mm_max_epi32(by4, _mm_shuffle_epi32(by4, 0x4E));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(by2, _mm_shuffle_epi32(by2, 0xB1))));
}

static inline void lanes_store_i8_pair(int8_t *q, int8_t *q_low, lanes v, lanes *sum,
                                       lanes *sum_low)
{
    const __m512i fine = _mm512_cvtps_epi32(v);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(fine, _mm512_set1_epi32(128)), 8);
    const __m512i low = _mm512_sub_epi32(fine, _mm512_slli_epi32(high, 8));
    _mm_storeu_si128((void *)q, _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((void *)q_low, _mm512_cvtepi32_epi8(low));
    *sum = _mm512_add_ps(*sum, _mm512_cvtepi32_ps(high));
    *sum_low = _mm512_add_ps(*sum_low, _mm512_cvtepi32_ps(low));
}

/* fine [4] = x [64] * factor, rounded; q and q_low [64] are split from them, and returned as well
 */
static inline void round_and_split(const float *x, __m512 factor, __m512 second_factor,
                                   __m512i *fine, int8_t *q, int8_t *q_low, __m512i *high,
                                   __m512i *low)
{
    /* Packing interleaves 16-byte lanes of both operands. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (size_t i = 0; i < 4; i++)
        fine[i] = _mm512_cvtps_epi32(
            _mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), i < 2 ? factor : second_factor));
    /* Up to 32512 + 128: 16 bits hold it. */
    const __m512i half = _mm512_set1_epi16(128);
    const __m512i a = _mm512_add_epi16(_mm512_packs_epi32(fine[0], fine[1]), half);
    const __m512i b = _mm512_add_epi16(_mm512_packs_epi32(fine[2], fine[3]), half);
    *high = _mm512_permutexvar_epi32(
        order, _mm512_packs_epi16(_mm512_srai_epi16(a, 8), _mm512_srai_epi16(b, 8)));
    /* The low byte is q_low + 128. */
    const __m512i byte = _mm512_set1_epi16(255);
    *low = _mm512_xor_si512(
        _mm512_permutexvar_epi32(
            order, _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte))),
        _mm512_set1_epi8(-128));
    _mm512_storeu_si512((void *)q, *high);
    _mm512_storeu_si512((void *)q_low, *low);
}

static inline void lanes_store_fine(int8_t *q, int8_t *q_low, const float *x, lanes factor,
                                    lanes *sum)
{
    __m512i fine[4];
    __m512i high;
    __m512i low;
    round_and_split(x, factor, factor, fine, q, q_low, &high, &low);
    const __m512i sums =
        _mm512_add_epi32(_mm512_add_epi32(fine[0], fine[1]), _mm512_add_epi32(fine[2], fine[3]));
    *sum = _mm512_add_ps(*sum, _mm512_cvtepi32_ps(sums));
}

static inline lanes lanes_load_codes(const unsigned char *p, unsigned shift, uint32_t mask)
{
    const __m512i words = _mm512_loadu_si512((const void *)p);
    return _mm512_cvtepi32_ps(
        _mm512_and_si512(_mm512_srli_epi32(words, shift), _mm512_set1_epi32((int)mask)));
}

/* Stores code k of each byte to `to` + k * step, plus 128 if it has fewer than 8 bits. */
static inline void spread_codes16(__m512i four, size_t bits, unsigned char *to, size_t step)
{
    const __m512i mask = _mm512_set1_epi8((char)((1U << bits) - 1));
    for (size_t k = 0; k < 8 / bits; k++) {
        const __m512i codes = _mm512_and_si512(_mm512_srli_epi32(four, (unsigned)(k * bits)), mask);
        _mm512_storeu_si512((void *)(to + k * step),
                            bits == 8 ? four : _mm512_or_si512(codes, _mm512_set1_epi8(-128)));
    }
}

static inline void lanes_spread_codes(const unsigned char *from, size_t stride, size_t bits,
                                      unsigned char *to, size_t step)
{
    const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i by_byte =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const void *)from));
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const void *)(from + stride)), 1);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const void *)(from + 2 * stride)), 2);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const void *)(from + 3 * stride)), 3);
    four = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(by_row, four), by_byte);
    spread_codes16(four, bits, to, step);
}

static inline void lanes_turn_codes(const unsigned char *from, size_t bits, unsigned char *to,
                                    size_t step)
{
    const __m512i by_byte =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i four[4];
    for (size_t i = 0; i < 4; i++)
        four[i] = _mm512_shuffle_epi8(_mm512_loadu_si512((const void *)(from + 64 * i)), by_byte);
    const __m512i low[2] = {_mm512_shuffle_i32x4(four[0], four[1], 0x44),
                            _mm512_shuffle_i32x4(four[2], four[3], 0x44)};
    const __m512i high[2] = {_mm512_shuffle_i32x4(four[0], four[1], 0xEE),
                             _mm512_shuffle_i32x4(four[2], four[3], 0xEE)};
    spread_codes16(_mm512_shuffle_i32x4(low[0], low[1], 0x88), bits, to, step);
    spread_codes16(_mm512_shuffle_i32x4(low[0], low[1], 0xDD), bits, to + 64, step);
    spread_codes16(_mm512_shuffle_i32x4(high[0], high[1], 0x88), bits, to + 128, step);
    spread_codes16(_mm512_shuffle_i32x4(high[0], high[1], 0xDD), bits, to + 192, step);
}

static inline lanes lanes_butterfly(lanes v, size_t h)
{
    const __m512 swapped = h == 8   ? _mm512_shuffle_f32x4(v, v, 0x4E)
                           : h == 4 ? _mm512_shuffle_f32x4(v, v, 0xB1)
                           : h == 2 ? _mm512_permute_ps(v, 0x4E)
                                    : _mm512_permute_ps(v, 0xB1);
    const __mmask16 second = h == 8 ? 0xFF00 : h == 4 ? 0xF0F0 : h == 2 ? 0xCCCC : 0xAAAA;
    return _mm512_mask_sub_ps(_mm512_add_ps(v, swapped), second, swapped, v);
}
