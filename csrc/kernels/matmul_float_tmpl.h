/* matmul_float_tmpl.h - products in the f32 form for every weight type, over lanes.
 *
 * Lanes are the 16 rows of a tile row. f16 and f32 tiles are used in place; a quantised tile is
 * first decoded to f32 columns on the stack, once for all tokens. Each sum adds ascending columns,
 * so speed comes from several independent sums at once: tile rows times tokens. The including file
 * provides lanes_*.h, QSF_NAME(op) and QSF_FLOAT_SUMS (4 or 8): how many sums of 16 rows its
 * registers hold.
 */
/* SPDX-License-Identifier: Apache-2.0 */

#include "kernels/part_scales.h"

/* Column `col` (16 rows) of a tile of halves or floats */
QSF_FORCED_INLINE lanes load_column(const unsigned char *tile, size_t col, bool is_f16)
{
    if (is_f16)
        return lanes_load_f16(tile + col * (2 * QSF_TILE_ROWS));
    const void *const column = tile + col * (sizeof(float) * QSF_TILE_ROWS);
    return lanes_load(column);
}

/* Multiplies n_rows tile rows with n_tokens tokens, both literals, together at most QSF_FLOAT_SUMS
 * sums. x [n_tokens, n_blocks * 64], y [n_tokens, y_stride] */
QSF_FORCED_INLINE void float_group(const unsigned char *tiles, size_t n_blocks, const float *x,
                                   float *y, size_t y_stride, size_t n_rows, size_t n_tokens,
                                   bool is_f16)
{
    const size_t column_bytes = QSF_TILE_ROWS * (is_f16 ? 2U : 4U);
    const size_t n_cols = n_blocks * QSF_BLOCK;
    lanes acc[QSF_FLOAT_SUMS];
    for (size_t i = 0; i < n_rows * n_tokens; i++)
        acc[i] = lanes_set(0.0F);
    /* The tiles of a tile row are contiguous, so its columns are too. */
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

/* Multiplies n_tile_rows tile rows with n_tokens (a literal) tokens, as many rows at a time as make
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
    for (; n_rows > 2 && i + 2 <= n_tile_rows; i += 2)
        float_group(tiles + i * tile_row_bytes, n_blocks, x, y + i * QSF_TILE_ROWS, y_stride, 2,
                    n_tokens, is_f16);
    for (; i < n_tile_rows; i++)
        float_group(tiles + i * tile_row_bytes, n_blocks, x, y + i * QSF_TILE_ROWS, y_stride, 1,
                    n_tokens, is_f16);
}

/* A few tile rows at a time, so that they stay in the cache for all tokens. */
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

/* How a code becomes a weight: fmaf(code, scale, min), or (code - zero) * scale, rounded once. */
typedef struct decoder {
    lanes scale;
    lanes min;
    lanes zero;
    bool has_min;
} decoder;

QSF_FORCED_INLINE decoder decoder_of(qsf_form form, const unsigned char *tile)
{
    decoder d = {lanes_load_f16(tile + QSF_TILE_SCALES_OFF), lanes_set(0.0F),
                 lanes_set((float)form.zero * form.unit), form.has_min};
    if (form.has_min)
        d.min = lanes_load_f16(tile + QSF_TILE_MINS_OFF);
    return d;
}

/* Column `col` of columns [64, 16] */
QSF_FORCED_INLINE void decode_column(decoder d, lanes code, float *columns, size_t col)
{
    const lanes w =
        d.has_min ? lanes_fma(code, d.scale, d.min) : lanes_mul(lanes_sub(code, d.zero), d.scale);
    lanes_store(columns + col * QSF_TILE_ROWS, w);
}

/* The level of a code of LEVELS or IQ4 */
QSF_FORCED_INLINE lanes level_of(qsf_codes kind, lanes code)
{
    static const float levels[] = {QSF_LEVELS};
    static const float iq4_levels[] = {QSF_IQ4_LEVELS};
    const float *const all = kind == QSF_CODES_IQ4 ? iq4_levels : levels;
    lanes level = lanes_set(all[0]);
    for (size_t i = 1; i < 16; i++)
        level = lanes_where_less(code, lanes_set((float)i), level, lanes_set(all[i]));
    return level;
}

/* Twice the value of a code of E2M1: with m = 0 .. 7, the largest of m, 2m - 4 and 4m - 16 */
QSF_FORCED_INLINE lanes e2m1_value(lanes code)
{
    const lanes eight = lanes_set(8.0F);
    const lanes m = lanes_where_less(code, eight, code, lanes_sub(code, eight));
    const lanes from4 = lanes_fma(m, lanes_set(2.0F), lanes_set(-4.0F));
    const lanes from6 = lanes_fma(m, lanes_set(4.0F), lanes_set(-16.0F));
    const lanes value = lanes_max(lanes_max(m, from4), from6);
    return lanes_where_less(code, eight, value, lanes_sub(lanes_set(0.0F), value));
}

/* Column c of the codes of a tile; of E2M1 the values, of LEVELS and IQ4 the levels.
 * docs/format.md, section 5, has the places of the codes. */
QSF_FORCED_INLINE lanes column_of(qsf_codes kind, const unsigned char *codes, unsigned c)
{
    const qsf_code_place at = qsf_code_place_of(kind, c / 4);
    const unsigned first = 8 * (c % 4); /* bit of the column in a word of four */
    const lanes low = lanes_load_codes(codes + 64 * at.plane, first + at.shift, at.mask);
    if (kind == QSF_CODES_E2M1)
        return e2m1_value(low);
    if (kind == QSF_CODES_LEVELS || kind == QSF_CODES_IQ4)
        return level_of(kind, low);
    if (at.high_mask == 0)
        return low;
    const unsigned n_low = kind == QSF_CODES_3BIT ? 2 : 4; /* bits below the high ones */
    const lanes high = lanes_load_codes(codes + 64 * at.high_plane,
                                        first + at.high_shift + n_low - 4, at.high_mask >> n_low);
    return lanes_fma(high, lanes_set((float)(1U << n_low)), low); /* exact */
}

/* Tile `idx` of a head */
QSF_FORCED_INLINE void decode_parts(qsf_form form, const unsigned char *head, size_t idx,
                                    float *columns)
{
    const unsigned char *const codes =
        head + qsf_codes_off(form) + idx * qsf_code_bytes(form.codes);
    const size_t n_parts = QSF_BLOCK / form.scale_cols;
    part_scales scales;
    load_part_scales(form, head, &scales);
    for (unsigned c = 0; c < QSF_BLOCK; c++) {
        const size_t part = idx * n_parts + c / form.scale_cols;
        const decoder d = {scales.scale[part], form.has_min ? scales.min[part] : lanes_set(0.0F),
                           lanes_set(form.codes == QSF_CODES_E2M1 ? 0.0F : (float)form.zero),
                           form.has_min};
        decode_column(d, column_of(form.codes, codes, c), columns, c);
    }
}

/* *byte = *byte * 3 mod 256; returns the digit before the point. All exact. */
QSF_FORCED_INLINE lanes next_digit(lanes *byte)
{
    const lanes one_or_two = lanes_where_less(*byte, lanes_set(171.0F), lanes_set(1.0F),
                                              lanes_set(2.0F)); /* 3 * 171 = 513 */
    const lanes digit = lanes_where_less(*byte, lanes_set(86.0F), lanes_set(0.0F), one_or_two);
    *byte = lanes_fma(digit, lanes_set(-256.0F), lanes_mul(*byte, lanes_set(3.0F)));
    return digit;
}

QSF_FORCED_INLINE void decode_trits(decoder d, const unsigned char *codes, float *columns)
{
    for (unsigned p = 0; p < 3; p++)
        for (unsigned j = 0; j < 4; j++) {
            lanes byte = lanes_load_codes(codes + p * 64, 8 * j, 255);
            for (unsigned k = 0; k < 5; k++)
                decode_column(d, next_digit(&byte), columns, 4 * (5 * p + k) + j);
        }
    unsigned char words[4 * QSF_TILE_ROWS] = {0};
    for (size_t r = 0; r < QSF_TILE_ROWS; r++)
        words[4 * r] = codes[192 + r];
    lanes byte = lanes_load_codes(words, 0, 255);
    for (unsigned j = 0; j < 4; j++)
        decode_column(d, next_digit(&byte), columns, 60 + j);
}

/* row: the tiles of a tile row */
QSF_FORCED_INLINE void decode_tile(qsf_form form, const unsigned char *row, size_t b,
                                   float *columns)
{
    const size_t idx = b % qsf_tiles_per_head(form);
    const unsigned char *const tile = row + (b - idx) * form.tile_bytes;
    if (form.scale_cols < QSF_BLOCK) {
        decode_parts(form, tile, idx, columns);
        return;
    }
    const unsigned char *const codes = tile + qsf_codes_off(form);
    const decoder d = decoder_of(form, tile);
    if (form.codes == QSF_CODES_TRITS)
        decode_trits(d, codes, columns);
    else
        for (unsigned c = 0; c < QSF_BLOCK; c++)
            decode_column(d, column_of(form.codes, codes, c), columns, c);
}

#define QSF_DECODED_ROWS 4 /* tile rows at a time; with one token, as many sums */

/* Continues the sums in y over n_rows decoded tiles (n_rows, n_tokens literals): columns [n_rows,
 * 64, 16], x [n_tokens, x_stride], y [n_tokens, y_stride] */
QSF_FORCED_INLINE void add_columns(const float *columns, size_t n_rows, const float *x,
                                   size_t x_stride, float *y, size_t y_stride, size_t n_tokens)
{
    lanes acc[4];
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < n_tokens; t++)
            acc[r * n_tokens + t] = lanes_load(y + t * y_stride + r * QSF_TILE_ROWS);
    for (size_t c = 0; c < QSF_BLOCK; c++)
        for (size_t r = 0; r < n_rows; r++) {
            const lanes w = lanes_load(columns + (r * QSF_BLOCK + c) * QSF_TILE_ROWS);
            for (size_t t = 0; t < n_tokens; t++)
                acc[r * n_tokens + t] =
                    lanes_fma(w, lanes_set(x[t * x_stride + c]), acc[r * n_tokens + t]);
        }
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < n_tokens; t++)
            lanes_store(y + t * y_stride + r * QSF_TILE_ROWS, acc[r * n_tokens + t]);
}

/* Continues the sums of all tokens over n_rows <= QSF_DECODED_ROWS decoded tiles of one block. */
QSF_FORCED_INLINE void add_decoded(const float *columns, size_t n_rows, const float *x,
                                   size_t n_tokens, size_t x_stride, float *y, size_t y_stride)
{
    size_t t = 0;
    for (; t + 4 <= n_tokens; t += 4)
        for (size_t r = 0; r < n_rows; r++)
            add_columns(columns + r * QSF_BLOCK * QSF_TILE_ROWS, 1, x + t * x_stride, x_stride,
                        y + t * y_stride + r * QSF_TILE_ROWS, y_stride, 4);
    for (; t < n_tokens; t++) {
        size_t r = 0;
        for (; r + 4 <= n_rows; r += 4)
            add_columns(columns + r * QSF_BLOCK * QSF_TILE_ROWS, 4, x + t * x_stride, x_stride,
                        y + t * y_stride + r * QSF_TILE_ROWS, y_stride, 1);
        for (; r < n_rows; r++)
            add_columns(columns + r * QSF_BLOCK * QSF_TILE_ROWS, 1, x + t * x_stride, x_stride,
                        y + t * y_stride + r * QSF_TILE_ROWS, y_stride, 1);
    }
}

typedef void decode_fn(const unsigned char *row, size_t b, float *columns);

/* Not inlined: one copy serves all types, at the cost of a call of `decode` per tile. */
static void matmul_decoded(decode_fn *decode, size_t tile_bytes, const unsigned char *tiles,
                           size_t n_tile_rows, const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t n_cols = x->n_blocks * QSF_BLOCK;
    for (size_t i = 0; i < n_tile_rows; i += QSF_DECODED_ROWS) {
        const size_t n_left = n_tile_rows - i;
        const size_t n_rows = n_left < QSF_DECODED_ROWS ? n_left : QSF_DECODED_ROWS;
        float *const yi = y + i * QSF_TILE_ROWS;
        for (size_t t = 0; t < x->n_tokens; t++)
            for (size_t r = 0; r < n_rows; r++)
                lanes_store(yi + t * y_stride + r * QSF_TILE_ROWS, lanes_set(0.0F));
        for (size_t b = 0; b < x->n_blocks; b++) {
            float columns[QSF_DECODED_ROWS * QSF_BLOCK * QSF_TILE_ROWS];
            for (size_t r = 0; r < n_rows; r++)
                decode(tiles + (i + r) * x->n_blocks * tile_bytes, b,
                       columns + r * QSF_BLOCK * QSF_TILE_ROWS);
            add_decoded(columns, n_rows, x->f32 + b * QSF_BLOCK, x->n_tokens, n_cols, yi, y_stride);
        }
    }
}

#define DECODED_MATMUL(id, symbol, type, ...)                                                    \
    static void QSF_NAME(decode_##type)(const unsigned char *row, size_t b, float *columns)      \
    {                                                                                            \
        decode_tile(qsf_form_of(id), row, b, columns);                                           \
    }                                                                                            \
    static void QSF_NAME(matmul_##type##_f32)(const unsigned char *tiles, size_t n_tile_rows,    \
                                              const qsf_acts *x, float *y, size_t y_stride)      \
    {                                                                                            \
        matmul_decoded(QSF_NAME(decode_##type), qsf_dtype_tile_bytes(id), tiles, n_tile_rows, x, \
                       y, y_stride);                                                             \
    }
QSF_CODED_TYPES(DECODED_MATMUL)

/* The fill function's part for the f32 form. */
static void QSF_NAME(fill_matmul_float)(qsf_kernels *k)
{
#define FILL_EXACT(id, symbol, type, ...) k->matmul_exact[id] = QSF_NAME(matmul_##type##_f32);
#define FILL_BOTH(id, symbol, type, ...) \
    FILL_EXACT(id, symbol, type, )       \
    k->matmul[id] = QSF_NAME(matmul_##type##_f32);
    QSF_CODED_TYPES(FILL_EXACT)
    QSF_FLOAT_TYPES(FILL_BOTH)
}
