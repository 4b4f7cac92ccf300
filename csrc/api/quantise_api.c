/* quantise_api.c - the exported functions that round matrices: check arguments, forward. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "base/half.h"
#include "base/status.h"
#include "include/qsf.h"
#include "quantise/quantise.h"

#define MAX_SIDE (UINT64_C(1) << 24) /* rows or columns of a matrix in a file */

static qsf_status check_rounding(const qsf_rounding *how, size_t n_cols)
{
    if (qsf_dtype_tile_bytes(how->dtype) == 0)
        return QSF_FAIL(QSF_ERR_ARG, "type %u has no tiles", how->dtype);
    if (how->rule > QSF_RULE_SCALE)
        return QSF_FAIL(QSF_ERR_ARG, "rule is %u: 0 to %d", how->rule, QSF_RULE_SCALE);
    if (how->rule == QSF_RULE_SCALE) {
        if (how->dtype != QSF_DTYPE_TERNARY && how->dtype != QSF_DTYPE_TERNARY_DENSE)
            return QSF_FAIL(QSF_ERR_ARG, "one scale for all is for ternary types, not %s",
                            qsf_dtype_name(how->dtype));
        if (!(how->scale >= 0.0F) || !isfinite(qsf_half_to_float(qsf_half_from_float(how->scale))))
            return QSF_FAIL(QSF_ERR_ARG, "the scale is %g: 0 to 65504", (double)how->scale);
    }
    for (size_t c = 0; how->weights != NULL && c < n_cols; c++) {
        if (!(how->weights[c] >= 0.0F && isfinite(how->weights[c])))
            return QSF_FAIL(QSF_ERR_ARG, "weights [%zu] is %g: at least 0 and finite", c,
                            (double)how->weights[c]);
    }
    return QSF_OK;
}

static qsf_status begin_job(const qsf_rounding *how, const qsf_rounding_job *job, size_t cap_bytes)
{
    if (how == NULL || job->rows == NULL || job->tiles == NULL || job->sums == NULL)
        return QSF_FAIL(QSF_ERR_ARG, "how, rows, tiles or sums is NULL");
    if (job->n_rows < 1 || job->n_rows > MAX_SIDE || job->n_cols < 1 || job->n_cols > MAX_SIDE)
        return QSF_FAIL(QSF_ERR_ARG, "%zu x %zu values: each 1 to 2^24", job->n_rows, job->n_cols);
    QSF_TRY(check_rounding(how, job->n_cols));
    const size_t n_tiles = (job->n_rows + QSF_TILE_ROWS - 1) / QSF_TILE_ROWS *
                           ((job->n_cols + QSF_BLOCK - 1) / QSF_BLOCK);
    if (cap_bytes < n_tiles * qsf_dtype_tile_bytes(how->dtype))
        return QSF_FAIL(QSF_ERR_ARG, "cap_bytes is %zu, the tiles take %zu", cap_bytes,
                        n_tiles * qsf_dtype_tile_bytes(how->dtype));
    *job->sums = (qsf_rounding_sums){0};
    return QSF_OK;
}

static qsf_status choose_rounder(qsf_rounding_job *job)
{
    qsf_isa isa = QSF_ISA_SCALAR;
    QSF_TRY(qsf_isa_choose(&isa));
    job->rounder = qsf_rounder_of(isa);
    return QSF_OK;
}

qsf_status qsf_quantise_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                             size_t n_cols, void *tiles, size_t cap_bytes, float *stored,
                             qsf_rounding_sums *sums)
{
    qsf_rounding_job job = {NULL, how, rows, n_rows, n_cols, tiles, stored, sums};
    QSF_TRY(begin_job(how, &job, cap_bytes));
    QSF_TRY(choose_rounder(&job));
    return qsf_quantise_job(&job);
}

size_t qsf_feedback_work_floats(size_t n_cols)
{
    return n_cols <= MAX_SIDE ? n_cols * QSF_FEEDBACK_ROWS : 0;
}

qsf_status qsf_feedback_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                             size_t n_cols, const float *factor, const int32_t *order, float *work,
                             size_t cap_floats, void *tiles, size_t cap_bytes, float *stored,
                             qsf_rounding_sums *sums)
{
    qsf_rounding_job job = {NULL, how, rows, n_rows, n_cols, tiles, stored, sums};
    QSF_TRY(begin_job(how, &job, cap_bytes));
    if (factor == NULL || order == NULL || work == NULL)
        return QSF_FAIL(QSF_ERR_ARG, "factor, order or work is NULL");
    if (cap_floats < qsf_feedback_work_floats(n_cols))
        return QSF_FAIL(QSF_ERR_ARG, "cap_floats is %zu, the work takes %zu", cap_floats,
                        qsf_feedback_work_floats(n_cols));
    if (qsf_levels_of(how->dtype) == NULL)
        return QSF_FAIL(QSF_ERR_ARG, "%s keeps the values: there is no error to feed back",
                        qsf_dtype_name(how->dtype));
    QSF_TRY(choose_rounder(&job));
    return qsf_feedback_job(&job, factor, order, work);
}
