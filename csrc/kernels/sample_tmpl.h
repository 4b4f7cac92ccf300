/* sample_tmpl.h - the kernels of sampling, over a whole vocabulary and over lanes.
 *
 * Included after exp_tmpl.h and vecops_tmpl.h. Contracts in kernels.h.
 */
/* SPDX-License-Identifier: Apache-2.0 */

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

/* The part of the fill function for these kernels. */
static void QSF_NAME(fill_sample)(qsf_kernels *k)
{
    k->bucket_max = QSF_NAME(bucket_max);
    k->weigh = QSF_NAME(weigh);
}
