/* feedback_tmpl.h - the loops of error-feedback rounding; over the lanes of kernels/.
 *
 * Included after fit_tmpl.h. A block receives the corrections for all earlier columns just before
 * it is rounded, as a product of matrices (Frantar et al. 2022, "lazy batch updates"), so that the
 * factor is read once for 64 rows.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define CATCH_UP_DEPTH 128 /* columns at a time: their errors and factors fit the caches */

/* The factors with which some earlier columns correct those of a block, copied together: rows of
 * the matrix are far apart, which causes misses in caches of low associativity. */
typedef struct block_factors {
    float at[CATCH_UP_DEPTH][QSF_BLOCK];
} block_factors;

/* Corrects columns j0 .. j0 + n_cols_here - 1 of the block with the errors of `depth` earlier
 * columns, in n_tiles tiles. errors: of the earlier columns; values: of the block. */
QSF_FORCED_INLINE void catch_up_part(const block_factors *factors, size_t depth, size_t j0,
                                     size_t n_cols_here, size_t n_tiles, const float *errors,
                                     float *values)
{
    lanes acc[QSF_CATCH_UP_COLS][QSF_CATCH_UP_TILES];
    for (size_t j = 0; j < n_cols_here; j++) {
        for (size_t t = 0; t < n_tiles; t++)
            acc[j][t] = lanes_load(values + (j0 + j) * QSF_FEEDBACK_ROWS + t * QSF_TILE_ROWS);
    }
    for (size_t k = 0; k < depth; k++) {
        lanes error[QSF_CATCH_UP_TILES];
        for (size_t t = 0; t < n_tiles; t++)
            error[t] = lanes_load(errors + k * QSF_FEEDBACK_ROWS + t * QSF_TILE_ROWS);
        for (size_t j = 0; j < n_cols_here; j++) {
            const lanes minus = lanes_set(-factors->at[k][j0 + j]);
            for (size_t t = 0; t < n_tiles; t++)
                acc[j][t] = lanes_fma(minus, error[t], acc[j][t]);
        }
    }
    for (size_t j = 0; j < n_cols_here; j++) {
        for (size_t t = 0; t < n_tiles; t++)
            lanes_store(values + (j0 + j) * QSF_FEEDBACK_ROWS + t * QSF_TILE_ROWS, acc[j][t]);
    }
}

static void feedback_catch_up(const float *factor, size_t n_cols, size_t first, size_t width,
                              float *work)
{
    block_factors factors;
    for (size_t begin = 0; begin < first; begin += CATCH_UP_DEPTH) {
        const size_t depth = first - begin < CATCH_UP_DEPTH ? first - begin : CATCH_UP_DEPTH;
        for (size_t k = 0; k < depth; k++)
            memcpy(factors.at[k], factor + (begin + k) * n_cols + first, width * sizeof *factor);
        for (size_t t = 0; t < QSF_FEEDBACK_TILES; t += QSF_CATCH_UP_TILES) {
            const float *const errors = work + begin * QSF_FEEDBACK_ROWS + t * QSF_TILE_ROWS;
            float *const values = work + first * QSF_FEEDBACK_ROWS + t * QSF_TILE_ROWS;
            size_t j = 0;
            for (; j + QSF_CATCH_UP_COLS <= width; j += QSF_CATCH_UP_COLS)
                catch_up_part(&factors, depth, j, QSF_CATCH_UP_COLS, QSF_CATCH_UP_TILES, errors,
                              values);
            for (; j < width; j++)
                catch_up_part(&factors, depth, j, 1, QSF_CATCH_UP_TILES, errors, values);
        }
    }
}

static void feedback_block(const qsf_code_range *range, const qsf_fit *fits, size_t part_cols,
                           const float *factor, size_t n_cols, size_t first, size_t width,
                           const uint8_t *places, float *work, qsf_tile_floats *codes,
                           qsf_tile_floats *stored)
{
    const lanes zero_code = lanes_set(range->zero);
    for (size_t k = first; k < first + width; k++) {
        const float *const row = factor + k * n_cols;
        const size_t place = places[k - first];
        const qsf_fit *const fit = &fits[place / part_cols];
        const lanes scale = lanes_load(fit->scales);
        const lanes off = offset_of(range, fit);
        const lanes value = lanes_load(work + k * QSF_FEEDBACK_ROWS);
        const lanes q = code_of(range, value, scale, off);
        const lanes kept = lanes_fma(q, scale, off);
        const lanes error = lanes_div(lanes_sub(value, kept), lanes_set(row[k]));
        lanes_store(codes->at[place], lanes_add(q, zero_code));
        lanes_store(stored->at[place], kept);
        lanes_store(work + k * QSF_FEEDBACK_ROWS, error);
        for (size_t m = k + 1; m < first + width; m++) {
            float *const later = work + m * QSF_FEEDBACK_ROWS;
            lanes_store(later, lanes_fma(lanes_set(-row[m]), error, lanes_load(later)));
        }
    }
}

/* The table of functions of this file and fit_tmpl.h. */
#define QSF_ROUNDER                                                                         \
    {                                                                                       \
        .fit_nearest = fit_nearest, .fit_search = fit_search, .encode = encode,             \
        .to_halves = to_halves, .measure = measure, .feedback_catch_up = feedback_catch_up, \
        .feedback_block = feedback_block,                                                   \
    }
