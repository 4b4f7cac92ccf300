/* rounding_job.h - the rows to round, and the destination of the result. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

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
} qsf_rounding_job;

/* Checks the arguments of a public function, whose tiles have cap_bytes; clears the sums and
 * chooses the rounder. QSF_ERR_ARG names the argument that is out of range. */
qsf_status qsf_rounding_job_begin(qsf_rounding_job *job, size_t cap_bytes);
