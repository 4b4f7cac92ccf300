/* rounder.h - fitting the scales of a tile and rounding to them: contracts of the inner loops.
 *
 * 16 rows side by side: what is done to one row does not depend on the others. A level q of a
 * type is an integer, low <= q <= high; its value is q * scale + off, where off is the min, or
 * scale * half for types without one. Its code is q + zero. Every instruction set gives the
 * same bits: sums go along the columns, from +0, one column after the other.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_QUANTISE_ROUNDER_H
#define QSF_QUANTISE_ROUNDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "platform/cpu.h"

/* The levels of a type; integers as floats. */
typedef struct qsf_levels {
    float low;
    float high;
    float zero;
    float half;  /* off in scales, of a type without a min */
    float reach; /* largest magnitude in scales that is rounded by no more than half a scale */
    bool has_min;
    bool is_even;  /* with every level v also -v, so that the sign of a scale is free */
    bool is_exact; /* so few magnitudes that the best scale is found by sorting */
} qsf_levels;

/* NULL for a type without levels (f16, f32). */
const qsf_levels *qsf_levels_of(uint32_t dtype);

/* Numbers of 16 rows by column; rows and columns that are padding are +0. */
typedef struct qsf_tile_floats {
    float at[QSF_BLOCK][QSF_TILE_ROWS];
} qsf_tile_floats;

/* One block of 16 rows, and the importance of its columns: in 0 .. 1, and not all 0. */
typedef struct qsf_fit_input {
    const qsf_tile_floats *x;
    size_t width; /* columns that are real, 1 .. 64 */
    float weights[QSF_BLOCK];
} qsf_fit_input;

/* What 16 blocks are rounded to: numbers that an f16 holds, or not finite ones. */
typedef struct qsf_fit {
    float scales[QSF_TILE_ROWS];
    float mins[QSF_TILE_ROWS]; /* 0 for types without one */
} qsf_fit;

/* Per row, sums over the columns of a tile; d = x - stored. */
typedef struct qsf_row_losses {
    float squared_error[QSF_TILE_ROWS]; /* d * d */
    float source_energy[QSF_TILE_ROWS]; /* x * x */
    float stored_energy[QSF_TILE_ROWS]; /* stored * stored */
    float inner_product[QSF_TILE_ROWS]; /* x * stored */
    float max_error[QSF_TILE_ROWS];     /* largest |d| */
} qsf_row_losses;

/* Plain rounding: from the least to the largest value, or to the largest magnitude. */
typedef void qsf_fit_nearest_fn(const qsf_levels *levels, const qsf_fit_input *in, qsf_fit *fit);

/* Makes a fit that is finite, plain rounding's, the one of the least weighted squared error that
 * is found: it never loses more. */
typedef void qsf_fit_search_fn(const qsf_levels *levels, const qsf_fit_input *in, qsf_fit *fit);

/* Codes, and the values they stand for, of the levels nearest to x. Columns from `width` on are
 * left alone. */
typedef void qsf_encode_fn(const qsf_levels *levels, const qsf_tile_floats *x, size_t width,
                           const qsf_fit *fit, qsf_tile_floats *codes, qsf_tile_floats *stored);

/* Columns from `width` on are not looked at. */
typedef void qsf_measure_fn(const qsf_tile_floats *x, const qsf_tile_floats *stored, size_t width,
                            qsf_row_losses *losses);

/* ---- error feedback: 64 rows at once, columns in the order in which they are rounded ---- */

#define QSF_FEEDBACK_TILES 4
#define QSF_FEEDBACK_ROWS (QSF_FEEDBACK_TILES * QSF_TILE_ROWS)

/* work [n_cols, 64]: of columns before `first` the scaled errors, of the others the values.
 * values[m] = fmaf(-factor[k, m], errors[k], values[m]) for k = 0 .. first - 1 ascending, for
 * the columns m = first .. first + width - 1. */
typedef void qsf_feedback_catch_up_fn(const float *factor, size_t n_cols, size_t first,
                                      size_t width, float *work);

/* Rounds one block of 16 rows: columns first .. first + width - 1 of `work` (at + 0 .. 15 of each),
 * `places` [width] says which column of the tile each is. Per column k: q = nearest level;
 * error = (value - q) / factor[k, k], which replaces the value;
 * values[m] = fmaf(-factor[k, m], error, values[m]) for the later columns m of the block. */
typedef void qsf_feedback_block_fn(const qsf_levels *levels, const qsf_fit *fit,
                                   const float *factor, size_t n_cols, size_t first, size_t width,
                                   const uint8_t *places, float *work, qsf_tile_floats *codes,
                                   qsf_tile_floats *stored);

/* halves [64 * 16]: x as f16, to nearest even, in the order of x. */
typedef void qsf_to_halves_fn(const qsf_tile_floats *x, unsigned char *halves);

typedef struct qsf_rounder {
    qsf_fit_nearest_fn *fit_nearest;
    qsf_fit_search_fn *fit_search;
    qsf_encode_fn *encode;
    qsf_to_halves_fn *to_halves;
    qsf_measure_fn *measure;
    qsf_feedback_catch_up_fn *feedback_catch_up;
    qsf_feedback_block_fn *feedback_block;
} qsf_rounder;

/* The best rounder of a level of instruction set; never NULL. */
const qsf_rounder *qsf_rounder_of(qsf_isa isa);

extern const qsf_rounder qsf_rounder_scalar;
#if QSF_ARCH_X86
extern const qsf_rounder qsf_rounder_avx2;
extern const qsf_rounder qsf_rounder_avx512;
#endif
#if QSF_ARCH_ARM
extern const qsf_rounder qsf_rounder_neon;
#endif

#endif
