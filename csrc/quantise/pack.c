/* pack.c - writes codes in the layouts of tiles: those of the rounder, and those of GGUF's blocks.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/quantise.h"

#include <inttypes.h>
#include <string.h>

#include "base/bytes.h"
#include "base/half.h"
#include "base/status.h"

#define N_GROUPS (QSF_BLOCK / 4)

/* The four codes of a row and a group of neighbouring columns, the first in the lowest byte. */
typedef struct code_words {
    uint32_t at[N_GROUPS][QSF_TILE_ROWS];
} code_words;

static void gather_words(const qsf_tile_floats *codes, size_t n_rows, size_t n_cols,
                         code_words *words)
{
    memset(words, 0, sizeof *words);
    for (size_t c = 0; c < n_cols; c++) {
        uint32_t *const to = words->at[c / 4];
        const unsigned shift = 8 * (c % 4);
        for (size_t r = 0; r < QSF_TILE_ROWS; r++)
            to[r] |= (uint32_t)(int32_t)codes->at[c][r] << shift;
    }
    for (size_t g = 0; g < N_GROUPS; g++) {
        for (size_t r = n_rows; r < QSF_TILE_ROWS; r++)
            words->at[g][r] = 0;
    }
}

/* Replaces levels by their codes. */
static void codes_of_levels(code_words *words)
{
    static const uint8_t levels[] = {QSF_LEVELS};
    uint8_t code_of[64] = {0};
    for (uint8_t code = 0; code < sizeof levels; code++)
        code_of[levels[code]] = code;
    unsigned char *const bytes = (unsigned char *)words->at;
    for (size_t i = 0; i < sizeof words->at; i++)
        bytes[i] = code_of[bytes[i]];
}

static void put_plane(const uint32_t *words, unsigned char *out)
{
    for (size_t r = 0; r < QSF_TILE_ROWS; r++)
        qsf_store_u32(out + 4 * r, words[r]);
}

/* Writes `bits` 1, 2 or 4 of each code, from the bit `first` on: plane p holds groups p, p + n,
 * ..., the first in the lowest bits. */
static void put_bits(const code_words *words, unsigned first, unsigned bits, unsigned char *out)
{
    const size_t n_planes = N_GROUPS * bits / 8;
    const uint32_t mask = 0x01010101U * ((1U << bits) - 1);
    for (size_t p = 0; p < n_planes; p++) {
        uint32_t plane[QSF_TILE_ROWS] = {0};
        for (size_t g = p, shift = 0; g < N_GROUPS; g += n_planes, shift += bits) {
            for (size_t r = 0; r < QSF_TILE_ROWS; r++)
                plane[r] |= (words->at[g][r] >> first & mask) << shift;
        }
        put_plane(plane, out + QSF_BLOCK * p);
    }
}

static void put_third_bits(const code_words *words, unsigned char *out)
{
    for (size_t h = 0; h < 2; h++) {
        uint32_t plane[QSF_TILE_ROWS] = {0};
        for (size_t i = 0; i < 2; i++) {
            for (size_t b = 0; b < 4; b++) {
                const uint32_t *const from = words->at[2 * h + i + 4 * b];
                for (size_t r = 0; r < QSF_TILE_ROWS; r++)
                    plane[r] |= (from[r] >> 2 & 0x01010101) << (4 * i + b);
            }
        }
        put_plane(plane, out + QSF_BLOCK * h);
    }
}

/* Returns the byte of five trits, the first the highest digit: ceil(256 n / 243). */
static uint32_t dense_byte(const uint32_t trits[5])
{
    uint32_t n = 0;
    for (size_t k = 0; k < 5; k++)
        n = 3 * n + trits[k];
    return (256 * n + 242) / 243;
}

static void put_dense(const code_words *words, unsigned char *out)
{
    for (size_t p = 0; p < 3; p++) {
        for (size_t r = 0; r < QSF_TILE_ROWS; r++) {
            for (size_t j = 0; j < 4; j++) {
                uint32_t trits[5];
                for (size_t k = 0; k < 5; k++)
                    trits[k] = words->at[5 * p + k][r] >> (8 * j) & 3;
                out[QSF_BLOCK * p + 4 * r + j] = (unsigned char)dense_byte(trits);
            }
        }
    }
    for (size_t r = 0; r < QSF_TILE_ROWS; r++) {
        const uint32_t last = words->at[15][r];
        const uint32_t trits[5] = {last & 3, last >> 8 & 3, last >> 16 & 3, last >> 24 & 3, 0};
        out[QSF_BLOCK * 3 + r] = (unsigned char)dense_byte(trits);
    }
}

static void put_halves(const float *values, size_t n_rows, unsigned char *out)
{
    for (size_t r = 0; r < QSF_TILE_ROWS; r++)
        qsf_store_u16(out + 2 * r, r < n_rows ? qsf_half_from_float(values[r]) : 0);
}

void qsf_pack_tile(uint32_t dtype, const qsf_tile_floats *codes, const qsf_fit *fit, size_t n_rows,
                   size_t n_cols, unsigned char *tile)
{
    const qsf_form form = qsf_form_of(dtype);
    unsigned char *const out = tile + qsf_codes_off(form);
    code_words words;
    gather_words(codes, n_rows, n_cols, &words);
    put_halves(fit->scales, n_rows, tile + QSF_TILE_SCALES_OFF);
    if (form.has_min)
        put_halves(fit->mins, n_rows, tile + QSF_TILE_MINS_OFF);
    if (form.codes == QSF_CODES_8BIT) {
        for (size_t g = 0; g < N_GROUPS; g++)
            put_plane(words.at[g], out + QSF_BLOCK * g);
    } else if (qsf_are_nibbles(form.codes)) {
        if (form.codes == QSF_CODES_LEVELS)
            codes_of_levels(&words);
        put_bits(&words, 0, 4, out);
    } else if (form.codes == QSF_CODES_TRITS) {
        put_dense(&words, out);
    } else {
        put_bits(&words, 0, 2, out);
        if (form.codes == QSF_CODES_3BIT)
            put_third_bits(&words, out + QSF_BLOCK * 4);
    }
}

/* ---- blocks of GGUF ---- */

/* Where the parts of a block are (ggml-common.h of llama.cpp); `mins` and `high` are 0 without. */
typedef struct block_form {
    size_t bytes;
    size_t n_cols;
    size_t scale; /* an f16 */
    size_t min;
    size_t integers; /* scales and mins of the parts of 256 columns */
    size_t high;     /* the bits of a code above the lowest four */
    size_t low;
} block_form;

static block_form block_form_of(uint32_t dtype)
{
    switch (dtype) {
    case QSF_DTYPE_Q4_0:
        return (block_form){.bytes = 18, .n_cols = 32, .low = 2};
    case QSF_DTYPE_Q4_1:
        return (block_form){.bytes = 20, .n_cols = 32, .min = 2, .low = 4};
    case QSF_DTYPE_Q5_0:
        return (block_form){.bytes = 22, .n_cols = 32, .high = 2, .low = 6};
    case QSF_DTYPE_Q5_1:
        return (block_form){.bytes = 24, .n_cols = 32, .min = 2, .high = 4, .low = 8};
    case QSF_DTYPE_Q8_0:
        return (block_form){.bytes = 34, .n_cols = 32, .low = 2};
    case QSF_DTYPE_Q4_K:
        return (block_form){.bytes = 144, .n_cols = 256, .min = 2, .integers = 4, .low = 16};
    case QSF_DTYPE_Q5_K:
        return (block_form){
            .bytes = 176, .n_cols = 256, .min = 2, .integers = 4, .high = 16, .low = 48};
    case QSF_DTYPE_Q6_K:
        return (block_form){
            .bytes = 210, .n_cols = 256, .scale = 208, .integers = 192, .high = 128};
    default:
        return (block_form){0};
    }
}

/* Returns bits 0 .. 3 as the lowest bits of four bytes. */
static uint32_t spread_bits(uint32_t bits)
{
    return (bits & 15) * 0x00204081U & 0x01010101U;
}

/* Reads the codes of 32 columns of a row, four a word. `part` is the number of these columns in
 * their block. */
static void read_codes(uint32_t dtype, const block_form *form, const unsigned char *block,
                       size_t part, uint32_t out[8])
{
    const unsigned char *const low = block + form->low;
    const unsigned char *const high = block + form->high;
    for (size_t k = 0; k < 8; k++) {
        switch (dtype) {
        case QSF_DTYPE_Q8_0:
            out[k] = qsf_load_u32(low + 4 * k) ^ 0x80808080U;
            break;
        case QSF_DTYPE_Q4_K:
        case QSF_DTYPE_Q5_K:
            out[k] = qsf_load_u32(low + part / 2 * 32 + 4 * k) >> part % 2 * 4 & 0x0F0F0F0FU;
            if (form->high != 0)
                out[k] |= (qsf_load_u32(high + 4 * k) >> part & 0x01010101U) << 4;
            break;
        case QSF_DTYPE_Q6_K: {
            const size_t half = part / 4;
            const uint32_t lows = qsf_load_u32(low + half * 64 + part % 2 * 32 + 4 * k);
            const uint32_t highs = qsf_load_u32(high + half * 32 + 4 * k);
            out[k] = (lows >> part % 4 / 2 * 4 & 0x0F0F0F0FU) |
                     (highs >> part % 4 * 2 & 0x03030303U) << 4;
            break;
        }
        default:
            out[k] = qsf_load_u32(low + k % 4 * 4) >> k / 4 * 4 & 0x0F0F0F0FU;
            if (form->high != 0)
                out[k] |= spread_bits(qsf_load_u32(high) >> 4 * k) << 4;
        }
    }
}

/* Writes the scales, mins and integers that a group of tiles has in common; what rows and blocks
 * past the end have is 0 already. `blocks` are those of the first row. */
static void put_block_scales(uint32_t dtype, const block_form *form, const unsigned char *blocks,
                             size_t row_bytes, size_t n_rows, size_t n_blocks, unsigned char *out)
{
    const size_t n_parts = form->n_cols < QSF_BLOCK ? QSF_BLOCK / form->n_cols : 1;
    const size_t half_bytes = n_parts * QSF_TILE_ROWS * 2;
    const size_t n_integers = dtype == QSF_DTYPE_Q6_K ? 16 : form->integers != 0 ? 12 : 0;
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t b = 0; b < n_blocks; b++) {
            const unsigned char *const block = blocks + r * row_bytes + b * form->bytes;
            unsigned char *to = out + 2 * (b * QSF_TILE_ROWS + r);
            memcpy(to, block + form->scale, 2);
            if (form->min != 0)
                memcpy(to + half_bytes, block + form->min, 2);
            to = out + half_bytes * (form->min != 0 ? 2 : 1) + r;
            for (size_t i = 0; i < n_integers; i++)
                to[i * QSF_TILE_ROWS] =
                    block[form->integers + i] ^ (dtype == QSF_DTYPE_Q6_K ? 0x80 : 0);
        }
    }
}

static void put_block_codes(qsf_codes codes, const code_words *words, unsigned char *out)
{
    if (codes == QSF_CODES_8BIT) {
        for (size_t g = 0; g < N_GROUPS; g++)
            put_plane(words->at[g], out + QSF_BLOCK * g);
        return;
    }
    put_bits(words, 0, 4, out);
    if (codes != QSF_CODES_4BIT)
        put_bits(words, 4, codes == QSF_CODES_5BIT ? 1 : 2, out + qsf_code_bytes(QSF_CODES_4BIT));
}

/* Reads the codes of a tile: n_cols 32 or 64 columns from `col` on of the group that `blocks`
 * begins. */
static void read_words(uint32_t dtype, const block_form *form, const unsigned char *blocks,
                       size_t row_bytes, size_t n_rows, size_t col, size_t n_cols,
                       code_words *words)
{
    memset(words, 0, sizeof *words);
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t c = 0; c < n_cols; c += 32) {
            const size_t at = col + c;
            uint32_t codes[8];
            read_codes(dtype, form, blocks + r * row_bytes + at / form->n_cols * form->bytes,
                       at % form->n_cols / 32, codes);
            for (size_t k = 0; k < 8; k++)
                words->at[c / 4 + k][r] = codes[k];
        }
    }
}

qsf_status qsf_repack_rows(uint32_t dtype, const void *stored, size_t n_rows, size_t n_cols,
                           void *tiles, size_t cap_bytes)
{
    const block_form form = block_form_of(dtype);
    const qsf_form type = qsf_form_of(dtype);
    if (form.bytes == 0 || n_rows == 0 || n_rows > QSF_ROUNDING_MAX_SIDE || n_cols == 0 ||
        n_cols > QSF_ROUNDING_MAX_SIDE || n_cols % form.n_cols != 0)
        return QSF_FAIL(QSF_ERR_ARG, "%zu x %zu weights are no whole blocks of type %" PRIu32,
                        n_rows, n_cols, dtype);
    const size_t n_tiles = qsf_tiles_per_head(type), group_cols = n_tiles * QSF_BLOCK;
    const size_t row_bytes = n_cols / form.n_cols * form.bytes;
    const size_t needed_bytes = (n_rows + QSF_TILE_ROWS - 1) / QSF_TILE_ROWS *
                                ((n_cols + group_cols - 1) / group_cols) * n_tiles *
                                type.tile_bytes;
    if (cap_bytes < needed_bytes)
        return QSF_FAIL(QSF_ERR_ARG, "cap_bytes is %zu, but the tiles have %zu", cap_bytes,
                        needed_bytes);
    unsigned char *out = tiles;
    for (size_t row = 0; row < n_rows; row += QSF_TILE_ROWS) {
        const size_t n = n_rows - row < QSF_TILE_ROWS ? n_rows - row : QSF_TILE_ROWS;
        for (size_t col = 0; col < n_cols; col += group_cols) {
            const size_t width = n_cols - col < group_cols ? n_cols - col : group_cols;
            const unsigned char *const blocks =
                (const unsigned char *)stored + row * row_bytes + col / form.n_cols * form.bytes;
            memset(out, 0, qsf_codes_off(type));
            put_block_scales(dtype, &form, blocks, row_bytes, n, width / form.n_cols, out);
            out += qsf_codes_off(type);
            for (size_t c = 0; c < group_cols; c += QSF_BLOCK) {
                code_words words;
                read_words(dtype, &form, blocks, row_bytes, n, c, qsf_block_width(width, c),
                           &words);
                put_block_codes(type.codes, &words, out);
                out += qsf_code_bytes(type.codes);
            }
        }
    }
    return QSF_OK;
}
