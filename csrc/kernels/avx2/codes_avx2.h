/* codes_avx2.h - the codes of a tile in 256-bit registers: 8 rows x 4 columns each.
 *
 * Included inside a target region, after <immintrin.h>, by files that provide
 *   add_codes(codes, q, q_stride, n_tokens, sum)
 *       adds codes * q to sum [n_tokens], q [n_tokens, q_stride] of those four columns
 *   groups_per_sum(codes)
 *       groups of columns of a tile whose sum cannot overflow
 *   sums_end(sum, n_tokens, factor, half, is_first, dot)
 *       adds factor * the sums [n_tokens] to a half of each dot, or sets it (is_first)
 * Half of a tile is rows 0..7 or 8..15: bytes 0..31 or 32..63 of each 64.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* sum += addend, in this order. Integer sums may be reordered, so compilers would keep every
 * product in memory and add them at the end. */
#define ADD_IN_ORDER(instruction, sum, addend) \
    __asm__(instruction " %1, %0, %0" : "+x"(sum) : "x"(addend))

#define QSF_TILE_GROUPS (QSF_BLOCK / 4) /* groups of four columns */

/* Rows 0..7 and 8..15 */
typedef struct dots {
    __m256i half[2];
} dots;

QSF_FORCED_INLINE void add_codes(__m256i codes, const int8_t *q, size_t q_stride, size_t n_tokens,
                                 __m256i *sum);
QSF_FORCED_INLINE size_t groups_per_sum(qsf_codes codes);
QSF_FORCED_INLINE void sums_end(const __m256i *sum, size_t n_tokens, short factor, size_t half,
                                bool is_first, dots *dot);

QSF_FORCED_INLINE __m256i load32(const unsigned char *p)
{
    return _mm256_loadu_si256((const void *)p);
}

/* Activations q [4] in each of 8 rows */
QSF_FORCED_INLINE __m256i broadcast4(const void *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm256_set1_epi32(four);
}

/* row [n_tokens]: addresses in q [n_tokens, q_stride]. The empty asm hides them: otherwise gcc
 * keeps an address for each group of columns in a register, and has too few registers. */
QSF_FORCED_INLINE void rows_of(const int8_t *q, size_t q_stride, size_t n_tokens,
                               const int8_t **row)
{
    for (size_t t = 0; t < n_tokens; t++) {
        row[t] = q + t * q_stride;
        __asm__("" : "+r"(row[t]));
    }
}

/* How the groups of columns are stored: n_planes planes of 64 bytes with n_codes codes in a byte;
 * code k of plane p belongs to group p * plane_step + k * code_step. The last four columns of dense
 * ternary are not included. */
typedef struct code_layout {
    size_t n_planes;
    size_t n_codes;
    size_t plane_step;
    size_t code_step;
} code_layout;

QSF_FORCED_INLINE code_layout layout_of(qsf_codes codes)
{
    if (qsf_are_nibbles(codes))
        return (code_layout){8, 2, 1, 8};
    if (codes == QSF_CODES_TRITS)
        return (code_layout){3, 5, 5, 1};
    return (code_layout){4, 4, 1, 4};
}

/* Decodes the five digits of each byte: code [5]. Bytes are in the high halves of 16-bit words,
 * even and odd ones separately: the high part of the product with 9 is two digits, 3 * t0 + t1 <=
 * 8, the low part is the remaining fraction. */
QSF_FORCED_INLINE void load_trits(__m256i bytes, __m256i *code)
{
    const __m256i high_bytes = _mm256_set1_epi16(-256);
    const __m256i first = _mm256_setr_epi8(0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                           1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0);
    const __m256i second = _mm256_setr_epi8(0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2,
                                            0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0);
    __m256i even = _mm256_slli_epi16(bytes, 8);
    __m256i odd = _mm256_and_si256(bytes, high_bytes);
    for (size_t k = 0; k < 5; k += 2) {
        const short power = k < 4 ? 9 : 3;
        const __m256i of_even = _mm256_mulhi_epu16(even, _mm256_set1_epi16(power));
        const __m256i of_odd = _mm256_mulhi_epu16(odd, _mm256_set1_epi16((short)(256 * power)));
        const __m256i digits = _mm256_or_si256(of_even, _mm256_and_si256(of_odd, high_bytes));
        if (k == 4) {
            code[4] = digits;
            return;
        }
        code[k] = _mm256_shuffle_epi8(first, digits);
        code[k + 1] = _mm256_shuffle_epi8(second, digits);
        even = _mm256_mullo_epi16(even, _mm256_set1_epi16(9));
        odd = _mm256_mullo_epi16(odd, _mm256_set1_epi16(9));
    }
}

/* Which part of a level of IQ4: a digit in base 16, for sums of 16 bits, or all of it */
typedef enum digit { DIGIT_LOW, DIGIT_HIGH, DIGITS_ALL } digit;

/* What codes stand for: of E2M1 the values + 12, of LEVELS and IQ4 the levels; others as they are
 */
QSF_FORCED_INLINE __m256i looked_up(qsf_codes kind, digit which, __m256i codes)
{
    static const uint8_t iq4_levels[] = {QSF_IQ4_LEVELS};
    __m128i values = kind == QSF_CODES_E2M1  ? _mm_setr_epi8(QSF_E2M1_LEVELS)
                     : kind == QSF_CODES_IQ4 ? _mm_loadu_si128((const void *)iq4_levels)
                                             : _mm_setr_epi8(QSF_LEVELS);
    if (kind == QSF_CODES_4BIT || !qsf_are_nibbles(kind))
        return codes;
    if (which == DIGIT_HIGH)
        values = _mm_srli_epi16(values, 4);
    if (which != DIGITS_ALL)
        values = _mm_and_si128(values, _mm_set1_epi8(15));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), codes);
}

/* Loads the codes of plane p of half a tile, of LEVELS the levels: code [n_codes]. Literal is_odd:
 * p % 2. */
QSF_FORCED_INLINE void load_plane(qsf_codes kind, const unsigned char *half, size_t p, bool is_odd,
                                  __m256i *code)
{
    const __m256i bytes = load32(half + p * 64);
    if (qsf_are_nibbles(kind)) {
        const __m256i mask = _mm256_set1_epi8(15);
        code[0] = looked_up(kind, DIGITS_ALL, _mm256_and_si256(bytes, mask));
        code[1] = looked_up(kind, DIGITS_ALL, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask));
        return;
    }
    if (kind == QSF_CODES_TRITS) {
        load_trits(bytes, code);
        return;
    }
    const __m256i mask = _mm256_set1_epi8(3);
    code[0] = _mm256_and_si256(bytes, mask);
    code[1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 2), mask);
    code[2] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    code[3] = _mm256_and_si256(_mm256_srli_epi16(bytes, 6), mask);
    if (kind != QSF_CODES_3BIT)
        return;
    /* Bit 4 * is_odd + k is the third bit of code k. */
    __m256i third = load32(half + 256 + p / 2 * 64);
    if (is_odd)
        third = _mm256_srli_epi16(third, 4);
    const __m256i fours = _mm256_set1_epi8(4);
    code[0] = _mm256_or_si256(code[0], _mm256_and_si256(_mm256_slli_epi16(third, 2), fours));
    code[1] = _mm256_or_si256(code[1], _mm256_and_si256(_mm256_slli_epi16(third, 1), fours));
    code[2] = _mm256_or_si256(code[2], _mm256_and_si256(third, fours));
    code[3] = _mm256_or_si256(code[3], _mm256_and_si256(_mm256_srli_epi16(third, 1), fours));
}

/* Codes of group g (a literal) of half a tile of a type with parts, looked up */
QSF_FORCED_INLINE __m256i load_group(qsf_codes kind, digit which, const unsigned char *half,
                                     size_t g)
{
    const qsf_code_place at = qsf_code_place_of(kind, g);
    const __m256i low =
        _mm256_and_si256(_mm256_srli_epi16(load32(half + 64 * at.plane), (int)at.shift),
                         _mm256_set1_epi8((char)at.mask));
    if (at.high_mask == 0)
        return looked_up(kind, which, low);
    const __m256i high = load32(half + 64 * at.high_plane);
    const __m256i placed = at.high_shift < 4 ? _mm256_slli_epi16(high, 4 - (int)at.high_shift)
                                             : _mm256_srli_epi16(high, (int)at.high_shift - 4);
    return _mm256_or_si256(low, _mm256_and_si256(placed, _mm256_set1_epi8((char)at.high_mask)));
}

/* Adds groups begin .. end - 1 of n_halves halves of a tile of a type with parts, as add_planes; q
 * of the block */
QSF_FORCED_INLINE void add_part_groups(qsf_codes kind, digit which, const unsigned char *half,
                                       size_t n_halves, size_t begin, size_t end, const int8_t *q,
                                       size_t q_stride, size_t n_tokens,
                                       __m256i (*sum)[QSF_GROUP_TOKENS])
{
    QSF_UNROLL(8)
    for (size_t g = begin; g < end; g++)
        for (size_t h = 0; h < n_halves; h++)
            add_codes(load_group(kind, which, half + 32 * h, g), q + 4 * g, q_stride, n_tokens,
                      sum[h]);
}

/* Loads the last four columns of half a dense ternary tile, one byte per row. */
QSF_FORCED_INLINE __m256i load_dense_end(const unsigned char *codes, size_t half_idx)
{
    const __m256i rows =
        _mm256_broadcastsi128_si256(_mm_loadl_epi64((const void *)(codes + 192 + 8 * half_idx)));
    const __m256i each4 = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4,
                                           4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    const __m256i bytes = _mm256_shuffle_epi8(rows, each4);
    /* Times 1, 3, 9, 27 mod 256: even bytes in place, odd ones 8 bits higher. */
    const __m256i low_bytes = _mm256_set1_epi16(255);
    const __m256i even =
        _mm256_mullo_epi16(_mm256_and_si256(bytes, low_bytes), _mm256_set1_epi32(1 | 9 << 16));
    const __m256i odd =
        _mm256_mullo_epi16(_mm256_andnot_si256(low_bytes, bytes), _mm256_set1_epi32(3 | 27 << 16));
    const __m256i last = _mm256_or_si256(_mm256_and_si256(even, low_bytes), odd);
    __m256i code[5];
    load_trits(last, code);
    return code[0];
}

/* Adds the groups of planes begin .. begin + n_planes - 1 of n_halves halves of a tile, of which
 * `half` is the first: sum [n_halves, n_tokens]. */
QSF_FORCED_INLINE void add_planes(qsf_codes kind, const unsigned char *half, size_t n_halves,
                                  size_t begin, size_t n_planes, const int8_t *q, size_t q_stride,
                                  size_t n_tokens, __m256i (*sum)[QSF_GROUP_TOKENS])
{
    const code_layout at = layout_of(kind);
    QSF_UNROLL(8)
    for (size_t p = begin; p < begin + n_planes; p++) {
        __m256i code[2][5];
        for (size_t h = 0; h < n_halves; h++)
            load_plane(kind, half + 32 * h, p, p % 2 == 1, code[h]);
        for (size_t k = 0; k < at.n_codes; k++)
            for (size_t h = 0; h < n_halves; h++)
                add_codes(code[h][k], q + 4 * (p * at.plane_step + k * at.code_step), q_stride,
                          n_tokens, sum[h]);
    }
}

/* to [2, 16, 32]: the codes of each group of columns, of one half and then the other */
QSF_FORCED_INLINE void unpack_tile(qsf_form form, const unsigned char *tile, unsigned char *to)
{
    const code_layout at = layout_of(form.codes);
    const unsigned char *const codes = tile + qsf_codes_off(form);
    for (size_t h = 0; h < 2; h++) {
        unsigned char *const to_half = to + h * QSF_TILE_GROUPS * 32;
        for (size_t p = 0; p < at.n_planes; p++) {
            __m256i code[5];
            load_plane(form.codes, codes + 32 * h, p, p % 2 == 1, code);
            for (size_t k = 0; k < at.n_codes; k++)
                _mm256_storeu_si256((void *)(to_half + 32 * (p * at.plane_step + k * at.code_step)),
                                    code[k]);
        }
        if (form.codes == QSF_CODES_TRITS)
            _mm256_storeu_si256((void *)(to_half + 32 * 15), load_dense_end(codes, h));
    }
}

/* ---- sums of products ---- */

QSF_FORCED_INLINE void sums_begin(size_t n_tokens, __m256i *sum)
{
    for (size_t t = 0; t < n_tokens; t++)
        sum[t] = _mm256_setzero_si256();
}

/* Halves of a tile that are multiplied at a time, with one load of activations: the sums of both
 * fit the registers for few tokens. */
QSF_FORCED_INLINE size_t halves_of(size_t n_tokens)
{
    return n_tokens <= QSF_PANEL_TOKENS ? 2 : 1;
}

/* dot [n_tokens] = exact sums of code * q, q [n_tokens, q_stride] */
QSF_FORCED_INLINE void dot_tile(qsf_form form, const unsigned char *tile, const int8_t *q,
                                size_t q_stride, size_t n_tokens, dots *dot)
{
    const code_layout at = layout_of(form.codes);
    const unsigned char *const codes = tile + qsf_codes_off(form);
    const size_t n_planes = at.n_planes * groups_per_sum(form.codes) / QSF_TILE_GROUPS;
    const size_t n_halves = halves_of(n_tokens);
    for (size_t h0 = 0; h0 < 2; h0 += n_halves)
        for (size_t p = 0; p < at.n_planes; p += n_planes) {
            __m256i sum[2][QSF_GROUP_TOKENS];
            for (size_t h = 0; h < n_halves; h++)
                sums_begin(n_tokens, sum[h]);
            add_planes(form.codes, codes + 32 * h0, n_halves, p, n_planes, q, q_stride, n_tokens,
                       sum);
            for (size_t h = 0; h < n_halves; h++) {
                if (form.codes == QSF_CODES_TRITS)
                    add_codes(load_dense_end(codes, h0 + h), q + 60, q_stride, n_tokens, sum[h]);
                sums_end(sum[h], n_tokens, 1, h0 + h, p == 0, dot);
            }
        }
}

QSF_FORCED_INLINE dots dots_add(dots a, dots b)
{
    return (dots){{_mm256_add_epi32(a.half[0], b.half[0]), _mm256_add_epi32(a.half[1], b.half[1])}};
}

QSF_FORCED_INLINE lanes dots_to_lanes(dots d, int32_t factor, int32_t start)
{
    const __m256i first = _mm256_set1_epi32(start);
    if (factor == 2)
        d = dots_add(d, d);
    return (lanes){_mm256_cvtepi32_ps(_mm256_add_epi32(d.half[0], first)),
                   _mm256_cvtepi32_ps(_mm256_add_epi32(d.half[1], first))};
}
