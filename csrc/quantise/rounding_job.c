/* rounding_job.c - checks the arguments of a rounding job. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/rounding_job.h"

#include <math.h>

#include "base/half.h"
#include "base/status.h"

static qsf_status check_rounding(const qsf_rounding *how, size_t n_cols)
{
    if (qsf_dtype_tile_bytes(how->dtype) == 0)
        return QSF_FAIL(QSF_ERR_ARG, "type %u has no tiles", how->dtype);
    if (qsf_dtype_is_quantised(how->dtype) && qsf_code_range_of(how->dtype) == NULL)
        return QSF_FAIL(QSF_ERR_ARG, "nothing is rounded to %s, it is only kept",
                        qsf_dtype_name(how->dtype));
    if (how->rule > QSF_RULE_SCALE)
        return QSF_FAIL(QSF_ERR_ARG, "rule is %u; it must be 0 to %d", how->rule, QSF_RULE_SCALE);
    if (how->rule == QSF_RULE_SCALE) {
        if (how->dtype != QSF_DTYPE_TERNARY && how->dtype != QSF_DTYPE_TERNARY_DENSE)
            return QSF_FAIL(QSF_ERR_ARG, "one scale for all blocks is for ternary types, not %s",
                            qsf_dtype_name(how->dtype));
        if (!(how->scale >= 0.0F) || !isfinite(qsf_half_to_float(qsf_half_from_float(how->scale))))
            return QSF_FAIL(QSF_ERR_ARG, "scale is %g; it must be 0 to 65504", (double)how->scale);
    }
    for (size_t c = 0; how->weights != NULL && c < n_cols; c++) {
        if (!(how->weights[c] >= 0.0F && isfinite(how->weights[c])))
            return QSF_FAIL(QSF_ERR_ARG, "weights [%zu] is %g; it must be at least 0 and finite", c,
                            (double)how->weights[c]);
    }
    return QSF_OK;
}

qsf_status qsf_rounding_job_begin(qsf_rounding_job *job, size_t cap_bytes)
{
    const qsf_rounding *const how = job->how;
    if (how == NULL || job->rows == NULL || job->tiles == NULL || job->sums == NULL)
        return QSF_FAIL(QSF_ERR_ARG, "how, rows, tiles or sums is NULL");
    if (job->n_rows < 1 || job->n_rows > QSF_ROUNDING_MAX_SIDE || job->n_cols < 1 ||
        job->n_cols > QSF_ROUNDING_MAX_SIDE)
        return QSF_FAIL(QSF_ERR_ARG, "%zu x %zu values; each side must be 1 to 2^24", job->n_rows,
                        job->n_cols);
    QSF_TRY(check_rounding(how, job->n_cols));
    const size_t n_tiles = (job->n_rows + QSF_TILE_ROWS - 1) / QSF_TILE_ROWS *
                           ((job->n_cols + QSF_BLOCK - 1) / QSF_BLOCK);
    if (cap_bytes < n_tiles * qsf_dtype_tile_bytes(how->dtype))
        return QSF_FAIL(QSF_ERR_ARG, "cap_bytes is %zu, but the tiles need %zu", cap_bytes,
                        n_tiles * qsf_dtype_tile_bytes(how->dtype));
    *job->sums = (qsf_rounding_sums){0};
    qsf_isa isa;
    QSF_TRY(qsf_isa_choose(&isa));
    job->rounder = qsf_rounder_of(isa);
    return QSF_OK;
}
