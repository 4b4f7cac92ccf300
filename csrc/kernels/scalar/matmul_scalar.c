/* matmul_scalar.c - matrix products in plain C: the specification for all instruction sets.
 *
 * Also the only dequant_row: an embedding lookup reads one row per token.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/vecops.h"

#define TILE_VALUES ((size_t)QSF_TILE_ROWS * QSF_BLOCK)

/* Bytes 0..63 of plane p of 64 bytes: row r, column c of a group of four columns. */
static unsigned plane_byte(const unsigned char *codes, size_t p, size_t r, size_t c)
{
    return codes[p * 64 + r * 4 + c % 4];
}

QSF_FORCED_INLINE unsigned code_at(qsf_codes kind, const unsigned char *codes, size_t r, size_t c)
{
    const qsf_code_place at = qsf_code_place_of(kind, c / 4);
    const unsigned byte = plane_byte(codes, at.plane, r, c);
    if (qsf_are_nibbles(kind)) /* a variable shift is slower */
        return c < 32 ? byte & 15 : byte >> 4;
    const unsigned low = byte >> at.shift & at.mask;
    if (at.high_mask == 0)
        return low;
    return low | (plane_byte(codes, at.high_plane, r, c) << 4 >> at.high_shift & at.high_mask);
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

/* The place of row r, column c of a tile row: in a tile or, for types with common scales, in a
 * group of tiles. */
typedef struct place {
    const unsigned char *head;
    const unsigned char *codes; /* of the tile */
    size_t r;
    size_t c;    /* in the tile */
    size_t part; /* which of the scales in the head */
} place;

QSF_FORCED_INLINE place place_of(qsf_form form, const unsigned char *tiles, size_t r, size_t c)
{
    const size_t head_cols = qsf_tiles_per_head(form) * QSF_BLOCK;
    const unsigned char *const head = tiles + c / QSF_BLOCK / qsf_tiles_per_head(form) *
                                                  qsf_tiles_per_head(form) * form.tile_bytes;
    const size_t tile = c % head_cols / QSF_BLOCK;
    return (place){head, head + qsf_codes_off(form) + tile * qsf_code_bytes(form.codes), r,
                   c % QSF_BLOCK, form.scale_cols > 0 ? c % head_cols / form.scale_cols : 0};
}

QSF_FORCED_INLINE int32_t code_of(qsf_form form, place at)
{
    static const uint8_t levels[] = {QSF_LEVELS};
    static const uint8_t iq4_levels[] = {QSF_IQ4_LEVELS};
    if (form.codes == QSF_CODES_TRITS)
        return (int32_t)trit(at.codes, at.r, at.c);
    const unsigned code = code_at(form.codes, at.codes, at.r, at.c);
    return form.codes == QSF_CODES_LEVELS ? levels[code]
           : form.codes == QSF_CODES_IQ4  ? iq4_levels[code]
                                          : (int32_t)code;
}

/* Returns the value of a code of a symmetric type, as a multiple of form.unit times the scale. */
static int32_t value_of(qsf_form form, int32_t code)
{
    static const int8_t of_e2m1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return form.codes == QSF_CODES_E2M1 ? of_e2m1[code] : form.factor * code - form.zero;
}

static float half_at(const unsigned char *halves, size_t i)
{
    return qsf_half_to_float(qsf_load_u16(halves + 2 * i));
}

/* Integer `part` of 0 .. 7 of row r in 12 planes of 16 rows: planes 0 .. 3 begin with `first`. */
static float integer_6bit(const unsigned char *planes, size_t first, size_t part, size_t r)
{
    const unsigned whole = planes[16 * (first + part % 4) + r];
    const unsigned low = planes[16 * (8 + part % 4) + r] >> first & 15;
    return (float)(part < 4 ? whole & 63 : low | whole >> 6 << 4);
}

/* The byte of a part in planes of 16 rows from `planes` on */
static int32_t integer_byte(place at, size_t planes)
{
    return at.head[planes + at.part * QSF_TILE_ROWS + at.r];
}

/* Of E8M0 half the scale. */
static float scale_of(qsf_form form, place at)
{
    switch (form.scales) {
    case QSF_SCALES_E8M0:
        return qsf_half_scale_from_e8m0(at.head[at.part * QSF_TILE_ROWS + at.r]);
    case QSF_SCALES_4BIT:
        return half_at(at.head, at.r) * (float)(integer_byte(at, 64) & 15);
    case QSF_SCALES_6BIT:
        return half_at(at.head, at.r) * integer_6bit(at.head + 64, 0, at.part, at.r);
    case QSF_SCALES_8BIT:
        return half_at(at.head, at.r) * (float)(integer_byte(at, 32) - 128);
    case QSF_SCALES_F16:
    case QSF_SCALES_NONE:
        break;
    }
    return half_at(at.head, at.part * QSF_TILE_ROWS + at.r);
}

static float min_of(qsf_form form, place at)
{
    if (form.scales == QSF_SCALES_4BIT)
        return -half_at(at.head + 32, at.r) * (float)(integer_byte(at, 64) >> 4);
    if (form.scales == QSF_SCALES_6BIT)
        return -half_at(at.head + 32, at.r) * integer_6bit(at.head + 64, 4, at.part, at.r);
    const size_t n_parts = QSF_BLOCK / form.scale_cols;
    return half_at(at.head, (n_parts + at.part) * QSF_TILE_ROWS + at.r);
}

/* The weight in row r, column c of a tile row of any type. */
QSF_FORCED_INLINE float weight_of(qsf_form form, const unsigned char *tiles, size_t r, size_t c)
{
    const place at = place_of(form, tiles, r, c);
    if (form.tile_bytes == 2 * TILE_VALUES)
        return half_at(at.head, at.c * QSF_TILE_ROWS + r);
    if (form.tile_bytes == 4 * TILE_VALUES)
        return qsf_load_f32(at.head + 4 * (at.c * QSF_TILE_ROWS + r));
    const int32_t code = code_of(form, at);
    if (form.has_min)
        return qsf_fmaf((float)code, scale_of(form, at), min_of(form, at));
    return (float)value_of(form, code) * (form.unit * scale_of(form, at));
}

/* Columns c .. c + form.scale_cols - 1 of the integer form, row r of a tile row, token t */
QSF_FORCED_INLINE float add_part(qsf_form form, const unsigned char *tiles, size_t r,
                                 const qsf_acts *x, size_t t, size_t c, float acc)
{
    const bool is_fine = form.codes == QSF_CODES_8BIT;
    const place at = place_of(form, tiles, r, c);
    const size_t block = t * x->n_blocks + c / QSF_BLOCK;
    int32_t dot = 0;
    int32_t sum = 0;
    for (size_t i = 0; i < form.scale_cols; i++) {
        const int32_t code = code_of(form, place_of(form, tiles, r, c + i));
        const size_t col = t * x->n_blocks * QSF_BLOCK + c + i;
        const int32_t q = is_fine ? 256 * x->q[col] + x->q_low[col] : x->q[col];
        dot += (form.has_min ? code : value_of(form, code)) * q;
        sum += q;
    }
    const float scale =
        form.scale_cols < QSF_BLOCK ? x->parts[block].scale[c % QSF_BLOCK / 32] : x->scale[block];
    const float x_scale = is_fine ? scale * 0x1p-8F : scale;
    acc = qsf_fmaf((float)dot, form.unit * scale_of(form, at) * x_scale, acc);
    return form.has_min ? qsf_fmaf(min_of(form, at), x_scale * (float)sum, acc) : acc;
}

/* One output: the row of tiles at `tiles`, times token t. */
QSF_FORCED_INLINE float dot_integer(qsf_form form, const unsigned char *tiles, size_t r,
                                    const qsf_acts *x, size_t t)
{
    float acc = 0.0F;
    for (size_t c = 0; c < x->n_blocks * QSF_BLOCK; c += form.scale_cols)
        acc = add_part(form, tiles, r, x, t, c, acc);
    return acc;
}

/* One output of the f32 form. */
QSF_FORCED_INLINE float dot_float(qsf_form form, const unsigned char *tiles, size_t r,
                                  const qsf_acts *x, size_t t)
{
    const float *const xt = x->f32 + t * x->n_blocks * QSF_BLOCK;
    float acc = 0.0F;
    for (size_t c = 0; c < x->n_blocks * QSF_BLOCK; c++)
        acc = qsf_fmaf(weight_of(form, tiles, r, c), xt[c], acc);
    return acc;
}

QSF_FORCED_INLINE void matmul(qsf_form form, bool is_integer_form, const unsigned char *tiles,
                              size_t n_tile_rows, const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t tile_row_bytes = x->n_blocks * form.tile_bytes;
    for (size_t t = 0; t < x->n_tokens; t++)
        for (size_t row = 0; row < n_tile_rows * QSF_TILE_ROWS; row++) {
            const unsigned char *const tile_row = tiles + row / QSF_TILE_ROWS * tile_row_bytes;
            const size_t r = row % QSF_TILE_ROWS;
            y[t * y_stride + row] = is_integer_form ? dot_integer(form, tile_row, r, x, t)
                                                    : dot_float(form, tile_row, r, x, t);
        }
}

/* The f32 product and the row decoder of one type. */
#define FLOAT_FORMS(id, symbol, type, ...)                                                 \
    static void matmul_##type##_f32_scalar(const unsigned char *tiles, size_t n_tile_rows, \
                                           const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                                      \
        matmul(qsf_form_of(id), false, tiles, n_tile_rows, x, y, y_stride);                \
    }                                                                                      \
    static void dequant_row_##type##_scalar(const unsigned char *tiles, size_t n_blocks,   \
                                            size_t row_in_tile, float *out)                \
    {                                                                                      \
        for (size_t c = 0; c < n_blocks * QSF_BLOCK; c++)                                  \
            out[c] = weight_of(qsf_form_of(id), tiles, row_in_tile, c);                    \
    }

/* Adds the integer product of one type to FLOAT_FORMS. */
#define ALL_FORMS(id, symbol, type, ...)                                               \
    FLOAT_FORMS(id, symbol, type, )                                                    \
    static void matmul_##type##_scalar(const unsigned char *tiles, size_t n_tile_rows, \
                                       const qsf_acts *x, float *y, size_t y_stride)   \
    {                                                                                  \
        matmul(qsf_form_of(id), true, tiles, n_tile_rows, x, y, y_stride);             \
    }

QSF_CODED_TYPES(ALL_FORMS)
QSF_FLOAT_TYPES(FLOAT_FORMS)

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
            values[r * stride + d] = qsf_fmaf((float)dot, w->factor[r], w->start[r]);
        }
}

#define FILL_FLOAT(id, symbol, type, ...)             \
    k->matmul_exact[id] = matmul_##type##_f32_scalar; \
    k->matmul[id] = matmul_##type##_f32_scalar;       \
    k->dequant_row[id] = dequant_row_##type##_scalar;
#define FILL(id, symbol, type, ...) \
    FILL_FLOAT(id, symbol, type, )  \
    k->matmul[id] = matmul_##type##_scalar;

void qsf_kernels_fill_scalar(qsf_kernels *k)
{
    QSF_CODED_TYPES(FILL)
    QSF_FLOAT_TYPES(FILL_FLOAT)
    k->value_products = value_products_scalar;
    qsf_vecops_fill_scalar(k);
}
