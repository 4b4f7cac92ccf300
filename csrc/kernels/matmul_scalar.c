/* matmul_scalar.c - matrix products in plain C: the specification for all instruction sets.
 *
 * Also the only dequant_row: an embedding lookup reads one row per token.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <math.h>
#include <stdbool.h>

#include "base/bytes.h"
#include "base/half.h"
#include "kernels/forced_inline.h"
#include "kernels/vecops.h"

/* Bytes 0..63 of plane p of 64 bytes: row r, column c of a group of four columns. */
static unsigned plane_byte(const unsigned char *codes, size_t p, size_t r, size_t c)
{
    return codes[p * 64 + r * 4 + c % 4];
}

/* Two bits of column c; the codes of 2- and 3-bit and ternary tiles begin with them. */
static unsigned low_bits(const unsigned char *codes, size_t r, size_t c)
{
    const size_t group = c / 4;
    return plane_byte(codes, group % 4, r, c) >> (2 * (group / 4)) & 3;
}

/* The third bit of a 3-bit code. */
static unsigned high_bit(const unsigned char *codes, size_t r, size_t c)
{
    const size_t p = c / 4 % 4;
    const size_t b = c / 4 / 4;
    return plane_byte(codes, 4 + p / 2, r, c) >> (4 * (p % 2) + b) & 1;
}

static unsigned nibble(const unsigned char *codes, size_t r, size_t c)
{
    const size_t group = c / 4;
    const unsigned byte = plane_byte(codes, group % 8, r, c);
    return group < 8 ? byte & 15 : byte >> 4;
}

/* Trit of a dense ternary tile: five groups of columns in each of three planes, the last
 * group in one byte per row. */
static unsigned trit(const unsigned char *codes, size_t r, size_t c)
{
    static const unsigned powers[] = {1, 3, 9, 27, 81};
    const size_t group = c / 4;
    const unsigned byte = group < 15 ? plane_byte(codes, group / 5, r, c) : codes[192 + r];
    const unsigned power = powers[group < 15 ? group % 5 : c % 4];
    return (byte * power & 255) * 3 >> 8;
}

/* The code of row r, column c of a tile. */
QSF_FORCED_INLINE int32_t code_of(qsf_dtype dtype, const unsigned char *tile, size_t r, size_t c)
{
    const unsigned char *const codes = tile + QSF_TILE_CODES_OFF(qsf_dtype_has_min(dtype));
    switch (dtype) {
    case QSF_DTYPE_2BIT_SYM:
    case QSF_DTYPE_2BIT:
    case QSF_DTYPE_TERNARY:
        return (int32_t)low_bits(codes, r, c);
    case QSF_DTYPE_3BIT:
        return (int32_t)(low_bits(codes, r, c) | high_bit(codes, r, c) << 2);
    case QSF_DTYPE_4BIT:
    case QSF_DTYPE_4BIT_SYM:
    case QSF_DTYPE_MXFP4:
        return (int32_t)nibble(codes, r, c);
    case QSF_DTYPE_8BIT:
        return (int32_t)plane_byte(codes, c / 4, r, c);
    case QSF_DTYPE_TERNARY_DENSE:
        return (int32_t)trit(codes, r, c);
    case QSF_DTYPE_MIXED:
    case QSF_DTYPE_F16:
    case QSF_DTYPE_F32:
    case QSF_DTYPE_COUNT:
        break;
    }
    assert(!"a type without codes");
    return 0;
}

/* Returns the value of a code of a symmetric type, as a multiple of unit_of() times the scale. */
static int32_t value_of(qsf_dtype dtype, int32_t code)
{
    static const int8_t of_mxfp4[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    if (dtype == QSF_DTYPE_MXFP4)
        return of_mxfp4[code];
    if (dtype == QSF_DTYPE_2BIT_SYM)
        return 2 * code - 3;
    return code - (dtype == QSF_DTYPE_4BIT_SYM ? 8 : dtype == QSF_DTYPE_8BIT ? 128 : 1);
}

static float unit_of(qsf_dtype dtype)
{
    return dtype == QSF_DTYPE_2BIT_SYM ? 0.5F : 1.0F;
}

/* As a multiple of the scale of column c's block, or of half that of MXFP4. */
static float scale_of(qsf_dtype dtype, const unsigned char *tile, size_t r, size_t c)
{
    if (dtype == QSF_DTYPE_MXFP4)
        return qsf_half_scale_from_e8m0(tile[c / QSF_SUB_BLOCK * QSF_TILE_ROWS + r]);
    return qsf_half_to_float(qsf_load_u16(tile + QSF_TILE_SCALES_OFF + 2 * r));
}

static float min_of(const unsigned char *tile, size_t r)
{
    return qsf_half_to_float(qsf_load_u16(tile + QSF_TILE_MINS_OFF + 2 * r));
}

/* The weight of row r, column c of a tile of any type. */
QSF_FORCED_INLINE float weight_of(qsf_dtype dtype, const unsigned char *tile, size_t r, size_t c)
{
    if (dtype == QSF_DTYPE_F16)
        return qsf_half_to_float(qsf_load_u16(tile + 2 * (c * QSF_TILE_ROWS + r)));
    if (dtype == QSF_DTYPE_F32)
        return qsf_load_f32(tile + 4 * (c * QSF_TILE_ROWS + r));
    const int32_t code = code_of(dtype, tile, r, c);
    if (qsf_dtype_has_min(dtype))
        return fmaf((float)code, scale_of(dtype, tile, r, c), min_of(tile, r));
    return (float)value_of(dtype, code) * (unit_of(dtype) * scale_of(dtype, tile, r, c));
}

/* Columns first .. first + n_cols - 1 of one block of the integer form, row r of a tile, times
 * 8-bit activations. */
QSF_FORCED_INLINE float add_block_i8(qsf_dtype dtype, const unsigned char *tile, size_t r,
                                     const qsf_acts *x, size_t block, size_t first, size_t n_cols,
                                     float acc)
{
    const bool has_min = qsf_dtype_has_min(dtype);
    int32_t dot = 0;
    for (size_t c = first; c < first + n_cols; c++) {
        const int32_t code = code_of(dtype, tile, r, c);
        dot += (has_min ? code : value_of(dtype, code)) * x->q[block * QSF_BLOCK + c];
    }
    const float w_scale = unit_of(dtype) * scale_of(dtype, tile, r, first);
    acc = fmaf((float)dot, w_scale * x->scale[block], acc);
    return has_min ? fmaf(min_of(tile, r), x->scaled_sum[block], acc) : acc;
}

/* As add_block_i8, with 16-bit activations for 8-bit weights. */
static float add_block_i16(const unsigned char *tile, size_t r, const qsf_acts *x, size_t block,
                           float acc)
{
    int32_t dot = 0;
    for (size_t c = 0; c < QSF_BLOCK; c++) {
        const size_t i = block * QSF_BLOCK + c;
        const int32_t value = value_of(QSF_DTYPE_8BIT, code_of(QSF_DTYPE_8BIT, tile, r, c));
        dot += value * (256 * x->q[i] + x->q_low[i]);
    }
    return fmaf((float)dot, scale_of(QSF_DTYPE_8BIT, tile, r, 0) * (x->scale[block] * 0x1p-8F),
                acc);
}

/* One output: the row of tiles at `tiles`, times token t. */
QSF_FORCED_INLINE float dot_integer(qsf_dtype dtype, const unsigned char *tiles, size_t r,
                                    const qsf_acts *x, size_t t)
{
    const size_t n_cols = dtype == QSF_DTYPE_MXFP4 ? QSF_SUB_BLOCK : QSF_BLOCK;
    float acc = 0.0F;
    for (size_t b = 0; b < x->n_blocks; b++) {
        const unsigned char *const tile = tiles + b * qsf_dtype_tile_bytes(dtype);
        const size_t block = t * x->n_blocks + b;
        if (dtype == QSF_DTYPE_8BIT) {
            acc = add_block_i16(tile, r, x, block, acc);
            continue;
        }
        for (size_t c = 0; c < QSF_BLOCK; c += n_cols)
            acc = add_block_i8(dtype, tile, r, x, block, c, n_cols, acc);
    }
    return acc;
}

/* One output of the f32 form. */
QSF_FORCED_INLINE float dot_float(qsf_dtype dtype, const unsigned char *tiles, size_t r,
                                  const qsf_acts *x, size_t t)
{
    const float *const xt = x->f32 + t * x->n_blocks * QSF_BLOCK;
    float acc = 0.0F;
    for (size_t c = 0; c < x->n_blocks * QSF_BLOCK; c++) {
        const unsigned char *const tile = tiles + c / QSF_BLOCK * qsf_dtype_tile_bytes(dtype);
        acc = fmaf(weight_of(dtype, tile, r, c % QSF_BLOCK), xt[c], acc);
    }
    return acc;
}

QSF_FORCED_INLINE void matmul(qsf_dtype dtype, bool is_integer_form, const unsigned char *tiles,
                              size_t n_tile_rows, const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t tile_row_bytes = x->n_blocks * qsf_dtype_tile_bytes(dtype);
    for (size_t t = 0; t < x->n_tokens; t++)
        for (size_t row = 0; row < n_tile_rows * QSF_TILE_ROWS; row++) {
            const unsigned char *const tile_row = tiles + row / QSF_TILE_ROWS * tile_row_bytes;
            const size_t r = row % QSF_TILE_ROWS;
            y[t * y_stride + row] = is_integer_form ? dot_integer(dtype, tile_row, r, x, t)
                                                    : dot_float(dtype, tile_row, r, x, t);
        }
}

/* The f32 product and the row decoder of one type. */
#define FLOAT_FORMS(type, dtype)                                                           \
    static void matmul_##type##_f32_scalar(const unsigned char *tiles, size_t n_tile_rows, \
                                           const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                                      \
        matmul(dtype, false, tiles, n_tile_rows, x, y, y_stride);                          \
    }                                                                                      \
    static void dequant_row_##type##_scalar(const unsigned char *tiles, size_t n_blocks,   \
                                            size_t row_in_tile, float *out)                \
    {                                                                                      \
        for (size_t c = 0; c < n_blocks * QSF_BLOCK; c++)                                  \
            out[c] = weight_of(dtype, tiles + c / QSF_BLOCK * qsf_dtype_tile_bytes(dtype), \
                               row_in_tile, c % QSF_BLOCK);                                \
    }                                                                                      \
    static void fill_##type##_float(qsf_kernels *k)                                        \
    {                                                                                      \
        k->matmul_exact[dtype] = matmul_##type##_f32_scalar;                               \
        k->dequant_row[dtype] = dequant_row_##type##_scalar;                               \
    }

/* Adds the integer product of one type to FLOAT_FORMS. */
#define ALL_FORMS(type, dtype)                                                         \
    FLOAT_FORMS(type, dtype)                                                           \
    static void matmul_##type##_scalar(const unsigned char *tiles, size_t n_tile_rows, \
                                       const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                                  \
        matmul(dtype, true, tiles, n_tile_rows, x, y, y_stride);                       \
    }                                                                                  \
    static void fill_##type(qsf_kernels *k)                                            \
    {                                                                                  \
        fill_##type##_float(k);                                                        \
        k->matmul[dtype] = matmul_##type##_scalar;                                     \
    }

ALL_FORMS(2bit_sym, QSF_DTYPE_2BIT_SYM)
ALL_FORMS(2bit, QSF_DTYPE_2BIT)
ALL_FORMS(3bit, QSF_DTYPE_3BIT)
ALL_FORMS(4bit, QSF_DTYPE_4BIT)
ALL_FORMS(4bit_sym, QSF_DTYPE_4BIT_SYM)
ALL_FORMS(ternary, QSF_DTYPE_TERNARY)
ALL_FORMS(ternary_dense, QSF_DTYPE_TERNARY_DENSE)
ALL_FORMS(8bit, QSF_DTYPE_8BIT)
ALL_FORMS(mxfp4, QSF_DTYPE_MXFP4)
FLOAT_FORMS(f16, QSF_DTYPE_F16)
FLOAT_FORMS(f32, QSF_DTYPE_F32)

/* As add_block_i16 over all positions of some blocks: one sum, one scale. */
static void value_products_scalar(const qsf_value_tiles *tiles, const qsf_value_weights *w,
                                  qsf_span_range parts, size_t n_rows, float *values, size_t stride)
{
    for (size_t r = 0; r < n_rows; r++)
        for (size_t d = 0; d < QSF_BLOCK; d++) {
            int32_t dot = 0;
            for (size_t p = parts.begin * QSF_BLOCK; p < parts.end * QSF_BLOCK; p++) {
                const unsigned char *const codes = tiles->codes[d / QSF_TILE_ROWS][p / QSF_BLOCK];
                const size_t c = p % QSF_BLOCK;
                const int32_t code = (int32_t)plane_byte(codes, c / 4, d % QSF_TILE_ROWS, c);
                dot += (code - 128) *
                       (256 * w->q[p / QSF_BLOCK][r][c] + w->q_low[p / QSF_BLOCK][r][c]);
            }
            values[r * stride + d] = fmaf((float)dot, w->factor[r], w->start[r]);
        }
}

void qsf_kernels_fill_scalar(qsf_kernels *k)
{
    fill_2bit_sym(k);
    fill_2bit(k);
    fill_3bit(k);
    fill_4bit(k);
    fill_4bit_sym(k);
    fill_ternary(k);
    fill_ternary_dense(k);
    fill_8bit(k);
    fill_mxfp4(k);
    fill_f16_float(k);
    fill_f32_float(k);
    k->matmul[QSF_DTYPE_F16] = k->matmul_exact[QSF_DTYPE_F16];
    k->matmul[QSF_DTYPE_F32] = k->matmul_exact[QSF_DTYPE_F32];
    k->value_products = value_products_scalar;
    qsf_vecops_fill_scalar(k);
}
