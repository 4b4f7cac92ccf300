/* fit_tmpl.h - finds the scale, the min and the codes of a block; over the lanes of kernels/.
 *
 * Included inside a target region, after a lanes_*.h. Rows are lanes.
 *
 * The search alternates two steps of least squares (like k-means with evenly spaced centres;
 * llama.cpp's make_qkx2_quants is similar): scale and min give codes, codes give the best scale and
 * min in closed form, rounded to the f16 that will be stored. It finds only the nearest of many
 * local minima, so it starts from several narrowed ranges and keeps the best result.
 * For types with two magnitudes (ternary; 2 bits around zero) it finds the best scale exactly: the
 * larger magnitude belongs to the k largest values for some k, so it sorts and tries all k.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define ROUND_MAGIC 12582912.0F /* 1.5 * 2^23: adding and subtracting it rounds to nearest even */

static inline lanes lanes_round_f16(lanes v)
{
    unsigned char halves[2 * QSF_LANES];
    lanes_store_f16(halves, v);
    return lanes_load_f16(halves);
}

/* Returns the nearest code, of two the one that is even or lower; the lowest for NaN. levels: those
 * of the range; a literal NULL where a loop must not look for them again and again */
QSF_FORCED_INLINE lanes nearest_code(const qsf_code_range *range, const float *levels, lanes v,
                                     lanes low, lanes high)
{
    v = lanes_min(lanes_max(v, low), high);
    if (levels == NULL)
        return lanes_sub(lanes_add(v, lanes_set(ROUND_MAGIC)), lanes_set(ROUND_MAGIC));
    lanes level = lanes_set(levels[15] - range->zero);
    for (size_t i = 15; i-- > 0;) {
        const float middle = 0.5F * (levels[i] + levels[i + 1]) - range->zero; /* exact */
        level = lanes_where_less(lanes_set(middle), v, level, lanes_set(levels[i] - range->zero));
    }
    return level;
}

/* Returns the smallest f16 that is not below the value (>= 0); never -0. */
static inline float ceil_f16(float value)
{
    const uint16_t half = qsf_half_from_float(value);
    const uint16_t up = qsf_half_to_float(half) < value;
    return qsf_half_to_float((uint16_t)(half + up)) + 0.0F;
}

static inline void find_range(const qsf_code_range *range, const qsf_fit_input *in, lanes *low,
                              lanes *high)
{
    *low = *high = lanes_load(in->x[0]);
    for (size_t c = 1; c < in->width; c++) {
        const lanes x = lanes_load(in->x[c]);
        *low = lanes_min(*low, x);
        *high = lanes_max(*high, x);
    }
    if (range->is_below)
        *low = lanes_min(*low, lanes_set(0.0F));
}

static void fit_nearest(const qsf_code_range *range, const qsf_fit_input *in, qsf_fit *fit)
{
    lanes low;
    lanes high;
    float lows[QSF_LANES];
    float highs[QSF_LANES];
    find_range(range, in, &low, &high);
    lanes_store(lows, low);
    lanes_store(highs, high);
    for (size_t r = 0; r < QSF_LANES; r++) {
        fit->mins[r] = 0.0F;
        if (range->has_min) {
            fit->mins[r] = qsf_half_to_float(qsf_half_from_float(lows[r])) + 0.0F;
            const float step = (highs[r] - fit->mins[r]) / range->high;
            fit->scales[r] = lows[r] == highs[r] ? 0.0F : ceil_f16(step > 0.0F ? step : 0.0F);
            continue;
        }
        const bool is_high = highs[r] >= -lows[r];
        const float amax = fabsf(is_high ? highs[r] : lows[r]);
        fit->scales[r] = ceil_f16(amax / range->reach);
        /* Only one end of the range has a code of the largest magnitude; the sign of the scale
         * selects the end at the value. */
        if (!range->is_even && is_high && fit->scales[r] != 0.0F)
            fit->scales[r] = -fit->scales[r];
    }
}

/* The state of the search. */
typedef struct search {
    const qsf_code_range *range;
    const qsf_fit_input *in;
    qsf_tile_floats x; /* the block minus the centre */
    lanes centre;
    lanes sum_w;
    lanes sum_wx;
    /* the best result so far */
    lanes scale;
    lanes min;
    lanes loss;
    /* least squares for the codes of the latest trial */
    lanes next_scale;
    lanes next_min;
    lanes next_scale_here; /* with the min unchanged */
} search;

/* Sums over the columns of a block, of the codes q of a trial: weight * loss, q, q * q, q * x */
typedef struct code_sums {
    lanes loss;
    lanes q;
    lanes qq;
    lanes qx;
} code_sums;

QSF_FORCED_INLINE code_sums sum_codes(const search *s, const float *levels, lanes scale, lanes off)
{
    const lanes zero = lanes_set(0.0F);
    const lanes inverse =
        lanes_where_less(zero, lanes_abs(scale), lanes_div(lanes_set(1.0F), scale), zero);
    const lanes bias = lanes_mul(lanes_sub(zero, off), inverse);
    const lanes minus_scale = lanes_sub(zero, scale);
    const lanes low = lanes_set(s->range->low);
    const lanes high = lanes_set(s->range->high);
    code_sums sums = {zero, zero, zero, zero};
    for (size_t c = 0; c < s->in->width; c++) {
        const lanes x = lanes_load(s->x.at[c]);
        const lanes w = lanes_set(s->in->weights[c]);
        const lanes q = nearest_code(s->range, levels, lanes_fma(x, inverse, bias), low, high);
        const lanes d = lanes_fma(q, minus_scale, lanes_sub(x, off));
        const lanes wq = lanes_mul(w, q);
        sums.loss = lanes_fma(lanes_mul(w, d), d, sums.loss);
        sums.q = lanes_add(sums.q, wq);
        sums.qq = lanes_fma(wq, q, sums.qq);
        sums.qx = lanes_fma(wq, x, sums.qx);
    }
    return sums;
}

/* The nearest of 0 .. 63 steps; 0 if the step is */
static inline lanes in_steps(const qsf_code_range *range, lanes v, const float *steps)
{
    const lanes zero = lanes_set(0.0F), step = lanes_load(steps);
    const lanes inverse = lanes_where_less(zero, step, lanes_div(lanes_set(1.0F), step), zero);
    const lanes n = nearest_code(range, NULL, lanes_mul(v, inverse), zero, lanes_set(63.0F));
    return lanes_mul(n, step);
}

/* Tries a scale and a min, rounded to what is stored; keeps them in each row where they reduce the
 * loss. */
static inline void try_scale(search *s, lanes scale, lanes min)
{
    const qsf_code_range *const range = s->range;
    const lanes zero = lanes_set(0.0F);
    const float *const steps = s->in->steps;
    scale = steps == NULL ? lanes_round_f16(scale) : in_steps(range, scale, steps);
    lanes off;
    if (range->has_min) {
        min = steps == NULL
                  ? lanes_round_f16(min)
                  : lanes_sub(zero, in_steps(range, lanes_sub(zero, min), steps + QSF_TILE_ROWS));
        off = lanes_sub(min, s->centre);
    } else {
        off = lanes_mul(scale, lanes_set(range->half));
    }
    const code_sums sums = range->levels == NULL ? sum_codes(s, NULL, scale, off)
                                                 : sum_codes(s, range->levels, scale, off);
    s->scale = lanes_where_less(sums.loss, s->loss, scale, s->scale);
    s->min = lanes_where_less(sums.loss, s->loss, min, s->min);
    s->loss = lanes_where_less(sums.loss, s->loss, sums.loss, s->loss);
    s->next_scale_here = lanes_div(lanes_sub(sums.qx, lanes_mul(off, sums.q)), sums.qq);
    s->next_scale = s->next_scale_here;
    if (range->has_min) {
        const lanes det = lanes_sub(lanes_mul(s->sum_w, sums.qq), lanes_mul(sums.q, sums.q));
        const lanes num = lanes_sub(lanes_mul(s->sum_w, sums.qx), lanes_mul(sums.q, s->sum_wx));
        s->next_scale = lanes_div(num, det);
        const lanes rest = lanes_sub(s->sum_wx, lanes_mul(s->next_scale, sums.q));
        s->next_min = lanes_add(lanes_div(rest, s->sum_w), s->centre);
    }
}

static inline void try_repeatedly(search *s, lanes scale, lanes min, unsigned n_rounds)
{
    try_scale(s, scale, min);
    for (unsigned i = 0; i < n_rounds; i++)
        try_scale(s, s->next_scale, s->next_min);
}

/* Starting points for types with a min: how much of the range is cut off at the low and the high
 * end, in steps (the scale of the whole range). Compared with a thousand random starts, the result
 * has 0.3 % (2 bits), 0.6 % (3) and 1.6 % (4) more squared error. */
typedef struct search_cut {
    float low;
    float high;
} search_cut;

#define N_CUTS 12

static const search_cut cuts_4bit[N_CUTS] = {
    {0.0F, 0.0F}, {0.5F, 0.5F}, {1.0F, 1.0F}, {1.5F, 1.5F}, {2.0F, 2.0F}, {2.7F, 2.7F},
    {0.0F, 1.0F}, {1.0F, 0.0F}, {0.0F, 2.0F}, {2.0F, 0.0F}, {3.5F, 0.5F}, {0.5F, 3.5F},
};

static const search_cut cuts_3bit[N_CUTS] = {
    {0.0F, 0.0F}, {0.3F, 0.3F}, {0.6F, 0.6F}, {0.9F, 0.9F}, {1.2F, 1.2F}, {1.5F, 1.5F},
    {0.0F, 0.7F}, {0.7F, 0.0F}, {0.3F, 1.2F}, {1.2F, 0.3F}, {0.3F, 2.0F}, {2.0F, 0.3F},
};

static const search_cut cuts_2bit[N_CUTS] = {
    {0.0F, 0.0F}, {0.3F, 0.3F}, {0.6F, 0.6F}, {0.8F, 0.8F}, {0.0F, 0.5F}, {0.5F, 0.0F},
    {0.2F, 0.8F}, {0.8F, 0.2F}, {0.4F, 1.2F}, {1.2F, 0.4F}, {0.1F, 1.6F}, {1.6F, 0.1F},
};

/* Local minima are close together, so the search also starts near the best: it multiplies the scale
 * by `scale`, about the middle of the codes, and moves them by `shift` scales. */
typedef struct search_move {
    float scale;
    float shift;
} search_move;

static const search_move moves[] = {
    {0.98F, 0.0F}, {1.02F, 0.0F}, {1.0F, 0.33F},  {1.0F, -0.33F}, {0.96F, 0.0F},
    {1.04F, 0.0F}, {0.98F, 0.4F}, {1.02F, -0.4F}, {1.0F, 0.5F},
};

static void search_min(search *s, lanes low, lanes high)
{
    const float n_steps = s->range->high;
    const search_cut *const cuts = n_steps > 7 ? cuts_4bit : n_steps > 3 ? cuts_3bit : cuts_2bit;
    const lanes step = lanes_div(lanes_sub(high, low), lanes_set(n_steps));
    for (size_t i = 0; i < N_CUTS; i++) {
        const float rest = 1.0F - (cuts[i].low + cuts[i].high) / n_steps;
        const lanes min = lanes_fma(step, lanes_set(cuts[i].low), low);
        try_repeatedly(s, lanes_mul(step, lanes_set(rest)), min, 2);
    }
    for (size_t i = 0; i < sizeof moves / sizeof *moves; i++) {
        const float shift = 0.5F * n_steps * (1.0F - moves[i].scale) + moves[i].shift;
        const lanes min = lanes_fma(s->scale, lanes_set(shift), s->min);
        try_repeatedly(s, lanes_mul(s->scale, lanes_set(moves[i].scale)), min, 1);
    }
    /* With the best min in its stored form. */
    try_scale(s, s->scale, s->min);
    try_scale(s, s->next_scale_here, s->min);
}

/* Starting points for 4 and 8 bits around zero: evenly spaced scales that reach beyond, or not up
 * to, the largest magnitude. With many codes the best scales hardly clip. */
static void search_symmetric(search *s, lanes amax)
{
    const float reach = s->range->reach;
    const bool has_many = reach > 100.0F;
    const unsigned n_starts = has_many ? 12 : 9;
    const float first = has_many ? 1.024F : 1.06F;
    const float narrowing = has_many ? 0.003F : 0.055F;
    const lanes zero = lanes_set(0.0F);
    for (unsigned i = 0; i < n_starts; i++) {
        const lanes scale = lanes_mul(amax, lanes_set((first - narrowing * (float)i) / reach));
        try_repeatedly(s, scale, zero, 1);
        if (!s->range->is_even)
            try_repeatedly(s, lanes_sub(zero, scale), zero, 1);
    }
    try_repeatedly(s, s->scale, zero, 1);
}

static inline void order_pair(float (*a)[QSF_LANES], float (*w)[QSF_LANES], size_t i, size_t j)
{
    const lanes a0 = lanes_load(a[i]);
    const lanes a1 = lanes_load(a[j]);
    const lanes w0 = lanes_load(w[i]);
    const lanes w1 = lanes_load(w[j]);
    lanes_store(a[i], lanes_where_less(a0, a1, a1, a0));
    lanes_store(a[j], lanes_where_less(a0, a1, a0, a1));
    lanes_store(w[i], lanes_where_less(a0, a1, w1, w0));
    lanes_store(w[j], lanes_where_less(a0, a1, w0, w1));
}

/* Batcher's odd-even merge sort, descending, of 64 magnitudes and their weights. */
static void sort_magnitudes(float (*a)[QSF_LANES], float (*w)[QSF_LANES])
{
    for (size_t p = 1; p < QSF_BLOCK; p *= 2) {
        for (size_t k = p; k >= 1; k /= 2) {
            for (size_t j = k % p; j + k < QSF_BLOCK; j += 2 * k) {
                for (size_t i = j; i < j + k && i + k < QSF_BLOCK; i++) {
                    if (i / (2 * p) == (i + k) / (2 * p))
                        order_pair(a, w, i, i + k);
                }
            }
        }
    }
}

/* If the k largest values have the larger magnitude, the best scale is sum(w a m) / sum(w m m),
 * where m is the value's magnitude in scales; it gains sum(w a m)^2 / sum(w m m). */
static void search_exact(search *s)
{
    float a[QSF_BLOCK][QSF_LANES] = {{0}};
    float weights[QSF_BLOCK][QSF_LANES] = {{0}};
    const float half = s->range->half;
    const lanes zero = lanes_set(0.0F);
    lanes product = zero;
    lanes energy = zero;
    for (size_t c = 0; c < s->in->width; c++) {
        const lanes x = lanes_abs(lanes_load(s->x.at[c]));
        const lanes w = lanes_set(s->in->weights[c]);
        lanes_store(a[c], x);
        lanes_store(weights[c], w);
        product = lanes_fma(lanes_mul(w, lanes_set(half)), x, product);
        energy = lanes_fma(w, lanes_set(half * half), energy);
    }
    sort_magnitudes(a, weights);
    /* 1 + half: the step between the magnitudes is one scale. */
    const lanes more = lanes_set((1.0F + half) * (1.0F + half) - half * half);
    lanes scale = half > 0.0F ? lanes_div(product, energy) : zero;
    lanes gain = lanes_mul(product, scale);
    for (size_t k = 0; k < s->in->width; k++) {
        const lanes w = lanes_load(weights[k]);
        product = lanes_fma(w, lanes_load(a[k]), product);
        energy = lanes_fma(w, more, energy);
        const lanes here = lanes_div(product, energy);
        const lanes gained = lanes_mul(product, here);
        scale = lanes_where_less(gain, gained, here, scale);
        gain = lanes_where_less(gain, gained, gained, gain);
    }
    try_scale(s, scale, zero);
}

static void fit_search(const qsf_code_range *range, const qsf_fit_input *in, qsf_fit *fit)
{
    search s;
    lanes low;
    lanes high;
    const lanes zero = lanes_set(0.0F);
    find_range(range, in, &low, &high);
    s.range = range;
    s.in = in;
    s.centre = range->has_min ? lanes_mul(lanes_add(low, high), lanes_set(0.5F)) : zero;
    s.sum_w = s.sum_wx = zero;
    for (size_t c = 0; c < in->width; c++) {
        const lanes w = lanes_set(in->weights[c]);
        const lanes x = lanes_sub(lanes_load(in->x[c]), s.centre);
        lanes_store(s.x.at[c], x);
        s.sum_w = lanes_add(s.sum_w, w);
        s.sum_wx = lanes_fma(w, x, s.sum_wx);
    }
    s.scale = s.min = zero;
    s.next_min = zero;
    s.loss = lanes_set(FLT_MAX);
    try_scale(&s, lanes_load(fit->scales), lanes_load(fit->mins));
    if (range->has_min) {
        /* A block of equal values has its value as min, or the step nearest to it, and scale 0. */
        s.loss = lanes_where_less(low, high, s.loss, lanes_set(-1.0F));
        search_min(&s, low, high);
    } else if (range->is_exact) {
        search_exact(&s);
    } else {
        search_symmetric(&s, lanes_max(high, lanes_sub(zero, low)));
    }
    /* adding 0 makes -0 to +0 */
    lanes_store(fit->scales, lanes_add(s.scale, zero));
    lanes_store(fit->mins, lanes_add(s.min, zero));
}

/* Returns the code nearest to x; 0 if the scale is 0. */
static inline lanes code_of(const qsf_code_range *range, lanes x, lanes scale, lanes off)
{
    const lanes zero = lanes_set(0.0F);
    const lanes is_scaled =
        lanes_where_less(zero, lanes_abs(scale), lanes_set(1.0F), lanes_set(0.0F));
    const lanes divisor = lanes_where_less(zero, is_scaled, scale, lanes_set(1.0F));
    const lanes q = nearest_code(range, range->levels, lanes_div(lanes_sub(x, off), divisor),
                                 lanes_set(range->low), lanes_set(range->high));
    return lanes_where_less(zero, is_scaled, q, zero);
}

static inline lanes offset_of(const qsf_code_range *range, const qsf_fit *fit)
{
    return range->has_min ? lanes_load(fit->mins)
                          : lanes_mul(lanes_load(fit->scales), lanes_set(range->half));
}

static void encode(const qsf_code_range *range, const float (*x)[QSF_TILE_ROWS], size_t width,
                   const qsf_fit *fit, float (*codes)[QSF_TILE_ROWS],
                   float (*stored)[QSF_TILE_ROWS])
{
    const lanes scale = lanes_load(fit->scales);
    const lanes off = offset_of(range, fit);
    const lanes zero_code = lanes_set(range->zero);
    for (size_t c = 0; c < width; c++) {
        const lanes q = code_of(range, lanes_load(x[c]), scale, off);
        lanes_store(codes[c], lanes_add(q, zero_code));
        lanes_store(stored[c], lanes_fma(q, scale, off));
    }
}

static void to_halves(const qsf_tile_floats *x, unsigned char *halves)
{
    for (size_t c = 0; c < QSF_BLOCK; c++)
        lanes_store_f16(halves + 2 * QSF_LANES * c, lanes_load(x->at[c]));
}

static void measure(const qsf_tile_floats *x, const qsf_tile_floats *stored, size_t width,
                    qsf_row_losses *losses)
{
    const lanes zero = lanes_set(0.0F);
    lanes squared = zero;
    lanes source = zero;
    lanes kept = zero;
    lanes product = zero;
    lanes largest = zero;
    for (size_t c = 0; c < width; c++) {
        const lanes a = lanes_load(x->at[c]);
        const lanes b = lanes_load(stored->at[c]);
        const lanes d = lanes_sub(a, b);
        squared = lanes_fma(d, d, squared);
        source = lanes_fma(a, a, source);
        kept = lanes_fma(b, b, kept);
        product = lanes_fma(a, b, product);
        largest = lanes_max(largest, lanes_abs(d));
    }
    lanes_store(losses->squared_error, squared);
    lanes_store(losses->source_energy, source);
    lanes_store(losses->stored_energy, kept);
    lanes_store(losses->inner_product, product);
    lanes_store(losses->max_error, largest);
}
