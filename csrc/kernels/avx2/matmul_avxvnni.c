/* matmul_avxvnni.c - matrix products with 256-bit vpdpbusd, for processors without AVX-512.
 *
 * As matmul_avx2.c, but one instruction adds products of four columns to 32-bit sums.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

#include <immintrin.h>

#define QSF_NAME(op) op##_avxvnni
#define QSF_GROUP_TOKENS 8
#define QSF_FINE_TOKENS 6 /* as QSF_PANEL_TOKENS */
#define QSF_UNPACKED_TOKENS 8
#define QSF_UNPACKED_BYTES 1024
#define QSF_PANEL_TOKENS 6 /* twelve sums, two registers of codes and one of activations */
#define QSF_PANEL_PREFETCH /* 4 % faster; AVX2 becomes 4 % slower */

QSF_TARGET_BEGIN("avxvnni,avx2,fma,f16c")

#include "kernels/avx2/lanes_avx2.h"

#include "kernels/avx2/codes_avx2.h"

/* sum [n_tokens]: sums of four columns */
QSF_FORCED_INLINE void add_codes(__m256i codes, const int8_t *q, size_t q_stride, size_t n_tokens,
                                 __m256i *sum)
{
    for (size_t t = 0; t < n_tokens; t++)
        sum[t] = _mm256_dpbusd_avx_epi32(sum[t], codes, broadcast4(q + t * q_stride));
}

/* Sums of 32 bits do not overflow. */
QSF_FORCED_INLINE size_t groups_per_sum(qsf_codes codes)
{
    (void)codes;
    return QSF_TILE_GROUPS;
}

QSF_FORCED_INLINE void sums_end(const __m256i *sum, size_t n_tokens, short factor, size_t half,
                                bool is_first, dots *dot)
{
    (void)factor;
    (void)is_first;
    for (size_t t = 0; t < n_tokens; t++)
        dot[t].half[half] = sum[t];
}

QSF_FORCED_INLINE void dot_part(qsf_form form, const unsigned char *codes, size_t part,
                                const int8_t *q, size_t q_stride, size_t n_tokens, dots *dot)
{
    const size_t n = form.scale_cols / 4;
    const size_t n_halves = halves_of(n_tokens);
    for (size_t h0 = 0; h0 < 2; h0 += n_halves) {
        __m256i sum[2][QSF_GROUP_TOKENS];
        for (size_t h = 0; h < n_halves; h++)
            sums_begin(n_tokens, sum[h]);
        add_part_groups(form.codes, DIGITS_ALL, codes + 32 * h0, n_halves, part * n, (part + 1) * n,
                        q, q_stride, n_tokens, sum);
        for (size_t h = 0; h < n_halves; h++)
            sums_end(sum[h], n_tokens, 1, h0 + h, true, dot);
    }
}

/* As sums_begin, in which gcc copies zeros from a register: a panel of a symmetric type then has
 * too few registers. With 8 bits this one is 10 % slower. */
QSF_FORCED_INLINE void panel_sums_begin(size_t n_tokens, __m256i *sum)
{
    for (size_t t = 0; t < n_tokens; t++)
        __asm__("vpxor %0, %0, %0" : "=x"(sum[t]));
}

/* As dot_tile, for a tile that unpack_tile() has unpacked: one load of activations for both halves.
 */
QSF_FORCED_INLINE void dot_unpacked(qsf_codes kind, const unsigned char *codes, const int8_t *q,
                                    size_t q_stride, size_t n_tokens, dots *dot)
{
    const int8_t *row[QSF_PANEL_TOKENS];
    __m256i sum[2][QSF_PANEL_TOKENS];
    (void)kind;
    rows_of(q, q_stride, n_tokens, row);
    panel_sums_begin(n_tokens, sum[0]);
    panel_sums_begin(n_tokens, sum[1]);
    QSF_UNROLL(16)
    for (size_t g = 0; g < QSF_TILE_GROUPS; g++) {
        const __m256i low = load32(codes + g * 32);
        const __m256i high = load32(codes + (QSF_TILE_GROUPS + g) * 32);
        for (size_t t = 0; t < n_tokens; t++) {
            const __m256i four = broadcast4(row[t] + 4 * g);
            sum[0][t] = _mm256_dpbusd_avx_epi32(sum[0][t], low, four);
            sum[1][t] = _mm256_dpbusd_avx_epi32(sum[1][t], high, four);
        }
    }
    sums_end(sum[0], n_tokens, 1, 0, true, dot);
    sums_end(sum[1], n_tokens, 1, 1, true, dot);
}

/* sum [n_halves, n_tokens]: codes of halves of an 8-bit tile * one plane of the activations */
QSF_FORCED_INLINE void dot_plane(const unsigned char *codes, size_t first, size_t n,
                                 size_t n_halves, const int8_t *q, size_t q_stride, size_t n_tokens,
                                 __m256i (*sum)[QSF_GROUP_TOKENS])
{
    for (size_t h = 0; h < n_halves; h++)
        sums_begin(n_tokens, sum[h]);
    for (size_t g = first; g < first + n; g++) {
        __m256i code[2];
        for (size_t h = 0; h < n_halves; h++)
            code[h] = load32(codes + g * 64 + h * 32);
        for (size_t t = 0; t < n_tokens; t++) {
            const __m256i four = broadcast4(q + t * q_stride + 4 * g);
            for (size_t h = 0; h < n_halves; h++)
                sum[h][t] = _mm256_dpbusd_avx_epi32(sum[h][t], code[h], four);
        }
    }
}

#include "kernels/fine_acts.h"

/* dot [n_tokens]: exact sums of code * x of the codes of an 8-bit tile. Sums of more tokens than
 * QSF_FINE_TOKENS fit the registers for one half only. */
QSF_FORCED_INLINE void dot_fine(const unsigned char *codes, size_t first_group, size_t n_groups,
                                const fine_acts *x, size_t n_tokens, dots *dot)
{
    const size_t n_halves = n_tokens <= QSF_FINE_TOKENS ? 2 : 1;
    for (size_t first = 0; first < 2; first += n_halves) {
        __m256i high[2][QSF_GROUP_TOKENS];
        __m256i low[2][QSF_GROUP_TOKENS];
        dot_plane(codes + 32 * first, first_group, n_groups, n_halves, x->q, x->q_stride, n_tokens,
                  high);
        dot_plane(codes + 32 * first, first_group, n_groups, n_halves, x->q_low, x->q_stride,
                  n_tokens, low);
        for (size_t h = 0; h < n_halves; h++)
            for (size_t t = 0; t < n_tokens; t++)
                dot[t].half[first + h] =
                    _mm256_add_epi32(_mm256_slli_epi32(high[h][t], 8), low[h][t]);
    }
}

#include "kernels/matmul_int_tmpl.h"

QSF_TARGET_END

void qsf_kernels_fill_avxvnni(qsf_kernels *k)
{
    fill_matmul_int_avxvnni(k);
}

#endif
