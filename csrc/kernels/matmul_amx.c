/* matmul_amx.c - matrix products of many tokens with AMX tiles of int8.
 *
 * An unpacked tile of weights is an AMX tile without rearranging: its 16 groups of 4 columns are
 * the rows. With the blocks of 16 tokens as the other operand, one tdpbssd computes all 16 x 16
 * dots.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#if QSF_ARCH_X86

#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/forced_inline.h"
#include "kernels/matmul_avx512.h"

#define QSF_MANY_TOKENS 16
#define QSF_MANY_ROWS 2
#define QSF_MANY_BLOCKS 8
#define AMX_FROM 8 /* fewer tokens are faster without AMX */

QSF_TARGET_BEGIN("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "kernels/lanes_avx512.h"

#include "kernels/unpack_avx512.h"

#include "kernels/matmul_many_tmpl.h"

/* Unpacks signed codes: the zero point is subtracted. */
QSF_FORCED_INLINE void unpack_codes(int_form form, const unsigned char *tile, unsigned char *codes)
{
    unpack_scaled(form, tile, form.zero, codes);
}

/* The record that ldtilecfg reads. */
typedef struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} tile_config;

/* Tiles 0, 1: dots of 16 tokens with two tile rows; 2: 16 tokens; 3, 4: codes of two tile rows; 5
 * .. 7: as 0 .. 2, for the n_tail remaining tokens. */
QSF_FORCED_INLINE void configure_tiles(size_t n_tail)
{
    tile_config config = {.palette = 1};
    for (size_t i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.n_rows[i] = i < 5 ? 16 : (uint8_t)(n_tail > 0 ? n_tail : 1);
    }
    /* gcc assumes that ldtilecfg reads only 8 bytes. */
    __asm__ volatile("" : : "m"(config) : "memory");
    _tile_loadconfig(&config);
}

/* dots [16 tokens, 16 rows] of one tile row: codes [16, 64] times the tokens in tile a, through
 * tiles c and b */
#define TILE_DOTS(c, a, b, codes, dots) \
    do {                                \
        _tile_zero(c);                  \
        _tile_loadd(b, codes, 64);      \
        _tile_dpbssd(c, a, b);          \
        _tile_stored(c, dots, 64);      \
    } while (0)

/* dots [n_rows, 16, 16] of one block: q [n_tokens, stride]. n_rows: 1 or even */
QSF_FORCED_INLINE void tile_dots(const many_codes *codes, const int8_t *q, size_t stride,
                                 size_t n_rows, size_t n_tokens, many_dots *out)
{
    if (n_tokens == 16)
        _tile_loadd(2, q, (int)stride);
    else
        _tile_loadd(7, q, (int)stride);
    for (size_t r = 0; r < n_rows; r += 2) {
        if (n_tokens == 16) {
            TILE_DOTS(0, 2, 3, codes->at[r], out->at[r]);
            if (r + 1 < n_rows)
                TILE_DOTS(1, 2, 4, codes->at[r + 1], out->at[r + 1]);
        } else {
            TILE_DOTS(5, 7, 3, codes->at[r], out->at[r]);
            if (r + 1 < n_rows)
                TILE_DOTS(6, 7, 4, codes->at[r + 1], out->at[r + 1]);
        }
    }
}

QSF_FORCED_INLINE void compute_dots(int_form form, many *m, size_t n_blocks, size_t n_rows,
                                    const qsf_acts *x, size_t block, size_t n_tokens)
{
    const size_t stride = x->n_blocks * QSF_BLOCK;
    for (size_t b = 0; b < n_blocks; b++) {
        const size_t i = (block + b) * QSF_BLOCK;
        tile_dots(&m->codes[b], x->q + i, stride, n_rows, n_tokens, &m->dots[b]);
        if (form.dtype != QSF_DTYPE_8BIT)
            continue;
        many_dots low;
        tile_dots(&m->codes[b], x->q_low + i, stride, n_rows, n_tokens, &low);
        for (size_t r = 0; r < n_rows; r++)
            for (size_t t = 0; t < n_tokens; t++) {
                int32_t *const dots = m->dots[b].at[r][t];
                const __m512i high = _mm512_loadu_si512((const void *)dots);
                _mm512_storeu_si512(
                    (void *)dots, _mm512_add_epi32(_mm512_slli_epi32(high, 8),
                                                   _mm512_loadu_si512((const void *)low.at[r][t])));
            }
    }
}

#define BY_TOKENS(type, dtype)                                                      \
    static void matmul_##type##_amx(const unsigned char *tiles, size_t n_tile_rows, \
                                    const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                               \
        if (x->n_tokens < AMX_FROM) {                                               \
            qsf_matmul_avx512(dtype)(tiles, n_tile_rows, x, y, y_stride);           \
            return;                                                                 \
        }                                                                           \
        configure_tiles(x->n_tokens % 16);                                          \
        matmul_many(int_form_of(dtype), tiles, n_tile_rows, x, y, y_stride);        \
        _tile_release();                                                            \
    }

BY_TOKENS(2bit_sym, QSF_DTYPE_2BIT_SYM)
BY_TOKENS(2bit, QSF_DTYPE_2BIT)
BY_TOKENS(3bit, QSF_DTYPE_3BIT)
BY_TOKENS(4bit, QSF_DTYPE_4BIT)
BY_TOKENS(4bit_sym, QSF_DTYPE_4BIT_SYM)
BY_TOKENS(ternary, QSF_DTYPE_TERNARY)
BY_TOKENS(ternary_dense, QSF_DTYPE_TERNARY_DENSE)
BY_TOKENS(8bit, QSF_DTYPE_8BIT)

QSF_TARGET_END

void qsf_kernels_fill_amx(qsf_kernels *k)
{
    k->matmul[QSF_DTYPE_2BIT_SYM] = matmul_2bit_sym_amx;
    k->matmul[QSF_DTYPE_2BIT] = matmul_2bit_amx;
    k->matmul[QSF_DTYPE_3BIT] = matmul_3bit_amx;
    k->matmul[QSF_DTYPE_4BIT] = matmul_4bit_amx;
    k->matmul[QSF_DTYPE_4BIT_SYM] = matmul_4bit_sym_amx;
    k->matmul[QSF_DTYPE_TERNARY] = matmul_ternary_amx;
    k->matmul[QSF_DTYPE_TERNARY_DENSE] = matmul_ternary_dense_amx;
    k->matmul[QSF_DTYPE_8BIT] = matmul_8bit_amx;
}

#endif
