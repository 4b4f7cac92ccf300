/* recur.c - kernels of recurrent mixers: every level, and scalar, against the contract bit by bit;
 * what has an exponential against the formula in double.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_data.h"

#define MOST_TAPS 16
#define EPSILON 1e-6F
#define FACTOR 0.25F

static const size_t sizes[] = {1, 2, 15, 16, 17, 33, 64, 65, 192};

/* Inputs of an operation on vectors [n]: the first ones may be where it writes. */
typedef struct operands {
    const float *in;
    size_t n;
    size_t n_taps;
    bool has_bias;
    bool is_ssd;
} operands;

/* in: rows of the taps, weights of the taps, the bias; [n] each */
static void run_conv(const qsf_kernels *k, const void *args, float *out)
{
    const operands *const o = args;
    const float *rows[MOST_TAPS];
    for (size_t t = 0; t < o->n_taps; t++)
        rows[t] = o->in + t * o->n;
    k->conv(rows, o->in + o->n_taps * o->n, o->n, o->n_taps,
            o->has_bias ? o->in + 2 * o->n_taps * o->n : NULL, out, o->n);
}

static void check_conv(size_t n, size_t n_taps, bool has_bias, fill how)
{
    float *const in = filled_floats((2 * n_taps + 1) * n, how);
    const operands o = {.in = in, .n = n, .n_taps = n_taps, .has_bias = has_bias};
    const output want = output_make(n * sizeof(float));
    for (size_t i = 0; i < n; i++) { /* as in kernels.h */
        float sum = 0.0F;
        for (size_t t = 0; t < n_taps; t++)
            sum = qsf_fmaf(in[(n_taps + t) * n + i], in[t * n + i], sum);
        ((float *)want.at)[i] = has_bias ? sum + in[2 * n_taps * n + i] : sum;
    }
    check_levels(&want, false, run_conv, &o, NULL, label("conv", n, how));
    free(want.block);
    free(in);
}

static void run_l2norm(const qsf_kernels *k, const void *args, float *out)
{
    k->l2norm(out, EPSILON, FACTOR, ((const operands *)args)->n);
}

static void check_l2norm(size_t n, fill how)
{
    float *const x = filled_floats(n, how);
    const operands o = {.n = n};
    const output want = check_kernel(run_l2norm, &o, x, n, label("l2norm", n, how));
    double squares = 0.0;
    for (size_t i = 0; i < n; i++)
        squares += (double)x[i] * (double)x[i];
    for (size_t i = 0; i < n && how <= FILL_EXTREMES; i++) {
        const double exact = (double)x[i] / sqrt(squares + (double)EPSILON) * (double)FACTOR;
        CHECK(fabs((double)((float *)want.at)[i] - exact) <= 2e-6 * fabs(exact));
    }
    free(want.block);
    free(x);
}

static void run_sigmoid_mul(const qsf_kernels *k, const void *args, float *out)
{
    const operands *const o = args;
    k->sigmoid_mul(out, o->in + o->n, o->n);
}

static void check_sigmoid_mul(size_t n, fill how)
{
    float *const x = filled_floats(2 * n, how);
    const operands o = {.in = x, .n = n};
    const output want = check_kernel(run_sigmoid_mul, &o, x, n, label("sigmoid_mul", n, how));
    for (size_t i = 0; i < n && how <= FILL_EXTREMES; i++) {
        const double exact = (double)x[n + i] / (1.0 + exp(-(double)x[i]));
        CHECK(fabs((double)((float *)want.at)[i] - exact) <= 5e-7 * fabs(exact) + 1e-35);
    }
    free(want.block);
    free(x);
}

/* in: decay, rate, bias; [n] each */
static void run_bounded_decays(const qsf_kernels *k, const void *args, float *out)
{
    const operands *const o = args;
    k->bounded_decays(out, o->in + o->n, o->in + 2 * o->n, 5.0F, o->n);
}

static void check_bounded_decays(size_t n, fill how)
{
    float *const in = filled_floats(3 * n, how);
    const operands o = {.in = in, .n = n};
    const output want =
        check_kernel(run_bounded_decays, &o, in, n, label("bounded_decays", n, how));
    for (size_t i = 0; i < n && how <= FILL_ZEROS; i++) {
        const double z = (double)in[n + i] * (double)(in[i] + in[2 * n + i]);
        CHECK(fabs((double)((const float *)want.at)[i] - exp(-5.0 / (1.0 + exp(-z)))) <= 1e-5);
    }
    free(want.block);
    free(in);
}

/* in: beta or step, decay, rate, bias; [n] each. Of SSD beta is the step, of which the decay is. */
static void run_gates(const qsf_kernels *k, const void *args, float *out)
{
    const operands *const o = args;
    const float *const rate = o->in + 2 * o->n;
    const float *const bias = o->in + 3 * o->n;
    if (o->is_ssd) {
        k->ssd_gates(out, out + o->n, rate, bias, o->n);
        return;
    }
    k->betas(out, 2.0F, o->n);
    k->decays(out + o->n, rate, bias, o->n);
}

static void check_gates(size_t n, fill how, bool is_ssd)
{
    float *const in = filled_floats(4 * n, how);
    const operands o = {.in = in, .n = n, .is_ssd = is_ssd};
    for (size_t i = 2 * n; i < 3 * n; i++)
        in[i] = fabsf(in[i]);
    const output want = check_kernel(run_gates, &o, in, 2 * n, label("gates", n, how));
    const float *const made = want.at;
    for (size_t i = 0; i < n && how <= FILL_ZEROS; i++) {
        const double step = log1p(exp((double)(in[is_ssd ? i : n + i] + in[3 * n + i])));
        const double beta = is_ssd ? step : 2.0 / (1.0 + exp(-(double)in[i]));
        const double decay = exp(-(double)in[2 * n + i] * step);
        CHECK(fabs((double)made[i] - beta) <= 5e-7 * fmax(beta, 1.0));
        CHECK(fabs((double)made[n + i] - decay) <= 1e-6);
    }
    free(want.block);
    free(in);
}

/* ---- the delta rule, and that of SSD ---- */

typedef struct rule_case {
    size_t n_rows;
    size_t key_dim;
    size_t n_cols;
    bool is_ssd;
    bool has_channel_decays;
} rule_case;

/* Floats of a row of gates: beta, then a decay or one for each channel */
static size_t gate_floats(const rule_case *c)
{
    return 1 + (c->has_channel_decays ? c->key_dim : 1);
}

static size_t state_floats(const rule_case *c)
{
    return c->key_dim * QSF_STATE_COLS;
}

/* Floats of a row of q, k, v */
static size_t row_floats(const rule_case *c)
{
    return 2 * c->key_dim + c->n_cols;
}

/* What changes: the state, then the rows of q, k and v, then o */
static size_t changing_floats(const rule_case *c)
{
    return state_floats(c) + c->n_rows * (row_floats(c) + c->n_cols);
}

/* in: what changes, then beta and decays of each row */
static qsf_state_rows rows_of(const rule_case *c, float *changing, const float *gates)
{
    float *const rows = changing + state_floats(c);
    return (qsf_state_rows){
        .n_rows = c->n_rows,
        .key_dim = c->key_dim,
        .n_cols = c->n_cols,
        .q = rows,
        .k = rows + c->key_dim,
        .v = rows + 2 * c->key_dim,
        .stride = row_floats(c),
        .o = rows + c->n_rows * row_floats(c),
        .o_stride = c->n_cols,
        .beta = gates,
        .decay = gates + 1,
        .gate_stride = gate_floats(c),
        .has_channel_decays = c->has_channel_decays,
        .skip = 0.7F,
    };
}

static qsf_state_rule_fn *rule_of(const rule_case *c, const qsf_kernels *k)
{
    return c->is_ssd ? k->ssd_rule : k->delta_rule;
}

/* By the contract of kernels.h: one column of one row */
static void run_column(const rule_case *c, float *state, const qsf_state_rows *x, size_t t,
                       size_t j)
{
    const float *const k = x->k + t * x->stride;
    const float *const q = x->q + t * x->stride;
    float *const v = x->v + t * x->stride;
    const float *const decay = x->decay + t * x->gate_stride;
    const size_t step = c->has_channel_decays ? 1 : 0;
    float recall = 0.0F;
    for (size_t i = 0; i < x->key_dim && !c->is_ssd; i++)
        recall = qsf_fmaf(decay[i * step] * k[i], state[i * QSF_STATE_COLS + j], recall);
    const float d = (c->is_ssd ? v[j] : v[j] - recall) * x->beta[t * x->gate_stride];
    float out = 0.0F;
    for (size_t i = 0; i < x->key_dim; i++) {
        float *const s = &state[i * QSF_STATE_COLS + j];
        *s = qsf_fmaf(k[i], d, decay[i * step] * *s);
        out = qsf_fmaf(q[i], *s, out);
    }
    x->o[t * x->o_stride + j] = c->is_ssd ? qsf_fmaf(x->skip, v[j], out) : out;
    v[j] = d;
}

/* Runs the rule for rows [begin, end). */
static void run_rows(qsf_state_rule_fn *rule, float *state, const qsf_state_rows *all, size_t begin,
                     size_t end)
{
    qsf_state_rows x = *all;
    x.n_rows = end - begin;
    x.q += begin * x.stride;
    x.k += begin * x.stride;
    x.v += begin * x.stride;
    x.o += begin * x.o_stride;
    x.beta += begin * x.gate_stride;
    x.decay += begin * x.gate_stride;
    rule(state, &x);
}

/* The log of a pass, replayed, gives the state of the pass. */
static void check_replay(const rule_case *c, const qsf_kernels *k, const float *before,
                         const float *after, const float *gates)
{
    float *const changed = exact_floats(changing_floats(c));
    memcpy(changed, after, changing_floats(c) * sizeof *changed);
    memcpy(changed, before, state_floats(c) * sizeof *changed);
    const qsf_state_rows x = rows_of(c, changed, gates);
    k->state_replay(changed, &x);
    CHECK(first_difference(changed, after, state_floats(c)) == state_floats(c));
    free(changed);
}

static void check_rule(const rule_case *c, fill how)
{
    const size_t n = changing_floats(c);
    const size_t n_gates = gate_floats(c) * c->n_rows;
    float *const in = exact_floats(n + n_gates);
    const float *const gates = in + n;
    fill_floats(in, n + n_gates, how);
    for (size_t i = 0; i < n_gates && how <= FILL_EXTREMES; i++)
        in[n + i] = random_u32() % 5 == 0 ? (float)(i / 2 % 2) : fabsf(random_unit());
    const output want = output_make(n * sizeof *in);
    memcpy(want.at, in, n * sizeof *in);
    for (size_t i = 0; i < state_floats(c); i++) /* behind the columns there are zeros */
        if (i % QSF_STATE_COLS >= c->n_cols)
            in[i] = ((float *)want.at)[i] = 0.0F;
    const qsf_state_rows contract = rows_of(c, want.at, gates);
    for (size_t t = 0; t < c->n_rows; t++)
        for (size_t j = 0; j < c->n_cols; j++)
            run_column(c, want.at, &contract, t, j);
    for (size_t i = 0; i <= n_levels; i++) {
        const qsf_kernels *const k = i == 0 ? &scalar : &levels[i - 1];
        const size_t cut = random_u32() % c->n_rows;
        const output have = output_make(n * sizeof *in);
        memcpy(have.at, in, n * sizeof *in);
        const qsf_state_rows x = rows_of(c, have.at, gates);
        if (cut > 0)
            run_rows(rule_of(c, k), have.at, &x, 0, cut);
        run_rows(rule_of(c, k), have.at, &x, cut, c->n_rows);
        if (how <= FILL_EXTREMES) /* zeros stay zeros unless they meet an infinity */
            check_replay(c, k, in, have.at, gates);
        if (how > FILL_EXTREMES) /* a decay below 0 makes them -0 */
            for (size_t at = 0; at < state_floats(c); at++)
                if (at % QSF_STATE_COLS >= c->n_cols)
                    ((float *)have.at)[at] = 0.0F;
        check_outputs(&want, &have, k->isa_name,
                      label(c->is_ssd               ? "ssd_rule"
                            : c->has_channel_decays ? "delta_rule by channels"
                                                    : "delta_rule",
                            c->key_dim, how));
        free(have.block);
    }
    free(want.block);
    free(in);
}

int check_recur(void)
{
    static const rule_case cases[] = {
        {.n_rows = 1, .key_dim = 1, .n_cols = 1},    {.n_rows = 2, .key_dim = 16, .n_cols = 24},
        {.n_rows = 3, .key_dim = 17, .n_cols = 32},  {.n_rows = 5, .key_dim = 24, .n_cols = 8},
        {.n_rows = 70, .key_dim = 20, .n_cols = 16}, {.n_rows = 9, .key_dim = 128, .n_cols = 32},
        {.n_rows = 2, .key_dim = 256, .n_cols = 31}};
    for (fill how = FILL_RANDOM; how < FILL_COUNT; how++) {
        for (size_t s = 0; s < COUNT_OF(sizes); s++) {
            for (size_t n_taps = 2; n_taps <= MOST_TAPS; n_taps += 7)
                check_conv(sizes[s], n_taps, n_taps == 9, how);
            check_l2norm(sizes[s], how);
            check_sigmoid_mul(sizes[s], how);
            check_gates(sizes[s], how, false);
            check_gates(sizes[s], how, true);
            check_bounded_decays(sizes[s], how);
        }
        for (size_t c = 0; c < COUNT_OF(cases); c++) {
            rule_case of_ssd = cases[c];
            rule_case of_channels = cases[c];
            of_ssd.is_ssd = true;
            of_channels.has_channel_decays = true;
            check_rule(&cases[c], how);
            check_rule(&of_channels, how);
            check_rule(&of_ssd, how);
        }
    }
    return check_report("recur");
}
