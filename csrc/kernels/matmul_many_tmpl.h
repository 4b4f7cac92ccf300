/* matmul_many_tmpl.h - products in the integer form, of many tokens, for every quantised type.
 *
 * Some tiles of a few tile rows are unpacked to bytes in the first-level cache; then all tokens are
 * multiplied with them, a group at a time, so that every type runs at the speed of plain bytes. The
 * dots of a group go to memory, and the float steps of kernels.h follow for all of them. The
 * including file provides lanes_*.h, these sizes (a `many` must fit the first-level cache beside
 * activations) and, after including this, the two functions declared here.
 *   QSF_MANY_TOKENS   most tokens of a group, 8 or 16
 *   QSF_MANY_ROWS     tile rows, 2 or 4
 *   QSF_MANY_BLOCKS   blocks that are unpacked at once
 */
/* SPDX-License-Identifier: Apache-2.0 */

#include "kernels/int_form.h"

/* Codes of one block and QSF_MANY_ROWS tile rows: 16 groups of 16 rows of 4 columns. */
typedef struct many_codes {
    _Alignas(64) unsigned char at[QSF_MANY_ROWS][QSF_TILE_ROWS * QSF_BLOCK];
} many_codes;

typedef struct many_dots {
    _Alignas(64) int32_t at[QSF_MANY_ROWS][QSF_MANY_TOKENS][QSF_TILE_ROWS];
} many_dots;

typedef struct many {
    many_codes codes[QSF_MANY_BLOCKS];
    many_dots dots[QSF_MANY_BLOCKS];
    lanes scale[QSF_MANY_BLOCKS][QSF_MANY_ROWS];
    lanes min[QSF_MANY_BLOCKS][QSF_MANY_ROWS];
} many;

/* codes [16, 64], a byte each, as compute_dots needs them */
QSF_FORCED_INLINE void unpack_codes(int_form form, const unsigned char *tile, unsigned char *codes);

/* m->dots[b].at[r][t] = the dot of kernels.h, from m->codes[b].at[r] and block
 * `block` + t * x->n_blocks + b of x. n_rows is a literal. */
QSF_FORCED_INLINE void compute_dots(int_form form, many *m, size_t n_blocks, size_t n_rows,
                                    const qsf_acts *x, size_t block, size_t n_tokens);

QSF_FORCED_INLINE void many_unpack(int_form form, const unsigned char *tile, size_t b, size_t r,
                                   many *m)
{
    unpack_codes(form, tile, m->codes[b].at[r]);
    m->scale[b][r] = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
    if (form.unit != 1.0F)
        m->scale[b][r] = lanes_mul(m->scale[b][r], lanes_set(form.unit));
    if (form.has_min)
        m->min[b][r] = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
}

/* Does the float steps of tokens t .. t + n_tokens - 1 of a group, over n_blocks blocks; `block` is
 * the first of token t, y its output of the first tile row. n_rows, n_tokens are literals. */
QSF_FORCED_INLINE void many_epilogue(int_form form, const many *m, const qsf_acts *x, size_t block,
                                     bool is_first, size_t n_blocks, size_t r0, size_t n_rows,
                                     size_t t, size_t n_tokens, float *y, size_t y_stride)
{
    const bool is_fine = form.dtype == QSF_DTYPE_8BIT;
    lanes acc[2][8];
    for (size_t k = 0; k < n_tokens; k++)
        for (size_t r = 0; r < n_rows; r++)
            acc[r][k] =
                is_first ? lanes_set(0.0F) : lanes_load(y + k * y_stride + r * QSF_TILE_ROWS);
    for (size_t b = 0; b < n_blocks; b++)
        for (size_t k = 0; k < n_tokens; k++) {
            const size_t i = block + k * x->n_blocks + b;
            const lanes x_scale = lanes_set(is_fine ? x->scale[i] * 0x1p-8F : x->scale[i]);
            for (size_t r = 0; r < n_rows; r++)
                acc[r][k] = lanes_fma(lanes_load_i32(m->dots[b].at[r0 + r][t + k]),
                                      lanes_mul(m->scale[b][r0 + r], x_scale), acc[r][k]);
            for (size_t r = 0; r < n_rows && form.has_min; r++)
                acc[r][k] = lanes_fma(m->min[b][r0 + r], lanes_set(x->scaled_sum[i]), acc[r][k]);
        }
    for (size_t k = 0; k < n_tokens; k++)
        for (size_t r = 0; r < n_rows; r++)
            lanes_store(y + k * y_stride + r * QSF_TILE_ROWS, acc[r][k]);
}

/* Does the float steps of n_rows tile rows from r0 on, 1 or 2, and all tokens of a group. */
QSF_FORCED_INLINE void many_epilogue_rows(int_form form, const many *m, const qsf_acts *x,
                                          size_t block, bool is_first, size_t n_blocks, size_t r0,
                                          size_t n_rows, size_t n_tokens, float *y, size_t y_stride)
{
    size_t t = 0;
    for (; t + 8 <= n_tokens; t += 8)
        many_epilogue(form, m, x, block + t * x->n_blocks, is_first, n_blocks, r0, n_rows, t, 8,
                      y + t * y_stride, y_stride);
    for (; t + 4 <= n_tokens; t += 4)
        many_epilogue(form, m, x, block + t * x->n_blocks, is_first, n_blocks, r0, n_rows, t, 4,
                      y + t * y_stride, y_stride);
    for (; t < n_tokens; t++)
        many_epilogue(form, m, x, block + t * x->n_blocks, is_first, n_blocks, r0, n_rows, t, 1,
                      y + t * y_stride, y_stride);
}

/* Multiplies blocks b0 .. b0 + n_blocks - 1 of n_rows (a literal) tile rows, unpacked, with
 * n_tokens tokens from t0 on; y: the first tile row's output of token t0 */
QSF_FORCED_INLINE void many_group(int_form form, many *m, const qsf_acts *x, size_t b0,
                                  size_t n_blocks, size_t n_rows, size_t t0, size_t n_tokens,
                                  float *y, size_t y_stride)
{
    const size_t block = t0 * x->n_blocks + b0;
    compute_dots(form, m, n_blocks, n_rows, x, block, n_tokens);
    if (n_rows == 1) {
        many_epilogue_rows(form, m, x, block, b0 == 0, n_blocks, 0, 1, n_tokens, y, y_stride);
        return;
    }
    for (size_t r = 0; r < n_rows; r += 2)
        many_epilogue_rows(form, m, x, block, b0 == 0, n_blocks, r, 2, n_tokens,
                           y + r * QSF_TILE_ROWS, y_stride);
}

/* Prefetches the tile of the next round to the second-level cache; behind the end it has no
 * effect. */
QSF_FORCED_INLINE void prefetch_next(const unsigned char *tile, size_t tile_bytes)
{
    for (size_t i = 0; i < tile_bytes; i += 64)
        __builtin_prefetch((const void *)((uintptr_t)tile + QSF_MANY_BLOCKS * tile_bytes + i), 0,
                           2);
}

QSF_FORCED_INLINE void many_rows(int_form form, const unsigned char *tiles, size_t n_rows,
                                 const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t tile_bytes = qsf_dtype_tile_bytes(form.dtype);
    many m;
    for (size_t b0 = 0; b0 < x->n_blocks; b0 += QSF_MANY_BLOCKS) {
        const size_t left = x->n_blocks - b0;
        const size_t n_blocks = left < QSF_MANY_BLOCKS ? left : QSF_MANY_BLOCKS;
        for (size_t r = 0; r < n_rows; r++)
            for (size_t b = 0; b < n_blocks; b++) {
                const unsigned char *const tile = tiles + (r * x->n_blocks + b0 + b) * tile_bytes;
                prefetch_next(tile, tile_bytes);
                many_unpack(form, tile, b, r, &m);
            }
        for (size_t t = 0; t < x->n_tokens; t += QSF_MANY_TOKENS) {
            const size_t t_left = x->n_tokens - t;
            many_group(form, &m, x, b0, n_blocks, n_rows, t,
                       t_left < QSF_MANY_TOKENS ? t_left : QSF_MANY_TOKENS, y + t * y_stride,
                       y_stride);
        }
    }
}

QSF_FORCED_INLINE void matmul_many(int_form form, const unsigned char *tiles, size_t n_tile_rows,
                                   const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t row_bytes = x->n_blocks * qsf_dtype_tile_bytes(form.dtype);
    size_t i = 0;
    for (; i + QSF_MANY_ROWS <= n_tile_rows; i += QSF_MANY_ROWS)
        many_rows(form, tiles + i * row_bytes, QSF_MANY_ROWS, x, y + i * QSF_TILE_ROWS, y_stride);
    for (; QSF_MANY_ROWS > 2 && i + 2 <= n_tile_rows; i += 2)
        many_rows(form, tiles + i * row_bytes, 2, x, y + i * QSF_TILE_ROWS, y_stride);
    for (; i < n_tile_rows; i++)
        many_rows(form, tiles + i * row_bytes, 1, x, y + i * QSF_TILE_ROWS, y_stride);
}
