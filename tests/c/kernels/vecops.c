/* vecops.c - vector operations: every level against scalar bit by bit, and scalar against the
 * formula in double.
 *
 * Tolerances are sums of roundings; EPS is the distance of floats at 1, so that one
 * operation loses at most EPS / 2 of its result.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_data.h"

#define EPS ((double)FLT_EPSILON)

static const size_t sizes[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 192, 1000};

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
    size_t gated_offset;
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

static double silu_clamped_exact(double x)
{
    const double g = x < 7.0 ? x : 7.0;
    return g / (1.0 + exp(-1.702 * g));
}

/* As silu; the argument of exp has two roundings. */
static double silu_clamped_tolerance(double x, double y)
{
    const double g = x < 7.0 ? x : 7.0;
    return fabs(y) * EPS * (3.0 + 1.702 * fabs(g)) + underflow(x);
}

#define ACTIVATION(name) \
#name, offsetof(qsf_kernels, name), offsetof(qsf_kernels, name##_mul), name##_exact

static const activation activations[] = {
    {ACTIVATION(silu), silu_tolerance},         {ACTIVATION(gelu_tanh), gelu_tanh_tolerance},
    {ACTIVATION(gelu_erf), gelu_erf_tolerance}, {ACTIVATION(relu), no_tolerance},
    {ACTIVATION(relu_squared), one_rounding},   {ACTIVATION(silu_clamped), silu_clamped_tolerance},
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

static void check_xielu(size_t n, fill how)
{
    static const float by[3] = {0.8F, 0.7F, 0.5F};
    float *const x = exact_floats(n);
    fill_floats(x, n, how);
    const output want = output_make(n * sizeof *x);
    memcpy(want.at, x, n * sizeof *x);
    scalar.xielu(want.at, by, n);
    for (size_t i = 0; i < n_levels; i++) {
        output have = output_make(n * sizeof *x);
        memcpy(have.at, x, n * sizeof *x);
        levels[i].xielu(have.at, by, n);
        compare_and_free(&want, &have, levels[i].isa_name, "xielu", n, how);
    }
    for (size_t i = 0; i < n && how <= FILL_ZEROS; i++) {
        const double v = (double)x[i];
        const double curve = v > 0.0 ? (double)by[0] * v * v : (double)by[1] * (expm1(v) - v);
        check_close("xielu", i, n, ((const float *)want.at)[i], curve + (double)by[2] * v,
                    4.0 * EPS * (1.0 + fabs(v) + v * v));
    }
    free(want.block);
    free(x);
}

/* ---- operations on two vectors ---- */

static output run_gated(const qsf_kernels *k, const activation *a, const float *x, const float *y,
                        size_t n)
{
    qsf_gated_fn *op;
    memcpy(&op, (const char *)k + a->gated_offset, sizeof op);
    const output out = output_make(n * sizeof *x);
    memcpy(out.at, x, n * sizeof *x);
    op(out.at, y, n);
    return out;
}

/* What the activation of the gate is multiplied with. */
static double gated_factor(const activation *a, double up)
{
    return a->exact == silu_clamped_exact ? fmin(fmax(up, -7.0), 7.0) + 1.0 : up;
}

static void check_gated(const activation *a, size_t n, fill how)
{
    float *const x = exact_floats(n);
    float *const y = exact_floats(n);
    fill_floats(x, n, how);
    fill_floats(y, n, how);
    const output want = run_gated(&scalar, a, x, y, n);
    for (size_t i = 0; i < n_levels; i++) {
        output have = run_gated(&levels[i], a, x, y, n);
        compare_and_free(&want, &have, levels[i].isa_name, a->name, n, how);
    }
    for (size_t i = 0; i < n && how <= FILL_EXTREMES; i++) {
        const double active = a->exact((double)x[i]);
        const double factor = gated_factor(a, (double)y[i]);
        const double gated = active * factor;
        const double tolerance = a->tolerance((double)x[i], active) * fabs(factor);
        check_close(a->name, i, n, ((const float *)want.at)[i], gated,
                    tolerance + fabs(gated) * EPS + (double)FLT_MIN);
    }
    free(want.block);
    free(x);
    free(y);
}

typedef enum simple { ADD, ADD_SCALED, MUL, SCALE, CLAMP, CAP, SIMPLE_COUNT } simple;

static const char *const simple_names[] = {"add", "add_scaled", "mul", "scale", "clamp", "cap"};

#define FACTOR 0.2197F
#define LIMIT 2.5F

static output run_simple(const qsf_kernels *k, simple which, const float *x, const float *y,
                         size_t n)
{
    const output out = output_make(n * sizeof *x);
    memcpy(out.at, x, n * sizeof *x);
    if (which == ADD)
        k->add(out.at, y, n);
    else if (which == ADD_SCALED)
        k->add_scaled(out.at, y, FACTOR, n);
    else if (which == MUL)
        k->mul(out.at, y, n);
    else if (which == SCALE)
        k->scale(out.at, FACTOR, n);
    else if (which == CLAMP)
        k->clamp(out.at, LIMIT, n);
    else
        k->cap(out.at, FACTOR, LIMIT, n);
    return out;
}

/* The cap: 3 ulp of tanh, its rounded argument (x / cosh^2 x < tanh x) and a product. */
static void check_simple_value(simple which, size_t i, size_t n, double x, double y, float have)
{
    const double capped = LIMIT * tanh(FACTOR * x);
    if (which == ADD)
        check_close("add", i, n, have, (double)((float)x + (float)y), 0.0);
    else if (which == ADD_SCALED)
        check_close("add_scaled", i, n, have, (double)qsf_fmaf(FACTOR, (float)y, (float)x), 0.0);
    else if (which == MUL)
        check_close("mul", i, n, have, (double)((float)x * (float)y), 0.0);
    else if (which == SCALE)
        check_close("scale", i, n, have, (double)(FACTOR * (float)x), 0.0);
    else if (which == CLAMP)
        check_close("clamp", i, n, have, fmax(-LIMIT, fmin(x, LIMIT)), 0.0);
    else
        check_close("cap", i, n, have, capped, fabs(capped) * 4.0 * EPS);
}

static void check_simple(simple which, size_t n, fill how)
{
    float *const x = exact_floats(n);
    float *const y = exact_floats(n);
    fill_floats(x, n, how);
    fill_floats(y, n, how);
    const output want = run_simple(&scalar, which, x, y, n);
    for (size_t i = 0; i < n_levels; i++) {
        output have = run_simple(&levels[i], which, x, y, n);
        compare_and_free(&want, &have, levels[i].isa_name, simple_names[which], n, how);
    }
    const float *const have = want.at;
    for (size_t i = 0; i < n; i++) {
        if (how <= FILL_EXTREMES)
            check_simple_value(which, i, n, (double)x[i], (double)y[i], have[i]);
        if (which >= CLAMP) /* bounded, and what is no number stays none */
            CHECK(isnan(x[i]) ? isnan(have[i]) : fabsf(have[i]) <= LIMIT);
    }
    free(want.block);
    free(x);
    free(y);
}

/* A subnormal sum just below a tie, which an fmaf that rounds twice takes for the tie. */
static void check_fused_corner(const qsf_kernels *k)
{
    const float y = 0x1.fffffcp-76F;
    float x = 0x400001p-149F;
    k->add_scaled(&x, &y, 0x1.000002p-75F, 1);
    CHECK(x == 0x400001p-149F);
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

/* ---- ALiBi ---- */

static void check_alibi(size_t n, uint32_t distance, fill how)
{
    const float scale = 0.125F;
    const float slope = 0.7071F;
    float *const scores = exact_floats(n);
    fill_floats(scores, n, how);
    const output want = output_make(n * sizeof *scores);
    for (size_t i = 0; i < n; i++) /* as in kernels.h */
        ((float *)want.at)[i] = qsf_fmaf(-slope, (float)(distance - i), scores[i] * scale);
    for (size_t i = 0; i <= n_levels; i++) {
        const qsf_kernels *const k = i == 0 ? &scalar : &levels[i - 1];
        const output have = output_make(n * sizeof *scores);
        memcpy(have.at, scores, n * sizeof *scores);
        k->alibi(have.at, scale, slope, distance, n);
        check_outputs(&want, &have, k->isa_name, "alibi");
        free(have.block);
        n_compared++;
    }
    free(want.block);
    free(scores);
}

int check_vecops(void)
{
    for (size_t n = 1; n <= QSF_KV_SPAN_TOKENS; n += n < 40 ? 1 : 27)
        for (fill how = 0; how < FILL_COUNT; how++) {
            check_alibi(n, (uint32_t)n - 1, how);
            check_alibi(n, (1U << 24) - 1, how);
        }
    check_fused_corner(&scalar);
    for (size_t i = 0; i < n_levels; i++)
        check_fused_corner(&levels[i]);
    for (size_t s = 0; s < COUNT_OF(sizes); s++)
        for (fill how = FILL_RANDOM; how < FILL_COUNT; how++) {
            for (size_t a = 0; a < COUNT_OF(activations); a++) {
                check_activation(&activations[a], sizes[s], how);
                check_gated(&activations[a], sizes[s], how);
            }
            check_xielu(sizes[s], how);
            for (simple which = ADD; which < SIMPLE_COUNT; which++)
                check_simple(which, sizes[s], how);
            for (norm which = NORM_RMS; which < NORM_COUNT; which++)
                check_norm(which, sizes[s], how);
            check_rope(false, sizes[s], how);
            check_rope(true, sizes[s], how);
        }
    for (size_t a = 0; a < COUNT_OF(activations); a++)
        check_activation_sweep(&activations[a]);
    CHECK(n_compared > 1000 * n_levels);
    return check_report("vecops");
}

/* ---- speed ---- */

#define BENCH_N 1024

static float bench_x[BENCH_N];
static float bench_y[BENCH_N];

/* args: the activation */
static void run_bench_activation(const qsf_kernels *k, const void *args)
{
    const activation *const a = args;
    qsf_activation_fn *op;
    memcpy(&op, (const char *)k + a->offset, sizeof op);
    memcpy(bench_x, bench_y, sizeof bench_x);
    op(bench_x, BENCH_N);
}

static void run_bench_silu_mul(const qsf_kernels *k, const void *args)
{
    memcpy(bench_x, args, sizeof bench_x);
    k->silu_mul(bench_x, bench_y, BENCH_N);
}

static void run_bench_add(const qsf_kernels *k, const void *args)
{
    memcpy(bench_x, args, sizeof bench_x);
    k->add(bench_x, args, BENCH_N);
}

static void run_bench_cap(const qsf_kernels *k, const void *args)
{
    memcpy(bench_x, args, sizeof bench_x);
    k->cap(bench_x, FACTOR, LIMIT, BENCH_N);
}

static void run_bench_rmsnorm(const qsf_kernels *k, const void *args)
{
    k->rmsnorm(args, args, 1e-5F, BENCH_N, bench_x);
}

static void run_bench_layernorm(const qsf_kernels *k, const void *args)
{
    k->layernorm(args, args, args, 1e-5F, BENCH_N, bench_x);
}

static void run_bench_rope_split(const qsf_kernels *k, const void *args)
{
    memcpy(bench_x, args, sizeof bench_x);
    k->rope_split(bench_x, args, args, BENCH_N / 2);
}

static void run_bench_rope_interleaved(const qsf_kernels *k, const void *args)
{
    memcpy(bench_x, args, sizeof bench_x);
    k->rope_interleaved(bench_x, args, args, BENCH_N / 2);
}

void bench_vecops(void)
{
    static const struct {
        const char *name;
        bench_run *run;
    } others[] = {
        {"silu_mul", run_bench_silu_mul},
        {"add", run_bench_add},
        {"cap", run_bench_cap},
        {"rmsnorm", run_bench_rmsnorm},
        {"layernorm", run_bench_layernorm},
        {"rope_split", run_bench_rope_split},
        {"rope_interleaved", run_bench_rope_interleaved},
    };
    fill_floats(bench_y, BENCH_N, FILL_RANDOM);
    for (size_t i = 0; i < COUNT_OF(activations); i++)
        bench_line(activations[i].name, BENCH_N, run_bench_activation, &activations[i]);
    for (size_t i = 0; i < COUNT_OF(others); i++)
        bench_line(others[i].name, BENCH_N, others[i].run, bench_y);
}
