/* quantise.h - rounds matrices to tiles, by blocks or with error feedback between columns.
 *
 * Callers pass rows of a matrix; rows do not influence each other. Allocates nothing.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "include/qsf.h"
#include "quantise/rounding_job.h"

/* Does the work of qsf_quantise_rows() and qsf_feedback_rows(), with any rounder. */
qsf_status qsf_quantise_job(const qsf_rounding_job *job);
qsf_status qsf_feedback_job(const qsf_rounding_job *job, const float *factor, const int32_t *order,
                            float *work);

/* ---- shared by quantise.c and feedback.c ---- */

/* Returns the number of columns of the block that begins at `col`. */
size_t qsf_block_width(size_t n_cols, size_t col);

/* Loads a tile of the rows, padded with zeros; false if a value is NaN or infinite. */
bool qsf_load_tile(const qsf_rounding_job *job, size_t row, size_t col, qsf_tile_floats *x);

/* Sets the weights of `in`, then finds scales and mins of `in->x`; false if one of them does not
 * fit f16. */
bool qsf_fit_block(const qsf_rounding_job *job, size_t col, qsf_fit_input *in, qsf_fit *fit);

/* Writes a tile, its values to `stored`, and adds the losses to the sums. `source` is the tile as
 * it was loaded. */
void qsf_put_tile(const qsf_rounding_job *job, size_t row, size_t col, const qsf_fit *fit,
                  const qsf_tile_floats *source, const qsf_tile_floats *codes,
                  const qsf_tile_floats *stored);

/* Returns QSF_ERR_NUMERIC; sums.bad_row becomes the row. */
qsf_status qsf_fail_at_row(const qsf_rounding_job *job, size_t row);
