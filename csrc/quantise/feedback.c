/* feedback.c - rounding column by column; later columns compensate for the errors of earlier ones.
 *
 * GPTQ: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for
 * Generative Pre-trained Transformers" (2022), with an order of blocks that the caller chooses.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/status.h"
#include "quantise/quantise.h"

#define MOST_REPEATS 4

/* The columns of one block, in the caller's order. */
typedef struct block_order {
    size_t first; /* place of its first column in the order */
    size_t col;   /* first column of the block in the matrix */
    size_t width;
    uint8_t places[QSF_BLOCK]; /* column in the tile, for each place */
} block_order;

/* Reads the block that begins at `first`; false if its columns are not together. */
static bool read_block_order(const int32_t *order, size_t n_cols, size_t first, block_order *run)
{
    uint64_t seen = 0;
    if (order[first] < 0 || (size_t)order[first] >= n_cols)
        return false;
    run->first = first;
    run->col = (size_t)order[first] / QSF_BLOCK * QSF_BLOCK;
    run->width = qsf_block_width(n_cols, run->col);
    if (run->width > n_cols - first)
        return false;
    for (size_t i = 0; i < run->width; i++) {
        const int32_t col = order[first + i];
        if (col < 0 || (size_t)col < run->col || (size_t)col >= run->col + run->width)
            return false;
        run->places[i] = (uint8_t)((size_t)col - run->col);
        seen |= UINT64_C(1) << run->places[i];
    }
    /* Every column occurs once if as many bits are set as there are columns. */
    return seen == (run->width == QSF_BLOCK ? UINT64_MAX : (UINT64_C(1) << run->width) - 1);
}

static qsf_status check_order(const int32_t *order, const float *factor, size_t n_cols)
{
    block_order run;
    for (size_t k = 0; k < n_cols; k += run.width) {
        QSF_FAIL_IF(!read_block_order(order, n_cols, k, &run), ARG,
                    "order: the columns of the block at place %zu of %zu are not together, or one "
                    "is missing",
                    k, n_cols);
        block_order other;
        for (size_t before = 0; before < k; before += other.width) {
            read_block_order(order, n_cols, before, &other);
            QSF_FAIL_IF(other.col == run.col, ARG, "order: column %zu comes at places %zu and %zu",
                        run.col, before, k);
        }
    }
    for (size_t k = 0; k < n_cols; k++) {
        const float diagonal = factor[k * n_cols + k];
        QSF_FAIL_IF(!(diagonal > 0.0F && diagonal - diagonal == 0.0F), ARG,
                    "factor [%zu, %zu] is %g; the diagonal must be above 0", k, k,
                    (double)diagonal);
    }
    return QSF_OK;
}

static void load_work(const qsf_rounding_job *job, size_t row, const int32_t *order, float *work)
{
    for (size_t k = 0; k < job->n_cols; k++) {
        float *const to = work + k * QSF_FEEDBACK_ROWS;
        const float *const from = job->rows + row * job->n_cols + (size_t)order[k];
        for (size_t r = 0; r < QSF_FEEDBACK_ROWS; r++)
            to[r] = row + r < job->n_rows ? from[r * job->n_cols] : 0.0F;
    }
}

/* Rounds one block of 16 rows; `work` points at the first of them. */
static bool round_block(const qsf_rounding_job *job, size_t row, const block_order *run,
                        const float *factor, float *work)
{
    const qsf_code_range *const range = qsf_code_range_of(job->how->dtype);
    qsf_tile_floats x;
    qsf_tile_floats source;
    qsf_tile_floats codes;
    qsf_fit fits[QSF_FIT_PARTS];
    bool is_sane = qsf_load_tile(job, row, run->col, &source);
    for (size_t i = 0; i < run->width; i++) {
        const float *const from = work + (run->first + i) * QSF_FEEDBACK_ROWS;
        memcpy(x.at[run->places[i]], from, sizeof x.at[0]);
        for (size_t r = 0; r < QSF_TILE_ROWS; r++)
            is_sane &= from[r] - from[r] == 0.0F; /* finite */
    }
    if (!is_sane || !qsf_fit_block(job, row, run->col, &x, fits))
        return false;
    /* The rounded values may overwrite the values: those are not needed any more. */
    job->rounder->feedback_block(range, fits, qsf_part_cols(job), factor, job->n_cols, run->first,
                                 run->width, run->places, work, &codes, &x);
    qsf_put_tile(job, row, run->col, fits, &source, &codes, &x);
    return true;
}

/* Rounds up to 64 rows; has_steps: see qsf_begin_tiles(). */
static qsf_status round_band(const qsf_rounding_job *job, size_t row, bool has_steps,
                             const float *factor, const int32_t *order, float *work)
{
    const size_t n_cols = job->n_cols;
    block_order run;
    load_work(job, row, order, work);
    for (size_t t = row; t < job->n_rows && t < row + QSF_FEEDBACK_ROWS; t += QSF_TILE_ROWS) {
        if (!qsf_begin_tiles(job, t, has_steps))
            return qsf_fail_at_row(job, t);
    }
    for (size_t k = 0; k < n_cols; k += run.width) {
        read_block_order(order, n_cols, k, &run);
        job->rounder->feedback_catch_up(factor, n_cols, k, run.width, work);
        for (size_t t = 0; t < QSF_FEEDBACK_ROWS; t += QSF_TILE_ROWS) {
            if (row + t < job->n_rows && !round_block(job, row + t, &run, factor, work + t))
                return qsf_fail_at_row(job, row + t);
        }
    }
    return QSF_OK;
}

qsf_status qsf_feedback_job(const qsf_rounding_job *job, const float *factor, const int32_t *order,
                            float *work)
{
    QSF_TRY(check_order(order, factor, job->n_cols));
    for (size_t row = 0; row < job->n_rows; row += QSF_FEEDBACK_ROWS) {
        const qsf_rounding_sums before = *job->sums;
        qsf_rounding_job band = *job;
        bool must_repeat = true; /* what columns compensate for may exceed the range of the rows */
        for (unsigned n = 0; must_repeat; n++) {
            *job->sums = before;
            must_repeat = false;
            band.must_repeat = n < MOST_REPEATS ? &must_repeat : NULL;
            QSF_TRY(round_band(&band, row, n > 0, factor, order, work));
        }
    }
    return QSF_OK;
}

size_t qsf_feedback_work_floats(size_t n_cols)
{
    return n_cols <= QSF_ROUNDING_MAX_SIDE ? n_cols * QSF_FEEDBACK_ROWS : 0;
}

qsf_status qsf_feedback_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                             size_t n_cols, const float *factor, const int32_t *order, float *work,
                             size_t cap_floats, void *tiles, size_t cap_bytes, float *stored,
                             qsf_rounding_sums *sums)
{
    qsf_rounding_job job = {NULL, how, rows, n_rows, n_cols, tiles, stored, sums, NULL};
    QSF_TRY(qsf_rounding_job_begin(&job, cap_bytes));
    QSF_FAIL_IF(factor == NULL || order == NULL || work == NULL, ARG,
                "factor, order or work is NULL");
    QSF_FAIL_IF(cap_floats < qsf_feedback_work_floats(n_cols), ARG,
                "cap_floats is %zu, but the work needs %zu", cap_floats,
                qsf_feedback_work_floats(n_cols));
    QSF_FAIL_IF(qsf_code_range_of(how->dtype) == NULL, ARG,
                "%s is not a quantised type: there is no error to feed back",
                qsf_dtype_name(how->dtype));
    return qsf_feedback_job(&job, factor, order, work);
}
