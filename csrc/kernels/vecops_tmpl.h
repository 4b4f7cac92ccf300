/* vecops_tmpl.h - norms, rope, activation functions, int8 quantisation, over lanes; outliers,
 * sampling.
 *
 * The including file provides the lane operations (lanes_*.h), lanes_exp (exp_tmpl.h), lane_fma,
 * which is lanes_fma for one float, and QSF_NAME(op), which adds the instruction set to a name.
 * Contracts in kernels.h.
 */
/* SPDX-License-Identifier: Apache-2.0 */
/* Returns how many of n elements from i on are in the same group of lanes. */
static inline size_t lanes_left(size_t n, size_t i)
{
    return n - i < QSF_LANES ? n - i : QSF_LANES;
}

/* Sets to [n], group by group of lanes, to `value`: lanes of AT(p), which are p [n] at the same
 * places, or of i and m, where the group begins and how many it has. */
#define STORE_EACH(to, n, value)                      \
    do {                                              \
        for (size_t i = 0; i < (n); i += QSF_LANES) { \
            const size_t m = lanes_left(n, i);        \
            lanes_store_part((to) + i, value, m);     \
        }                                             \
    } while (0)
#define AT(p) lanes_load_part((p) + i, m)

/* x / (1 + e^-z): x times the logistic function of z */
static inline lanes times_logistic(lanes x, lanes z)
{
    const lanes e = lanes_exp(lanes_mul(z, lanes_set(-1.0F)));
    return lanes_div(x, lanes_add(lanes_set(1.0F), e));
}

static inline lanes lanes_silu(lanes x)
{
    return times_logistic(x, x);
}

/* x / 2 * (1 + tanh u), u = sqrt(2 / pi) * (x + 0.044715 x^3), computed as x times the logistic
 * function of 2u, because (1 + tanh u) / 2 = 1 / (1 + e^-2u) loses no digits where tanh u is near
 * -1. */
static inline lanes lanes_gelu_tanh(lanes x)
{
    const lanes inner = lanes_fma(lanes_mul(lanes_set(0.044715F), x), lanes_mul(x, x), x);
    return times_logistic(x, lanes_mul(lanes_set(1.5957691216057308F), inner));
}

/* x / 2 * (1 + erf z), z = x / sqrt 2, with formula 7.1.26 of Abramowitz and Stegun, Handbook of
 * Mathematical Functions: for z >= 0, erfc z = P(t) e^(-z^2), t = 1 / (1 + 0.3275911 z), with an
 * error of at most 1.5e-7. So the result is x (1 - erfc|z| / 2) for x > 0, else x erfc|z| / 2. */
static inline lanes lanes_gelu_erf(lanes x)
{
    const lanes ones = lanes_set(1.0F);
    const lanes z = lanes_mul(lanes_abs(x), lanes_set(0.70710678118654752F));
    const lanes t = lanes_div(ones, lanes_fma(lanes_set(0.3275911F), z, ones));
    lanes p = lanes_set(1.061405429F);
    p = lanes_fma(p, t, lanes_set(-1.453152027F));
    p = lanes_fma(p, t, lanes_set(1.421413741F));
    p = lanes_fma(p, t, lanes_set(-0.284496736F));
    p = lanes_fma(p, t, lanes_set(0.254829592F));
    const lanes gauss = lanes_exp(lanes_mul(lanes_mul(z, lanes_set(-1.0F)), z));
    const lanes half_erfc = lanes_mul(lanes_mul(lanes_mul(lanes_set(0.5F), p), t), gauss);
    const lanes factor =
        lanes_where_less(lanes_set(0.0F), x, lanes_sub(ones, half_erfc), half_erfc);
    return lanes_mul(x, factor);
}

/* 0 > x ? 0 : x, so NaN stays. */
static inline lanes lanes_relu(lanes x)
{
    return lanes_max(lanes_set(0.0F), x);
}

static inline lanes lanes_relu_squared(lanes x)
{
    return lanes_mul(lanes_relu(x), lanes_relu(x));
}

/* g / (1 + e^-1.702 g), g = min(x, 7); NaN stays. */
static inline lanes lanes_silu_clamped(lanes x)
{
    const lanes seven = lanes_set(7.0F);
    const lanes g = lanes_where_less(seven, x, seven, x);
    return times_logistic(g, lanes_mul(lanes_set(1.702F), g));
}

typedef lanes lanes_unary(lanes x);

/* x [n] = op(x) */
QSF_FORCED_INLINE void apply(lanes_unary *op, float *x, size_t n)
{
    size_t i = 0;
    for (; i + QSF_LANES <= n; i += QSF_LANES)
        lanes_store(x + i, op(lanes_load(x + i)));
    if (i < n)
        lanes_store_part(x + i, op(lanes_load_part(x + i, n - i)), n - i);
}

/* gate [n] = op(gate) * up */
QSF_FORCED_INLINE void apply_gated(lanes_unary *op, float *gate, const float *up, size_t n)
{
    STORE_EACH(gate, n, lanes_mul(op(AT(gate)), AT(up)));
}

/* The two kernels of an activation function. */
#define ACTIVATION(name)                                                     \
    static void QSF_NAME(name)(float *x, size_t n)                           \
    {                                                                        \
        apply(lanes_##name, x, n);                                           \
    }                                                                        \
    static void QSF_NAME(name##_mul)(float *gate, const float *up, size_t n) \
    {                                                                        \
        apply_gated(lanes_##name, gate, up, n);                              \
    }

ACTIVATION(gelu_tanh)
ACTIVATION(gelu_erf)
ACTIVATION(silu)
ACTIVATION(relu)
ACTIVATION(relu_squared)

static void QSF_NAME(silu_clamped)(float *x, size_t n)
{
    apply(lanes_silu_clamped, x, n);
}

static void QSF_NAME(silu_clamped_mul)(float *gate, const float *up, size_t n)
{
    const lanes low = lanes_set(-7.0F);
    const lanes high = lanes_set(7.0F);
    for (size_t i = 0; i < n; i += QSF_LANES) {
        const size_t m = lanes_left(n, i);
        const lanes u = lanes_load_part(up + i, m);
        const lanes not_high = lanes_where_less(high, u, high, u);
        const lanes clamped = lanes_where_less(not_high, low, low, not_high);
        const lanes g = lanes_silu_clamped(lanes_load_part(gate + i, m));
        lanes_store_part(gate + i, lanes_mul(g, lanes_add(clamped, lanes_set(1.0F))), m);
    }
}

static void QSF_NAME(xielu)(float *x, const float *by, size_t n)
{
    const lanes zeros = lanes_set(0.0F);
    for (size_t i = 0; i < n; i += QSF_LANES) {
        const size_t m = lanes_left(n, i);
        const lanes v = lanes_load_part(x + i, m);
        const lanes linear = lanes_mul(lanes_set(by[2]), v);
        const lanes above = lanes_fma(lanes_mul(lanes_set(by[0]), v), v, linear);
        const lanes e = lanes_exp(lanes_where_less(zeros, v, zeros, v));
        const lanes curve = lanes_sub(lanes_sub(e, lanes_set(1.0F)), v);
        const lanes below = lanes_fma(lanes_set(by[1]), curve, linear);
        lanes_store_part(x + i, lanes_where_less(zeros, v, above, below), m);
    }
}

static void QSF_NAME(sigmoid_mul)(float *gate, const float *up, size_t n)
{
    STORE_EACH(gate, n, times_logistic(AT(up), AT(gate)));
}

static void QSF_NAME(mul)(float *x, const float *y, size_t n)
{
    STORE_EACH(x, n, lanes_mul(AT(x), AT(y)));
}

static void QSF_NAME(add)(float *x, const float *y, size_t n)
{
    STORE_EACH(x, n, lanes_add(AT(x), AT(y)));
}

static void QSF_NAME(add_scaled)(float *x, const float *y, float factor, size_t n)
{
    STORE_EACH(x, n, lanes_fma(lanes_set(factor), AT(y), AT(x)));
}

static void QSF_NAME(scale)(float *x, float factor, size_t n)
{
    STORE_EACH(x, n, lanes_mul(AT(x), lanes_set(factor)));
}

static void QSF_NAME(clamp)(float *x, float limit, size_t n)
{
    /* The bound is the first operand, so that NaN stays NaN. */
    STORE_EACH(x, n, lanes_min(lanes_set(limit), lanes_max(lanes_set(-limit), AT(x))));
}

static void QSF_NAME(cap)(float *x, float factor, float cap, size_t n)
{
    STORE_EACH(x, n, lanes_mul(lanes_set(cap), lanes_tanh(lanes_mul(AT(x), lanes_set(factor)))));
}

static inline float sum_of_squares(const float *x, size_t n)
{
    lanes squares = lanes_set(0.0F);
    for (size_t i = 0; i < n; i += QSF_LANES) {
        const lanes v = lanes_load_part(x + i, lanes_left(n, i));
        squares = lanes_fma(v, v, squares);
    }
    return lanes_sum(squares);
}

static void QSF_NAME(rmsnorm)(const float *x, const float *w, float eps, size_t n, float *out)
{
    const lanes factor = lanes_set(1.0F / sqrtf(sum_of_squares(x, n) / (float)n + eps));
    STORE_EACH(out, n, lanes_mul(lanes_mul(AT(x), factor), AT(w)));
}

static void QSF_NAME(layernorm)(const float *x, const float *w, const float *b, float eps, size_t n,
                                float *out)
{
    const lanes zero = lanes_set(0.0F);
    lanes sum = zero;
    for (size_t i = 0; i < n; i += QSF_LANES)
        sum = lanes_add(sum, lanes_load_part(x + i, lanes_left(n, i)));
    const lanes mean = lanes_set(lanes_sum(sum) / (float)n);
    lanes squares = zero;
    for (size_t i = 0; i < n; i += QSF_LANES) {
        const size_t m = lanes_left(n, i);
        const lanes d = lanes_sub(lanes_load_part(x + i, m), mean);
        const lanes present = lanes_between(0, m, d, zero);
        squares = lanes_fma(present, present, squares);
    }
    const lanes factor = lanes_set(1.0F / sqrtf(lanes_sum(squares) / (float)n + eps));
    STORE_EACH(
        out, n,
        lanes_fma(lanes_mul(lanes_sub(AT(x), mean), factor), AT(w), b != NULL ? AT(b) : zero));
}

static void QSF_NAME(rope_split)(float *x, const float *cos, const float *sin, size_t n_pairs)
{
    const lanes minus_one = lanes_set(-1.0F);
    float *const y = x + n_pairs;
    for (size_t i = 0; i < n_pairs; i += QSF_LANES) {
        const size_t m = lanes_left(n_pairs, i);
        const lanes a = lanes_load_part(x + i, m);
        const lanes b = lanes_load_part(y + i, m);
        const lanes c = lanes_load_part(cos + i, m);
        const lanes s = lanes_load_part(sin + i, m);
        const lanes minus_bs = lanes_mul(lanes_mul(b, s), minus_one);
        lanes_store_part(x + i, lanes_fma(a, c, minus_bs), m);
        lanes_store_part(y + i, lanes_fma(b, c, lanes_mul(a, s)), m);
    }
}

static void QSF_NAME(rope_interleaved)(float *x, const float *cos, const float *sin, size_t n_pairs)
{
    for (size_t i = 0; i < n_pairs; i++) {
        const float a = x[2 * i];
        const float b = x[2 * i + 1];
        x[2 * i] = lane_fma(a, cos[i], -(b * sin[i]));
        x[2 * i + 1] = lane_fma(b, cos[i], a * sin[i]);
    }
}

static inline void sum_parts(const int8_t *q, const int8_t *q_low, qsf_act_parts *parts)
{
    memset(parts->quarter, 0, sizeof parts->quarter);
    for (size_t i = 0; i < QSF_BLOCK; i++)
        parts->quarter[i / 16] = (int16_t)(parts->quarter[i / 16] + q[i]);
    parts->first_fine = 0;
    for (size_t i = 0; i < 32; i++)
        parts->first_fine += 256 * q[i] + q_low[i];
}

/* x [n], one scale: returns it. Adds q and q_low to the sums, integers below 2^24 and so exact in
 * any order. */
static inline float round_range(const float *x, size_t n, int8_t *q, int8_t *q_low, lanes *sums,
                                lanes *low_sums)
{
    lanes magnitude = lanes_set(0.0F);
    for (size_t i = 0; i < n; i += QSF_LANES)
        magnitude = lanes_larger_magnitude(magnitude, lanes_abs(lanes_load(x + i)));
    const float amax = lanes_top_magnitude(magnitude);
    if (amax >= QSF_QUANTISE_MIN && amax <= FLT_MAX) {
        const lanes factor = lanes_set(32512.0F / amax);
        for (size_t i = 0; i < n; i += QSF_LANES)
            lanes_store_i8_pair(q + i, q_low + i, lanes_mul(lanes_load(x + i), factor), sums,
                                low_sums);
    } else {
        memset(q, 0, n);
        memset(q_low, 0, n);
    }
    return amax / 127.0F;
}

/* Block b of a row: x [64] */
static inline void quantise_block(const float *x, size_t b, bool by_halves, const qsf_act_row *out)
{
    int8_t *const q = out->q + b * QSF_BLOCK;
    int8_t *const q_low = out->q_low + b * QSF_BLOCK;
    qsf_act_parts *const parts = &out->parts[b];
    const size_t n = by_halves ? QSF_BLOCK / 2 : QSF_BLOCK;
    lanes sums = lanes_set(0.0F);
    lanes low_sums = lanes_set(0.0F);
    parts->scale[0] = round_range(x, n, q, q_low, &sums, &low_sums);
    parts->scale[1] =
        by_halves ? round_range(x + n, n, q + n, q_low + n, &sums, &low_sums) : parts->scale[0];
    sum_parts(q, q_low, parts);
    const float sum = lanes_sum(sums);
    out->scale[b] = parts->scale[0];
    out->sum[b] = (int32_t)sum;
    out->scaled_sum[b] = out->scale[b] * sum;
    out->fine_sum[b] = 256 * (int32_t)sum + (int32_t)lanes_sum(low_sums);
}

static void QSF_NAME(quantise)(const float *x, size_t n_blocks, bool by_halves,
                               const qsf_act_row *out)
{
    for (size_t b = 0; b < n_blocks; b++)
        quantise_block(x + b * QSF_BLOCK, b, by_halves, out);
}

#define OUTLIERS_AT_ONCE 64

/* Decodes the deltas of n entries, finite, to f32. The product by 2^112 is exact: it moves the
 * exponent from its f16 bias to its f32 bias, also for subnormals. */
static inline void decode_deltas(const unsigned char *entries, size_t n, float *deltas)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t entry = qsf_load_u32(entries + 4 * i);
        const uint32_t bits = (entry & 0x80000000U) | (entry >> 3 & 0x0FFFE000U);
        float value;
        memcpy(&value, &bits, sizeof value);
        deltas[i] = value * 0x1p112F;
    }
}

/* Decodes the entries once for all n_tokens, a literal; the sums of a row are close together. */
QSF_FORCED_INLINE void add_outliers_of(size_t n_tokens, const unsigned char *entries,
                                       size_t n_entries, size_t n_rows, const float *x,
                                       size_t x_stride, float *y, size_t y_stride)
{
    float acc[QSF_TILE_ROWS][4];
    float deltas[OUTLIERS_AT_ONCE];
    for (size_t r = 0; r < QSF_TILE_ROWS; r++)
        for (size_t t = 0; t < n_tokens; t++)
            acc[r][t] = r < n_rows ? y[t * y_stride + r] : 0.0F;
    size_t end = 0; /* one more than the position of the last entry */
    for (size_t begin = 0; begin < n_entries; begin += OUTLIERS_AT_ONCE) {
        const size_t left = n_entries - begin;
        const size_t n = left < OUTLIERS_AT_ONCE ? left : OUTLIERS_AT_ONCE;
        decode_deltas(entries + 4 * begin, n, deltas);
        for (size_t i = 0; i < n; i++) {
            end += qsf_load_u16(entries + 4 * (begin + i));
            const size_t r = (end - 1) % QSF_TILE_ROWS;
            const float *const xc = x + (end - 1) / QSF_TILE_ROWS;
            for (size_t t = 0; t < n_tokens; t++)
                acc[r][t] = lane_fma(deltas[i], xc[t * x_stride], acc[r][t]);
        }
    }
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < n_tokens; t++)
            y[t * y_stride + r] = acc[r][t];
}

static void QSF_NAME(add_outliers)(const unsigned char *entries, size_t n_entries, size_t n_rows,
                                   const qsf_acts *x, float *y, size_t y_stride)
{
    const size_t x_stride = x->n_blocks * QSF_BLOCK;
    size_t t = 0;
    for (; t + 4 <= x->n_tokens; t += 4)
        add_outliers_of(4, entries, n_entries, n_rows, x->f32 + t * x_stride, x_stride,
                        y + t * y_stride, y_stride);
    for (; t < x->n_tokens; t++)
        add_outliers_of(1, entries, n_entries, n_rows, x->f32 + t * x_stride, x_stride,
                        y + t * y_stride, y_stride);
}

#ifndef QSF_LOW_TOKENS
#define QSF_LOW_TOKENS 4 /* whose sums are in registers */
#endif

/* n_tokens, is_8bit: literals */
QSF_FORCED_INLINE void add_low_rank_of(size_t n_tokens, bool is_8bit, const unsigned char *b,
                                       size_t rank, size_t n_rows, const float *z, size_t z_stride,
                                       float *y, size_t y_stride)
{
    const size_t column_bytes = is_8bit ? QSF_LANES : 2 * QSF_LANES;
    for (size_t row = 0; row < n_rows; row += QSF_LANES, b += column_bytes * rank) {
        const size_t m = lanes_left(n_rows, row);
        const lanes scale = is_8bit ? lanes_load_f16(b) : lanes_set(1.0F);
        b += is_8bit ? 2 * QSF_LANES : 0;
        lanes acc[QSF_LOW_TOKENS];
        for (size_t t = 0; t < n_tokens; t++)
            acc[t] = lanes_set(0.0F);
        for (size_t k = 0; k < rank; k++) {
            const lanes w = is_8bit
                                ? lanes_sub(lanes_load_u8(b + column_bytes * k), lanes_set(128.0F))
                                : lanes_load_f16(b + column_bytes * k);
            for (size_t t = 0; t < n_tokens; t++)
                acc[t] = lanes_fma(w, lanes_set(z[t * z_stride + k]), acc[t]);
        }
        for (size_t t = 0; t < n_tokens; t++) {
            float *const to = y + t * y_stride + row;
            lanes_store_part(to, lanes_fma(scale, acc[t], lanes_load_part(to, m)), m);
        }
    }
}

static void QSF_NAME(add_low_rank)(const unsigned char *b, bool is_8bit, size_t rank, size_t n_rows,
                                   const float *z, size_t z_stride, size_t n_tokens, float *y,
                                   size_t y_stride)
{
    for (size_t t = 0, n; t < n_tokens; t += n) {
        const float *const from = z + t * z_stride;
        float *const to = y + t * y_stride;
        n = n_tokens - t < QSF_LOW_TOKENS ? 1 : QSF_LOW_TOKENS;
        if (n > 1 && is_8bit)
            add_low_rank_of(QSF_LOW_TOKENS, true, b, rank, n_rows, from, z_stride, to, y_stride);
        else if (n > 1)
            add_low_rank_of(QSF_LOW_TOKENS, false, b, rank, n_rows, from, z_stride, to, y_stride);
        else if (is_8bit)
            add_low_rank_of(1, true, b, rank, n_rows, from, z_stride, to, y_stride);
        else
            add_low_rank_of(1, false, b, rank, n_rows, from, z_stride, to, y_stride);
    }
}

static float QSF_NAME(sum_of_product)(float a, float b, float c)
{
    return a * b + c;
}

/* ---- sampling, over a whole vocabulary ---- */

static bool QSF_NAME(bucket_max)(const float *x, size_t n, float *out, float *max)
{
    const lanes lowest = lanes_set(-INFINITY);
    lanes largest = lowest;
    /* x - x is 0 if x is finite, else NaN. Two sums and two maxima hide the latency. */
    lanes sums[2] = {lanes_set(0.0F), lanes_set(0.0F)};
    size_t i = 0;
    for (; i + QSF_STRIP <= n; i += QSF_STRIP, out += QSF_STRIP_BUCKETS) {
        lanes most[2] = {lowest, lowest};
        for (size_t j = 0; j < QSF_STRIP; j += 2 * QSF_LANES)
            for (size_t k = 0; k < 2; k++) {
                const lanes v = lanes_load(x + i + j + k * QSF_LANES);
                most[k] = lanes_max(v, most[k]);
                sums[k] = lanes_add(sums[k], lanes_sub(v, v));
            }
        most[0] = lanes_max(most[0], most[1]);
        lanes_store(out, most[0]);
        largest = lanes_max(most[0], largest);
    }
    if (i < n) {
        lanes most = lowest;
        for (; i < n; i += QSF_LANES) {
            const size_t m = lanes_left(n, i);
            const lanes v = lanes_load_part(x + i, m);
            most = lanes_max(lanes_between(0, m, v, lowest), most);
            sums[0] = lanes_add(sums[0], lanes_sub(v, v));
        }
        lanes_store(out, most);
        largest = lanes_max(most, largest);
    }
    *max = lanes_top(largest);
    return lanes_sum(lanes_add(sums[0], sums[1])) == 0.0F;
}

static void QSF_NAME(weigh)(const float *x, size_t n, float max, float factor, float least,
                            float *e, float *sums)
{
    const lanes zero = lanes_set(0.0F);
    const lanes ones = lanes_set(1.0F);
    const lanes maxes = lanes_set(max);
    const lanes factors = lanes_set(factor);
    const lanes leasts = lanes_set(least);
    for (size_t begin = 0; begin < n; begin += QSF_STRIP) {
        const size_t end = n - begin < QSF_STRIP ? n : begin + QSF_STRIP;
        lanes sum = zero;
        for (size_t i = begin; i < end; i += QSF_LANES) {
            const size_t m = lanes_left(end, i);
            const lanes v = lanes_load_part(x + i, m);
            const lanes below = lanes_exp(lanes_mul(lanes_sub(v, maxes), factors));
            const lanes all = lanes_where_less(v, maxes, below, ones);
            const lanes kept = lanes_where_less(all, leasts, zero, all);
            lanes_store_part(e + i, kept, m);
            sum = lanes_add(sum, lanes_between(0, m, kept, zero));
        }
        sums[begin / QSF_STRIP] = lanes_sum(sum);
    }
}
