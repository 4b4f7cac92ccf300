/* matmul_avx2.c - matrix products with AVX2: two registers hold the rows, 8 and 8.
 *
 * vpmaddubsw multiplies unsigned by signed bytes and adds neighbours to 16 bits, which
 * must not saturate; vpmaddwd with ones then adds neighbours to 32 bits: the row sums.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

#include <immintrin.h>

#define QSF_NAME(op) op##_avx2
#define QSF_FLOAT_SUMS 4 /* in 8 of 16 registers */
#define QSF_GROUP_TOKENS 8
#define QSF_UNPACKED_TOKENS 8
#define QSF_UNPACKED_BYTES 1024
#define QSF_PANEL_TOKENS 4 /* eight sums, two registers of codes, three of products */

QSF_TARGET_BEGIN("avx2,fma,f16c")

#include "kernels/avx2/lanes_avx2.h"

#include "kernels/matmul_float_tmpl.h"

#include "kernels/avx2/codes_avx2.h"

/* sum [n_tokens]: 16-bit sums of two columns */
QSF_FORCED_INLINE void add_codes(__m256i codes, const int8_t *q, size_t q_stride, size_t n_tokens,
                                 __m256i *sum)
{
    for (size_t t = 0; t < n_tokens; t++) {
        const __m256i pairs = _mm256_maddubs_epi16(codes, broadcast4(q + t * q_stride));
        ADD_IN_ORDER("vpaddw", sum[t], pairs);
    }
}

/* Returns the number of groups of columns whose 16-bit sum cannot overflow: g groups of codes up
 * to c reach at most g * 2 * c * 127, which is 30480 for 8 groups of 4 bits, 28448 for 16 groups of
 * 3 bits and 30480 for 2 groups of levels up to 60. */
QSF_FORCED_INLINE size_t groups_per_sum(qsf_codes codes)
{
    return codes == QSF_CODES_4BIT ? 8 : codes == QSF_CODES_LEVELS ? 2 : 16;
}

/* Widens the 16-bit sums into a half of each dot. */
QSF_FORCED_INLINE void sums_end(const __m256i *sum, size_t n_tokens, short factor, size_t half,
                                bool is_first, dots *dot)
{
    const __m256i factors = _mm256_set1_epi16(factor);
    for (size_t t = 0; t < n_tokens; t++) {
        const __m256i wide = _mm256_madd_epi16(sum[t], factors);
        dot[t].half[half] = is_first ? wide : _mm256_add_epi32(dot[t].half[half], wide);
    }
}

/* Groups of a part whose 16-bit sum cannot overflow: 8 * 2 * 15 * 127 = 30480 (of IQ4 each digit),
 * 4 of 5 bits 31496, 2 of 6 bits 32004, 4 of values of E2M1 up to 24 24384. */
QSF_FORCED_INLINE size_t part_groups_per_sum(qsf_codes codes)
{
    return codes == QSF_CODES_4BIT || codes == QSF_CODES_IQ4 ? 8 : codes == QSF_CODES_6BIT ? 2 : 4;
}

QSF_FORCED_INLINE void dot_part(qsf_form form, const unsigned char *codes, size_t part,
                                const int8_t *q, size_t q_stride, size_t n_tokens, dots *dot)
{
    const size_t n = form.scale_cols / 4;
    const size_t n_groups = part_groups_per_sum(form.codes);
    const size_t n_halves = halves_of(n_tokens);
    const size_t n_digits = form.codes == QSF_CODES_IQ4 ? 2 : 1;
    for (size_t h0 = 0; h0 < 2; h0 += n_halves)
        QSF_UNROLL(2)
    for (size_t g = part * n; g < (part + 1) * n; g += n_groups)
        QSF_UNROLL(2)
    for (size_t i = 0; i < n_digits; i++) {
        __m256i sum[2][QSF_GROUP_TOKENS];
        for (size_t h = 0; h < n_halves; h++)
            sums_begin(n_tokens, sum[h]);
        add_part_groups(form.codes, n_digits == 1 ? DIGITS_ALL : (digit)i, codes + 32 * h0,
                        n_halves, g, g + n_groups, q, q_stride, n_tokens, sum);
        for (size_t h = 0; h < n_halves; h++)
            sums_end(sum[h], n_tokens, i == 0 ? 1 : 16, h0 + h, g == part * n && i == 0, dot);
    }
}

/* As dot_tile, for a tile that unpack_tile() has unpacked: one load of activations for both halves.
 */
QSF_FORCED_INLINE void dot_unpacked(qsf_codes kind, const unsigned char *codes, const int8_t *q,
                                    size_t q_stride, size_t n_tokens, dots *dot)
{
    const size_t n_groups = groups_per_sum(kind);
    const int8_t *row[QSF_PANEL_TOKENS];
    rows_of(q, q_stride, n_tokens, row);
    QSF_UNROLL(2)
    for (size_t g0 = 0; g0 < QSF_TILE_GROUPS; g0 += n_groups) {
        __m256i sum[2][QSF_PANEL_TOKENS];
        sums_begin(n_tokens, sum[0]);
        sums_begin(n_tokens, sum[1]);
        QSF_UNROLL(16)
        for (size_t g = g0; g < g0 + n_groups; g++) {
            const __m256i low = load32(codes + g * 32);
            const __m256i high = load32(codes + (QSF_TILE_GROUPS + g) * 32);
            for (size_t t = 0; t < n_tokens; t++) {
                const __m256i four = broadcast4(row[t] + 4 * g);
                const __m256i low_pairs = _mm256_maddubs_epi16(low, four);
                const __m256i high_pairs = _mm256_maddubs_epi16(high, four);
                ADD_IN_ORDER("vpaddw", sum[0][t], low_pairs);
                ADD_IN_ORDER("vpaddw", sum[1][t], high_pairs);
            }
        }
        sums_end(sum[0], n_tokens, 1, 0, g0 == 0, dot);
        sums_end(sum[1], n_tokens, 1, 1, g0 == 0, dot);
    }
}

/* The 16-bit activations 256 * q + q_low of a block, columns 0, 2, 1, 3 of each four:
 * fine [64] */
QSF_FORCED_INLINE void join_planes(const int8_t *q, const int8_t *q_low, int16_t *fine)
{
    const __m256i even_first =
        _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6,
                         7, 8, 9, 12, 13, 10, 11, 14, 15);
    for (size_t c = 0; c < QSF_BLOCK; c += 16) {
        const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(q + c)));
        const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(q_low + c)));
        const __m256i both = _mm256_add_epi16(_mm256_slli_epi16(high, 8), low);
        _mm256_storeu_si256((void *)(fine + c), _mm256_shuffle_epi8(both, even_first));
    }
}

/* A block of 16-bit activations */
typedef struct fine_acts {
    int16_t fine[QSF_GROUP_TOKENS][QSF_BLOCK];
} fine_acts;

QSF_FORCED_INLINE void load_fine(const int8_t *q, const int8_t *q_low, size_t q_stride,
                                 size_t n_tokens, fine_acts *x)
{
    for (size_t t = 0; t < n_tokens; t++)
        join_planes(q + t * q_stride, q_low + t * q_stride, x->fine[t]);
}

/* dot [n_tokens] = exact sums of code * x of the codes of an 8-bit tile. They are widened to 16
 * bits in place, as columns 0, 2 and 1, 3. */
QSF_FORCED_INLINE void dot_fine(const unsigned char *bytes, size_t first, size_t n,
                                const fine_acts *x, size_t n_tokens, dots *dot)
{
    const __m256i low_bytes = _mm256_set1_epi16(255);
    const size_t n_halves = n_tokens <= 2 ? 2 : 1; /* of the registers two hold parts of codes */
    const int16_t *row[QSF_GROUP_TOKENS];
    for (size_t t = 0; t < n_tokens; t++) {
        row[t] = x->fine[t];
        if (n_halves == 2) /* otherwise gcc broadcasts from registers, which is slower */
            __asm__("" : "+r"(row[t]));
    }
    for (size_t h0 = 0; h0 < 2; h0 += n_halves) {
        __m256i sum[2][QSF_GROUP_TOKENS];
        for (size_t h = 0; h < n_halves; h++)
            sums_begin(n_tokens, sum[h]);
        for (size_t g = first; g < first + n; g++)
            for (size_t h = 0; h < n_halves; h++) {
                const __m256i codes = load32(bytes + g * 64 + (h0 + h) * 32);
                const __m256i even = _mm256_and_si256(codes, low_bytes);
                const __m256i odd = _mm256_srli_epi16(codes, 8);
                for (size_t t = 0; t < n_tokens; t++) {
                    const __m256i by_even = _mm256_madd_epi16(even, broadcast4(row[t] + 4 * g));
                    const __m256i by_odd = _mm256_madd_epi16(odd, broadcast4(row[t] + 4 * g + 2));
                    ADD_IN_ORDER("vpaddd", sum[h][t], by_even);
                    ADD_IN_ORDER("vpaddd", sum[h][t], by_odd);
                }
            }
        for (size_t h = 0; h < n_halves; h++)
            for (size_t t = 0; t < n_tokens; t++)
                dot[t].half[h0 + h] = sum[h][t];
    }
}

#include "kernels/matmul_int_tmpl.h"

QSF_TARGET_END

void qsf_kernels_fill_avx2(qsf_kernels *k)
{
    fill_matmul_int_avx2(k);
    fill_matmul_float_avx2(k);
    qsf_vecops_fill_avx2(k);
}

#endif
