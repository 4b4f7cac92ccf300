/* quantise.c - rounds matrices to tiles, each block independently, and packs the codes. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "quantise/quantise.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/half.h"
#include "base/status.h"

#define EXPONENT_BITS 0x7F800000U
#define RANGE_SLACK 1.1F /* the search narrows ranges by as much */

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

/* Returns the tiles that have their scales in common with that at a row and column. */
static unsigned char *head_at(const qsf_rounding_job *job, size_t row, size_t col)
{
    const size_t n_blocks = (job->n_cols + QSF_BLOCK - 1) / QSF_BLOCK, block = col / QSF_BLOCK;
    const qsf_form form = qsf_form_of(job->how->dtype);
    const size_t first = row / QSF_TILE_ROWS * n_blocks + block - block % qsf_tiles_per_head(form);
    return job->tiles + first * form.tile_bytes;
}

/* Returns the integer of a scale or of a min, both >= 0. */
static uint32_t steps_of(float value, float step)
{
    const float n = step > 0.0F ? value / step + 0.5F : 0.0F;
    return n < 63.0F ? (uint32_t)n : 63;
}

/* Raises the steps of a head that 63 of, times `slack`, do not reach a scale or a min. */
static bool raise_steps(const qsf_fit *fit, float slack, unsigned char *head)
{
    bool is_raised = false;
    for (size_t i = 0; i < 2 * (size_t)QSF_TILE_ROWS; i++) {
        const size_t r = i % QSF_TILE_ROWS;
        const float value = i == r ? fit->scales[r] : -fit->mins[r], step = value / 63.0F;
        if (value <= slack * 63.0F * qsf_half_to_float(qsf_load_u16(head + 2 * i)))
            continue;
        const uint16_t half = qsf_half_from_float(step);
        qsf_store_u16(head + 2 * i, (uint16_t)(half + (qsf_half_to_float(half) < step)));
        is_raised = true;
    }
    return is_raised;
}

bool qsf_begin_tiles(const qsf_rounding_job *job, size_t row, bool has_steps)
{
    const qsf_form form = qsf_form_of(job->how->dtype);
    const size_t steps_bytes = has_steps ? 4 * (size_t)QSF_TILE_ROWS : 0;
    qsf_tile_floats x;
    qsf_fit fit;
    for (size_t col = 0; form.scales == QSF_SCALES_6BIT && col < job->n_cols; col += QSF_BLOCK) {
        unsigned char *const head = head_at(job, row, col);
        if (col % (QSF_BLOCK * qsf_tiles_per_head(form)) == 0)
            memset(head + steps_bytes, 0, qsf_codes_off(form) - steps_bytes);
        if (!qsf_load_tile(job, row, col, &x))
            return false;
        for (size_t c = 0; c < QSF_BLOCK && !has_steps; c += form.scale_cols) {
            const qsf_fit_input in = {.x = x.at + c, .width = form.scale_cols};
            job->rounder->fit_nearest(qsf_code_range_of(job->how->dtype), &in, &fit);
            raise_steps(&fit, 1.0F, head);
        }
    }
    return true;
}

static bool fit_part(const qsf_rounding_job *job, const qsf_fit_input *in, unsigned char *head,
                     qsf_fit *fit)
{
    const qsf_code_range *const range = qsf_code_range_of(job->how->dtype);
    job->rounder->fit_nearest(range, in, fit);
    for (size_t r = 0; r < QSF_TILE_ROWS; r++) {
        if (!is_finite(fit->scales[r]) || !is_finite(fit->mins[r]))
            return false;
    }
    if (in->steps != NULL && job->must_repeat != NULL)
        *job->must_repeat |= raise_steps(fit, RANGE_SLACK, head);
    if (job->how->rule == QSF_RULE_SEARCH)
        job->rounder->fit_search(range, in, fit);
    for (size_t r = 0; in->steps != NULL && r < QSF_TILE_ROWS; r++) {
        const float step = in->steps[r], min_step = in->steps[QSF_TILE_ROWS + r];
        fit->scales[r] = (float)steps_of(fit->scales[r], step) * step;
        fit->mins[r] = 0.0F - (float)steps_of(-fit->mins[r], min_step) * min_step;
    }
    return true;
}

bool qsf_fit_block(const qsf_rounding_job *job, size_t row, size_t col, const qsf_tile_floats *x,
                   qsf_fit fits[QSF_FIT_PARTS])
{
    float steps[2 * QSF_TILE_ROWS];
    const bool has_steps = qsf_form_of(job->how->dtype).scales == QSF_SCALES_6BIT;
    for (size_t i = 0; has_steps && i < 2 * (size_t)QSF_TILE_ROWS; i++)
        steps[i] = qsf_half_to_float(qsf_load_u16(head_at(job, row, col) + 2 * i));
    const float *const weights = job->how->weights;
    const size_t width = qsf_block_width(job->n_cols, col), part_cols = qsf_part_cols(job);
    memset(fits, 0, QSF_FIT_PARTS * sizeof *fits); /* of the parts past the last column */
    for (size_t c = 0, part = 0; c < width; c += part_cols, part++) {
        if (job->how->rule == QSF_RULE_SCALE) {
            for (size_t r = 0; r < QSF_TILE_ROWS; r++) /* the caller has checked the scale */
                fits[part].scales[r] = qsf_half_to_float(qsf_half_from_float(job->how->scale));
            continue;
        }
        qsf_fit_input in = {.x = x->at + c,
                            .width = width - c < part_cols ? width - c : part_cols,
                            .steps = has_steps ? steps : NULL};
        set_weights(weights != NULL ? weights + col + c : NULL, in.width, in.weights);
        if (!fit_part(job, &in, head_at(job, row, col), &fits[part]))
            return false;
    }
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

static void pack_tile(const qsf_rounding_job *job, size_t row, size_t col,
                      const qsf_tile_floats *codes, const qsf_fit *fits);

static void put_stored(const qsf_rounding_job *job, size_t row, size_t col, size_t n_rows,
                       size_t width, const qsf_tile_floats *stored)
{
    for (size_t r = 0; job->stored != NULL && r < n_rows; r++) {
        float *const to = job->stored + (row + r) * job->n_cols + col;
        for (size_t c = 0; c < width; c++)
            to[c] = stored->at[c][r];
    }
}

void qsf_put_tile(const qsf_rounding_job *job, size_t row, size_t col, const qsf_fit *fits,
                  const qsf_tile_floats *source, const qsf_tile_floats *codes,
                  const qsf_tile_floats *stored)
{
    const size_t n_rows = n_rows_here(job, row);
    const size_t width = qsf_block_width(job->n_cols, col);
    pack_tile(job, row, col, codes, fits);
    put_stored(job, row, col, n_rows, width, stored);
    add_losses(job, source, stored, n_rows, width);
}

/* Writes the values of f16 and f32 tiles. */
static bool put_floats(const qsf_rounding_job *job, size_t row, size_t col,
                       const qsf_tile_floats *x)
{
    unsigned char *const tile = head_at(job, row, col);
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
    qsf_fit fits[QSF_FIT_PARTS];
    const size_t part_cols = qsf_part_cols(job);
    for (size_t row = 0; row < job->n_rows; row += QSF_TILE_ROWS) {
        if (!qsf_begin_tiles(job, row, false))
            return qsf_fail_at_row(job, row);
        for (size_t col = 0; col < job->n_cols; col += QSF_BLOCK) {
            if (!qsf_load_tile(job, row, col, &x))
                return qsf_fail_at_row(job, row);
            if (range == NULL) {
                if (!put_floats(job, row, col, &x))
                    return qsf_fail_at_row(job, row);
                continue;
            }
            if (!qsf_fit_block(job, row, col, &x, fits))
                return qsf_fail_at_row(job, row);
            const size_t width = qsf_block_width(job->n_cols, col);
            for (size_t c = 0, part = 0; c < width; c += part_cols, part++)
                job->rounder->encode(range, x.at + c, width - c < part_cols ? width - c : part_cols,
                                     &fits[part], codes.at + c, stored.at + c);
            qsf_put_tile(job, row, col, fits, &x, &codes, &stored);
        }
    }
    return QSF_OK;
}

qsf_status qsf_quantise_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                             size_t n_cols, void *tiles, size_t cap_bytes, float *stored,
                             qsf_rounding_sums *sums)
{
    qsf_rounding_job job = {NULL, how, rows, n_rows, n_cols, tiles, stored, sums, NULL};
    QSF_TRY(qsf_rounding_job_begin(&job, cap_bytes));
    return qsf_quantise_job(&job);
}

static qsf_status check_rounding(const qsf_rounding *how, size_t n_cols)
{
    QSF_FAIL_IF(qsf_dtype_tile_bytes(how->dtype) == 0, ARG, "type %u has no tiles", how->dtype);
    QSF_FAIL_IF(qsf_dtype_is_quantised(how->dtype) && qsf_code_range_of(how->dtype) == NULL, ARG,
                "nothing is rounded to %s, it is only kept", qsf_dtype_name(how->dtype));
    QSF_FAIL_IF(n_cols % (QSF_BLOCK * qsf_tiles_per_head(qsf_form_of(how->dtype))) != 0 &&
                    qsf_tiles_per_head(qsf_form_of(how->dtype)) > 1,
                ARG, "%zu columns are no whole blocks of %s", n_cols, qsf_dtype_name(how->dtype));
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

/* ---- packing ---- */

#define N_GROUPS (QSF_BLOCK / 4)

/* The four codes of a row and a group of neighbouring columns, the first in the lowest byte. */
typedef struct code_words {
    uint32_t at[N_GROUPS][QSF_TILE_ROWS];
} code_words;

static void gather_words(const qsf_tile_floats *codes, size_t n_rows, size_t n_cols,
                         code_words *words)
{
    memset(words, 0, sizeof *words);
    for (size_t c = 0; c < n_cols; c++) {
        uint32_t *const to = words->at[c / 4];
        const unsigned shift = 8 * (c % 4);
        for (size_t r = 0; r < QSF_TILE_ROWS; r++)
            to[r] |= (uint32_t)(int32_t)codes->at[c][r] << shift;
    }
    for (size_t g = 0; g < N_GROUPS; g++) {
        for (size_t r = n_rows; r < QSF_TILE_ROWS; r++)
            words->at[g][r] = 0;
    }
}

/* Replaces levels by their codes. */
static void codes_of_levels(code_words *words)
{
    static const uint8_t levels[] = {QSF_LEVELS};
    uint8_t code_of[64] = {0};
    for (uint8_t code = 0; code < sizeof levels; code++)
        code_of[levels[code]] = code;
    unsigned char *const bytes = (unsigned char *)words->at;
    for (size_t i = 0; i < sizeof words->at; i++)
        bytes[i] = code_of[bytes[i]];
}

static void put_plane(const uint32_t *words, unsigned char *out)
{
    for (size_t r = 0; r < QSF_TILE_ROWS; r++)
        qsf_store_u32(out + 4 * r, words[r]);
}

/* Returns the byte of five trits, the first the highest digit: ceil(256 n / 243). */
static uint32_t dense_byte(const uint32_t trits[5])
{
    uint32_t n = 0;
    for (size_t k = 0; k < 5; k++)
        n = 3 * n + trits[k];
    return (256 * n + 242) / 243;
}

static void put_dense(const code_words *words, unsigned char *out)
{
    for (size_t p = 0; p < 3; p++) {
        for (size_t r = 0; r < QSF_TILE_ROWS; r++) {
            for (size_t j = 0; j < 4; j++) {
                uint32_t trits[5];
                for (size_t k = 0; k < 5; k++)
                    trits[k] = words->at[5 * p + k][r] >> (8 * j) & 3;
                out[QSF_BLOCK * p + 4 * r + j] = (unsigned char)dense_byte(trits);
            }
        }
    }
    for (size_t r = 0; r < QSF_TILE_ROWS; r++) {
        const uint32_t last = words->at[15][r];
        const uint32_t trits[5] = {last & 3, last >> 8 & 3, last >> 16 & 3, last >> 24 & 3, 0};
        out[QSF_BLOCK * 3 + r] = (unsigned char)dense_byte(trits);
    }
}

/* Writes the codes of a tile where qsf_code_place_of() says. */
static void put_codes(qsf_codes codes, const code_words *words, unsigned char *out)
{
    uint32_t planes[N_GROUPS][QSF_TILE_ROWS] = {{0}};
    if (codes == QSF_CODES_TRITS) {
        put_dense(words, out);
        return;
    }
    for (size_t g = 0; g < N_GROUPS; g++) {
        const qsf_code_place at = qsf_code_place_of(codes, g);
        for (size_t r = 0; r < QSF_TILE_ROWS; r++) {
            const uint32_t word = words->at[g][r];
            const uint64_t high = word & 0x01010101U * at.high_mask;
            planes[at.plane][r] |= (word & 0x01010101U * at.mask) << at.shift;
            planes[at.high_plane][r] |= (uint32_t)(high << at.high_shift >> 4);
        }
    }
    for (size_t p = 0; p < qsf_code_bytes(codes) / QSF_BLOCK; p++)
        put_plane(planes[p], out + QSF_BLOCK * p);
}

static void put_halves(const float *values, size_t n_rows, unsigned char *out)
{
    for (size_t r = 0; r < QSF_TILE_ROWS; r++)
        qsf_store_u16(out + 2 * r, r < n_rows ? qsf_half_from_float(values[r]) : 0);
}

/* Adds the integers of part i of a head, which are 0 so far (kernels/part_scales.h). */
static void put_steps(const qsf_fit *fit, size_t n_rows, size_t i, unsigned char *head)
{
    for (size_t r = 0; r < n_rows; r++) {
        const float step = qsf_half_to_float(qsf_load_u16(head + 2 * r));
        const float min_step = qsf_half_to_float(qsf_load_u16(head + 32 + 2 * r));
        const uint32_t scale = steps_of(fit->scales[r], step);
        const uint32_t min = steps_of(-fit->mins[r], min_step);
        unsigned char *const to = head + 64 + i % 4 * QSF_TILE_ROWS + r;
        to[0] |= (unsigned char)(i < 4 ? scale : scale >> 4 << 6);
        to[64] |= (unsigned char)(i < 4 ? min : min >> 4 << 6);
        if (i >= 4)
            to[128] = (unsigned char)((scale & 15) | (min & 15) << 4);
    }
}

/* Writes a tile. Codes, scales and mins after the last row, and codes after the last column, become
 * 0. `codes` are integers. */
static void pack_tile(const qsf_rounding_job *job, size_t row, size_t col,
                      const qsf_tile_floats *codes, const qsf_fit *fits)
{
    const qsf_form form = qsf_form_of(job->how->dtype);
    const size_t n_rows = n_rows_here(job, row);
    const size_t b = col / QSF_BLOCK % qsf_tiles_per_head(form);
    unsigned char *const tile = head_at(job, row, col);
    unsigned char *const out = tile + qsf_codes_off(form) + b * qsf_code_bytes(form.codes);
    code_words words;
    gather_words(codes, n_rows, qsf_block_width(job->n_cols, col), &words);
    const size_t n_parts = QSF_BLOCK / form.scale_cols;
    for (size_t p = 0; p < n_parts; p++) {
        if (form.scales == QSF_SCALES_6BIT) {
            put_steps(&fits[p], n_rows, n_parts * b + p, tile);
            continue;
        }
        put_halves(fits[p].scales, n_rows, tile + 2 * QSF_TILE_ROWS * p);
        if (form.has_min)
            put_halves(fits[p].mins, n_rows, tile + 2 * QSF_TILE_ROWS * (n_parts + p));
    }
    if (form.codes == QSF_CODES_LEVELS)
        codes_of_levels(&words);
    put_codes(form.codes, &words, out);
}

/* ---- blocks of GGUF ---- */

/* Where the parts of a block are (ggml-common.h of llama.cpp); `mins` and `high` are 0 without. */
typedef struct block_form {
    size_t bytes;
    size_t n_cols;
    size_t scale; /* an f16 */
    size_t min;
    size_t integers; /* scales and mins of the parts of 256 columns, perhaps from 0 on */
    size_t high;     /* the bits of a code above the lowest four */
    size_t low;
} block_form;

static block_form block_form_of(uint32_t dtype)
{
    switch (dtype) {
    case QSF_DTYPE_Q4_0:
        return (block_form){.bytes = 18, .n_cols = 32, .low = 2};
    case QSF_DTYPE_Q4_1:
        return (block_form){.bytes = 20, .n_cols = 32, .min = 2, .low = 4};
    case QSF_DTYPE_Q5_0:
        return (block_form){.bytes = 22, .n_cols = 32, .high = 2, .low = 6};
    case QSF_DTYPE_Q5_1:
        return (block_form){.bytes = 24, .n_cols = 32, .min = 2, .high = 4, .low = 8};
    case QSF_DTYPE_Q8_0:
        return (block_form){.bytes = 34, .n_cols = 32, .low = 2};
    case QSF_DTYPE_Q4_K:
        return (block_form){.bytes = 144, .n_cols = 256, .min = 2, .integers = 4, .low = 16};
    case QSF_DTYPE_Q5_K:
        return (block_form){
            .bytes = 176, .n_cols = 256, .min = 2, .integers = 4, .high = 16, .low = 48};
    case QSF_DTYPE_Q6_K:
        return (block_form){
            .bytes = 210, .n_cols = 256, .scale = 208, .integers = 192, .high = 128};
    case QSF_DTYPE_Q2_K:
        return (block_form){.bytes = 84, .n_cols = 256, .scale = 80, .min = 82, .low = 16};
    case QSF_DTYPE_Q3_K:
        return (block_form){.bytes = 110, .n_cols = 256, .scale = 108, .integers = 96, .low = 32};
    case QSF_DTYPE_IQ4_NL:
        return (block_form){.bytes = 18, .n_cols = 32, .low = 2};
    case QSF_DTYPE_IQ4_XS:
        return (block_form){.bytes = 136, .n_cols = 256, .integers = 2, .low = 8};
    default:
        return (block_form){0};
    }
}

/* Returns bits 0 .. 3 as the lowest bits of four bytes. */
static uint32_t spread_bits(uint32_t bits)
{
    return (bits & 15) * 0x00204081U & 0x01010101U;
}

/* Reads the codes of 32 columns of a row, four a word. `part` is the number of these columns in
 * their block. */
static void read_codes(uint32_t dtype, const block_form *form, const unsigned char *block,
                       size_t part, uint32_t out[8])
{
    const unsigned char *const low = block + form->low;
    const unsigned char *const high = block + form->high;
    for (size_t k = 0; k < 8; k++) {
        switch (dtype) {
        case QSF_DTYPE_Q8_0:
            out[k] = qsf_load_u32(low + 4 * k) ^ 0x80808080U;
            break;
        case QSF_DTYPE_Q4_K:
        case QSF_DTYPE_Q5_K:
            out[k] = qsf_load_u32(low + part / 2 * 32 + 4 * k) >> part % 2 * 4 & 0x0F0F0F0FU;
            if (form->high != 0)
                out[k] |= (qsf_load_u32(high + 4 * k) >> part & 0x01010101U) << 4;
            break;
        case QSF_DTYPE_Q6_K: {
            const size_t half = part / 4;
            const uint32_t lows = qsf_load_u32(low + half * 64 + part % 2 * 32 + 4 * k);
            const uint32_t highs = qsf_load_u32(high + half * 32 + 4 * k);
            out[k] = (lows >> part % 4 / 2 * 4 & 0x0F0F0F0FU) |
                     (highs >> part % 4 * 2 & 0x03030303U) << 4;
            break;
        }
        case QSF_DTYPE_Q2_K:
        case QSF_DTYPE_Q3_K:
            out[k] = qsf_load_u32(low + part / 4 * 32 + 4 * k) >> part % 4 * 2 & 0x03030303U;
            if (dtype == QSF_DTYPE_Q3_K)
                out[k] |= (qsf_load_u32(high + 4 * k) >> part & 0x01010101U) << 2;
            break;
        default:
            out[k] = qsf_load_u32(low + part * 16 + k % 4 * 4) >> k / 4 * 4 & 0x0F0F0F0FU;
            if (form->high != 0)
                out[k] |= spread_bits(qsf_load_u32(high) >> 4 * k) << 4;
        }
    }
}

/* Reads the integers of a block's parts as a tile has them, and returns how many planes they are.
 */
static size_t read_integers(uint32_t dtype, const unsigned char *from, unsigned char out[16])
{
    switch (dtype) {
    case QSF_DTYPE_Q4_K:
    case QSF_DTYPE_Q5_K:
        memcpy(out, from, 12);
        return 12;
    case QSF_DTYPE_Q2_K:
        memcpy(out, from, 16);
        return 16;
    case QSF_DTYPE_Q6_K:
        for (size_t i = 0; i < 16; i++)
            out[i] = from[i] ^ 0x80;
        return 16;
    case QSF_DTYPE_Q3_K: /* s + 32: four low bits of each, then two high ones */
        for (size_t i = 0; i < 16; i++)
            out[i] = (unsigned char)(96 + ((from[i % 8] >> i / 8 * 4 & 15) |
                                           (from[8 + i % 4] >> i / 4 * 2 & 3) << 4));
        return 16;
    case QSF_DTYPE_IQ4_XS: /* s + 32: two high bits of each, then four low ones */
        for (size_t i = 0; i < 8; i++)
            out[i] = (unsigned char)(96 + ((from[2 + i / 2] >> i % 2 * 4 & 15) |
                                           (from[i / 4] >> i % 4 * 2 & 3) << 4));
        return 8;
    default:
        return 0;
    }
}

/* Writes the scales, mins and integers that a group of tiles has in common; what rows and blocks
 * past the end have is 0 already. `blocks` are those of the first row. */
static void put_block_scales(uint32_t dtype, const block_form *form, const unsigned char *blocks,
                             size_t row_bytes, size_t n_rows, size_t n_blocks, unsigned char *out)
{
    const size_t n_parts = form->n_cols < QSF_BLOCK ? QSF_BLOCK / form->n_cols : 1;
    const size_t half_bytes = n_parts * QSF_TILE_ROWS * 2;
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t b = 0; b < n_blocks; b++) {
            const unsigned char *const block = blocks + r * row_bytes + b * form->bytes;
            unsigned char *to = out + 2 * (b * QSF_TILE_ROWS + r);
            memcpy(to, block + form->scale, 2);
            if (form->min != 0)
                memcpy(to + half_bytes, block + form->min, 2);
            to = out + half_bytes * (form->min != 0 ? 2 : 1) + r;
            unsigned char integers[16];
            const size_t n = read_integers(dtype, block + form->integers, integers);
            for (size_t i = 0; i < n; i++)
                to[i * QSF_TILE_ROWS] = integers[i];
        }
    }
}

/* Reads the codes of a tile: n_cols 32 or 64 columns from `col` on of the group that `blocks`
 * begins. */
static void read_words(uint32_t dtype, const block_form *form, const unsigned char *blocks,
                       size_t row_bytes, size_t n_rows, size_t col, size_t n_cols,
                       code_words *words)
{
    memset(words, 0, sizeof *words);
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t c = 0; c < n_cols; c += 32) {
            const size_t at = col + c;
            uint32_t codes[8];
            read_codes(dtype, form, blocks + r * row_bytes + at / form->n_cols * form->bytes,
                       at % form->n_cols / 32, codes);
            for (size_t k = 0; k < 8; k++)
                words->at[c / 4 + k][r] = codes[k];
        }
    }
}

qsf_status qsf_repack_rows(uint32_t dtype, const void *stored, size_t n_rows, size_t n_cols,
                           void *tiles, size_t cap_bytes)
{
    const block_form form = block_form_of(dtype);
    const qsf_form type = qsf_form_of(dtype);
    QSF_FAIL_IF(form.bytes == 0 || n_rows == 0 || n_rows > QSF_ROUNDING_MAX_SIDE || n_cols == 0 ||
                    n_cols > QSF_ROUNDING_MAX_SIDE || n_cols % form.n_cols != 0,
                ARG, "%zu x %zu weights are no whole blocks of type %" PRIu32, n_rows, n_cols,
                dtype);
    const size_t n_tiles = qsf_tiles_per_head(type), group_cols = n_tiles * QSF_BLOCK;
    const size_t row_bytes = n_cols / form.n_cols * form.bytes;
    const size_t needed_bytes = (n_rows + QSF_TILE_ROWS - 1) / QSF_TILE_ROWS *
                                ((n_cols + group_cols - 1) / group_cols) * n_tiles *
                                type.tile_bytes;
    QSF_FAIL_IF(cap_bytes < needed_bytes, ARG, "cap_bytes is %zu, but the tiles have %zu",
                cap_bytes, needed_bytes);
    unsigned char *out = tiles;
    for (size_t row = 0; row < n_rows; row += QSF_TILE_ROWS) {
        const size_t n = n_rows - row < QSF_TILE_ROWS ? n_rows - row : QSF_TILE_ROWS;
        for (size_t col = 0; col < n_cols; col += group_cols) {
            const size_t width = n_cols - col < group_cols ? n_cols - col : group_cols;
            const unsigned char *const blocks =
                (const unsigned char *)stored + row * row_bytes + col / form.n_cols * form.bytes;
            memset(out, 0, qsf_codes_off(type));
            put_block_scales(dtype, &form, blocks, row_bytes, n, width / form.n_cols, out);
            out += qsf_codes_off(type);
            for (size_t c = 0; c < group_cols; c += QSF_BLOCK) {
                code_words words;
                read_words(dtype, &form, blocks, row_bytes, n, c, qsf_block_width(width, c),
                           &words);
                put_codes(type.codes, &words, out);
                out += qsf_code_bytes(type.codes);
            }
        }
    }
    return QSF_OK;
}
