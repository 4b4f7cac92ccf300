/* check_kernels.c - vector operations and KV stores: every level against scalar bit by bit, and
 * scalar against the formula in double.
 *
 * Tolerances are sums of roundings; EPS is the distance of floats at 1, so that one
 * operation loses at most EPS / 2 of its result.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/half.h"
#include "kernel_data.h"

#define EPS ((double)FLT_EPSILON)

static const size_t sizes[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 192, 1000};

static qsf_kernels scalar;
static qsf_kernels levels[QSF_ISA_COUNT];
static size_t n_levels;
static uint64_t n_compared;

static void compare_and_free(const output *want, output *have, const char *isa, const char *op,
                             size_t n, fill how)
{
    char what[96];
    snprintf(what, sizeof what, "%s, n %zu, fill %d", op, n, (int)how);
    check_outputs(want, have, isa, what);
    free(have->block);
    n_compared++;
}

/* Written so that NaN fails. */
static void check_close(const char *op, size_t i, size_t n, float have, double want,
                        double tolerance)
{
    if (!CHECK(fabs((double)have - want) <= tolerance))
        printf("  scalar %s: [%zu] of %zu is %.9g, not %.9g +- %.3g\n", op, i, n, (double)have,
               want, tolerance);
}

/* ---- activation functions: name, kernel, double, tolerance ---- */

typedef struct activation {
    const char *name;
    size_t offset; /* of the pointer in qsf_kernels */
    double (*exact)(double x);
    double (*tolerance)(double x, double y);
} activation;

static double silu_exact(double x)
{
    return x / (1.0 + exp(-x));
}

/* x / (1 + e) where e overflows is 0 instead of at most |x| / FLT_MAX; the quotient may also be
 * subnormal. */
static double underflow(double x)
{
    return fabs(x) / (double)FLT_MAX + (double)FLT_MIN;
}

/* exp is off by at most 2 ulp = 2 EPS; the sum and the quotient round by EPS / 2 each. */
static double silu_tolerance(double x, double y)
{
    return fabs(y) * 3.0 * EPS + underflow(x);
}

static double gelu_tanh_argument(double x)
{
    return 1.5957691216057308 * (x + 0.044715 * x * x * x);
}

static double gelu_tanh_exact(double x)
{
    return 0.5 * x * (1.0 + tanh(0.5 * gelu_tanh_argument(x)));
}

/* As silu, but the argument of exp is itself off: 5 roundings and 2 constants, together below
 * 3.5 EPS of it, and exp makes of that an equal relative error of its own. The last term
 * is the cancellation of 1 + tanh in the double. */
static double gelu_tanh_tolerance(double x, double y)
{
    return fabs(y) * EPS * (3.0 + 3.5 * fabs(gelu_tanh_argument(x))) + underflow(x) +
           fabs(x) * DBL_EPSILON;
}

static double gelu_erf_exact(double x)
{
    return 0.5 * x * erfc(-x * 0.70710678118654752440);
}

/* erfc / 2 is off by 0.75e-7 by formula 7.1.26. Five steps of the polynomial lose EPS / 2 each
 * of at most 4.5 (the sum of the absolute coefficients), t two roundings to which the
 * polynomial answers with at most 4.5 each, and gauss at most 2.5 EPS plus its argument's two
 * roundings (z^2 e^-z^2 < 0.37): 11 + 4.5 + 4 EPS, halved; 1 - erfc / 2 and the product 1. */
static double gelu_erf_tolerance(double x, double y)
{
    (void)y;
    return fabs(x) * (0.75e-7 + 11.0 * EPS);
}

static double relu_exact(double x)
{
    return x > 0.0 ? x : 0.0;
}

static double no_tolerance(double x, double y)
{
    (void)x;
    (void)y;
    return 0.0;
}

static double relu_squared_exact(double x)
{
    return x > 0.0 ? x * x : 0.0;
}

static double one_rounding(double x, double y)
{
    (void)x;
    return y * EPS / 2.0;
}

static const activation activations[] = {
    {"silu", offsetof(qsf_kernels, silu), silu_exact, silu_tolerance},
    {"gelu_tanh", offsetof(qsf_kernels, gelu_tanh), gelu_tanh_exact, gelu_tanh_tolerance},
    {"gelu_erf", offsetof(qsf_kernels, gelu_erf), gelu_erf_exact, gelu_erf_tolerance},
    {"relu", offsetof(qsf_kernels, relu), relu_exact, no_tolerance},
    {"relu_squared", offsetof(qsf_kernels, relu_squared), relu_squared_exact, one_rounding},
};

static output run_activation(const qsf_kernels *k, const activation *a, const float *x, size_t n)
{
    qsf_activation_fn *op;
    memcpy(&op, (const char *)k + a->offset, sizeof op);
    const output out = output_make(n * sizeof *x);
    memcpy(out.at, x, n * sizeof *x);
    op(out.at, n);
    return out;
}

static void check_activation(const activation *a, size_t n, fill how)
{
    float *const x = exact_floats(n);
    fill_floats(x, n, how);
    if (how == FILL_RANDOM) /* the interesting range */
        for (size_t i = 0; i < n; i++)
            x[i] *= 4.0F;
    const output want = run_activation(&scalar, a, x, n);
    for (size_t i = 0; i < n_levels; i++) {
        output have = run_activation(&levels[i], a, x, n);
        compare_and_free(&want, &have, levels[i].isa_name, a->name, n, how);
    }
    for (size_t i = 0; i < n && how <= FILL_EXTREMES; i++) {
        const double y = a->exact((double)x[i]);
        check_close(a->name, i, n, ((const float *)want.at)[i], y, a->tolerance((double)x[i], y));
    }
    free(want.block);
    free(x);
}

/* All of exp's range at a step fine enough to meet every exponent and both ends. */
static void check_activation_sweep(const activation *a)
{
    enum { N = 4096 };
    float *const x = exact_floats(N);
    for (size_t i = 0; i < N; i++)
        x[i] = ((float)i - N / 2) * 0.053F;
    const output want = run_activation(&scalar, a, x, N);
    for (size_t i = 0; i < n_levels; i++) {
        output have = run_activation(&levels[i], a, x, N);
        compare_and_free(&want, &have, levels[i].isa_name, a->name, N, FILL_RANDOM);
    }
    for (size_t i = 0; i < N; i++) {
        const double y = a->exact((double)x[i]);
        check_close(a->name, i, N, ((const float *)want.at)[i], y, a->tolerance((double)x[i], y));
    }
    free(want.block);
    free(x);
}

/* ---- operations on two vectors ---- */

static output run_silu_mul(const qsf_kernels *k, const float *x, const float *y, size_t n)
{
    const output out = output_make(n * sizeof *x);
    memcpy(out.at, x, n * sizeof *x);
    k->silu_mul(out.at, y, n);
    return out;
}

static output run_add(const qsf_kernels *k, const float *x, const float *y, size_t n)
{
    const output out = output_make(n * sizeof *x);
    memcpy(out.at, x, n * sizeof *x);
    k->add(out.at, y, n);
    return out;
}

static void check_pairs(size_t n, fill how)
{
    float *const x = exact_floats(n);
    float *const y = exact_floats(n);
    fill_floats(x, n, how);
    fill_floats(y, n, how);
    const output product = run_silu_mul(&scalar, x, y, n);
    const output sum = run_add(&scalar, x, y, n);
    for (size_t i = 0; i < n_levels; i++) {
        output have = run_silu_mul(&levels[i], x, y, n);
        compare_and_free(&product, &have, levels[i].isa_name, "silu_mul", n, how);
        have = run_add(&levels[i], x, y, n);
        compare_and_free(&sum, &have, levels[i].isa_name, "add", n, how);
    }
    for (size_t i = 0; i < n && how <= FILL_EXTREMES; i++) {
        const double gated = silu_exact((double)x[i]) * (double)y[i];
        check_close("silu_mul", i, n, ((const float *)product.at)[i], gated,
                    fabs(gated) * 4.0 * EPS + underflow((double)x[i]) * (1.0 + fabs((double)y[i])));
        check_close("add", i, n, ((const float *)sum.at)[i], (double)(x[i] + y[i]), 0.0);
    }
    free(product.block);
    free(sum.block);
    free(x);
    free(y);
}

/* ---- norms ---- */

typedef enum norm { NORM_RMS, NORM_LAYER, NORM_LAYER_PLAIN, NORM_COUNT } norm;

static output run_norm(const qsf_kernels *k, norm which, bool in_place, const float *x,
                       const float *w, const float *b, size_t n)
{
    const output out = output_make(n * sizeof *x);
    const float *in = x;
    if (in_place) {
        memcpy(out.at, x, n * sizeof *x);
        in = out.at;
    }
    if (which == NORM_RMS)
        k->rmsnorm(in, w, 1e-5F, n, out.at);
    else
        k->layernorm(in, w, which == NORM_LAYER ? b : NULL, 1e-5F, n, out.at);
    return out;
}

/* Sums of n terms in 16 lanes round n / 16 + 5 times; division, eps, root, reciprocal and two
 * products are 6 more: n / 16 + 12 roundings of EPS / 2, halved again under the root for
 * the sum but counted whole. The mean's own error moves every d by mean_error. */
static void check_norm_values(norm which, const float *x, const float *w, const float *b, size_t n,
                              const float *have)
{
    const double factor_error = ((double)n / 16.0 + 12.0) * EPS / 2.0;
    double mean = 0.0;
    double mean_abs = 0.0;
    for (size_t i = 0; i < n; i++) {
        mean += which == NORM_RMS ? 0.0 : (double)x[i] / (double)n;
        mean_abs += which == NORM_RMS ? 0.0 : fabs((double)x[i]) / (double)n;
    }
    double var = 0.0;
    for (size_t i = 0; i < n; i++)
        var += ((double)x[i] - mean) * ((double)x[i] - mean) / (double)n;
    const double factor = 1.0 / sqrt(var + (double)1e-5F);
    const double mean_error = mean_abs * factor_error;
    for (size_t i = 0; i < n; i++) {
        const double d = (double)x[i] - mean;
        const double shift = which == NORM_LAYER ? (double)b[i] : 0.0;
        const double want = d * factor * (double)w[i] + shift;
        /* A moved mean also moves the factor, by at most mean_error * factor of itself. */
        const double relative = factor_error + EPS + mean_error * factor;
        const double tolerance =
            fabs((double)w[i]) * factor * (mean_error + fabs(d) * relative) + fabs(want) * EPS;
        check_close(which == NORM_RMS ? "rmsnorm" : "layernorm", i, n, have[i], want, tolerance);
    }
}

static void check_norm(norm which, size_t n, fill how)
{
    float *const x = exact_floats(n);
    float *const w = exact_floats(n);
    float *const b = exact_floats(n);
    fill_floats(x, n, how);
    fill_floats(w, n, how == FILL_BITS ? how : FILL_RANDOM);
    fill_floats(b, n, how == FILL_BITS ? how : FILL_RANDOM);
    const output want = run_norm(&scalar, which, false, x, w, b, n);
    output in_place = run_norm(&scalar, which, true, x, w, b, n);
    compare_and_free(&want, &in_place, "scalar", "norm in place", n, how);
    for (size_t i = 0; i < n_levels; i++) {
        output have = run_norm(&levels[i], which, false, x, w, b, n);
        compare_and_free(&want, &have, levels[i].isa_name, "norm", n, how);
        have = run_norm(&levels[i], which, true, x, w, b, n);
        compare_and_free(&want, &have, levels[i].isa_name, "norm in place", n, how);
    }
    if (how <= FILL_EXTREMES)
        check_norm_values(which, x, w, b, n, want.at);
    free(want.block);
    free(x);
    free(w);
    free(b);
}

/* ---- rope ---- */

static output run_rope(const qsf_kernels *k, bool interleaved, const float *x, const float *cos,
                       const float *sin, size_t n_pairs)
{
    const output out = output_make(2 * n_pairs * sizeof *x);
    memcpy(out.at, x, 2 * n_pairs * sizeof *x);
    (interleaved ? k->rope_interleaved : k->rope_split)(out.at, cos, sin, n_pairs);
    return out;
}

static void check_rope(bool interleaved, size_t n_pairs, fill how)
{
    float *const x = exact_floats(2 * n_pairs);
    float *const c = exact_floats(n_pairs);
    float *const s = exact_floats(n_pairs);
    fill_floats(x, 2 * n_pairs, how);
    fill_floats(c, n_pairs, how);
    fill_floats(s, n_pairs, how);
    const output want = run_rope(&scalar, interleaved, x, c, s, n_pairs);
    for (size_t i = 0; i < n_levels; i++) {
        output have = run_rope(&levels[i], interleaved, x, c, s, n_pairs);
        compare_and_free(&want, &have, levels[i].isa_name, "rope", n_pairs, how);
    }
    for (size_t i = 0; i < n_pairs && how <= FILL_EXTREMES; i++) {
        const size_t ia = interleaved ? 2 * i : i;
        const size_t ib = interleaved ? 2 * i + 1 : i + n_pairs;
        const double ac = (double)x[ia] * (double)c[i];
        const double bs = (double)x[ib] * (double)s[i];
        const double bc = (double)x[ib] * (double)c[i];
        const double as = (double)x[ia] * (double)s[i];
        const float *const y = want.at; /* one product and one fmaf round */
        check_close("rope a", i, n_pairs, y[ia], ac - bs, (fabs(ac) + 2.0 * fabs(bs)) * EPS / 2);
        check_close("rope b", i, n_pairs, y[ib], bc + as, (fabs(bc) + 2.0 * fabs(as)) * EPS / 2);
    }
    free(want.block);
    free(x);
    free(c);
    free(s);
}

/* ---- quantisation of activations ---- */

typedef struct quantised {
    output q;
    output q_low;
    output scale;
    output sum;
    output scaled_sum;
    output fine_sum;
} quantised;

static quantised run_quantise(const qsf_kernels *k, const float *x, size_t n_blocks)
{
    const quantised z = {
        output_make(n_blocks * QSF_BLOCK),     output_make(n_blocks * QSF_BLOCK),
        output_make(n_blocks * sizeof(float)), output_make(n_blocks * sizeof(int32_t)),
        output_make(n_blocks * sizeof(float)), output_make(n_blocks * sizeof(int32_t))};
    const qsf_act_row row = {z.q.at,   z.q_low.at,      z.scale.at,
                             z.sum.at, z.scaled_sum.at, z.fine_sum.at};
    k->quantise(x, n_blocks, &row);
    return z;
}

static void quantised_free(quantised *z)
{
    free(z->q.block);
    free(z->q_low.block);
    free(z->scale.block);
    free(z->sum.block);
    free(z->scaled_sum.block);
    free(z->fine_sum.block);
}

/* Block b of a row: x [64] */
static void check_quantised_block(const float *x, const quantised *z, size_t b)
{
    const int8_t *const q = (const int8_t *)z->q.at + b * QSF_BLOCK;
    const int8_t *const q_low = (const int8_t *)z->q_low.at + b * QSF_BLOCK;
    const float scale = ((const float *)z->scale.at)[b];
    const float scaled_sum = ((const float *)z->scaled_sum.at)[b];
    float amax = 0.0F;
    for (size_t i = 0; i < QSF_BLOCK; i++)
        amax = isnan(x[i]) || isnan(amax) ? NAN : fmaxf(amax, fabsf(x[i]));
    const bool is_zero = !(amax >= 0x1p-112F) || isinf(amax);
    int32_t total = 0;
    int32_t fine_total = 0;
    bool all_right = true;
    for (size_t i = 0; i < QSF_BLOCK; i++) {
        const double scaled = is_zero ? 0.0 : (double)(x[i] * (32512.0F / amax));
        const int32_t fine = 256 * q[i] + q_low[i];
        all_right = all_right && (double)fine == nearbyint(scaled);
        all_right = all_right && (double)q[i] == floor((double)fine / 256.0 + 0.5);
        total += q[i];
        fine_total += fine;
    }
    CHECK(all_right);
    CHECK(((const int32_t *)z->sum.at)[b] == total);
    CHECK(((const int32_t *)z->fine_sum.at)[b] == fine_total);
    CHECK(isnan(amax) ? isnan(scale) : scale == amax / 127.0F);
    CHECK(isnan(amax) || isinf(amax) ? isnan(scaled_sum) : scaled_sum == scale * (float)total);
}

static void check_quantise(size_t n_blocks, fill how)
{
    float *const x = exact_floats(n_blocks * QSF_BLOCK);
    fill_floats(x, n_blocks * QSF_BLOCK, how);
    if (how == FILL_BITS) /* one special value in an ordinary block, at each place */
        for (size_t b = 0; b < n_blocks; b++) {
            const float special = b % 3 == 0 ? NAN : b % 3 == 1 ? -INFINITY : 0x1.8p-113F;
            fill_floats(x + b * QSF_BLOCK, QSF_BLOCK, b % 3 == 2 ? FILL_ZEROS : FILL_RANDOM);
            x[b * QSF_BLOCK + (b * 7 + 3) % QSF_BLOCK] = special;
        }
    quantised want = run_quantise(&scalar, x, n_blocks);
    for (size_t b = 0; b < n_blocks; b++)
        check_quantised_block(x + b * QSF_BLOCK, &want, b);
    for (size_t i = 0; i < n_levels; i++) {
        quantised have = run_quantise(&levels[i], x, n_blocks);
        CHECK_BYTES(want.q.at, have.q.at, want.q.n_bytes);
        CHECK_BYTES(want.q_low.at, have.q_low.at, want.q_low.n_bytes);
        CHECK_BYTES(want.sum.at, have.sum.at, want.sum.n_bytes);
        CHECK_BYTES(want.fine_sum.at, have.fine_sum.at, want.fine_sum.n_bytes);
        CHECK(output_guards_intact(&have.q) && output_guards_intact(&have.q_low));
        CHECK(output_guards_intact(&have.sum) && output_guards_intact(&have.fine_sum));
        check_outputs(&want.scale, &have.scale, levels[i].isa_name, "quantise: scale");
        check_outputs(&want.scaled_sum, &have.scaled_sum, levels[i].isa_name,
                      "quantise: scaled_sum");
        quantised_free(&have);
        n_compared++;
    }
    quantised_free(&want);
    free(x);
}

/* ---- halves ---- */

/* Every half goes up and comes back, through each level's loads and stores. */
static void check_every_half(const qsf_kernels *k)
{
    enum { N = 64 };
    for (uint32_t first = 0; first < 0x10000; first += N) {
        float value[N];
        uint16_t page[N * QSF_KV_PAGE_TOKENS];
        bool same = true;
        for (uint32_t i = 0; i < N; i++)
            value[i] = qsf_half_to_float((uint16_t)(first + i));
        k->v_store[QSF_DTYPE_F16](value, N, 0, page);
        for (uint32_t i = 0; i < N; i++) {
            const uint32_t half = first + i;
            const bool is_nan = (half & 0x7FFF) > 0x7C00; /* becomes quiet */
            same = same && page[i] == (is_nan ? half | 0x200 : half);
        }
        CHECK(same);
    }
}

int main(int argc, char **argv)
{
    test_seed(argc, argv, "check_kernels");
    random_restart(0);
    qsf_kernels_init(&scalar, QSF_ISA_SCALAR);
    n_levels = levels_here(levels);
    for (size_t s = 0; s < COUNT_OF(sizes); s++)
        for (fill how = FILL_RANDOM; how < FILL_COUNT; how++) {
            for (size_t a = 0; a < COUNT_OF(activations); a++)
                check_activation(&activations[a], sizes[s], how);
            check_pairs(sizes[s], how);
            for (norm which = NORM_RMS; which < NORM_COUNT; which++)
                check_norm(which, sizes[s], how);
            check_rope(false, sizes[s], how);
            check_rope(true, sizes[s], how);
        }
    for (size_t a = 0; a < COUNT_OF(activations); a++)
        check_activation_sweep(&activations[a]);
    for (size_t n_blocks = 1; n_blocks <= 43; n_blocks += 6)
        for (fill how = FILL_RANDOM; how < FILL_COUNT; how++)
            check_quantise(n_blocks, how);
    check_every_half(&scalar);
    for (size_t i = 0; i < n_levels; i++)
        check_every_half(&levels[i]);
    CHECK(n_compared > 1000 * n_levels);
    return check_report("check_kernels");
}
