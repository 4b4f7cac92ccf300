/* outliers.h - the side table of a matrix: weights that its few bits do not span (docs/format.md,
 * section 5).
 *
 * What is found of a table in memory has been checked, so that who applies it need not: a table
 * from a hostile file is refused, and never read outside of.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_FORMAT_OUTLIERS_H
#define QSF_FORMAT_OUTLIERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/records.h"

#define QSF_OUTLIER_ENTRY_BYTES 4 /* u16 step, f16 delta */

/* A side table in memory. */
typedef struct qsf_outliers {
    const qsf_tensor *tensor;   /* of layout outliers */
    const unsigned char *bytes; /* [data_bytes]; NULL: the matrix has no side table */
} qsf_outliers;

/* Bytes of the data; false: no side table may have this type or so many entries. The shape has
 * been checked. */
bool qsf_outliers_measure(const qsf_tensor *t, uint64_t *data_bytes);

/* The entries of a tile row of the matrix, which lie in it and in their order. false: the table
 * is malformed there. */
bool qsf_outliers_find(const qsf_outliers *o, size_t tile_row, const unsigned char **entries,
                       size_t *n_entries);

/* Checks all of it. QSF_ERR_FORMAT: what is malformed. */
qsf_status qsf_outliers_check(const qsf_outliers *o);

#endif
