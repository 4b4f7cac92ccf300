/* quantise.h - matrices to tiles: by blocks, or with error feedback from column to column.
 *
 * Knows neither files nor threads: callers hand in rows of a matrix, and rows do not
 * influence each other. Allocates nothing.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_QUANTISE_QUANTISE_H
#define QSF_QUANTISE_QUANTISE_H

#include <stddef.h>

#include "include/qsf.h"
#include "quantise/rounding_job.h"

/* The work of qsf_quantise_rows() and qsf_feedback_rows(), with any rounder. */
qsf_status qsf_quantise_job(const qsf_rounding_job *job);
qsf_status qsf_feedback_job(const qsf_rounding_job *job, const float *factor, const int32_t *order,
                            float *work);

/* ---- shared by the two ---- */

/* Columns of the block that begins at `col`. */
size_t qsf_block_width(size_t n_cols, size_t col);

/* Loads a tile of the rows, with zeros for padding; false when a value is not finite. */
bool qsf_load_tile(const qsf_rounding_job *job, size_t row, size_t col, qsf_tile_floats *x);

/* Finds scales and mins of `in->x`, whose weights are set here; false if an f16 holds one not. */
bool qsf_fit_block(const qsf_rounding_job *job, size_t col, qsf_fit_input *in, qsf_fit *fit);

/* Writes a tile, and its values to `stored`, and adds what was lost. `source` is the tile as it
 * was loaded. */
void qsf_put_tile(const qsf_rounding_job *job, size_t row, size_t col, const qsf_fit *fit,
                  const qsf_tile_floats *source, const qsf_tile_floats *codes,
                  const qsf_tile_floats *stored);

/* QSF_ERR_NUMERIC, with the place in the sums. */
qsf_status qsf_fail_at_row(const qsf_rounding_job *job, size_t row);

#endif
