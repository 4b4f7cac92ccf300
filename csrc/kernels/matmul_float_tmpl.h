/* matmul_float_tmpl.h - products in the f32 form for every weight type, over lanes.
 *
 * Lanes are the 16 rows of a tile row. f16 and f32 tiles are used as they lie; a quantised
 * tile is first decoded to f32 columns on the stack, once for all tokens. Each sum runs over
 * ascending columns, so speed comes from several independent sums at once: tile rows times
 * tokens. The including file provides lanes_*.h, QSF_NAME(op) and QSF_FLOAT_SUMS (4 or
 * 8): how many sums of 16 rows its registers hold.
 */
/* SPDX-License-Identifier: Apache-2.0 */

/* Column `col` (16 rows) of a tile of halves or floats */
QSF_FORCED_INLINE lanes load_column(const unsigned char *tile, size_t col, bool is_f16)
{
    if (is_f16)
        return lanes_load_f16(tile + col * (2 * QSF_TILE_ROWS));
    float column[QSF_TILE_ROWS];
    memcpy(column, tile + col * sizeof column, sizeof column);
    return lanes_load(column);
}

/* n_rows tile rows times n_tokens tokens, both literals, together at most QSF_FLOAT_SUMS sums.
 * x [n_tokens, n_blocks * 64], y [n_tokens, y_stride] */
QSF_FORCED_INLINE void float_group(const unsigned char *tiles, size_t n_blocks, const float *x,
                                   float *y, size_t y_stride, size_t n_rows, size_t n_tokens,
                                   bool is_f16)
{
    const size_t column_bytes = QSF_TILE_ROWS * (is_f16 ? 2U : 4U);
    const size_t n_cols = n_blocks * QSF_BLOCK;
    lanes acc[QSF_FLOAT_SUMS];
    for (size_t i = 0; i < n_rows * n_tokens; i++)
        acc[i] = lanes_set(0.0F);
    /* The tiles of a tile row follow each other, so its columns do too. */
    for (size_t c = 0; c < n_cols; c++)
        for (size_t r = 0; r < n_rows; r++) {
            const lanes w = load_column(tiles + r * n_cols * column_bytes, c, is_f16);
            for (size_t t = 0; t < n_tokens; t++) {
                const lanes xt = lanes_set(x[t * n_cols + c]);
                acc[r * n_tokens + t] = lanes_fma(w, xt, acc[r * n_tokens + t]);
            }
        }
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < n_tokens; t++)
            lanes_store(y + t * y_stride + r * QSF_TILE_ROWS, acc[r * n_tokens + t]);
}

/* n_tile_rows tile rows times n_tokens (a literal) tokens, as many rows at a time as make
 * QSF_FLOAT_SUMS sums. */
QSF_FORCED_INLINE void float_rows(const unsigned char *tiles, size_t n_tile_rows, size_t n_blocks,
                                  const float *x, float *y, size_t y_stride, size_t n_tokens,
                                  bool is_f16)
{
    const size_t n_rows = QSF_FLOAT_SUMS / n_tokens;
    const size_t tile_row_bytes = n_blocks * QSF_BLOCK * QSF_TILE_ROWS * (is_f16 ? 2U : 4U);
    size_t i = 0;
    for (; i + n_rows <= n_tile_rows; i += n_rows)
        float_group(tiles + i * tile_row_bytes, n_blocks, x, y + i * QSF_TILE_ROWS, y_stride,
                    n_rows, n_tokens, is_f16);
    for (; i < n_tile_rows; i++)
        float_group(tiles + i * tile_row_bytes, n_blocks, x, y + i * QSF_TILE_ROWS, y_stride, 1,
                    n_tokens, is_f16);
}

/* A few tile rows at a time, so that all tokens meet them while they are in the cache. */
QSF_FORCED_INLINE void matmul_float(const unsigned char *tiles, size_t n_tile_rows,
                                    const qsf_acts *x, float *y, size_t y_stride, bool is_f16)
{
    const size_t n_cols = x->n_blocks * QSF_BLOCK;
    const size_t tile_row_bytes = n_cols * QSF_TILE_ROWS * (is_f16 ? 2U : 4U);
    for (size_t i = 0; i < n_tile_rows; i += QSF_FLOAT_SUMS) {
        const size_t n_left = n_tile_rows - i;
        const size_t n = n_left < QSF_FLOAT_SUMS ? n_left : QSF_FLOAT_SUMS;
        const unsigned char *const rows = tiles + i * tile_row_bytes;
        float *const yi = y + i * QSF_TILE_ROWS;
        size_t t = 0;
#if QSF_FLOAT_SUMS >= 8
        for (; t + 8 <= x->n_tokens; t += 8)
            float_rows(rows, n, x->n_blocks, x->f32 + t * n_cols, yi + t * y_stride, y_stride, 8,
                       is_f16);
#endif
        for (; t + 4 <= x->n_tokens; t += 4)
            float_rows(rows, n, x->n_blocks, x->f32 + t * n_cols, yi + t * y_stride, y_stride, 4,
                       is_f16);
        for (; t + 2 <= x->n_tokens; t += 2)
            float_rows(rows, n, x->n_blocks, x->f32 + t * n_cols, yi + t * y_stride, y_stride, 2,
                       is_f16);
        for (; t < x->n_tokens; t++)
            float_rows(rows, n, x->n_blocks, x->f32 + t * n_cols, yi + t * y_stride, y_stride, 1,
                       is_f16);
    }
}

static void QSF_NAME(matmul_f16_f32)(const unsigned char *tiles, size_t n_tile_rows,
                                     const qsf_acts *x, float *y, size_t y_stride)
{
    matmul_float(tiles, n_tile_rows, x, y, y_stride, true);
}

static void QSF_NAME(matmul_f32_f32)(const unsigned char *tiles, size_t n_tile_rows,
                                     const qsf_acts *x, float *y, size_t y_stride)
{
    matmul_float(tiles, n_tile_rows, x, y, y_stride, false);
}

/* columns [64, 16]: the tile's weights, fmaf(code, scale, min) */
static inline void decode_4bit(const unsigned char *tile, float *columns)
{
    const lanes scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
    const lanes min = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
    for (size_t p = 0; p < 8; p++) {
        const unsigned char *const codes = tile + QSF_TILE_CODES_OFF(true) + p * 64;
        for (unsigned j = 0; j < 4; j++) {
            const lanes low = lanes_load_codes(codes, 8 * j, 15);
            const lanes high = lanes_load_codes(codes, 8 * j + 4, 15);
            lanes_store(columns + (4 * p + j) * QSF_TILE_ROWS, lanes_fma(low, scale, min));
            lanes_store(columns + (4 * (p + 8) + j) * QSF_TILE_ROWS, lanes_fma(high, scale, min));
        }
    }
}

/* columns [64, 16]: the tile's weights, (code - 128) * scale */
static inline void decode_8bit(const unsigned char *tile, float *columns)
{
    const lanes scale = lanes_load_f16(tile + QSF_TILE_SCALES_OFF);
    for (size_t g = 0; g < 16; g++) {
        const unsigned char *const codes = tile + QSF_TILE_CODES_OFF(false) + g * 64;
        for (unsigned j = 0; j < 4; j++) {
            const lanes code = lanes_load_codes(codes, 8 * j, 255);
            lanes_store(columns + (4 * g + j) * QSF_TILE_ROWS,
                        lanes_mul(lanes_sub(code, lanes_set(128.0F)), scale));
        }
    }
}

/* Goes on with the sums in y [n_tokens, y_stride], over one decoded tile:
 * columns [64, 16], x [n_tokens, x_stride] */
QSF_FORCED_INLINE void add_columns(const float *columns, const float *x, size_t x_stride, float *y,
                                   size_t y_stride, size_t n_tokens)
{
    lanes acc[4];
    for (size_t t = 0; t < n_tokens; t++)
        acc[t] = lanes_load(y + t * y_stride);
    for (size_t c = 0; c < QSF_BLOCK; c++) {
        const lanes w = lanes_load(columns + c * QSF_TILE_ROWS);
        for (size_t t = 0; t < n_tokens; t++)
            acc[t] = lanes_fma(w, lanes_set(x[t * x_stride + c]), acc[t]);
    }
    for (size_t t = 0; t < n_tokens; t++)
        lanes_store(y + t * y_stride, acc[t]);
}

typedef void decode_fn(const unsigned char *tile, float *columns);

QSF_FORCED_INLINE void matmul_decoded(decode_fn *decode, size_t tile_bytes,
                                      const unsigned char *tiles, size_t n_tile_rows,
                                      const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t n_cols = x->n_blocks * QSF_BLOCK;
    for (size_t i = 0; i < n_tile_rows; i++) {
        float *const yi = y + i * QSF_TILE_ROWS;
        for (size_t t = 0; t < x->n_tokens; t++)
            lanes_store(yi + t * y_stride, lanes_set(0.0F));
        for (size_t b = 0; b < x->n_blocks; b++) {
            float columns[QSF_BLOCK * QSF_TILE_ROWS];
            decode(tiles + (i * x->n_blocks + b) * tile_bytes, columns);
            const float *const xb = x->f32 + b * QSF_BLOCK;
            size_t t = 0;
            for (; t + 4 <= x->n_tokens; t += 4)
                add_columns(columns, xb + t * n_cols, n_cols, yi + t * y_stride, y_stride, 4);
            for (; t < x->n_tokens; t++)
                add_columns(columns, xb + t * n_cols, n_cols, yi + t * y_stride, y_stride, 1);
        }
    }
}

static void QSF_NAME(matmul_4bit_f32)(const unsigned char *tiles, size_t n_tile_rows,
                                      const qsf_acts *x, float *y, size_t y_stride)
{
    matmul_decoded(decode_4bit, qsf_dtype_tile_bytes(QSF_DTYPE_4BIT), tiles, n_tile_rows, x, y,
                   y_stride);
}

static void QSF_NAME(matmul_8bit_f32)(const unsigned char *tiles, size_t n_tile_rows,
                                      const qsf_acts *x, float *y, size_t y_stride)
{
    matmul_decoded(decode_8bit, qsf_dtype_tile_bytes(QSF_DTYPE_8BIT), tiles, n_tile_rows, x, y,
                   y_stride);
}

/* The fill function's part for the f32 form. */
static void QSF_NAME(fill_matmul_float)(qsf_kernels *k)
{
    k->matmul[QSF_DTYPE_F16] = QSF_NAME(matmul_f16_f32);
    k->matmul[QSF_DTYPE_F32] = QSF_NAME(matmul_f32_f32);
    k->matmul_exact[QSF_DTYPE_4BIT] = QSF_NAME(matmul_4bit_f32);
    k->matmul_exact[QSF_DTYPE_8BIT] = QSF_NAME(matmul_8bit_f32);
    k->matmul_exact[QSF_DTYPE_F16] = QSF_NAME(matmul_f16_f32);
    k->matmul_exact[QSF_DTYPE_F32] = QSF_NAME(matmul_f32_f32);
}
