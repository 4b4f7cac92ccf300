/* rounder.h - fitting the scales of a tile and rounding to them: contracts of the inner loops.
 *
 * The functions work on 16 rows that do not influence each other. A code q of a type is an integer,
 * low <= q <= high; it stands for q * scale + off, where off is the min, or scale * half for types
 * without a min. The tile stores q + zero. Every instruction set gives the same bits: sums add one
 * column after the other, from +0.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <float.h> /* the templates need these outside of any target region */
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/fused.h"
#include "base/half.h"
#include "kernels/forced_inline.h"
#include "platform/cpu.h"
#include "types/dtype.h"

/* The codes of a type; integers as floats. */
typedef struct qsf_code_range {
    const float *levels; /* the 16 codes + zero, ascending; NULL: all from low to high */
    float low;
    float high;
    float zero;
    float half;  /* off / scale, for a type without a min */
    float reach; /* largest |value| / scale that is rounded by at most half a scale */
    bool has_min;
    bool is_below; /* no min is above 0 */
    bool is_even;  /* symmetric: for each value v also -v, so the sign of a scale is free */
    bool is_exact; /* so few magnitudes that sorting finds the best scale */
} qsf_code_range;

/* Returns NULL for a type without codes (f16, f32). */
const qsf_code_range *qsf_code_range_of(uint32_t dtype);

/* Numbers by column and row; padding is +0. */
typedef struct qsf_tile_floats {
    float at[QSF_BLOCK][QSF_TILE_ROWS];
} qsf_tile_floats;

/* Columns of 16 rows that share scales, and their importance: 0 .. 1, not all 0. */
typedef struct qsf_fit_input {
    const float (*x)[QSF_TILE_ROWS];
    size_t width;       /* columns without padding, 1 .. 64 */
    const float *steps; /* [16] of the scales, [16] of -min, both 0 .. 63 steps; NULL: any f16 */
    float weights[QSF_BLOCK];
} qsf_fit_input;

#define QSF_FIT_PARTS 2 /* at most, of a tile that is rounded: 64 or 32 columns share a scale */

/* Scales and mins of a part of a tile: values of an f16, NaN or infinite. */
typedef struct qsf_fit {
    float scales[QSF_TILE_ROWS];
    float mins[QSF_TILE_ROWS]; /* 0 for types without one */
} qsf_fit;

/* Sums of each row over the columns of a tile; d = x - stored. */
typedef struct qsf_row_losses {
    float squared_error[QSF_TILE_ROWS]; /* d * d */
    float source_energy[QSF_TILE_ROWS]; /* x * x */
    float stored_energy[QSF_TILE_ROWS]; /* stored * stored */
    float inner_product[QSF_TILE_ROWS]; /* x * stored */
    float max_error[QSF_TILE_ROWS];     /* largest |d| */
} qsf_row_losses;

/* Finds the scale and min from the smallest and the largest value, or the largest magnitude. */
typedef void qsf_fit_nearest_fn(const qsf_code_range *range, const qsf_fit_input *in, qsf_fit *fit);

/* Improves a finite fit of qsf_fit_nearest_fn: reduces the weighted squared error as far as the
 * search finds, and never increases it. */
typedef void qsf_fit_search_fn(const qsf_code_range *range, const qsf_fit_input *in, qsf_fit *fit);

/* Writes the codes nearest to `width` columns of x and the values they stand for. */
typedef void qsf_encode_fn(const qsf_code_range *range, const float (*x)[QSF_TILE_ROWS],
                           size_t width, const qsf_fit *fit, float (*codes)[QSF_TILE_ROWS],
                           float (*stored)[QSF_TILE_ROWS]);

/* Ignores columns from `width` on. */
typedef void qsf_measure_fn(const qsf_tile_floats *x, const qsf_tile_floats *stored, size_t width,
                            qsf_row_losses *losses);

/* ---- error feedback: 64 rows at once, columns in the order in which they are rounded ---- */

#define QSF_FEEDBACK_TILES 4
#define QSF_FEEDBACK_ROWS (QSF_FEEDBACK_TILES * QSF_TILE_ROWS)

/* work [n_cols, 64] has scaled errors in columns before `first`, and values in the others. For
 * columns m = first .. first + width - 1: values[m] = fmaf(-factor[k, m], errors[k], values[m]) for
 * k = 0 .. first - 1 ascending. */
typedef void qsf_feedback_catch_up_fn(const float *factor, size_t n_cols, size_t first,
                                      size_t width, float *work);

/* Rounds one block of 16 rows: columns first .. first + width - 1 of `work` (at + 0 .. 15 of each);
 * places [width] are their columns in the tile; part_cols of these share a fit. Per column k: q =
 * nearest code; error = (value - its value) / factor[k, k], which replaces the value; values[m] =
 * fmaf(-factor[k, m], error, values[m]) for the later columns m of the block. */
typedef void qsf_feedback_block_fn(const qsf_code_range *range, const qsf_fit *fits,
                                   size_t part_cols, const float *factor, size_t n_cols,
                                   size_t first, size_t width, const uint8_t *places, float *work,
                                   qsf_tile_floats *codes, qsf_tile_floats *stored);

/* halves [64 * 16] = x as f16, rounded to nearest even, in the order of x */
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

/* Returns the best rounder for an instruction set; never NULL. */
const qsf_rounder *qsf_rounder_of(qsf_isa isa);

extern const qsf_rounder qsf_rounder_scalar;
#if QSF_ARCH_X86
extern const qsf_rounder qsf_rounder_avx2;
extern const qsf_rounder qsf_rounder_avx512;
#endif
#if QSF_ARCH_ARM
extern const qsf_rounder qsf_rounder_neon;
#endif
