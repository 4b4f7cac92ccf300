/* recur_tmpl.h - convolutions and states of recurrent mixers, over lanes.
 *
 * Included after vecops_tmpl.h. A column of a state never meets another one, so lanes are columns
 * and no sum is over lanes: the order of the contract (kernels.h) costs nothing.
 */
/* SPDX-License-Identifier: Apache-2.0 */

static void QSF_NAME(conv)(const float *const *rows, const float *w, size_t w_stride, size_t n_taps,
                           const float *bias, float *out, size_t n)
{
    for (size_t i = 0; i < n; i += QSF_LANES) {
        const size_t m = lanes_left(n, i);
        lanes sum = lanes_set(0.0F);
        for (size_t t = 0; t < n_taps; t++)
            sum = lanes_fma(lanes_load_part(w + t * w_stride + i, m),
                            lanes_load_part(rows[t] + i, m), sum);
        if (bias != NULL)
            sum = lanes_add(sum, lanes_load_part(bias + i, m));
        lanes_store_part(out + i, sum, m);
    }
}

static void QSF_NAME(l2norm)(float *x, float eps, float factor, size_t n)
{
    const lanes norm = lanes_set(1.0F / sqrtf(sum_of_squares(x, n) + eps));
    STORE_EACH(x, n, lanes_mul(lanes_mul(AT(x), norm), lanes_set(factor)));
}

/* ln(1 + e^x) with an error of at most 4 * 2^-24 of it for |x| <= 30. The logarithm of 1 + u,
 * u = e^-|x|, is 2 artanh(u / (2 + u)), whose series has seven terms here. */
static inline lanes lanes_softplus(lanes x)
{
    const lanes u = lanes_exp(lanes_mul(lanes_abs(x), lanes_set(-1.0F)));
    const lanes s = lanes_div(u, lanes_add(lanes_set(2.0F), u));
    const lanes z = lanes_mul(s, s);
    const lanes twice = lanes_add(s, s);
    lanes p = lanes_set(1.0F / 15.0F);
    p = lanes_fma(p, z, lanes_set(1.0F / 13.0F));
    p = lanes_fma(p, z, lanes_set(1.0F / 11.0F));
    p = lanes_fma(p, z, lanes_set(1.0F / 9.0F));
    p = lanes_fma(p, z, lanes_set(1.0F / 7.0F));
    p = lanes_fma(p, z, lanes_set(1.0F / 5.0F));
    p = lanes_fma(p, z, lanes_set(1.0F / 3.0F));
    const lanes log1p = lanes_fma(lanes_mul(twice, z), p, twice);
    return lanes_add(lanes_max(lanes_set(0.0F), x), log1p);
}

/* Returns softplus(x + bias), and stores e^(-rate * softplus) in decay; m values each. */
static inline lanes step_and_decay(const float *x, const float *bias, const float *rate,
                                   float *decay, size_t m)
{
    const lanes step = lanes_softplus(lanes_add(lanes_load_part(x, m), lanes_load_part(bias, m)));
    const lanes forgotten = lanes_mul(lanes_load_part(rate, m), step);
    lanes_store_part(decay, lanes_exp(lanes_mul(forgotten, lanes_set(-1.0F))), m);
    return step;
}

static void QSF_NAME(betas)(float *beta, float factor, size_t n)
{
    STORE_EACH(beta, n, times_logistic(lanes_set(factor), AT(beta)));
}

static void QSF_NAME(decays)(float *decay, const float *rate, const float *bias, size_t n)
{
    for (size_t i = 0; i < n; i += QSF_LANES)
        (void)step_and_decay(decay + i, bias + i, rate + i, decay + i, lanes_left(n, i));
}

static void QSF_NAME(bounded_decays)(float *decay, const float *rate, const float *bias,
                                     float limit, size_t n)
{
    STORE_EACH(decay, n,
               lanes_exp(times_logistic(lanes_set(-limit),
                                        lanes_mul(AT(rate), lanes_add(AT(decay), AT(bias))))));
}

static void QSF_NAME(ssd_gates)(float *step, float *decay, const float *rate, const float *bias,
                                size_t n)
{
    STORE_EACH(step, n, step_and_decay(step + i, bias + i, rate + i, decay + i, m));
}

/* The columns of a block of a state, as two lanes */
typedef struct columns {
    lanes lo;
    lanes hi;
} columns;

static inline columns columns_fma(float a, columns b, columns c)
{
    const lanes factor = lanes_set(a);
    return (columns){lanes_fma(factor, b.lo, c.lo), lanes_fma(factor, b.hi, c.hi)};
}

static inline columns columns_load(const float *p)
{
    return (columns){lanes_load(p), lanes_load(p + QSF_LANES)};
}

static inline size_t columns_of_hi(size_t n_cols)
{
    return n_cols > QSF_LANES ? n_cols - QSF_LANES : 0;
}

/* The columns after n_cols are +0. */
static inline columns columns_load_part(const float *p, size_t n_cols)
{
    const size_t n_hi = columns_of_hi(n_cols);
    return (columns){lanes_load_part(p, n_cols - n_hi),
                     n_hi != 0 ? lanes_load_part(p + QSF_LANES, n_hi) : lanes_set(0.0F)};
}

static inline void columns_store_part(float *p, columns v, size_t n_cols)
{
    const size_t n_hi = columns_of_hi(n_cols);
    lanes_store_part(p, v.lo, n_cols - n_hi);
    if (n_hi != 0)
        lanes_store_part(p + QSF_LANES, v.hi, n_hi);
}

/* s = fmaf(k, d, decay * s) for one row of a block; returns it */
static inline columns update_row(float *s, float k, columns d, lanes decay)
{
    const columns old = columns_load(s);
    const columns kept = {lanes_mul(decay, old.lo), lanes_mul(decay, old.hi)};
    const columns now = columns_fma(k, d, kept);
    lanes_store(s, now.lo);
    lanes_store(s + QSF_LANES, now.hi);
    return now;
}

QSF_FORCED_INLINE void decayed_key(const float *k, const float *decay, bool by_channel, size_t n,
                                   float *out)
{
    const lanes of_all = lanes_set(decay[0]);
    STORE_EACH(out, n, lanes_mul(AT(k), by_channel ? AT(decay) : of_all));
}

/* One walk over the state computes the output of a row and the recall of the next row; the
 * contract describes them as two walks. */
QSF_FORCED_INLINE void run_delta(float *state, const qsf_state_rows *x, bool by_channel)
{
    float key[QSF_MAX_STATE_DIM]; /* of the next row, times its decay */
    columns recall = {lanes_set(0.0F), lanes_set(0.0F)};
    decayed_key(x->k, x->decay, by_channel, x->key_dim, key);
    for (size_t i = 0; i < x->key_dim; i++)
        recall = columns_fma(key[i], columns_load(state + i * QSF_STATE_COLS), recall);
    for (size_t t = 0; t < x->n_rows; t++) {
        const float *const k = x->k + t * x->stride;
        const float *const q = x->q + t * x->stride;
        const lanes beta = lanes_set(x->beta[t * x->gate_stride]);
        const float *const decays = x->decay + t * x->gate_stride;
        const lanes of_all = lanes_set(decays[0]);
        const columns v = columns_load_part(x->v + t * x->stride, x->n_cols);
        const columns d = {lanes_mul(lanes_sub(v.lo, recall.lo), beta),
                           lanes_mul(lanes_sub(v.hi, recall.hi), beta)};
        const size_t next = t + 1 < x->n_rows ? t + 1 : t; /* after the last: not used */
        columns out = {lanes_set(0.0F), lanes_set(0.0F)};
        recall = out;
        decayed_key(x->k + next * x->stride, x->decay + next * x->gate_stride, by_channel,
                    x->key_dim, key);
        for (size_t i = 0; i < x->key_dim; i++) {
            const lanes decay = by_channel ? lanes_set(decays[i]) : of_all;
            const columns s = update_row(state + i * QSF_STATE_COLS, k[i], d, decay);
            out = columns_fma(q[i], s, out);
            recall = columns_fma(key[i], s, recall);
        }
        columns_store_part(x->v + t * x->stride, d, x->n_cols);
        columns_store_part(x->o + t * x->o_stride, out, x->n_cols);
    }
}

static void QSF_NAME(delta_rule)(float *state, const qsf_state_rows *x)
{
    if (x->has_channel_decays)
        run_delta(state, x, true);
    else
        run_delta(state, x, false);
}

static void QSF_NAME(ssd_rule)(float *state, const qsf_state_rows *x)
{
    for (size_t t = 0; t < x->n_rows; t++) {
        const float *const k = x->k + t * x->stride;
        const float *const q = x->q + t * x->stride;
        const lanes beta = lanes_set(x->beta[t * x->gate_stride]);
        const lanes decay = lanes_set(x->decay[t * x->gate_stride]);
        const columns v = columns_load_part(x->v + t * x->stride, x->n_cols);
        const columns d = {lanes_mul(v.lo, beta), lanes_mul(v.hi, beta)};
        columns out = {lanes_set(0.0F), lanes_set(0.0F)};
        for (size_t i = 0; i < x->key_dim; i++)
            out = columns_fma(q[i], update_row(state + i * QSF_STATE_COLS, k[i], d, decay), out);
        columns_store_part(x->v + t * x->stride, d, x->n_cols);
        columns_store_part(x->o + t * x->o_stride, columns_fma(x->skip, v, out), x->n_cols);
    }
}

static void QSF_NAME(state_replay)(float *state, const qsf_state_rows *x)
{
    const size_t step = x->has_channel_decays ? 1 : 0;
    for (size_t t = 0; t < x->n_rows; t++) {
        const float *const k = x->k + t * x->stride;
        const float *const decays = x->decay + t * x->gate_stride;
        const columns d = columns_load_part(x->v + t * x->stride, x->n_cols);
        for (size_t i = 0; i < x->key_dim; i++)
            (void)update_row(state + i * QSF_STATE_COLS, k[i], d, lanes_set(decays[i * step]));
    }
}
