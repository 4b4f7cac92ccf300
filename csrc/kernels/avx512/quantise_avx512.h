/* quantise_avx512.h - activations to integers, four blocks at a time.
 *
 * The numbers of a block (maximum, factor, sums) are computed for four blocks together. Values
 * stay integers: their sums are exact in any order.
 */
/* SPDX-License-Identifier: Apache-2.0 */

#define BLOCKS_AT_ONCE 4

/* Lane 4 i: the largest of v[i], whose elements are not negative as integers. */
QSF_FORCED_INLINE __m512i top_of_four(const __m512i *v)
{
    const __m512i low01 = _mm512_shuffle_i32x4(v[0], v[1], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(v[0], v[1], 0xEE);
    const __m512i low23 = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(v[2], v[3], 0xEE);
    const __m512i by8_01 = _mm512_max_epi32(low01, high01);
    const __m512i by8_23 = _mm512_max_epi32(low23, high23);
    const __m512i by4 = _mm512_max_epi32(_mm512_shuffle_i32x4(by8_01, by8_23, 0x88),
                                         _mm512_shuffle_i32x4(by8_01, by8_23, 0xDD));
    const __m512i by2 = _mm512_max_epi32(by4, _mm512_shuffle_epi32(by4, _MM_PERM_BADC));
    return _mm512_max_epi32(by2, _mm512_shuffle_epi32(by2, _MM_PERM_CDAB));
}

/* (*first)[i] = sum of elements 0 .. 7 of v[i], (*second)[i] of the others */
QSF_FORCED_INLINE void sum_halves_of_four(const __m512i *v, __m128i *first, __m128i *second)
{
    const __m512i by4_01 = _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[1], 0x88),
                                            _mm512_shuffle_i32x4(v[0], v[1], 0xDD));
    const __m512i by4_23 = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2], v[3], 0x88),
                                            _mm512_shuffle_i32x4(v[2], v[3], 0xDD));
    const __m512i by2 = _mm512_add_epi32(_mm512_unpacklo_epi32(by4_01, by4_23),
                                         _mm512_unpackhi_epi32(by4_01, by4_23));
    /* Lane 0: the first half of v[0], 1: of v[2], 4, 5: the second; 8, 9, 12, 13: of v[1], v[3] */
    const __m512i sums = _mm512_add_epi32(by2, _mm512_shuffle_epi32(by2, _MM_PERM_BADC));
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 4, 12, 5, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i sorted = _mm512_permutexvar_epi32(order, sums);
    *first = _mm512_castsi512_si128(sorted);
    *second = _mm512_extracti32x4_epi32(sorted, 1);
}

/* Stores q and q_low of a block, x [64] times the factors of its halves. sums, low_sums: of 4
 * neighbours each */
QSF_FORCED_INLINE void round_block(const float *x, __m512 factor, __m512 second_factor, int8_t *q,
                                   int8_t *q_low, __m512i *sums, __m512i *low_sums)
{
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i fine[4];
    __m512i high;
    __m512i low;
    round_and_split(x, factor, second_factor, fine, q, q_low, &high, &low);
    *sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, high);
    *low_sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, low);
}

/* Lanes 0 .. 3: the largest magnitudes of columns `from` .. `from` + 31 of four blocks x */
QSF_FORCED_INLINE __m128 top_of_halves(const float *x, size_t from)
{
    __m512i v[BLOCKS_AT_ONCE];
    for (size_t i = 0; i < BLOCKS_AT_ONCE; i++) {
        const float *const half = x + i * QSF_BLOCK + from;
        v[i] = _mm512_castps_si512(lanes_larger_magnitude(lanes_abs(lanes_load(half)),
                                                          lanes_abs(lanes_load(half + QSF_LANES))));
    }
    const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm_castsi128_ps(
        _mm512_castsi512_si128(_mm512_permutexvar_epi32(places, top_of_four(v))));
}

/* True if each lane can divide, and is not infinite or NaN. */
QSF_FORCED_INLINE bool are_usual(__m128 amax)
{
    return (_mm_cmp_ps_mask(amax, _mm_set1_ps(QSF_QUANTISE_MIN), _CMP_GE_OQ) &
            _mm_cmp_ps_mask(amax, _mm_set1_ps(FLT_MAX), _CMP_LE_OQ)) == 0xF;
}

/* Blocks [b, b + 4). Returns false and stores nothing if a block needs the slow path. */
QSF_FORCED_INLINE bool quantise_four(const float *x, size_t b, bool by_halves,
                                     const qsf_act_row *out)
{
    __m512i v[BLOCKS_AT_ONCE];
    __m512i low[BLOCKS_AT_ONCE];
    __m128 amax[2] = {top_of_halves(x, 0), top_of_halves(x, QSF_BLOCK / 2)};
    if (!by_halves)
        amax[0] = amax[1] =
            _mm_castsi128_ps(_mm_max_epi32(_mm_castps_si128(amax[0]), _mm_castps_si128(amax[1])));
    if (!are_usual(amax[0]) || !are_usual(amax[1]))
        return false;
    __m512 factors[2];
    float scales[2][BLOCKS_AT_ONCE];
    for (size_t h = 0; h < 2; h++) {
        factors[h] = _mm512_castps128_ps512(_mm_div_ps(_mm_set1_ps(32512.0F), amax[h]));
        _mm_storeu_ps(scales[h], _mm_div_ps(amax[h], _mm_set1_ps(127.0F)));
    }
    for (size_t i = 0; i < BLOCKS_AT_ONCE; i++) {
        const __m512i lane = _mm512_set1_epi32((int)i);
        round_block(x + i * QSF_BLOCK, _mm512_permutexvar_ps(lane, factors[0]),
                    _mm512_permutexvar_ps(lane, factors[1]), out->q + (b + i) * QSF_BLOCK,
                    out->q_low + (b + i) * QSF_BLOCK, &v[i], &low[i]);
    }
    const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    int32_t fine[BLOCKS_AT_ONCE];
    __m128i first;
    __m128i second;
    __m128i first_low;
    __m128i second_low;
    sum_halves_of_four(v, &first, &second);
    sum_halves_of_four(low, &first_low, &second_low);
    const __m128i sum = _mm_add_epi32(first, second);
    const __m128 scale = _mm_loadu_ps(scales[0]);
    _mm_storeu_ps(out->scale + b, scale);
    _mm_storeu_si128((void *)(out->sum + b), sum);
    const __m128i first_fine = _mm_add_epi32(_mm_slli_epi32(first, 8), first_low);
    _mm_storeu_si128((void *)fine, first_fine);
    for (size_t i = 0; i < BLOCKS_AT_ONCE; i++) {
        const __m512i by2 = _mm512_add_epi32(v[i], _mm512_shuffle_epi32(v[i], _MM_PERM_BADC));
        const __m512i by4 = _mm512_add_epi32(by2, _mm512_shuffle_epi32(by2, _MM_PERM_CDAB));
        const __m256i quarters = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(places, by4));
        _mm_storel_epi64((void *)out->parts[b + i].quarter, _mm256_castsi256_si128(quarters));
        out->parts[b + i].first_fine = fine[i];
        out->parts[b + i].scale[0] = scales[0][i];
        out->parts[b + i].scale[1] = scales[1][i];
    }
    _mm_storeu_ps(out->scaled_sum + b, _mm_mul_ps(scale, _mm_cvtepi32_ps(sum)));
    _mm_storeu_si128((void *)(out->fine_sum + b),
                     _mm_add_epi32(_mm_slli_epi32(sum, 8), _mm_add_epi32(first_low, second_low)));
    return true;
}

static void quantise_by_fours(const float *x, size_t n_blocks, bool by_halves,
                              const qsf_act_row *out)
{
    size_t b = 0;
    for (; b + BLOCKS_AT_ONCE <= n_blocks; b += BLOCKS_AT_ONCE)
        if (!quantise_four(x + b * QSF_BLOCK, b, by_halves, out))
            for (size_t i = b; i < b + BLOCKS_AT_ONCE; i++)
                quantise_block(x + i * QSF_BLOCK, i, by_halves, out);
    for (; b < n_blocks; b++)
        quantise_block(x + b * QSF_BLOCK, b, by_halves, out);
}
