/* sample_tmpl.h - the kernels of sampling, over a whole vocabulary and over lanes.
 *
 * Included after exp_tmpl.h and vecops_tmpl.h. Contracts in kernels.h.
 */
/* SPDX-License-Identifier: Apache-2.0 */

static bool QSF_NAME(all_finite)(const float *x, size_t n)
{
    /* x - x is 0 if x is finite, else NaN. Four sums hide the latency of the addition. */
    lanes sums[4] = {lanes_set(0.0F), lanes_set(0.0F), lanes_set(0.0F), lanes_set(0.0F)};
    size_t i = 0;
    for (; i + 4 * QSF_LANES <= n; i += 4 * QSF_LANES) {
        for (size_t j = 0; j < 4; j++) {
            const lanes v = lanes_load(x + i + j * QSF_LANES);
            sums[j] = lanes_add(sums[j], lanes_sub(v, v));
        }
    }
    for (; i < n; i += QSF_LANES) {
        const lanes v = lanes_load_part(x + i, lanes_left(n, i));
        sums[0] = lanes_add(sums[0], lanes_sub(v, v));
    }
    const lanes sum = lanes_add(lanes_add(sums[0], sums[1]), lanes_add(sums[2], sums[3]));
    return lanes_sum(sum) == 0.0F;
}

static float QSF_NAME(bucket_max)(const float *x, size_t n, float *out)
{
    const lanes lowest = lanes_set(-INFINITY);
    lanes largest = lowest;
    size_t i = 0;
    for (; i + QSF_STRIP <= n; i += QSF_STRIP, out += QSF_STRIP_BUCKETS) {
        lanes a = lanes_load(x + i);
        lanes b = lanes_load(x + i + QSF_LANES);
        for (size_t j = 2 * QSF_LANES; j < QSF_STRIP; j += 2 * QSF_LANES) {
            a = lanes_max(lanes_load(x + i + j), a);
            b = lanes_max(lanes_load(x + i + j + QSF_LANES), b);
        }
        a = lanes_max(a, b);
        lanes_store(out, a);
        largest = lanes_max(a, largest);
    }
    if (i < n) {
        lanes a = lowest;
        for (; i < n; i += QSF_LANES) {
            const size_t m = lanes_left(n, i);
            a = lanes_max(lanes_between(0, m, lanes_load_part(x + i, m), lowest), a);
        }
        lanes_store(out, a);
        largest = lanes_max(a, largest);
    }
    return lanes_top(largest);
}

static void QSF_NAME(weigh)(const float *x, size_t n, float max, float factor, float least,
                            float *e, float *sums)
{
    const lanes zero = lanes_set(0.0F);
    const lanes one = lanes_set(1.0F);
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
            const lanes all = lanes_where_less(v, maxes, below, one);
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
    k->all_finite = QSF_NAME(all_finite);
    k->bucket_max = QSF_NAME(bucket_max);
    k->weigh = QSF_NAME(weigh);
}
