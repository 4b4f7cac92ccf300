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

/* What an operation reads. */
typedef struct operands {
    const float *x;
    const float *y;
    const float *z;
    size_t n;
    const void *which; /* of operations that are checked alike */
} operands;

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

static void run_activation(const qsf_kernels *k, const void *args, float *out)
{
    const operands *const o = args;
    qsf_activation_fn *op;
    memcpy(&op, (const char *)k + ((const activation *)o->which)->offset, sizeof op);
    op(out, o->n);
}

static void check_activation(const activation *a, const float *x, size_t n, fill how)
{
    const operands o = {.n = n, .which = a};
    const output want = check_kernel(run_activation, &o, x, n, label(a->name, n, how));
    for (size_t i = 0; i < n && how <= FILL_EXTREMES; i++) {
        const double y = a->exact((double)x[i]);
        check_close(a->name, i, n, ((const float *)want.at)[i], y, a->tolerance((double)x[i], y));
    }
    free(want.block);
}

/* The interesting range, or a fill. */
static void check_activation_of(const activation *a, size_t n, fill how)
{
    float *const x = filled_floats(n, how);
    for (size_t i = 0; i < n && how == FILL_RANDOM; i++)
        x[i] *= 4.0F;
    check_activation(a, x, n, how);
    free(x);
}

/* All of exp's range at a step fine enough to meet every exponent and both ends. */
static void check_activation_sweep(const activation *a)
{
    enum { N = 4096 };
    float *const x = exact_floats(N);
    for (size_t i = 0; i < N; i++)
        x[i] = ((float)i - N / 2) * 0.053F;
    check_activation(a, x, N, FILL_RANDOM);
    free(x);
}

/* ---- operations on two vectors ---- */

static void run_gated(const qsf_kernels *k, const void *args, float *out)
{
    const operands *const o = args;
    qsf_gated_fn *op;
    memcpy(&op, (const char *)k + ((const activation *)o->which)->gated_offset, sizeof op);
    op(out, o->y, o->n);
}

/* What the activation of the gate is multiplied with. */
static double gated_factor(const activation *a, double up)
{
    return a->exact == silu_clamped_exact ? fmin(fmax(up, -7.0), 7.0) + 1.0 : up;
}

static void check_gated(const activation *a, size_t n, fill how)
{
    float *const x = filled_floats(n, how);
    float *const y = filled_floats(n, how);
    const operands o = {.y = y, .n = n, .which = a};
    const output want = check_kernel(run_gated, &o, x, n, label(a->name, n, how));
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

#define FACTOR 0.2197F
#define LIMIT 2.5F

static const float xielu_by[3] = {0.8F, 0.7F, 0.5F};

/* An operation on x [n], and y [n] for some: its call, and what it makes of one element. */
#define MAP(op, call, formula)                                             \
    static void run_##op(const qsf_kernels *k, const void *args, float *x) \
    {                                                                      \
        const operands *const o = args;                                    \
        call;                                                              \
    }                                                                      \
    static double exact_##op(float x, float y)                             \
    {                                                                      \
        (void)y;                                                           \
        return formula;                                                    \
    }

MAP(add, k->add(x, o->y, o->n), (double)(x + y))
MAP(add_scaled, k->add_scaled(x, o->y, FACTOR, o->n), (double)qsf_fmaf(FACTOR, y, x))
MAP(mul, k->mul(x, o->y, o->n), (double)(x *y))
MAP(scale, k->scale(x, FACTOR, o->n), (double)(FACTOR *x))
MAP(clamp, k->clamp(x, LIMIT, o->n), fmax(-LIMIT, fmin((double)x, LIMIT)))
MAP(cap, k->cap(x, FACTOR, LIMIT, o->n), LIMIT *tanh(FACTOR *(double)x))
MAP(xielu, k->xielu(x, xielu_by, o->n),
    (double)xielu_by[2] * (double)x + (x > 0.0F
                                           ? (double)(xielu_by[0] * x) * (double)x
                                           : (double)xielu_by[1] * (expm1((double)x) - (double)x)))

typedef struct map {
    const char *name;
    kernel_run *run;
    double (*exact)(float x, float y);
    double roundings; /* of the result, in EPS */
    double more;      /* and of 1 + |x| + x^2 */
    fill last_exact;  /* fills above give no numbers to compare */
    bool is_bounded;
} map;

/* The cap: 3 ulp of tanh, its rounded argument (x / cosh^2 x < tanh x) and a product. */
static const map maps[] = {
    {"add", run_add, exact_add, 0.0, 0.0, FILL_EXTREMES, false},
    {"add_scaled", run_add_scaled, exact_add_scaled, 0.0, 0.0, FILL_EXTREMES, false},
    {"mul", run_mul, exact_mul, 0.0, 0.0, FILL_EXTREMES, false},
    {"scale", run_scale, exact_scale, 0.0, 0.0, FILL_EXTREMES, false},
    {"clamp", run_clamp, exact_clamp, 0.0, 0.0, FILL_EXTREMES, true},
    {"cap", run_cap, exact_cap, 4.0, 0.0, FILL_EXTREMES, true},
    {"xielu", run_xielu, exact_xielu, 0.0, 4.0, FILL_ZEROS, false},
};

static void check_map(const map *m, size_t n, fill how)
{
    float *const x = filled_floats(n, how);
    float *const y = filled_floats(n, how);
    const operands o = {.y = y, .n = n};
    const output want = check_kernel(m->run, &o, x, n, label(m->name, n, how));
    const float *const have = want.at;
    for (size_t i = 0; i < n; i++) {
        const double exact = m->exact(x[i], y[i]);
        const double v = fabs((double)x[i]);
        if (how <= m->last_exact)
            check_close(m->name, i, n, have[i], exact,
                        EPS * (m->roundings * fabs(exact) + m->more * (1.0 + v + v * v)));
        if (m->is_bounded) /* and what is no number stays none */
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

/* Without x in place: of what out holds. */
static void run_norm(const qsf_kernels *k, const void *args, float *out)
{
    const operands *const o = args;
    const norm which = *(const norm *)o->which;
    const float *const in = o->x != NULL ? o->x : out;
    if (which == NORM_RMS)
        k->rmsnorm(in, o->y, 1e-5F, o->n, out);
    else
        k->layernorm(in, o->y, which == NORM_LAYER ? o->z : NULL, 1e-5F, o->n, out);
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
    float *const x = filled_floats(n, how);
    float *const w = filled_floats(n, how == FILL_BITS ? how : FILL_RANDOM);
    float *const b = filled_floats(n, how == FILL_BITS ? how : FILL_RANDOM);
    const operands o = {.x = x, .y = w, .z = b, .n = n, .which = &which};
    const operands in_place = {.y = w, .z = b, .n = n, .which = &which};
    const output want = check_kernel(run_norm, &o, NULL, n, label("norm", n, how));
    check_levels(&want, false, run_norm, &in_place, x, label("norm in place", n, how));
    if (how <= FILL_EXTREMES)
        check_norm_values(which, x, w, b, n, want.at);
    free(want.block);
    free(x);
    free(w);
    free(b);
}

/* ---- rope ---- */

static void run_rope(const qsf_kernels *k, const void *args, float *out)
{
    const operands *const o = args;
    (*(const bool *)o->which ? k->rope_interleaved : k->rope_split)(out, o->x, o->y, o->n);
}

static void check_rope(bool interleaved, size_t n_pairs, fill how)
{
    float *const x = filled_floats(2 * n_pairs, how);
    float *const c = filled_floats(n_pairs, how);
    float *const s = filled_floats(n_pairs, how);
    const operands o = {.x = c, .y = s, .n = n_pairs, .which = &interleaved};
    const output want = check_kernel(run_rope, &o, x, 2 * n_pairs, label("rope", n_pairs, how));
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

#define ALIBI_SCALE 0.125F
#define ALIBI_SLOPE 0.7071F

static void run_alibi(const qsf_kernels *k, const void *args, float *out)
{
    const operands *const o = args;
    k->alibi(out, ALIBI_SCALE, ALIBI_SLOPE, *(const uint32_t *)o->which, o->n);
}

static void check_alibi(size_t n, uint32_t distance, fill how)
{
    float *const scores = filled_floats(n, how);
    const operands o = {.n = n, .which = &distance};
    const output want = output_make(n * sizeof *scores);
    for (size_t i = 0; i < n; i++) /* as in kernels.h */
        ((float *)want.at)[i] =
            qsf_fmaf(-ALIBI_SLOPE, (float)(distance - i), scores[i] * ALIBI_SCALE);
    check_levels(&want, false, run_alibi, &o, scores, label("alibi", n, how));
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
                check_activation_of(&activations[a], sizes[s], how);
                check_gated(&activations[a], sizes[s], how);
            }
            for (size_t m = 0; m < COUNT_OF(maps); m++)
                check_map(&maps[m], sizes[s], how);
            for (norm which = NORM_RMS; which < NORM_COUNT; which++)
                check_norm(which, sizes[s], how);
            check_rope(false, sizes[s], how);
            check_rope(true, sizes[s], how);
        }
    for (size_t a = 0; a < COUNT_OF(activations); a++)
        check_activation_sweep(&activations[a]);
    return check_report("vecops");
}
