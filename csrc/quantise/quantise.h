/* quantise.h - rounds matrices to tiles, by blocks or with error feedback between columns.
 *
 * Callers pass rows of a matrix; rows do not influence each other. Allocates nothing.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "include/qsf.h"
#include "quantise/rounder.h"

#define QSF_ROUNDING_MAX_SIDE (UINT64_C(1) << 24) /* most rows or columns of a matrix */

typedef struct qsf_rounding_job {
    const qsf_rounder *rounder;
    const qsf_rounding *how;
    const float *rows; /* [n_rows, n_cols] */
    size_t n_rows;
    size_t n_cols;
    unsigned char *tiles;
    float *stored; /* [n_rows, n_cols], or NULL */
    qsf_rounding_sums *sums;
    bool *must_repeat; /* set where steps of scales were too small; NULL: scales are cut there */
} qsf_rounding_job;

/* Checks the arguments of a public function, whose tiles have cap_bytes; clears the sums and
 * chooses the rounder. QSF_ERR_ARG names the argument that is out of range. */
qsf_status qsf_rounding_job_begin(qsf_rounding_job *job, size_t cap_bytes);

/* Does the work of qsf_quantise_rows() and qsf_feedback_rows(), with any rounder. */
qsf_status qsf_quantise_job(const qsf_rounding_job *job);
qsf_status qsf_feedback_job(const qsf_rounding_job *job, const float *factor, const int32_t *order,
                            float *work);

/* ---- shared by quantise.c and feedback.c ---- */

/* Returns the number of columns of the block that begins at `col`. */
static inline size_t qsf_block_width(size_t n_cols, size_t col)
{
    return n_cols - col < QSF_BLOCK ? n_cols - col : QSF_BLOCK;
}

/* Returns the number of columns that share a scale: 64 or 32. */
static inline size_t qsf_part_cols(const qsf_rounding_job *job)
{
    return qsf_form_of(job->how->dtype).scale_cols;
}

/* Loads a tile of the rows, padded with zeros; false if a value is NaN or infinite. */
bool qsf_load_tile(const qsf_rounding_job *job, size_t row, size_t col, qsf_tile_floats *x);

/* Prepares the tiles of 16 rows: sets the steps of scales that are integers, for 256 columns, from
 * the range of the rows unless `has_steps`, and those integers to 0. False if a value is NaN or
 * infinite. */
bool qsf_begin_tiles(const qsf_rounding_job *job, size_t row, bool has_steps);

/* Finds the scales and mins of a tile, by part; false if one of them does not fit f16. */
bool qsf_fit_block(const qsf_rounding_job *job, size_t row, size_t col, const qsf_tile_floats *x,
                   qsf_fit fits[QSF_FIT_PARTS]);

/* Writes a tile, its values to `stored`, and adds the losses to the sums. `source` is the tile as
 * it was loaded. */
void qsf_put_tile(const qsf_rounding_job *job, size_t row, size_t col, const qsf_fit *fits,
                  const qsf_tile_floats *source, const qsf_tile_floats *codes,
                  const qsf_tile_floats *stored);

/* Returns QSF_ERR_NUMERIC; sums.bad_row becomes the row. */
qsf_status qsf_fail_at_row(const qsf_rounding_job *job, size_t row);
