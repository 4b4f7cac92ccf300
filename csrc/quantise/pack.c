/* pack.c - writes codes in the layouts of tiles. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/quantise.h"

#include <string.h>

#include "base/bytes.h"
#include "base/half.h"

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

/* Writes codes of `bits` 2 or 4: plane p holds groups p, p + n, ..., the first in the lowest
 * bits. */
static void put_bits(const code_words *words, unsigned bits, uint32_t mask, unsigned char *out)
{
    const size_t n_planes = N_GROUPS * bits / 8;
    for (size_t p = 0; p < n_planes; p++) {
        uint32_t plane[QSF_TILE_ROWS] = {0};
        for (size_t g = p, shift = 0; g < N_GROUPS; g += n_planes, shift += bits) {
            for (size_t r = 0; r < QSF_TILE_ROWS; r++)
                plane[r] |= (words->at[g][r] & mask) << shift;
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
        put_bits(&words, 4, 0x0F0F0F0F, out);
    } else if (form.codes == QSF_CODES_TRITS) {
        put_dense(&words, out);
    } else {
        put_bits(&words, 2, 0x03030303, out);
        if (form.codes == QSF_CODES_3BIT)
            put_third_bits(&words, out + QSF_BLOCK * 4);
    }
}
