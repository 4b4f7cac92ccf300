/* check_quantise.c - rounding of matrices: all instruction sets give one result, what is stored is
 * what the kernels read, and nothing is written elsewhere. How well it is rounded, and what is
 * refused: tests/python/converter/test_quantisers.py and test_feedback.py. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "check.h"
#include "kernels/kernels.h"
#include "quantise/quantise.h"

#define MAX_ROWS 70
#define MAX_COLS 512
#define MAX_VALUES (MAX_ROWS * MAX_COLS)
#define MAX_TILES (5 * MAX_COLS / 64)
#define GUARD 0xA5
#define GUARD_BYTES 64

/* One result: tiles with a guard behind them, values, sums. */
typedef struct result {
    unsigned char tiles[MAX_TILES * 4096 + GUARD_BYTES];
    float stored[MAX_VALUES + 1];
    qsf_rounding_sums sums;
} result;

static float rows[MAX_VALUES];
static float weights[MAX_COLS];
static float factor[MAX_COLS * MAX_COLS];
static int32_t order[MAX_COLS];
static float work[MAX_COLS * QSF_FEEDBACK_ROWS];
static result have;
static result want;
static size_t stride;
static size_t n_cases;

static float draw(void)
{
    return (float)check_draw(1U << 24) / (float)(1U << 24);
}

/* About normal, with a few values far out, blocks of one value, and levels that repeat. */
static void fill_rows(size_t n_rows, size_t n_cols)
{
    for (size_t i = 0; i < n_rows * n_cols; i++) {
        const size_t row = i / n_cols;
        rows[i] = (draw() + draw() + draw() + draw() - 2.0F) * (row % 5 == 4 ? 1e-6F : 0.1F);
        if (i % 97 == 0)
            rows[i] *= 30.0F;
        if (row % 7 == 5)
            rows[i] = 0.1F;
        if (row % 7 == 6)
            rows[i] = i % 3 == 0 ? -0.5F : i % 3 == 1 ? 0.0F : 0.5F;
    }
    for (size_t c = 0; c < n_cols; c++)
        weights[c] = c % 11 == 3 ? 0.0F : draw() * 4.0F;
}

static size_t n_tiles_of(size_t n_rows, size_t n_cols)
{
    return (n_rows + 15) / 16 * ((n_cols + 63) / 64);
}

/* Runs one job on `isa`; with feedback if `is_fed`. */
static qsf_status run(qsf_isa isa, const qsf_rounding *how, size_t n_rows, size_t n_cols,
                      bool is_fed, result *out)
{
    memset(out, GUARD, sizeof *out);
    out->sums = (qsf_rounding_sums){0};
    const qsf_rounding_job job = {qsf_rounder_of(isa), how,         rows,       n_rows, n_cols,
                                  out->tiles,          out->stored, &out->sums, NULL};
    return is_fed ? qsf_feedback_job(&job, factor, order, work) : qsf_quantise_job(&job);
}

/* The kernels give the values that are said to be stored, and the sums are theirs. */
static void check_stored(const qsf_rounding *how, size_t n_rows, size_t n_cols, const result *r)
{
    qsf_kernels kernels;
    float decoded[(MAX_COLS + 63) / 64 * 64];
    const size_t n_blocks = (n_cols + 63) / 64;
    const size_t tile_bytes = qsf_dtype_tile_bytes(how->dtype);
    double squared = 0.0;
    double largest = 0.0;
    qsf_kernels_init(&kernels, QSF_ISA_SCALAR);
    for (size_t row = 0; row < n_rows; row++) {
        kernels.dequant_row[how->dtype](r->tiles + row / 16 * n_blocks * tile_bytes, n_blocks,
                                        row % 16, decoded);
        for (size_t c = 0; c < n_cols; c++) {
            const double stored = (double)r->stored[row * n_cols + c];
            const double d = (double)rows[row * n_cols + c] - stored;
            if (!CHECK_NEAR(stored, (double)decoded[c], 0.0))
                return;
            squared += d * d;
            largest = fabs(d) > largest ? fabs(d) : largest;
        }
    }
    CHECK_EQ_U64(r->sums.n_values, n_rows * n_cols);
    CHECK_NEAR(r->sums.squared_error, squared, 1e-5 * squared + 1e-20);
    CHECK_NEAR(r->sums.max_error, largest, 1e-6 * largest);
}

static void check_guards(const qsf_rounding *how, size_t n_rows, size_t n_cols, const result *r)
{
    unsigned char guard[GUARD_BYTES];
    memset(guard, GUARD, sizeof guard);
    const size_t n_bytes = n_tiles_of(n_rows, n_cols) * qsf_dtype_tile_bytes(how->dtype);
    CHECK_BYTES(r->tiles + n_bytes, guard, sizeof guard);
    CHECK_BYTES(r->stored + n_rows * n_cols, guard, sizeof(float));
}

/* Each instruction set of the machine against plain C. */
static void check_case(const qsf_rounding *how, size_t n_rows, size_t n_cols, bool is_fed)
{
    const size_t head_cols = 64 * qsf_tiles_per_head(qsf_form_of(how->dtype));
    if (n_cases++ % stride != 0 || (head_cols > 64 && n_cols % head_cols != 0))
        return;
    CHECK_OK(run(QSF_ISA_SCALAR, how, n_rows, n_cols, is_fed, &want));
    check_stored(how, n_rows, n_cols, &want);
    check_guards(how, n_rows, n_cols, &want);
    for (unsigned isa = QSF_ISA_SCALAR + 1; isa < QSF_ISA_COUNT; isa++) {
        if (!qsf_isa_has((qsf_isa)isa) || qsf_rounder_of((qsf_isa)isa) == &qsf_rounder_scalar)
            continue;
        CHECK_OK(run((qsf_isa)isa, how, n_rows, n_cols, is_fed, &have));
        if (!CHECK_BYTES(have.tiles, want.tiles, sizeof have.tiles) ||
            !CHECK_BYTES(have.stored, want.stored, sizeof have.stored) ||
            !CHECK_BYTES(&have.sums, &want.sums, sizeof have.sums))
            printf("  %s, type %u, rule %u, %zu x %zu\n", qsf_isa_name((qsf_isa)isa), how->dtype,
                   how->rule, n_rows, n_cols);
    }
}

/* Nothing is rounded to MXFP4 and most types of GGUF: files have what was stored so before. */
static bool is_rounded_to(uint32_t dtype)
{
    return qsf_dtype_tile_bytes(dtype) != 0 &&
           (!qsf_dtype_is_quantised(dtype) || qsf_code_range_of(dtype) != NULL);
}

static void check_types(void)
{
    static const size_t shapes[][2] = {{1, 1}, {15, 63}, {16, 64}, {17, 65}, {17, 512}};
    for (uint32_t dtype = 0; dtype < QSF_DTYPE_COUNT; dtype++) {
        if (!is_rounded_to(dtype))
            continue;
        for (size_t i = 0; i < COUNT_OF(shapes); i++) {
            const size_t n_rows = shapes[i][0];
            const size_t n_cols = shapes[i][1];
            fill_rows(n_rows, n_cols);
            check_case(&(qsf_rounding){dtype, QSF_RULE_NEAREST, 0.0F, NULL}, n_rows, n_cols, false);
            check_case(&(qsf_rounding){dtype, QSF_RULE_SEARCH, 0.0F, NULL}, n_rows, n_cols, false);
            check_case(&(qsf_rounding){dtype, QSF_RULE_SEARCH, 0.0F, weights}, n_rows, n_cols,
                       false);
            if (dtype == QSF_DTYPE_TERNARY || dtype == QSF_DTYPE_TERNARY_DENSE)
                check_case(&(qsf_rounding){dtype, QSF_RULE_SCALE, 0.07F, NULL}, n_rows, n_cols,
                           false);
        }
    }
}

/* An order with blocks and columns reversed, and a factor that carries errors on. */
static void make_feedback(size_t n_cols, float carried)
{
    size_t k = 0;
    for (size_t col = (n_cols - 1) / 64 * 64;; col -= 64) {
        for (size_t c = qsf_block_width(n_cols, col); c > 0; c--)
            order[k++] = (int32_t)(col + c - 1);
        if (col == 0)
            break;
    }
    for (size_t i = 0; i < n_cols * n_cols; i++) {
        const size_t row = i / n_cols;
        const size_t col = i % n_cols;
        factor[i] = row == col ? 1.0F : col > row ? carried * (draw() - 0.5F) : NAN;
    }
}

static void check_feedback(void)
{
    static const size_t shapes[][2] = {{1, 1}, {17, 65}, {70, 150}, {MAX_ROWS, MAX_COLS}};
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const size_t n_rows = shapes[i][0];
        const size_t n_cols = shapes[i][1];
        fill_rows(n_rows, n_cols);
        make_feedback(n_cols, 0.2F);
        for (uint32_t dtype = 0; dtype < QSF_DTYPE_COUNT; dtype++) {
            if (qsf_code_range_of(dtype) == NULL)
                continue;
            const qsf_rounding how = {dtype, QSF_RULE_NEAREST, 0.0F, weights};
            check_case(&how, n_rows, n_cols, true);
        }
    }
}

int main(void)
{
    stride = check_stride();
    check_types();
    check_feedback();
    return check_report("check_quantise");
}
