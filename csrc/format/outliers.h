/* outliers.h - sparse outliers: weights of a matrix that are too large for their block
 * (docs/format.md, section 5).
 *
 * qsf_outliers_find checks the entries that it returns, so its caller need not: a table of a
 * hostile file is refused and never read out of bounds.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"

#define QSF_OUTLIER_ENTRY_BYTES 4 /* u16 step, f16 delta */

/* The sparse outliers of a matrix in memory. */
typedef struct qsf_outliers {
    const qsf_tensor *tensor;   /* of layout outliers */
    const unsigned char *bytes; /* [data_bytes]; NULL: the matrix has no outliers */
} qsf_outliers;

/* Computes the size of the data. False if the type or the number of entries is not allowed. The
 * caller has checked the shape. */
bool qsf_outliers_measure(const qsf_tensor *t, uint64_t *data_bytes);

/* Finds the entries of a tile row and checks that they are in order and inside it. False if they
 * are not. */
bool qsf_outliers_find(const qsf_outliers *o, size_t tile_row, const unsigned char **entries,
                       size_t *n_entries);

/* Checks all tile rows. QSF_ERR_FORMAT: the text names the first malformed one. */
qsf_status qsf_outliers_check(const qsf_outliers *o);
