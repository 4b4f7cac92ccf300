/* matmul_dotprod.c - matrix products with SDOT, an extension of NEON in ARMv8.2.
 *
 * From 6 tokens on, tiles are unpacked to memory, once for all of them.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

/* Before version 16, clang offers the intrinsics only if the whole program is for a processor that
 * has them (as Apple's have). Otherwise this level uses the kernels of neon. */
#if QSF_ARCH_ARM && (defined(__ARM_FEATURE_DOTPROD) || !defined(__clang__) || __clang_major__ >= 16)

#include <arm_neon.h>

#define QSF_NAME(op) op##_dotprod
#define QSF_FLOAT_SUMS 4 /* in 16 of 32 registers */
#define QSF_GROUP_TOKENS 8
#define QSF_UNPACKED_TOKENS 6
#define QSF_UNPACKED_BYTES 1024
#define QSF_PANEL_TOKENS 6 /* sums in 24 of 32 registers, activations in 6, codes in one */
#define QSF_FINE_ZERO 0    /* sdot_fine has subtracted it */

/* clang names the feature; gcc names the architecture. */
#if defined(__clang__)
QSF_TARGET_BEGIN("dotprod")
#else
QSF_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#endif

#include "kernels/neon/lanes_neon.h"

#include "kernels/neon/dot_tile_sdot.h"

#include "kernels/fine_acts.h"

QSF_FORCED_INLINE void dot_fine(const unsigned char *bytes, size_t first, size_t n,
                                const fine_acts *x, size_t n_tokens, dots *dot)
{
    sdot_fine(bytes, first, n, x->q, x->q_low, x->q_stride, n_tokens, dot);
}

/* to [16 groups, 4 quarters, 4 x 4] */
QSF_FORCED_INLINE void unpack_tile(qsf_form form, const unsigned char *tile, unsigned char *to)
{
    QSF_UNROLL_8
    for (size_t g = 0; g < 8; g++) {
        QSF_UNROLL_8
        for (size_t quarter = 0; quarter < 4; quarter++) {
            const code_pair codes = unpack_pair(form, tile, quarter, g);
            vst1q_s8((int8_t *)to + 64 * g + 16 * quarter, codes.at[0]);
            vst1q_s8((int8_t *)to + 64 * (g + 8) + 16 * quarter, codes.at[1]);
        }
        keep_loads_here();
    }
}

/* As dot_tile, of a tile that unpack_tile() has unpacked */
QSF_FORCED_INLINE void dot_unpacked(qsf_codes kind, const unsigned char *codes, const int8_t *q,
                                    size_t q_stride, size_t n_tokens, dots *dot)
{
    (void)kind;
    QSF_UNROLL_8
    for (size_t t = 0; t < n_tokens; t++) {
        QSF_UNROLL_8
        for (size_t quarter = 0; quarter < 4; quarter++)
            dot[t].quarter[quarter] = partial_zero();
    }
    QSF_UNROLL_8
    for (size_t c = 0; c < QSF_BLOCK; c += 16) {
        int8x16_t x[QSF_PANEL_TOKENS];
        QSF_UNROLL_8
        for (size_t t = 0; t < n_tokens; t++)
            x[t] = vld1q_s8(q + t * q_stride + c);
        QSF_UNROLL(16)
        for (size_t i = 0; i < 16; i++) {
            const int8x16_t code = vld1q_s8((const int8_t *)codes + 16 * c + 16 * i);
            QSF_UNROLL_8
            for (size_t t = 0; t < n_tokens; t++)
                dot[t].quarter[i % 4] = partial_add(dot[t].quarter[i % 4], code, x[t], i / 4);
            keep_loads_here();
        }
    }
}

#include "kernels/matmul_int_tmpl.h"

QSF_TARGET_END

void qsf_kernels_fill_dotprod(qsf_kernels *k)
{
    fill_matmul_int_dotprod(k);
}

#elif QSF_ARCH_ARM

void qsf_kernels_fill_dotprod(qsf_kernels *k)
{
    (void)k;
}

#endif
