/* matmul.c - matrix products and rows of weights: every level against scalar bit by bit, and scalar
 * products against the formula in double. That the weights of a tile are those of docs/format.md:
 * check_quantise.c with tests/python/file/test_reader.py, test_mxfp4.py, test_gguf_families.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/half.h"
#include "kernel_data.h"

#define ID(id, ...) (id),
static const qsf_dtype dtypes[] = {QSF_CODED_TYPES(ID) QSF_FLOAT_TYPES(ID)};

static uint64_t n_compared;

typedef struct problem {
    qsf_dtype dtype;
    bool exact;
    fill how;
    size_t n_tokens;
    size_t n_blocks;
    size_t n_tile_rows;
    unsigned char *tiles; /* [n_tile_rows, n_blocks] tiles */
    float *f32;           /* [n_tokens, n_blocks * 64] */
    int8_t *q;            /* [n_tokens, n_blocks * 64] */
    int8_t *q_low;        /* [n_tokens, n_blocks * 64] */
    float *scale;         /* [n_tokens, n_blocks] */
    int32_t *sum;         /* [n_tokens, n_blocks] */
    qsf_act_parts *parts; /* [n_tokens, n_blocks] */
    float *scaled_sum;    /* [n_tokens, n_blocks] */
    int32_t *fine_sum;    /* [n_tokens, n_blocks] */
    qsf_acts acts;        /* of these only what the form may read, the others NULL */
} problem;

static uint16_t random_half(fill how)
{
    const bool is_negative = (random_u32() & 1) != 0;
    static const uint16_t fixed[FILL_COUNT] = {[FILL_LARGEST] = 0x3C00, [FILL_SMALLEST] = 0xBC00};
    uint16_t half = how == FILL_HUGE ? 0x7BFF : 0; /* without its sign */
    if (how == FILL_RANDOM || how == FILL_EXTREMES)
        return qsf_half_from_float(random_unit() * 0.1F);
    if (how == FILL_BITS)
        return (uint16_t)(random_u32() | (random_u32() % 4 == 0 ? 0x7C00U : 0U));
    if (how == FILL_DENORMAL)
        half = (uint16_t)(random_u32() & 0x3FF);
    return fixed[how] != 0 ? fixed[how] : (uint16_t)(half | (is_negative ? 0x8000 : 0));
}

/* A scale of MXFP4: 2^(e - 127) */
static unsigned char random_exponent(fill how)
{
    static const struct {
        unsigned char least;
        uint32_t n;
    } of[FILL_COUNT] = {
        [FILL_RANDOM] = {120, 10}, [FILL_EXTREMES] = {120, 10}, [FILL_ZEROS] = {0, 3},
        [FILL_DENORMAL] = {0, 3},  [FILL_LARGEST] = {128, 1},   [FILL_SMALLEST] = {128, 1},
        [FILL_HUGE] = {250, 6},    [FILL_BITS] = {0, 256}};
    return (unsigned char)(of[how].least + random_u32() % of[how].n);
}

static unsigned char random_code(fill how)
{
    static const unsigned char edges[] = {0x00, 0x0F, 0xF0, 0xFF, 0x80, 0x7F, 0x01, 0x88};
    if (how == FILL_LARGEST)
        return 0xFF;
    if (how == FILL_ZEROS || how == FILL_SMALLEST)
        return 0x00;
    if (how == FILL_EXTREMES)
        return edges[random_u32() % COUNT_OF(edges)];
    return (unsigned char)(random_u32() & 0xFF);
}

/* Tiles that have their scales in common. */
static void fill_head(unsigned char *head, qsf_dtype dtype, fill how)
{
    const qsf_form form = qsf_form_of(dtype);
    const size_t n_bytes = qsf_tiles_per_head(form) * form.tile_bytes;
    size_t n_halves = qsf_codes_off(form) / 2;
    if (dtype == QSF_DTYPE_F32) {
        float values[1024];
        fill_floats(values, 1024, how);
        memcpy(head, values, sizeof values);
        return;
    }
    if (dtype == QSF_DTYPE_F16)
        n_halves = 1024;
    else if (form.scales == QSF_SCALES_6BIT || form.scales == QSF_SCALES_4BIT)
        n_halves = 32;
    else if (form.scales == QSF_SCALES_8BIT)
        n_halves = 16;
    for (size_t i = 0; i < n_halves && form.scales == QSF_SCALES_E8M0; i++) {
        head[2 * i] = random_exponent(how);
        head[2 * i + 1] = random_exponent(how);
    }
    for (size_t i = 0; i < n_halves && form.scales != QSF_SCALES_E8M0; i++) {
        const uint16_t h = random_half(how);
        memcpy(head + 2 * i, &h, 2);
    }
    for (size_t i = 2 * n_halves; i < n_bytes; i++)
        head[i] = random_code(how);
}

/* At least -127 beside q_low. Alone it may be -128: q_low is multiplied like that, too. */
static int8_t random_q(fill how, int8_t least)
{
    const bool odd = (random_u32() & 1) != 0;
    if (how == FILL_ZEROS)
        return 0;
    if (how == FILL_LARGEST || (how == FILL_EXTREMES && odd))
        return 127;
    if (how == FILL_SMALLEST || how == FILL_EXTREMES)
        return least;
    return (int8_t)((int32_t)(random_u32() % (uint32_t)(128 - least)) + least);
}

/* Any -128..127, but no more than 32512 in all: see qsf_quantise_fn. */
static int8_t random_q_low(fill how, int8_t q)
{
    const int8_t low = (int8_t)((int32_t)(random_u32() & 0xFF) - 128);
    if (how == FILL_ZEROS)
        return 0;
    if (how == FILL_EXTREMES && q != -127)
        return -128;
    return (q == 127 && low > 0) || (q == -127 && low < 0) ? 0 : low;
}

static void fill_acts(problem *p)
{
    const size_t n_blocks = p->n_tokens * p->n_blocks;
    const int8_t least = qsf_dtype_has_coarse_acts(p->dtype) ? -128 : -127;
    fill_floats(p->f32, n_blocks * QSF_BLOCK, p->how);
    fill_floats(p->scale, n_blocks, p->how);
    for (size_t b = 0; b < n_blocks; b++) {
        p->sum[b] = 0;
        p->parts[b] = (qsf_act_parts){.scale = {p->scale[b], p->scale[(b + 1) % n_blocks]}};
        p->fine_sum[b] = 0;
        for (size_t i = b * QSF_BLOCK; i < (b + 1) * QSF_BLOCK; i++) {
            p->q[i] = random_q(p->how, least);
            p->q_low[i] = random_q_low(p->how, p->q[i]);
            p->sum[b] += p->q[i];
            int16_t *const quarter = &p->parts[b].quarter[i % QSF_BLOCK / 16];
            *quarter = (int16_t)(*quarter + p->q[i]);
            p->parts[b].first_fine += i % QSF_BLOCK < 32 ? 256 * p->q[i] + p->q_low[i] : 0;
            p->fine_sum[b] += 256 * p->q[i] + p->q_low[i];
        }
        p->scaled_sum[b] = p->scale[b] * (float)p->sum[b];
    }
}

static problem problem_make(qsf_dtype dtype, bool exact, fill how, size_t n_tokens, size_t n_blocks,
                            size_t n_tile_rows)
{
    const size_t n_together = qsf_tiles_per_head(qsf_form_of(dtype));
    n_blocks = (n_blocks + n_together - 1) / n_together * n_together;
    problem p = {.dtype = dtype,
                 .exact = exact,
                 .how = how,
                 .n_tokens = n_tokens,
                 .n_blocks = n_blocks,
                 .n_tile_rows = n_tile_rows};
    const size_t n_all = n_tokens * n_blocks;
    const size_t tile_bytes = qsf_dtype_tile_bytes(dtype);
    random_restart(((n_tokens * 64 + n_blocks) * 64 + n_tile_rows) * 64 + (size_t)how);
    p.tiles = exact_alloc(n_tile_rows * n_blocks * tile_bytes);
    for (size_t i = 0; i < n_tile_rows * n_blocks; i += n_together)
        fill_head(p.tiles + i * tile_bytes, dtype, how);
    p.f32 = exact_floats(n_all * QSF_BLOCK);
    p.q = exact_alloc(n_all * QSF_BLOCK);
    p.q_low = exact_alloc(n_all * QSF_BLOCK);
    p.scale = exact_floats(n_all);
    p.sum = exact_alloc(n_all * sizeof *p.sum);
    p.parts = exact_alloc(n_all * sizeof *p.parts);
    p.scaled_sum = exact_floats(n_all);
    p.fine_sum = exact_alloc(n_all * sizeof *p.fine_sum);
    fill_acts(&p);
    p.acts = (qsf_acts){.n_tokens = n_tokens, .n_blocks = n_blocks};
    if (exact || !qsf_dtype_is_quantised(dtype)) {
        p.acts.f32 = p.f32;
    } else {
        p.acts.q = p.q;
        p.acts.scale = p.scale;
    }
    const qsf_form form = qsf_form_of(dtype);
    const bool has_parts = form.scale_cols < QSF_BLOCK;
    if (p.acts.q == NULL)
        return p;
    if (form.codes == QSF_CODES_8BIT) {
        p.acts.q_low = p.q_low;
        p.acts.fine_sum = p.fine_sum;
    } else if (form.has_min && !has_parts) {
        p.acts.scaled_sum = p.scaled_sum;
    } else if (!has_parts) {
        p.acts.sum = p.sum;
    }
    if (has_parts) {
        p.acts.parts = p.parts;
        p.acts.scale = NULL;
    }
    return p;
}

static void problem_free(problem *p)
{
    free(p->tiles);
    free(p->f32);
    free(p->q);
    free(p->q_low);
    free(p->scale);
    free(p->sum);
    free(p->parts);
    free(p->scaled_sum);
    free(p->fine_sum);
}

#define Y_GAP 5 /* floats between two tokens of y, which nobody writes */

static size_t y_floats(const problem *p)
{
    return p->n_tokens * (p->n_tile_rows * QSF_TILE_ROWS + Y_GAP);
}

static void run_product(const qsf_kernels *k, const void *args, float *y)
{
    const problem *const p = args;
    (p->exact ? k->matmul_exact : k->matmul)[p->dtype](p->tiles, p->n_tile_rows, &p->acts, y,
                                                       p->n_tile_rows * QSF_TILE_ROWS + Y_GAP);
}

/* The exact output of row `row`, token t, and how far the float one may be off. With u = half
 * of FLT_EPSILON, each fmaf loses at most u of a partial sum, and no partial sum exceeds the
 * sum of the absolute terms: code * scale and min, which are at most twice the largest weight of
 * their block each. Integer form: at most two terms and two fmafs a part of a block, each term with
 * at most two roundings of its own (w_scale * x_scale, and 8-bit's large dot; scaled_sum). f32
 * form: a term and an fmaf a column. One more u covers the rounded weight, one the products of
 * these. */
static double exact_output(const problem *p, size_t row, size_t t, double *tolerance)
{
    static float w[(43 + 8) * QSF_BLOCK];
    const bool integer_form = p->acts.q != NULL;
    const size_t part_cols = integer_form ? qsf_form_of(p->dtype).scale_cols : 1;
    double sum = 0.0;
    double sum_abs = 0.0;
    scalar.dequant_row[p->dtype](p->tiles + row / QSF_TILE_ROWS * p->n_blocks *
                                                qsf_dtype_tile_bytes(p->dtype),
                                 p->n_blocks, row % QSF_TILE_ROWS, w);
    for (size_t b = 0; b < p->n_blocks; b++) {
        const size_t block = t * p->n_blocks + b;
        double largest = 0.0;
        double sum_x = 0.0;
        for (size_t c = 0; c < QSF_BLOCK; c++) {
            const size_t i = block * QSF_BLOCK + c;
            const double weight = (double)w[b * QSF_BLOCK + c];
            const double q =
                (double)p->q[i] + (p->acts.q_low != NULL ? (double)p->q_low[i] / 256.0 : 0.0);
            const float x_scale =
                part_cols < QSF_BLOCK ? p->parts[block].scale[c / 32] : p->scale[block];
            const double x = integer_form ? q * (double)x_scale : (double)p->f32[i];
            sum += weight * x;
            sum_x += fabs(x);
            largest = fmax(largest, fabs(weight));
        }
        sum_abs += (integer_form ? 4.0 : 1.0) * largest * sum_x;
    }
    const double n_roundings =
        (double)(p->n_blocks * QSF_BLOCK / part_cols) * (integer_form ? 2.0 : 1.0) + 4.0;
    *tolerance = sum_abs * n_roundings * (double)(FLT_EPSILON / 2);
    return sum;
}

static void check_exact(const problem *p, const float *y, const char *what)
{
    const size_t n_rows = p->n_tile_rows * QSF_TILE_ROWS;
    for (size_t i = 0; i < p->n_tokens * n_rows; i++) {
        double tolerance;
        const size_t t = i / n_rows;
        const double want = exact_output(p, i % n_rows, t, &tolerance);
        const double have = (double)y[i + t * Y_GAP];
        if (!CHECK(fabs(have - want) <= tolerance)) {
            printf("  scalar %s: token %zu row %zu is %.9g, not %.9g +- %.3g\n", what, t,
                   i % n_rows, have, want, tolerance);
            return;
        }
    }
}

static void check_problem(qsf_dtype dtype, bool exact, fill how, size_t n_tokens, size_t n_blocks,
                          size_t n_tile_rows)
{
    problem p = problem_make(dtype, exact, how, n_tokens, n_blocks, n_tile_rows);
    char what[160];
    snprintf(what, sizeof what, "matmul%s %s, %zu tokens, %zu blocks, %zu tile rows, fill %d",
             exact ? "_exact" : "", qsf_dtype_name(dtype), n_tokens, n_blocks, n_tile_rows,
             (int)how);
    const output y = check_kernel(run_product, &p, NULL, y_floats(&p), what);
    n_compared += n_levels;
    if (how <= FILL_EXTREMES && n_tokens * n_blocks * n_tile_rows <= 12)
        check_exact(&p, y.at, what);
    free(y.block);
    problem_free(&p);
}

static void check_sizes(qsf_dtype dtype, bool exact, size_t stride)
{
    /* Around the groups of tokens, the unpacked panels of blocks, and the groups of rows. */
    static const size_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 71};
    static const size_t blocks[] = {1, 2, 3, 8, 9, 43};
    static const size_t tile_rows[] = {1, 2, 3, 11};
    size_t n_sizes = 0;
    size_t n_problems = 0;
    for (size_t t = 0; t < COUNT_OF(tokens); t++)
        for (size_t b = 0; b < COUNT_OF(blocks); b++)
            for (size_t r = 0; r < COUNT_OF(tile_rows); r++) {
                if (tokens[t] * blocks[b] * tile_rows[r] > (exact ? 150 : 400)) /* scalar is slow */
                    continue;
                if (n_sizes++ % stride != 0)
                    continue;
                check_problem(dtype, exact, FILL_RANDOM, tokens[t], blocks[b], tile_rows[r]);
                const fill other = (fill)(1 + n_problems % (FILL_COUNT - 1));
                check_problem(dtype, exact, other, tokens[t], blocks[b], tile_rows[r]);
                n_problems++;
            }
    for (fill how = FILL_RANDOM; how < FILL_COUNT; how++)
        check_problem(dtype, exact, how, 3, 2, 2);
    /* More blocks, tile rows and tokens than go through a product together */
    check_problem(dtype, exact, FILL_RANDOM, 17, 35, 2);
    check_problem(dtype, exact, FILL_RANDOM, 18, 2, 35);
    check_problem(dtype, exact, FILL_RANDOM, 261, 5, 1);
}

typedef struct row_args {
    const problem *p;
    size_t row;
} row_args;

static void run_row(const qsf_kernels *k, const void *args, float *out)
{
    const row_args *const a = args;
    k->dequant_row[a->p->dtype](a->p->tiles, a->p->n_blocks, a->row, out);
}

static void check_rows(qsf_dtype dtype, fill how)
{
    problem p = problem_make(dtype, true, how, 1, 3, 1);
    char what[64];
    snprintf(what, sizeof what, "dequant_row %s, fill %d", qsf_dtype_name(dtype), (int)how);
    for (size_t row = 0; row < QSF_TILE_ROWS; row++) {
        const row_args args = {&p, row};
        const output out = check_kernel(run_row, &args, NULL, p.n_blocks * QSF_BLOCK, what);
        free(out.block);
    }
    problem_free(&p);
}

static int check_products(bool exact, const char *name)
{
    const size_t stride = check_stride();
    for (size_t d = 0; d < COUNT_OF(dtypes); d++)
        check_sizes(dtypes[d], exact, stride);
    CHECK(n_compared * stride > 500 * n_levels || n_levels == 0);
    return check_report(name);
}

int check_matmul(void)
{
    return check_products(false, "matmul");
}

int check_matmul_exact(void)
{
    return check_products(true, "matmul_exact");
}

int check_dequant_row(void)
{
    for (size_t d = 0; d < COUNT_OF(dtypes); d++)
        for (fill how = FILL_RANDOM; how < FILL_COUNT; how++)
            check_rows(dtypes[d], how);
    CHECK(check_counts_.n_checks > 0 || n_levels == 0); /* scalar alone has nothing beside it */
    return check_report("dequant_row");
}
