/* matmul_scalar.c - what a matrix product is: the specification that the other levels equal.
 *
 * Also the only dequant_row: an embedding lookup reads one row per token.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "base/bytes.h"
#include "base/half.h"
#include "kernels/vecops.h"

/* The code of row r, column c of a 4-bit tile: 0..15. */
static int32_t code_4bit(const unsigned char *tile, size_t r, size_t c)
{
    const size_t group = c / 4;
    const unsigned char byte = tile[QSF_TILE_4BIT_CODES_OFF + group % 8 * 64 + r * 4 + c % 4];
    return group < 8 ? byte & 15 : byte >> 4;
}

/* The code of row r, column c of an 8-bit tile: 0..255. */
static int32_t code_8bit(const unsigned char *tile, size_t r, size_t c)
{
    return tile[QSF_TILE_8BIT_CODES_OFF + c / 4 * 64 + r * 4 + c % 4];
}

static float scale_of(const unsigned char *tile, size_t r)
{
    return qsf_half_to_float(qsf_load_u16(tile + QSF_TILE_SCALES_OFF + 2 * r));
}

static float min_of(const unsigned char *tile, size_t r)
{
    return qsf_half_to_float(qsf_load_u16(tile + QSF_TILE_MINS_OFF + 2 * r));
}

typedef float weight_fn(const unsigned char *tile, size_t r, size_t c);

static float weight_4bit(const unsigned char *tile, size_t r, size_t c)
{
    return fmaf((float)code_4bit(tile, r, c), scale_of(tile, r), min_of(tile, r));
}

static float weight_8bit(const unsigned char *tile, size_t r, size_t c)
{
    return (float)(code_8bit(tile, r, c) - 128) * scale_of(tile, r);
}

static float weight_f16(const unsigned char *tile, size_t r, size_t c)
{
    return qsf_half_to_float(qsf_load_u16(tile + 2 * (c * QSF_TILE_ROWS + r)));
}

static float weight_f32(const unsigned char *tile, size_t r, size_t c)
{
    return qsf_load_f32(tile + 4 * (c * QSF_TILE_ROWS + r));
}

/* One output of the integer form: the row of 4-bit tiles at `tiles`, times token t. */
static float dot_4bit(const unsigned char *tiles, size_t r, const qsf_acts *x, size_t t)
{
    float acc = 0.0F;
    for (size_t b = 0; b < x->n_blocks; b++) {
        const unsigned char *const tile = tiles + b * qsf_dtype_tile_bytes(QSF_DTYPE_4BIT);
        const size_t block = t * x->n_blocks + b;
        int32_t dot = 0;
        for (size_t c = 0; c < QSF_BLOCK; c++)
            dot += code_4bit(tile, r, c) * x->q[block * QSF_BLOCK + c];
        acc = fmaf((float)dot, scale_of(tile, r) * x->scale[block], acc);
        acc = fmaf(min_of(tile, r), x->scaled_sum[block], acc);
    }
    return acc;
}

static float dot_8bit(const unsigned char *tiles, size_t r, const qsf_acts *x, size_t t)
{
    float acc = 0.0F;
    for (size_t b = 0; b < x->n_blocks; b++) {
        const unsigned char *const tile = tiles + b * qsf_dtype_tile_bytes(QSF_DTYPE_8BIT);
        const size_t block = t * x->n_blocks + b;
        int32_t dot = 0;
        for (size_t c = 0; c < QSF_BLOCK; c++) {
            const size_t i = block * QSF_BLOCK + c;
            dot += (code_8bit(tile, r, c) - 128) * (256 * x->q[i] + x->q_low[i]);
        }
        acc = fmaf((float)dot, scale_of(tile, r) * (x->scale[block] * 0x1p-8F), acc);
    }
    return acc;
}

/* One output of the f32 form. */
static float dot_float(weight_fn *weight, qsf_dtype dtype, const unsigned char *tiles, size_t r,
                       const qsf_acts *x, size_t t)
{
    const float *const xt = x->f32 + t * x->n_blocks * QSF_BLOCK;
    float acc = 0.0F;
    for (size_t c = 0; c < x->n_blocks * QSF_BLOCK; c++) {
        const unsigned char *const tile = tiles + c / QSF_BLOCK * qsf_dtype_tile_bytes(dtype);
        acc = fmaf(weight(tile, r, c % QSF_BLOCK), xt[c], acc);
    }
    return acc;
}

static void matmul_4bit_i8_scalar(const unsigned char *tiles, size_t n_tile_rows, const qsf_acts *x,
                                  float *y, size_t y_stride)
{
    const size_t tile_row_bytes = x->n_blocks * qsf_dtype_tile_bytes(QSF_DTYPE_4BIT);
    for (size_t t = 0; t < x->n_tokens; t++)
        for (size_t row = 0; row < n_tile_rows * QSF_TILE_ROWS; row++)
            y[t * y_stride + row] =
                dot_4bit(tiles + row / QSF_TILE_ROWS * tile_row_bytes, row % QSF_TILE_ROWS, x, t);
}

static void matmul_8bit_i16_scalar(const unsigned char *tiles, size_t n_tile_rows,
                                   const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t tile_row_bytes = x->n_blocks * qsf_dtype_tile_bytes(QSF_DTYPE_8BIT);
    for (size_t t = 0; t < x->n_tokens; t++)
        for (size_t row = 0; row < n_tile_rows * QSF_TILE_ROWS; row++)
            y[t * y_stride + row] =
                dot_8bit(tiles + row / QSF_TILE_ROWS * tile_row_bytes, row % QSF_TILE_ROWS, x, t);
}

static void matmul_float(weight_fn *weight, qsf_dtype dtype, const unsigned char *tiles,
                         size_t n_tile_rows, const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t tile_row_bytes = x->n_blocks * qsf_dtype_tile_bytes(dtype);
    for (size_t t = 0; t < x->n_tokens; t++)
        for (size_t row = 0; row < n_tile_rows * QSF_TILE_ROWS; row++)
            y[t * y_stride + row] =
                dot_float(weight, dtype, tiles + row / QSF_TILE_ROWS * tile_row_bytes,
                          row % QSF_TILE_ROWS, x, t);
}

static void dequant_row(weight_fn *weight, qsf_dtype dtype, const unsigned char *tiles,
                        size_t n_blocks, size_t row_in_tile, float *out)
{
    for (size_t c = 0; c < n_blocks * QSF_BLOCK; c++)
        out[c] =
            weight(tiles + c / QSF_BLOCK * qsf_dtype_tile_bytes(dtype), row_in_tile, c % QSF_BLOCK);
}

/* The f32 product and the row decoder of one type. */
#define FLOAT_FORMS(type, dtype)                                                           \
    static void matmul_##type##_f32_scalar(const unsigned char *tiles, size_t n_tile_rows, \
                                           const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                                      \
        matmul_float(weight_##type, dtype, tiles, n_tile_rows, x, y, y_stride);            \
    }                                                                                      \
    static void dequant_row_##type##_scalar(const unsigned char *tiles, size_t n_blocks,   \
                                            size_t row_in_tile, float *out)                \
    {                                                                                      \
        dequant_row(weight_##type, dtype, tiles, n_blocks, row_in_tile, out);              \
    }

FLOAT_FORMS(4bit, QSF_DTYPE_4BIT)
FLOAT_FORMS(8bit, QSF_DTYPE_8BIT)
FLOAT_FORMS(f16, QSF_DTYPE_F16)
FLOAT_FORMS(f32, QSF_DTYPE_F32)

void qsf_kernels_fill_scalar(qsf_kernels *k)
{
    k->matmul[QSF_DTYPE_4BIT] = matmul_4bit_i8_scalar;
    k->matmul[QSF_DTYPE_8BIT] = matmul_8bit_i16_scalar;
    k->matmul[QSF_DTYPE_F16] = matmul_f16_f32_scalar;
    k->matmul[QSF_DTYPE_F32] = matmul_f32_f32_scalar;
    k->matmul_exact[QSF_DTYPE_4BIT] = matmul_4bit_f32_scalar;
    k->matmul_exact[QSF_DTYPE_8BIT] = matmul_8bit_f32_scalar;
    k->matmul_exact[QSF_DTYPE_F16] = matmul_f16_f32_scalar;
    k->matmul_exact[QSF_DTYPE_F32] = matmul_f32_f32_scalar;
    k->dequant_row[QSF_DTYPE_4BIT] = dequant_row_4bit_scalar;
    k->dequant_row[QSF_DTYPE_8BIT] = dequant_row_8bit_scalar;
    k->dequant_row[QSF_DTYPE_F16] = dequant_row_f16_scalar;
    k->dequant_row[QSF_DTYPE_F32] = dequant_row_f32_scalar;
    qsf_vecops_fill_scalar(k);
}
