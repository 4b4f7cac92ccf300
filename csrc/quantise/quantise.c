/* quantise.c - rounds matrices to tiles, each block independently. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/quantise.h"

#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/half.h"
#include "base/status.h"

#define EXPONENT_BITS 0x7F800000U

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline bool is_finite(float value)
{
    return (bits_of(value) & EXPONENT_BITS) != EXPONENT_BITS;
}

size_t qsf_block_width(size_t n_cols, size_t col)
{
    return n_cols - col < QSF_BLOCK ? n_cols - col : QSF_BLOCK;
}

static size_t n_rows_here(const qsf_rounding_job *job, size_t row)
{
    return job->n_rows - row < QSF_TILE_ROWS ? job->n_rows - row : QSF_TILE_ROWS;
}

bool qsf_load_tile(const qsf_rounding_job *job, size_t row, size_t col, qsf_tile_floats *x)
{
    const size_t n_rows = n_rows_here(job, row);
    const size_t width = qsf_block_width(job->n_cols, col);
    if (n_rows < QSF_TILE_ROWS || width < QSF_BLOCK)
        memset(x, 0, sizeof *x);
    uint32_t largest = 0;
    for (size_t r = 0; r < n_rows; r++) {
        const float *const from = job->rows + (row + r) * job->n_cols + col;
        for (size_t c = 0; c < width; c++) {
            const uint32_t magnitude = bits_of(from[c]) & 0x7FFFFFFFU;
            largest = magnitude > largest ? magnitude : largest;
        }
        for (size_t c = 0; c < width; c++)
            x->at[c][r] = from[c];
    }
    return largest < EXPONENT_BITS;
}

/* Divides the weights of a block by the largest, so that no sum over- or underflows. */
static void set_weights(const float *weights, size_t width, float *out)
{
    float largest = 0.0F;
    for (size_t c = 0; weights != NULL && c < width; c++)
        largest = weights[c] > largest ? weights[c] : largest;
    for (size_t c = 0; c < width; c++)
        out[c] = largest > 0.0F ? weights[c] / largest : 1.0F;
}

bool qsf_fit_block(const qsf_rounding_job *job, size_t col, qsf_fit_input *in, qsf_fit *fit)
{
    const qsf_code_range *const range = qsf_code_range_of(job->how->dtype);
    in->width = qsf_block_width(job->n_cols, col);
    if (job->how->rule == QSF_RULE_SCALE) {
        const float scale = qsf_half_to_float(qsf_half_from_float(job->how->scale));
        for (size_t r = 0; r < QSF_TILE_ROWS; r++) {
            fit->scales[r] = scale;
            fit->mins[r] = 0.0F;
        }
        return true; /* the caller has checked the scale */
    }
    const float *const weights = job->how->weights;
    set_weights(weights != NULL ? weights + col : NULL, in->width, in->weights);
    job->rounder->fit_nearest(range, in, fit);
    for (size_t r = 0; r < QSF_TILE_ROWS; r++) {
        if (!is_finite(fit->scales[r]) || !is_finite(fit->mins[r]))
            return false;
    }
    if (job->how->rule == QSF_RULE_SEARCH)
        job->rounder->fit_search(range, in, fit);
    return true;
}

qsf_status qsf_fail_at_row(const qsf_rounding_job *job, size_t row)
{
    job->sums->bad_row = row;
    return QSF_FAIL(NUMERIC, "rows %zu to %zu: a value is not finite or too large for %s", row,
                    row + n_rows_here(job, row) - 1, qsf_dtype_name(job->how->dtype));
}

static void add_losses(const qsf_rounding_job *job, const qsf_tile_floats *source,
                       const qsf_tile_floats *stored, size_t n_rows, size_t width)
{
    qsf_rounding_sums *const sums = job->sums;
    qsf_row_losses losses;
    job->rounder->measure(source, stored, width, &losses);
    sums->n_values += n_rows * width;
    for (size_t r = 0; r < n_rows; r++) {
        sums->squared_error += (double)losses.squared_error[r];
        sums->source_energy += (double)losses.source_energy[r];
        sums->stored_energy += (double)losses.stored_energy[r];
        sums->inner_product += (double)losses.inner_product[r];
        if ((double)losses.max_error[r] > sums->max_error)
            sums->max_error = (double)losses.max_error[r];
    }
}

static unsigned char *tile_at(const qsf_rounding_job *job, size_t row, size_t col)
{
    const size_t n_blocks = (job->n_cols + QSF_BLOCK - 1) / QSF_BLOCK;
    const size_t tile_idx = row / QSF_TILE_ROWS * n_blocks + col / QSF_BLOCK;
    return job->tiles + tile_idx * qsf_dtype_tile_bytes(job->how->dtype);
}

static void put_stored(const qsf_rounding_job *job, size_t row, size_t col, size_t n_rows,
                       size_t width, const qsf_tile_floats *stored)
{
    for (size_t r = 0; job->stored != NULL && r < n_rows; r++) {
        float *const to = job->stored + (row + r) * job->n_cols + col;
        for (size_t c = 0; c < width; c++)
            to[c] = stored->at[c][r];
    }
}

void qsf_put_tile(const qsf_rounding_job *job, size_t row, size_t col, const qsf_fit *fit,
                  const qsf_tile_floats *source, const qsf_tile_floats *codes,
                  const qsf_tile_floats *stored)
{
    const size_t n_rows = n_rows_here(job, row);
    const size_t width = qsf_block_width(job->n_cols, col);
    qsf_pack_tile(job->how->dtype, codes, fit, n_rows, width, tile_at(job, row, col));
    put_stored(job, row, col, n_rows, width, stored);
    add_losses(job, source, stored, n_rows, width);
}

/* Writes the values of f16 and f32 tiles. */
static bool put_floats(const qsf_rounding_job *job, size_t row, size_t col,
                       const qsf_tile_floats *x)
{
    unsigned char *const tile = tile_at(job, row, col);
    qsf_tile_floats stored = *x;
    bool ok = true;
    if (job->how->dtype == QSF_DTYPE_F16) {
        job->rounder->to_halves(x, tile);
        for (size_t i = 0; i < QSF_BLOCK * QSF_TILE_ROWS; i++) {
            const uint16_t half = qsf_load_u16(tile + 2 * i);
            ok &= (half & 0x7C00) != 0x7C00;
            stored.at[i / QSF_TILE_ROWS][i % QSF_TILE_ROWS] = qsf_half_to_float(half);
        }
    } else {
        for (size_t i = 0; i < QSF_BLOCK * QSF_TILE_ROWS; i++)
            qsf_store_u32(tile + 4 * i, bits_of(x->at[i / QSF_TILE_ROWS][i % QSF_TILE_ROWS]));
    }
    const size_t n_rows = n_rows_here(job, row);
    const size_t width = qsf_block_width(job->n_cols, col);
    put_stored(job, row, col, n_rows, width, &stored);
    add_losses(job, x, &stored, n_rows, width);
    return ok;
}

qsf_status qsf_quantise_job(const qsf_rounding_job *job)
{
    const qsf_code_range *const range = qsf_code_range_of(job->how->dtype);
    qsf_tile_floats x;
    qsf_tile_floats codes;
    qsf_tile_floats stored;
    qsf_fit_input in;
    qsf_fit fit;
    in.x = &x;
    for (size_t row = 0; row < job->n_rows; row += QSF_TILE_ROWS) {
        for (size_t col = 0; col < job->n_cols; col += QSF_BLOCK) {
            if (!qsf_load_tile(job, row, col, &x))
                return qsf_fail_at_row(job, row);
            if (range == NULL) {
                if (!put_floats(job, row, col, &x))
                    return qsf_fail_at_row(job, row);
                continue;
            }
            if (!qsf_fit_block(job, col, &in, &fit))
                return qsf_fail_at_row(job, row);
            job->rounder->encode(range, &x, in.width, &fit, &codes, &stored);
            qsf_put_tile(job, row, col, &fit, &x, &codes, &stored);
        }
    }
    return QSF_OK;
}

qsf_status qsf_quantise_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                             size_t n_cols, void *tiles, size_t cap_bytes, float *stored,
                             qsf_rounding_sums *sums)
{
    qsf_rounding_job job = {NULL, how, rows, n_rows, n_cols, tiles, stored, sums};
    QSF_TRY(qsf_rounding_job_begin(&job, cap_bytes));
    return qsf_quantise_job(&job);
}

static qsf_status check_rounding(const qsf_rounding *how, size_t n_cols)
{
    QSF_FAIL_IF(qsf_dtype_tile_bytes(how->dtype) == 0, ARG, "type %u has no tiles", how->dtype);
    QSF_FAIL_IF(qsf_dtype_is_quantised(how->dtype) && qsf_code_range_of(how->dtype) == NULL, ARG,
                "nothing is rounded to %s, it is only kept", qsf_dtype_name(how->dtype));
    QSF_FAIL_IF(how->rule > QSF_RULE_SCALE, ARG, "rule is %u; it must be 0 to %d", how->rule,
                QSF_RULE_SCALE);
    if (how->rule == QSF_RULE_SCALE) {
        QSF_FAIL_IF(how->dtype != QSF_DTYPE_TERNARY && how->dtype != QSF_DTYPE_TERNARY_DENSE, ARG,
                    "one scale for all blocks is for ternary types, not %s",
                    qsf_dtype_name(how->dtype));
        QSF_FAIL_IF(!(how->scale >= 0.0F) ||
                        !isfinite(qsf_half_to_float(qsf_half_from_float(how->scale))),
                    ARG, "scale is %g; it must be 0 to 65504", (double)how->scale);
    }
    for (size_t c = 0; how->weights != NULL && c < n_cols; c++) {
        QSF_FAIL_IF(!(how->weights[c] >= 0.0F && isfinite(how->weights[c])), ARG,
                    "weights [%zu] is %g; it must be at least 0 and finite", c,
                    (double)how->weights[c]);
    }
    return QSF_OK;
}

qsf_status qsf_rounding_job_begin(qsf_rounding_job *job, size_t cap_bytes)
{
    const qsf_rounding *const how = job->how;
    QSF_FAIL_IF(how == NULL || job->rows == NULL || job->tiles == NULL || job->sums == NULL, ARG,
                "how, rows, tiles or sums is NULL");
    QSF_FAIL_IF(job->n_rows < 1 || job->n_rows > QSF_ROUNDING_MAX_SIDE || job->n_cols < 1 ||
                    job->n_cols > QSF_ROUNDING_MAX_SIDE,
                ARG, "%zu x %zu values; each side must be 1 to 2^24", job->n_rows, job->n_cols);
    QSF_TRY(check_rounding(how, job->n_cols));
    const size_t n_tiles = (job->n_rows + QSF_TILE_ROWS - 1) / QSF_TILE_ROWS *
                           ((job->n_cols + QSF_BLOCK - 1) / QSF_BLOCK);
    QSF_FAIL_IF(cap_bytes < n_tiles * qsf_dtype_tile_bytes(how->dtype), ARG,
                "cap_bytes is %zu, but the tiles need %zu", cap_bytes,
                n_tiles * qsf_dtype_tile_bytes(how->dtype));
    *job->sums = (qsf_rounding_sums){0};
    qsf_isa isa;
    QSF_TRY(qsf_isa_choose(&isa));
    job->rounder = qsf_rounder_of(isa);
    return QSF_OK;
}
