/* attend_tmpl.h - one query head against the pages of one KV head, over lanes.
 *
 * Included after exp_tmpl.h and vecops_tmpl.h. Contract at qsf_attend_fn in kernels.h.
 *
 * Slots outside [first, end) are loaded with their page but selected away before they can
 * meet a sum: they may hold anything. Pages wholly outside are never touched.
 */
/* SPDX-License-Identifier: Apache-2.0 */

/* 16 elements from `idx` on of a page of halves or floats */
QSF_FORCED_INLINE lanes load_page(const void *page, size_t idx, bool is_f16)
{
    return is_f16 ? lanes_load_f16((const unsigned char *)page + 2 * idx)
                  : lanes_load((const float *)page + idx);
}

/* scores [n_pages, 32] = scale * (q [head_dim] . k), for n_pages (a literal) pages
 * [head_dim, 32]: two independent sums per page hide the latency of the multiply-adds. */
QSF_FORCED_INLINE void score_pages(const float *q, const void *const *k_pages, size_t n_pages,
                                   size_t head_dim, float scale, float *scores, bool is_f16)
{
    lanes acc[8];
    for (size_t i = 0; i < 2 * n_pages; i++)
        acc[i] = lanes_set(0.0F);
    for (size_t d = 0; d < head_dim; d++) {
        const lanes qd = lanes_set(q[d]);
        for (size_t i = 0; i < 2 * n_pages; i++) {
            const size_t idx = d * QSF_KV_PAGE_TOKENS + (i & 1) * QSF_LANES;
            acc[i] = lanes_fma(qd, load_page(k_pages[i / 2], idx, is_f16), acc[i]);
        }
    }
    for (size_t i = 0; i < 2 * n_pages; i++)
        lanes_store(scores + i * QSF_LANES, lanes_mul(acc[i], lanes_set(scale)));
}

/* The lanes of positions p .. p + 15 that lie in [first, end), as begin and end. */
static inline size_t lane_of(size_t position, size_t p)
{
    if (position <= p)
        return 0;
    return position - p < QSF_LANES ? position - p : QSF_LANES;
}

/* scores [p] becomes e^(scores[p] - max), for positions outside [first, end) 0. Returns 1 / total.
 */
static inline float softmax(float *scores, size_t first, size_t end)
{
    const size_t begin = first / QSF_LANES * QSF_LANES;
    const lanes lowest = lanes_set(-INFINITY);
    lanes largest = lowest;
    for (size_t p = begin; p < end; p += QSF_LANES) {
        const lanes s = lanes_load(scores + p);
        largest = lanes_max(lanes_between(lane_of(first, p), lane_of(end, p), s, lowest), largest);
    }
    const lanes max = lanes_set(lanes_top(largest));
    lanes total = lanes_set(0.0F);
    for (size_t p = begin; p < end; p += QSF_LANES) {
        const lanes e = lanes_exp(lanes_sub(lanes_load(scores + p), max));
        const lanes present = lanes_between(lane_of(first, p), lane_of(end, p), e, lanes_set(0.0F));
        total = lanes_add(total, present);
        lanes_store(scores + p, present);
    }
    return 1.0F / lanes_sum(total);
}

/* out [16 * n] = factor * sum of e[p] v[p][d], for the n (a literal) groups of 16 columns
 * from d on; v pages are [32, head_dim]. */
QSF_FORCED_INLINE void sum_values(const float *e, const void *const *v_pages, size_t head_dim,
                                  size_t d, size_t n, size_t first, size_t end, float factor,
                                  float *out, bool is_f16)
{
    lanes acc[4];
    for (size_t i = 0; i < n; i++)
        acc[i] = lanes_set(0.0F);
    for (size_t p = first; p < end; p++) {
        const void *const page = v_pages[p / QSF_KV_PAGE_TOKENS];
        const size_t row = p % QSF_KV_PAGE_TOKENS * head_dim + d;
        for (size_t i = 0; i < n; i++)
            acc[i] =
                lanes_fma(lanes_set(e[p]), load_page(page, row + i * QSF_LANES, is_f16), acc[i]);
    }
    for (size_t i = 0; i < n; i++)
        lanes_store(out + i * QSF_LANES, lanes_mul(acc[i], lanes_set(factor)));
}

/* The same for the last head_dim % 16 columns, from d on. */
QSF_FORCED_INLINE void sum_values_part(const float *e, const void *const *v_pages, size_t head_dim,
                                       size_t d, size_t first, size_t end, float factor, float *out,
                                       bool is_f16)
{
    const size_t n = head_dim - d;
    lanes acc = lanes_set(0.0F);
    for (size_t p = first; p < end; p++) {
        const size_t row = p % QSF_KV_PAGE_TOKENS * head_dim + d;
        const void *const page = v_pages[p / QSF_KV_PAGE_TOKENS];
        lanes v;
        if (is_f16) {
            unsigned char halves[2 * QSF_LANES] = {0};
            memcpy(halves, (const unsigned char *)page + 2 * row, 2 * n);
            v = lanes_load_f16(halves);
        } else {
            v = lanes_load_part((const float *)page + row, n);
        }
        acc = lanes_fma(lanes_set(e[p]), v, acc);
    }
    lanes_store_part(out, lanes_mul(acc, lanes_set(factor)), n);
}

QSF_FORCED_INLINE void attend(const float *q, const void *const *k_pages,
                              const void *const *v_pages, size_t head_dim, size_t first, size_t end,
                              float scale, float *scores, float *out, bool is_f16)
{
    const size_t end_page = (end + QSF_KV_PAGE_TOKENS - 1) / QSF_KV_PAGE_TOKENS;
    size_t page = first / QSF_KV_PAGE_TOKENS;
    for (; page + 4 <= end_page; page += 4)
        score_pages(q, k_pages + page, 4, head_dim, scale, scores + page * QSF_KV_PAGE_TOKENS,
                    is_f16);
    for (; page < end_page; page++)
        score_pages(q, k_pages + page, 1, head_dim, scale, scores + page * QSF_KV_PAGE_TOKENS,
                    is_f16);

    const float factor = softmax(scores, first, end);

    size_t d = 0;
    for (; d + 4 * QSF_LANES <= head_dim; d += 4 * QSF_LANES)
        sum_values(scores, v_pages, head_dim, d, 4, first, end, factor, out + d, is_f16);
    for (; d + QSF_LANES <= head_dim; d += QSF_LANES)
        sum_values(scores, v_pages, head_dim, d, 1, first, end, factor, out + d, is_f16);
    if (d < head_dim)
        sum_values_part(scores, v_pages, head_dim, d, first, end, factor, out + d, is_f16);
}

static void QSF_NAME(attend_f16)(const float *q, const void *const *k_pages,
                                 const void *const *v_pages, size_t head_dim, size_t first,
                                 size_t end, float scale, float *scores, float *out)
{
    attend(q, k_pages, v_pages, head_dim, first, end, scale, scores, out, true);
}

static void QSF_NAME(attend_f32)(const float *q, const void *const *k_pages,
                                 const void *const *v_pages, size_t head_dim, size_t first,
                                 size_t end, float scale, float *scores, float *out)
{
    attend(q, k_pages, v_pages, head_dim, first, end, scale, scores, out, false);
}

/* The fill function's body. */
static void QSF_NAME(fill)(qsf_kernels *k)
{
    k->quantise = QSF_NAME(quantise);
    k->rmsnorm = QSF_NAME(rmsnorm);
    k->layernorm = QSF_NAME(layernorm);
    k->rope_split = QSF_NAME(rope_split);
    k->rope_interleaved = QSF_NAME(rope_interleaved);
    k->gelu_tanh = QSF_NAME(gelu_tanh);
    k->gelu_erf = QSF_NAME(gelu_erf);
    k->silu = QSF_NAME(silu);
    k->relu = QSF_NAME(relu);
    k->relu_squared = QSF_NAME(relu_squared);
    k->silu_mul = QSF_NAME(silu_mul);
    k->add = QSF_NAME(add);
    k->k_store_f16 = QSF_NAME(k_store_f16);
    k->v_store_f16 = QSF_NAME(v_store_f16);
    k->k_store_f32 = QSF_NAME(k_store_f32);
    k->v_store_f32 = QSF_NAME(v_store_f32);
    k->attend_f16 = QSF_NAME(attend_f16);
    k->attend_f32 = QSF_NAME(attend_f32);
}
