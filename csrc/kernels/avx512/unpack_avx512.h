/* unpack_avx512.h - the codes of a tile of any quantised type as bytes, in AVX-512 registers; the
 * float step of values that are codes.
 *
 * Included inside a target region, after lanes_avx512.h.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define QSF_TILE_GROUPS 16 /* groups of 4 columns: one register of codes each */

QSF_FORCED_INLINE __m512i load64(const unsigned char *p)
{
    return _mm512_loadu_si512((const void *)p);
}

/* Each unpack_*: plane p of a tile, 64 bytes, to the codes of some groups of columns. */

/* What codes stand for: of E2M1 the values + 12, of LEVELS and IQ4 the levels; others as they are
 */
QSF_FORCED_INLINE __m512i looked_up(qsf_codes kind, __m512i codes)
{
    static const uint8_t iq4_levels[] = {QSF_IQ4_LEVELS};
    const __m128i values = kind == QSF_CODES_E2M1  ? _mm_setr_epi8(QSF_E2M1_LEVELS)
                           : kind == QSF_CODES_IQ4 ? _mm_loadu_si128((const void *)iq4_levels)
                                                   : _mm_setr_epi8(QSF_LEVELS);
    return kind == QSF_CODES_4BIT || !qsf_are_nibbles(kind)
               ? codes
               : _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), codes);
}

/* Groups p and p + 8 */
QSF_FORCED_INLINE void unpack_nibbles(qsf_codes kind, const unsigned char *bytes, size_t p,
                                      __m512i *codes)
{
    const __m512i nibbles = _mm512_set1_epi8(15);
    const __m512i both = load64(bytes + p * 64);
    codes[0] = looked_up(kind, _mm512_and_si512(both, nibbles));
    codes[1] = looked_up(kind, _mm512_and_si512(_mm512_srli_epi32(both, 4), nibbles));
}

/* Group g, a literal, of types with parts, looked up */
QSF_FORCED_INLINE __m512i unpack_group(qsf_codes kind, const unsigned char *bytes, size_t g)
{
    const qsf_code_place at = qsf_code_place_of(kind, g);
    const __m512i low = _mm512_and_si512(_mm512_srli_epi32(load64(bytes + 64 * at.plane), at.shift),
                                         _mm512_set1_epi8((char)at.mask));
    if (at.high_mask == 0)
        return looked_up(kind, low);
    const __m512i high = load64(bytes + 64 * at.high_plane);
    const __m512i placed = at.high_shift < 4 ? _mm512_slli_epi32(high, 4 - at.high_shift)
                                             : _mm512_srli_epi32(high, at.high_shift - 4);
    /* low | (placed & mask) */
    return _mm512_ternarylogic_epi32(low, placed, _mm512_set1_epi8((char)at.high_mask), 0xF8);
}

/* Groups p, p + 4, p + 8, p + 12 */
QSF_FORCED_INLINE void unpack_2bit(const unsigned char *bytes, size_t p, __m512i *codes)
{
    const __m512i threes = _mm512_set1_epi8(3);
    const __m512i four = load64(bytes + p * 64);
    for (unsigned b = 0; b < 4; b++)
        codes[b] = _mm512_and_si512(_mm512_srli_epi32(four, 2 * b), threes);
}

/* As unpack_2bit. The third bit of plane p = 2h + i and pair b is bit 4i + b of plane h. */
QSF_FORCED_INLINE void unpack_3bit(const unsigned char *bytes, size_t p, __m512i *codes)
{
    const __m512i fours = _mm512_set1_epi8(4);
    const __m512i thirds = load64(bytes + 256 + p / 2 * 64);
    unpack_2bit(bytes, p, codes);
    for (unsigned b = 0; b < 4; b++) {
        const unsigned at = (p % 2 == 0 ? 0 : 4) + b;
        const __m512i third =
            at < 2 ? _mm512_slli_epi32(thirds, 2 - at) : _mm512_srli_epi32(thirds, at - 2);
        /* codes | (third & fours) */
        codes[b] = _mm512_ternarylogic_epi32(codes[b], third, fours, 0xF8);
    }
}

/* 3 * bytes mod 256: the remaining fractions after the next digit in base 3 */
QSF_FORCED_INLINE __m512i after_trit(__m512i bytes)
{
    return _mm512_add_epi8(bytes, _mm512_add_epi8(bytes, bytes));
}

/* The next digit, bytes * 3 >> 8: 1 from 86 on, 2 from 171 on. */
QSF_FORCED_INLINE __m512i trit_of(__m512i bytes)
{
    const __m512i ones = _mm512_set1_epi8(1);
    const __m512i from86 = _mm512_subs_epu8(bytes, _mm512_set1_epi8(85));
    const __m512i from171 = _mm512_subs_epu8(bytes, _mm512_set1_epi8((char)170));
    return _mm512_add_epi8(_mm512_min_epu8(from86, ones), _mm512_min_epu8(from171, ones));
}

/* bytes [16], a row each, times 1, 3, 9 and 27 mod 256: the next digits of each are those of
 * columns 60 .. 63. */
QSF_FORCED_INLINE __m512i last_trits(const unsigned char *bytes)
{
    const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)bytes));
    const __m512i twice = _mm512_or_si512(words, _mm512_slli_epi32(words, 16));
    const __m512i even = _mm512_mullo_epi16(twice, _mm512_set1_epi32(1 | 9 << 16));
    const __m512i odd = _mm512_mullo_epi16(twice, _mm512_set1_epi32(3 | 27 << 16));
    /* the low bytes of even, and those of odd above them */
    return _mm512_ternarylogic_epi32(even, _mm512_slli_epi32(odd, 8), _mm512_set1_epi16(255), 0xE4);
}

/* Groups 5 p .. 5 p + 4, or the last one */
QSF_FORCED_INLINE void unpack_dense(const unsigned char *bytes, size_t p, __m512i *codes)
{
    if (p == 3) {
        codes[0] = trit_of(last_trits(bytes + 192));
        return;
    }
    __m512i left = load64(bytes + p * 64);
    for (size_t k = 0; k < 5; k++) {
        codes[k] = trit_of(left);
        left = after_trit(left);
    }
}

/* How the groups of a tile are stored: group n_planes * k + p, k = 0 .. n_in_plane - 1, is in plane
 * p; for dense ternary, group 5 p + k. */
typedef struct planes {
    size_t n_planes;
    size_t n_in_plane;
} planes;

QSF_FORCED_INLINE planes planes_of(qsf_codes codes)
{
    if (codes == QSF_CODES_8BIT)
        return (planes){16, 1};
    if (qsf_are_nibbles(codes))
        return (planes){8, 2};
    return codes == QSF_CODES_TRITS ? (planes){4, 5} : (planes){4, 4};
}

/* Returns the k-th group of columns in plane p; 16 or more: none. */
QSF_FORCED_INLINE size_t group_of(qsf_codes codes, size_t p, size_t k)
{
    return codes == QSF_CODES_TRITS ? 5 * p + k : planes_of(codes).n_planes * k + p;
}

/* out [5] = codes of the groups in plane p, 16 rows of 4 columns, a byte each; of E2M1 values + 12.
 * bytes: the codes of a tile */
QSF_FORCED_INLINE void unpack_plane(qsf_codes codes, const unsigned char *bytes, size_t p,
                                    __m512i *out)
{
    if (codes == QSF_CODES_8BIT)
        out[0] = load64(bytes + p * 64);
    else if (qsf_are_nibbles(codes))
        unpack_nibbles(codes, bytes, p, out);
    else if (codes == QSF_CODES_3BIT)
        unpack_3bit(bytes, p, out);
    else if (codes == QSF_CODES_TRITS)
        unpack_dense(bytes, p, out);
    else
        unpack_2bit(bytes, p, out);
}

/* codes [16 groups, 16 rows, 4]: factor * code - zero; a literal 0 costs nothing */
QSF_FORCED_INLINE void unpack_scaled(qsf_form form, const unsigned char *tile, int32_t zero,
                                     unsigned char *codes)
{
    const planes layout = planes_of(form.codes);
    for (size_t p = 0; p < layout.n_planes; p++) {
        __m512i code[5];
        unpack_plane(form.codes, tile + qsf_codes_off(form), p, code);
        for (size_t k = 0; k < layout.n_in_plane; k++) {
            const size_t g = group_of(form.codes, p, k);
            if (form.factor == 2)
                code[k] = _mm512_add_epi8(code[k], code[k]);
            if (zero != 0)
                code[k] = _mm512_sub_epi8(code[k], _mm512_set1_epi8((char)zero));
            if (g < QSF_TILE_GROUPS)
                _mm512_storeu_si512((void *)(codes + g * 64), code[k]);
        }
    }
}

/* Values of row r of 16 dims from their dots, whose codes have zero point 128 */
QSF_FORCED_INLINE lanes values_of(__m512i dot, const qsf_value_weights *w, size_t r)
{
    const __m512i zero = _mm512_set1_epi32(128 * w->fine_sum[r]);
    return lanes_fma(_mm512_cvtepi32_ps(_mm512_sub_epi32(dot, zero)), lanes_set(w->factor[r]),
                     lanes_set(w->start[r]));
}
