/* dot_tile_neon.h - unpacks the tiles of the low-bit types and multiplies them, with NEON.
 *
 * A register holds the codes of 4 rows x 4 columns: quarter i = 0..3 is the rows 4i .. 4i + 3,
 * group g = 0..15 the columns 4g .. 4g + 3. Codes are below 64, so they are signed bytes as
 * well as unsigned ones. The including file provides
 *   partial                a type: the sums of one quarter, in any form
 *   partial_zero()
 *   partial_add(partial sums, int8x16_t codes, int8x16_t q, size_t lane)
 *                          adds codes * q, q being bytes 4 lane .. 4 lane + 3, for every row
 *   partial_rows(partial)  the sums of the four rows
 *   LEVEL_PAIRS            pairs of groups of LEVELS, and groups of IQ4, whose sums fit a partial:
 *                          2, or 8 (all)
 * Arguments called literals are constants after inlining: instructions contain them.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>

/* Sums indexed by a loop stay in registers only if the loop is unrolled. */
#define QSF_UNROLL_8 _Pragma("GCC unroll 8")
#define QSF_ROLLED _Pragma("GCC unroll 1")

/* Without this, gcc loads and unpacks a whole tile first and runs out of registers. It generates no
 * instruction; the compiler moves no load across it. */
static inline void keep_loads_here(void)
{
    atomic_signal_fence(memory_order_seq_cst);
}

/* The 16 row sums of a tile and a token */
typedef struct dots {
    int32x4_t quarter[4];
} dots;

/* The codes of groups g and g + 8 */
typedef struct code_pair {
    int8x16_t at[2];
} code_pair;

QSF_FORCED_INLINE code_pair code_pair_of(uint8x16_t first, uint8x16_t second)
{
    return (code_pair){{vreinterpretq_s8_u8(first), vreinterpretq_s8_u8(second)}};
}

QSF_FORCED_INLINE code_pair unpack_4bit(const unsigned char *codes, size_t quarter, size_t g)
{
    const uint8x16_t bytes = vld1q_u8(codes + 64 * g + 16 * quarter);
    return code_pair_of(vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4));
}

/* The levels of codes of LEVELS */
QSF_FORCED_INLINE code_pair levels_of(code_pair codes)
{
    static const uint8_t values[] = {QSF_LEVELS};
    const uint8x16_t levels = vld1q_u8(values);
    return code_pair_of(vqtbl1q_u8(levels, vreinterpretq_u8_s8(codes.at[0])),
                        vqtbl1q_u8(levels, vreinterpretq_u8_s8(codes.at[1])));
}

/* Columns 4(p + 4b) + j are bits 2b, 2b + 1 of plane p: groups g and g + 8 lie in one byte. */
QSF_FORCED_INLINE code_pair unpack_2bit(const unsigned char *codes, size_t quarter, size_t g)
{
    const uint8x16_t threes = vdupq_n_u8(3);
    const uint8x16_t bytes = vld1q_u8(codes + 64 * (g % 4) + 16 * quarter);
    if (g < 4)
        return code_pair_of(vandq_u8(bytes, threes), vandq_u8(vshrq_n_u8(bytes, 4), threes));
    return code_pair_of(vandq_u8(vshrq_n_u8(bytes, 2), threes), vshrq_n_u8(bytes, 6));
}

/* The low bits of both groups stay in place, as nibbles. Their third bits are two of the four in a
 * nibble of the last planes: a table moves them to bits 2 and 6. */
QSF_FORCED_INLINE code_pair unpack_3bit(const unsigned char *codes, size_t quarter, size_t g)
{
    static const uint8_t thirds[2][16] = {
        {0, 4, 0, 4, 64, 68, 64, 68, 0, 4, 0, 4, 64, 68, 64, 68},
        {0, 0, 4, 4, 0, 0, 4, 4, 64, 64, 68, 68, 64, 64, 68, 68},
    };
    const size_t p = g % 4;
    const size_t b = g / 4;
    const uint8x16_t nibbles = vdupq_n_u8(15);
    const uint8x16_t low = vld1q_u8(codes + 64 * p + 16 * quarter);
    const uint8x16_t high = vld1q_u8(codes + 256 + 64 * (p / 2) + 16 * quarter);
    const uint8x16_t nibble = p % 2 == 0 ? vandq_u8(high, nibbles) : vshrq_n_u8(high, 4);
    const uint8x16_t low_bits = vandq_u8(b == 0 ? low : vshrq_n_u8(low, 2), vdupq_n_u8(0x33));
    const uint8x16_t both = vorrq_u8(low_bits, vqtbl1q_u8(vld1q_u8(thirds[b]), nibble));
    return code_pair_of(vandq_u8(both, nibbles), vshrq_n_u8(both, 4));
}

/* Unpacks group g of a dense ternary tile. The digit of v = byte * 3^k mod 256 is 3v >> 8, which
 * equals (v + v / 2) / 2 >> 6: the bit that v / 2 drops does not matter, because 3v is no multiple
 * of 256 if v is odd. */
QSF_FORCED_INLINE uint8x16_t unpack_trit(const unsigned char *codes, size_t quarter, size_t g)
{
    static const uint8_t powers[] = {1, 3, 9, 27, 81};
    static const uint8_t each_four_times[] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    static const uint8_t by_column[] = {1, 3, 9, 27, 1, 3, 9, 27, 1, 3, 9, 27, 1, 3, 9, 27};
    uint8x16_t v;
    if (g < 15) {
        const uint8x16_t bytes = vld1q_u8(codes + 64 * (g / 5) + 16 * quarter);
        v = g % 5 == 0 ? bytes : vmulq_u8(bytes, vdupq_n_u8(powers[g % 5]));
    } else {
        const uint8x16_t idx =
            vaddq_u8(vld1q_u8(each_four_times), vdupq_n_u8((uint8_t)(4 * quarter)));
        v = vmulq_u8(vqtbl1q_u8(vld1q_u8(codes + 192), idx), vld1q_u8(by_column));
    }
    return vshrq_n_u8(vhaddq_u8(v, vshrq_n_u8(v, 1)), 6);
}

/* Groups g (a literal below 8) and g + 8 of a quarter */
QSF_FORCED_INLINE code_pair unpack_pair(qsf_form form, const unsigned char *tile, size_t quarter,
                                        size_t g)
{
    const unsigned char *const codes = tile + qsf_codes_off(form);
    if (form.codes == QSF_CODES_4BIT)
        return unpack_4bit(codes, quarter, g);
    if (form.codes == QSF_CODES_LEVELS)
        return levels_of(unpack_4bit(codes, quarter, g));
    if (form.codes == QSF_CODES_3BIT)
        return unpack_3bit(codes, quarter, g);
    if (form.codes == QSF_CODES_TRITS)
        return code_pair_of(unpack_trit(codes, quarter, g), unpack_trit(codes, quarter, g + 8));
    return unpack_2bit(codes, quarter, g);
}

/* Adds groups g and g + 8 of n_quarters quarters: acc [n_tokens, n_quarters], q [n_tokens,
 * q_stride]; g and the counts literals. */
QSF_FORCED_INLINE void add_groups(qsf_form form, const unsigned char *tile, const int8_t *q,
                                  size_t q_stride, size_t n_tokens, size_t first_quarter,
                                  size_t n_quarters, size_t g, partial *acc)
{
    code_pair codes[4];
    QSF_UNROLL_8
    for (size_t i = 0; i < n_quarters; i++)
        codes[i] = unpack_pair(form, tile, first_quarter + i, g);
    QSF_UNROLL_8
    for (size_t t = 0; t < n_tokens; t++) {
        QSF_UNROLL_8
        for (size_t half = 0; half < 2; half++) {
            const int8x16_t q16 = vld1q_s8(q + t * q_stride + 32 * half + g / 4 * 16);
            QSF_UNROLL_8
            for (size_t i = 0; i < n_quarters; i++) {
                partial *const sums = acc + t * n_quarters + i;
                *sums = partial_add(*sums, codes[i].at[half], q16, g % 4);
            }
        }
    }
    if (n_quarters > 1)
        keep_loads_here();
}

/* Adds the rows of acc [n_tokens, n_quarters] to the dots, or sets these (is_first). */
QSF_FORCED_INLINE void add_rows(const partial *acc, size_t n_tokens, size_t first_quarter,
                                size_t n_quarters, bool is_first, dots *dot)
{
    QSF_UNROLL_8
    for (size_t t = 0; t < n_tokens; t++) {
        QSF_UNROLL_8
        for (size_t i = 0; i < n_quarters; i++) {
            int32x4_t *const rows = dot[t].quarter + first_quarter + i;
            const int32x4_t more = partial_rows(acc[t * n_quarters + i]);
            *rows = is_first ? more : vaddq_s32(*rows, more);
        }
    }
}

/* Computes the rows of n_quarters quarters of a tile. */
QSF_FORCED_INLINE void dot_quarters(qsf_form form, const unsigned char *tile, const int8_t *q,
                                    size_t q_stride, size_t n_tokens, size_t first_quarter,
                                    size_t n_quarters, dots *dot)
{
    const size_t n_pairs = form.codes == QSF_CODES_LEVELS ? LEVEL_PAIRS : 8;
    QSF_UNROLL_8
    for (size_t first = 0; first < 8; first += n_pairs) {
        partial acc[8];
        QSF_UNROLL_8
        for (size_t i = 0; i < n_tokens * n_quarters; i++)
            acc[i] = partial_zero();
        QSF_UNROLL_8
        for (size_t g = first; g < first + n_pairs; g++)
            add_groups(form, tile, q, q_stride, n_tokens, first_quarter, n_quarters, g, acc);
        add_rows(acc, n_tokens, first_quarter, n_quarters, first == 0, dot);
    }
}

/* dot [n_tokens] = exact sums of code * q, q [n_tokens, q_stride]. One or two tokens take the four
 * quarters together, so that there are enough independent sums; more tokens take one quarter after
 * the other, whose sums then fit the registers beside the codes. */
QSF_FORCED_INLINE void dot_tile(qsf_form form, const unsigned char *tile, const int8_t *q,
                                size_t q_stride, size_t n_tokens, dots *dot)
{
    const size_t n_quarters = n_tokens <= 2 ? 4 : 1;
    QSF_ROLLED
    for (size_t quarter = 0; quarter < 4; quarter += n_quarters)
        dot_quarters(form, tile, q, q_stride, n_tokens, quarter, n_quarters, dot);
}

/* Group g, a literal, of a quarter of a tile of a type with parts; of E2M1 and IQ4 the values */
QSF_FORCED_INLINE int8x16_t unpack_group(qsf_codes kind, const unsigned char *codes, size_t quarter,
                                         size_t g)
{
    static const int8_t values[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static const uint8_t iq4_levels[] = {QSF_IQ4_LEVELS};
    const qsf_code_place at = qsf_code_place_of(kind, g);
    const uint8x16_t bytes = vld1q_u8(codes + 64 * at.plane + 16 * quarter);
    const uint8x16_t mask = vdupq_n_u8((uint8_t)at.mask);
    const uint8x16_t low =
        at.shift == 4 && at.mask == 15
            ? vshrq_n_u8(bytes, 4)
            : vandq_u8(vshlq_u8(bytes, vdupq_n_s8((int8_t) - (int)at.shift)), mask);
    if (kind == QSF_CODES_E2M1)
        return vqtbl1q_s8(vld1q_s8(values), low);
    if (kind == QSF_CODES_IQ4) {
        const uint8x16_t signed_levels = veorq_u8(vld1q_u8(iq4_levels), vdupq_n_u8(128));
        return vreinterpretq_s8_u8(vqtbl1q_u8(signed_levels, low));
    }
    if (at.high_mask == 0)
        return vreinterpretq_s8_u8(low);
    const uint8x16_t high = vld1q_u8(codes + 64 * at.high_plane + 16 * quarter);
    const uint8x16_t placed = vshlq_u8(high, vdupq_n_s8((int8_t)(4 - (int)at.high_shift)));
    return vreinterpretq_s8_u8(vorrq_u8(low, vandq_u8(placed, vdupq_n_u8((uint8_t)at.high_mask))));
}

/* As dot_quarters for a part of a tile. At most 8 * 31 * 127 = 31496 or 4 * 63 * 127 = 32004 is
 * added to a sum, or 2 * 127 * 128 = 32512 of IQ4. */
QSF_FORCED_INLINE void dot_part_quarters(qsf_form form, const unsigned char *codes, size_t part,
                                         const int8_t *q, size_t q_stride, size_t n_tokens,
                                         size_t first_quarter, size_t n_quarters, dots *dot)
{
    const size_t n = form.scale_cols / 4;
    const size_t n_groups = form.codes == QSF_CODES_IQ4 ? LEVEL_PAIRS : n;
    QSF_UNROLL_8
    for (size_t first = part * n; first < (part + 1) * n; first += n_groups) {
        partial acc[8];
        QSF_UNROLL_8
        for (size_t i = 0; i < n_tokens * n_quarters; i++)
            acc[i] = partial_zero();
        QSF_UNROLL_8
        for (size_t g = first; g < first + n_groups; g++) {
            int8x16_t value[4];
            QSF_UNROLL_8
            for (size_t i = 0; i < n_quarters; i++)
                value[i] = unpack_group(form.codes, codes, first_quarter + i, g);
            QSF_UNROLL_8
            for (size_t t = 0; t < n_tokens; t++) {
                const int8x16_t q16 = vld1q_s8(q + t * q_stride + g / 4 * 16);
                QSF_UNROLL_8
                for (size_t i = 0; i < n_quarters; i++)
                    acc[t * n_quarters + i] =
                        partial_add(acc[t * n_quarters + i], value[i], q16, g % 4);
            }
            if (n_quarters > 1)
                keep_loads_here();
        }
        add_rows(acc, n_tokens, first_quarter, n_quarters, first == part * n, dot);
    }
}

#define QSF_SIGNED_VALUES

QSF_FORCED_INLINE void dot_part(qsf_form form, const unsigned char *codes, size_t part,
                                const int8_t *q, size_t q_stride, size_t n_tokens, dots *dot)
{
    const size_t n_quarters = n_tokens <= 2 ? 4 : 1;
    QSF_ROLLED
    for (size_t quarter = 0; quarter < 4; quarter += n_quarters)
        dot_part_quarters(form, codes, part, q, q_stride, n_tokens, quarter, n_quarters, dot);
}

QSF_FORCED_INLINE float32x4_t quarter_to_f32(int32x4_t sums, int32_t factor, int32x4_t start)
{
    return vcvtq_f32_s32(vaddq_s32(factor == 2 ? vaddq_s32(sums, sums) : sums, start));
}

QSF_FORCED_INLINE dots dots_add(dots a, dots b)
{
    QSF_UNROLL_8
    for (size_t i = 0; i < 4; i++)
        a.quarter[i] = vaddq_s32(a.quarter[i], b.quarter[i]);
    return a;
}

QSF_FORCED_INLINE lanes dots_to_lanes(dots d, int32_t factor, int32_t start)
{
    const int32x4_t start4 = vdupq_n_s32(start);
    return (lanes){
        quarter_to_f32(d.quarter[0], factor, start4), quarter_to_f32(d.quarter[1], factor, start4),
        quarter_to_f32(d.quarter[2], factor, start4), quarter_to_f32(d.quarter[3], factor, start4)};
}
