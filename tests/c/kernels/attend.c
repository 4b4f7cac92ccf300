/* attend.c - KV pages and the steps of attention over a span: every level against
 * scalar bit by bit, and scalar against the formulas in double. Slots that no row attends to hold
 * NaN; pages before the first and after the last that any attends to are NULL.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/bytes.h"
#include "base/half.h"
#include "kernels/kernels.h"
#include "kernel_data.h"

#define PAGE QSF_KV_PAGE_TOKENS
#define SPAN QSF_KV_SPAN_TOKENS
#define MAX_ROWS 19
#define MAX_HEAD_DIM 256

static const qsf_dtype types[] = {QSF_DTYPE_F32, QSF_DTYPE_F16, QSF_DTYPE_8BIT, QSF_DTYPE_4BIT,
                                  QSF_DTYPE_2BIT};
static const size_t head_dims[] = {1, 2, 15, 16, 17, 63, 64, 80, 96, 128, 160, MAX_HEAD_DIM};
static const qsf_span_range ranges[] = {
    {0, 1},   {0, 2},    {0, 15},   {0, 16},    {0, 17},    {0, 31},   {0, 32},   {0, 33},
    {5, 6},   {31, 33},  {31, 32},  {32, 33},   {32, 64},   {20, 50},  {33, 130}, {63, 128},
    {64, 64}, {64, 192}, {0, SPAN}, {255, 256}, {100, 256}, {240, 250}};

static uint64_t n_compared;

static size_t blocks_of(size_t head_dim)
{
    return (head_dim + QSF_BLOCK - 1) / QSF_BLOCK;
}

static size_t key_page_bytes(qsf_dtype type, size_t head_dim)
{
    return PAGE / QSF_TILE_ROWS * blocks_of(head_dim) * qsf_dtype_tile_bytes(type);
}

static size_t value_page_bytes(qsf_dtype type, size_t head_dim)
{
    return blocks_of(head_dim) * qsf_kv_value_block_bytes(type);
}

/* ---- stores ---- */

/* What a page says of one slot, out [n_blocks * 64]. */
static void read_key(qsf_dtype type, const void *page, size_t head_dim, size_t slot, float *out)
{
    const size_t n_blocks = blocks_of(head_dim);
    const unsigned char *const tiles = page;
    scalar.dequant_row[type](tiles + slot / QSF_TILE_ROWS * n_blocks * qsf_dtype_tile_bytes(type),
                             n_blocks, slot % QSF_TILE_ROWS, out);
}

/* Code `i` of `bits` bits of a block's slot: 16 dims are in 16 bytes. */
static unsigned value_code(const unsigned char *codes, size_t bits, size_t i)
{
    const size_t n_pieces = bits / 2;
    const size_t piece = i / 16 % n_pieces;
    const unsigned byte = codes[16 * piece + i % 16];
    return byte >> (i / 16 / n_pieces * bits) & ((1U << bits) - 1);
}

static float half_at(const unsigned char *halves, size_t i)
{
    return qsf_half_to_float(qsf_load_u16(halves + 2 * i));
}

static float value_at(qsf_dtype type, const unsigned char *block, size_t slot, size_t i)
{
    const size_t bits = type == QSF_DTYPE_8BIT ? 8 : type == QSF_DTYPE_4BIT ? 4 : 2;
    const unsigned char *const codes =
        block + (bits < 8 ? 4 : 2) * PAGE + slot * bits * QSF_BLOCK / 8;
    if (type == QSF_DTYPE_F32)
        return qsf_load_f32(block + 4 * (slot * QSF_BLOCK + i));
    if (type == QSF_DTYPE_F16)
        return half_at(block, slot * QSF_BLOCK + i);
    const float code = (float)value_code(codes, bits, i);
    if (type == QSF_DTYPE_8BIT)
        return (code - 128.0F) * half_at(block, slot);
    return qsf_fmaf(code, half_at(block, slot), half_at(block, PAGE + slot));
}

static void read_value(qsf_dtype type, const void *page, size_t head_dim, size_t slot, float *out)
{
    for (size_t i = 0; i < blocks_of(head_dim) * QSF_BLOCK; i++)
        out[i] = value_at(
            type, (const unsigned char *)page + i / QSF_BLOCK * qsf_kv_value_block_bytes(type),
            slot, i % QSF_BLOCK);
}

/* Half a step off at most, and at the lower end what the f16 minimum is off; a step is at most
 * 2^-10 or the least half larger than the block's range asks for. */
static void check_stored_block(qsf_dtype type, const float *x, size_t n, const float *stored)
{
    double lowest = (double)x[0];
    double highest = (double)x[0];
    bool is_finite = true;
    for (size_t i = 0; i < n; i++) {
        is_finite = is_finite && isfinite(x[i]);
        lowest = fmin(lowest, (double)x[i]);
        highest = fmax(highest, (double)x[i]);
    }
    const double largest = fmax(fabs(lowest), fabs(highest));
    const double u = (double)FLT_EPSILON;
    double tolerance = 0.0;
    if (type == QSF_DTYPE_F16) {
        tolerance = largest * 0x1p-11 + 0x1p-25;
    } else if (type == QSF_DTYPE_8BIT) {
        const double step = largest / 127.0 * (1.0 + 0x1p-10 + u) + 0x1p-24;
        tolerance = step * (0.5 + 256.0 * u) + largest * u;
        is_finite = is_finite && largest / 127.0 <= 65000.0;
    } else if (type != QSF_DTYPE_F32) {
        const double steps = type == QSF_DTYPE_4BIT ? 15.0 : 3.0;
        const double min_error = fabs(lowest) * 0x1p-11 + 0x1p-25;
        const double step =
            (highest - lowest + min_error) / steps * (1.0 + 0x1p-10 + 2.0 * u) + 0x1p-24;
        tolerance = step * (0.5 + 16.0 * u) + min_error + 2.0 * largest * u;
        is_finite = is_finite && highest - lowest <= 65000.0 * steps && fabs(lowest) <= 65000.0;
    }
    const bool may_overflow = type != QSF_DTYPE_F32 && largest > 65000.0;
    for (size_t i = 0; i < n; i++) {
        if (is_finite && (type != QSF_DTYPE_F16 || !may_overflow)) {
            if (!CHECK(fabs((double)stored[i] - (double)x[i]) <= tolerance))
                printf("  %s: %a is stored as %a\n", qsf_dtype_name(type), (double)x[i],
                       (double)stored[i]);
        } else if (!may_overflow && type != QSF_DTYPE_F16 && type != QSF_DTYPE_F32) {
            CHECK(isnan(stored[i]));
        }
    }
}

static void check_slot(qsf_dtype type, size_t head_dim, const float *x, const output *k,
                       const output *v, size_t slot)
{
    float key[MAX_HEAD_DIM + QSF_BLOCK];
    float value[MAX_HEAD_DIM + QSF_BLOCK];
    read_key(type, k->at, head_dim, slot, key);
    read_value(type, v->at, head_dim, slot, value);
    for (size_t d = 0; d < head_dim; d++)
        CHECK((isnan(key[d]) && isnan(value[d])) || key[d] == value[d]);
    for (size_t d = 0; d < head_dim; d += QSF_BLOCK)
        check_stored_block(type, x + d, head_dim - d < QSF_BLOCK ? head_dim - d : QSF_BLOCK,
                           key + d);
}

typedef struct page_args {
    qsf_dtype type;
    size_t head_dim;
    const float *rows; /* [32, head_dim] */
    bool is_key;
} page_args;

/* Fills a page slot by slot in a scattered order, each slot once before with something else. */
static void run_stores(const qsf_kernels *k, const void *args, float *page)
{
    const page_args *const a = args;
    qsf_kv_store_fn *const store = a->is_key ? k->k_store[a->type] : k->v_store[a->type];
    for (size_t i = 0; i < PAGE; i++)
        store(a->rows + (i + 1) % PAGE * a->head_dim, a->head_dim, i, page);
    for (size_t i = 0; i < PAGE; i++)
        store(a->rows + i * 7 % PAGE * a->head_dim, a->head_dim, i * 7 % PAGE, page);
}

static output check_page(const page_args *a, size_t n_bytes, fill how)
{
    char what[64];
    snprintf(what, sizeof what, "%c_store %s, head_dim %zu, fill %d", a->is_key ? 'k' : 'v',
             qsf_dtype_name(a->type), a->head_dim, (int)how);
    output page = run_kernel(&scalar, run_stores, a, NULL, n_bytes);
    page.has_codes = true;
    check_levels(&page, true, run_stores, a, NULL, what);
    return page;
}

static void check_stores(qsf_dtype type, size_t head_dim, fill how)
{
    float *const rows = filled_floats(PAGE * head_dim, how);
    if (how == FILL_RANDOM) /* blocks of one value, and one that is off */
        for (size_t d = 0; d < head_dim; d++) {
            rows[d] = 0.7F;
            rows[head_dim + d] = -1e-3F;
            rows[2 * head_dim + d] += d == head_dim / 2 ? 1000.0F : 0.0F;
            rows[3 * head_dim + d] *= 1e-7F;
        }
    const output k =
        check_page(&(page_args){type, head_dim, rows, true}, key_page_bytes(type, head_dim), how);
    const output v = check_page(&(page_args){type, head_dim, rows, false},
                                value_page_bytes(type, head_dim), how);
    for (size_t slot = 0; slot < PAGE; slot++)
        check_slot(type, head_dim, rows + slot * head_dim, &k, &v, slot);
    free(k.block);
    free(v.block);
    free(rows);
}

/* Every half goes into a page of V and comes back, through each level's loads and stores. */
static void check_every_half(const qsf_kernels *k)
{
    enum { N = 64 };
    for (uint32_t first = 0; first < 0x10000; first += N) {
        float value[N];
        uint16_t page[N * PAGE];
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

/* ---- softmax ---- */

/* The score of the largest and e as the formula has them; products round once, differences once. */
static void check_softmax_values(const float *scores, qsf_span_range range, float scale,
                                 const float *e, qsf_span_sums sums)
{
    float largest = -INFINITY;
    for (size_t p = range.begin; p < range.end; p++) {
        const float score = scores[p] * scale;
        largest = score > largest ? score : largest;
    }
    CHECK(sums.max == largest);
    const double max = (double)largest;
    double total = 0.0;
    const double u = (double)FLT_EPSILON / 2.0;
    for (size_t p = range.begin; p < range.end; p++) {
        const double distance = (double)(scores[p] * scale) - max;
        const double want = exp(distance);
        total += want;
        if (!CHECK(fabs((double)e[p] - want) <= want * u * (5.0 - distance) + 0x1p-149))
            printf("  e of %zu: %a, not %a\n", p, (double)e[p], want);
    }
    CHECK(fabs((double)sums.total - total) <= total * u * (5.0 + 200.0 + SPAN / 16.0 + 4.0));
}

typedef struct softmax_args {
    qsf_span_range range;
    float scale;
} softmax_args;

/* out: the scores, which become e; max; total */
static void run_softmax(const qsf_kernels *k, const void *args, float *out)
{
    const softmax_args *const a = args;
    qsf_span_sums sums;
    k->span_softmax(out, &a->range, 1, a->scale, &sums);
    out[SPAN] = sums.max;
    out[SPAN + 1] = sums.total;
}

static void check_softmax(qsf_span_range range, fill how, float spread)
{
    float scores[SPAN + 2];
    const softmax_args args = {range, 0.125F};
    if (range.begin == range.end)
        return;
    memset(scores, 0xFF, sizeof scores); /* NaN */
    fill_floats(scores + range.begin, range.end - range.begin, how);
    for (size_t p = range.begin; how == FILL_RANDOM && p < range.end; p++)
        scores[p] *= spread;
    const output want = check_kernel(run_softmax, &args, scores, SPAN + 2,
                                     label("span_softmax", range.end - range.begin, how));
    const float *const e = want.at;
    if (how == FILL_RANDOM || how == FILL_ZEROS)
        check_softmax_values(scores, range, args.scale, e, (qsf_span_sums){e[SPAN], e[SPAN + 1]});
    free(want.block);
}

/* ---- values ---- */

/* Pages of V, and where the values are the first dims of keys, of K: with one block more. */
typedef struct span {
    qsf_dtype type;
    size_t head_dim;
    bool has_keys;
    size_t n_rows;
    qsf_span_range ranges[MAX_ROWS];
    float *stored;                     /* [256, head_dim], as decoded; of slots in use */
    float *e;                          /* [n_rows, 256], NaN outside the ranges */
    void *pages[2][QSF_KV_SPAN_PAGES]; /* of V, of K */
} span;

static void *nan_page(size_t n_bytes)
{
    return memset(exact_alloc(n_bytes), 0xFF, n_bytes);
}

/* Stores a row at each position that some row of queries sees; pages are there from the first to
 * the last of them. */
static void fill_span(span *s, const bool *is_used, fill how)
{
    const size_t key_dim = s->head_dim + (s->has_keys ? QSF_BLOCK : 0);
    size_t first = SPAN;
    size_t last = 0;
    for (size_t p = 0; p < SPAN; p++)
        if (is_used[p]) {
            first = first < p ? first : p;
            last = p;
        }
    for (size_t i = first / PAGE; first <= last && i <= last / PAGE; i++) {
        s->pages[0][i] = nan_page(value_page_bytes(s->type, s->head_dim));
        s->pages[1][i] = s->has_keys ? nan_page(key_page_bytes(s->type, key_dim)) : NULL;
    }
    for (size_t p = 0; p < SPAN; p++) {
        float row[MAX_HEAD_DIM + QSF_BLOCK];
        float decoded[MAX_HEAD_DIM + QSF_BLOCK];
        if (!is_used[p])
            continue;
        fill_floats(row, key_dim, how);
        scalar.v_store[s->type](row, s->head_dim, p % PAGE, s->pages[0][p / PAGE]);
        if (s->has_keys)
            scalar.k_store[s->type](row, key_dim, p % PAGE, s->pages[1][p / PAGE]);
        read_value(s->type, s->pages[0][p / PAGE], s->head_dim, p % PAGE, decoded);
        memcpy(s->stored + p * s->head_dim, decoded, s->head_dim * sizeof *decoded);
    }
}

static span span_make(qsf_dtype type, size_t head_dim, size_t n_rows, size_t range_idx, fill how)
{
    span s = {.type = type,
              .head_dim = head_dim,
              .has_keys = head_dim % QSF_BLOCK == 0,
              .n_rows = n_rows};
    bool is_used[SPAN] = {false};
    s.stored = exact_floats(SPAN * head_dim);
    s.e = exact_floats(n_rows * SPAN);
    memset(s.e, 0xFF, n_rows * SPAN * sizeof *s.e);
    for (size_t r = 0; r < n_rows; r++) {
        s.ranges[r] = ranges[range_idx];
        /* Causal rows end later and later, windows begin so; others are where they are. */
        const uint32_t shift = (uint32_t)(range_idx % 3 == 2 ? random_u32() % 100 : r / 2);
        s.ranges[r].begin += range_idx % 3 != 0 ? shift : 0;
        s.ranges[r].end += shift;
        if (s.ranges[r].end > SPAN || s.ranges[r].begin >= s.ranges[r].end)
            s.ranges[r] = ranges[range_idx];
        for (size_t p = s.ranges[r].begin; p < s.ranges[r].end; p++) {
            is_used[p] = true;
            s.e[r * SPAN + p] =
                how == FILL_BITS ? float_of_bits(random_u32()) : (random_unit() + 1.0F) / 2.0F;
        }
    }
    fill_span(&s, is_used, how);
    return s;
}

static void span_free(span *s)
{
    for (size_t i = 0; i < 2 * (size_t)QSF_KV_SPAN_PAGES; i++)
        free(s->pages[i % 2][i / 2]);
    free(s->stored);
    free(s->e);
}

typedef struct values_args {
    const span *s;
    size_t first_row;
    size_t n_rows;
    bool is_of_keys;
} values_args;

static void run_values(const qsf_kernels *k, const void *args, float *out)
{
    const values_args *const a = args;
    const span *const s = a->s;
    const size_t tile_bytes = qsf_dtype_tile_bytes(s->type);
    const size_t n_blocks = blocks_of(s->head_dim);
    const size_t block_bytes = a->is_of_keys ? tile_bytes : qsf_kv_value_block_bytes(s->type);
    const qsf_span_range all = qsf_union_of_ranges(s->ranges + a->first_row, a->n_rows);
    for (size_t b = 0; b < n_blocks; b++) {
        qsf_value_blocks blocks = {.tile_step = a->is_of_keys ? (n_blocks + 1) * tile_bytes : 0};
        qsf_value_tiles tiles;
        for (size_t i = 0; i < QSF_KV_SPAN_PAGES; i++)
            if (s->pages[a->is_of_keys][i] != NULL)
                blocks.pages[i] =
                    (const unsigned char *)s->pages[a->is_of_keys][i] + b * block_bytes;
        qsf_span_values_prepare(k, s->type, &blocks, all, &tiles);
        qsf_span_values(k, s->type, &blocks, &tiles, all, s->e + a->first_row * SPAN,
                        s->ranges + a->first_row, a->n_rows, out + b * QSF_BLOCK,
                        n_blocks * QSF_BLOCK);
    }
}

/* How far the sum of products e * v may be from the exact one, for sums of magnitudes: of e * v,
 * and of the parts of v that codes have: e * scale * code and e * min. */
typedef struct magnitudes {
    double product;
    double code;
    double min;
    double largest; /* |e * scale| */
} magnitudes;

static double values_tolerance(qsf_dtype type, const magnitudes *m, double n)
{
    const double u = (double)FLT_EPSILON / 2.0;
    const double top = type == QSF_DTYPE_8BIT ? 128.0 : type == QSF_DTYPE_4BIT ? 15.0 : 3.0;
    if (type == QSF_DTYPE_F32 || type == QSF_DTYPE_F16)
        return n * u * 1.01 * m->product;
    /* Each weight is off by half a step and three roundings; dot, its factor and the result by one
     * or two. The lanes of the minima are sums of 16, and 4 more. */
    return n * 0.5 * m->largest / 32512.0 * top + 8.0 * u * m->code + 22.0 * u * m->min +
           n * u * m->product * 0.01;
}

static void check_sums(const span *s, const float *have)
{
    const size_t stride = blocks_of(s->head_dim) * QSF_BLOCK;
    const bool has_min = s->type == QSF_DTYPE_4BIT || s->type == QSF_DTYPE_2BIT;
    for (size_t r = 0; r < s->n_rows; r++)
        for (size_t d = 0; d < s->head_dim; d++) {
            double sum = 0.0;
            magnitudes m = {0};
            for (size_t p = s->ranges[r].begin; p < s->ranges[r].end; p++) {
                const unsigned char *const scales =
                    (const unsigned char *)s->pages[0][p / PAGE] +
                    d / QSF_BLOCK * qsf_kv_value_block_bytes(s->type);
                const double e = (double)s->e[r * SPAN + p];
                const double value = (double)s->stored[p * s->head_dim + d];
                const double min = has_min ? (double)half_at(scales, PAGE + p % PAGE) : 0.0;
                sum += e * value;
                m.product += fabs(e * value);
                m.code += fabs(e * (value - min));
                m.min += fabs(e * min);
                m.largest = fmax(m.largest, fabs(e * (double)half_at(scales, p % PAGE)));
            }
            const double n = (double)s->ranges[r].end - (double)s->ranges[r].begin;
            if (!CHECK(fabs((double)have[r * stride + d] - sum) <=
                       values_tolerance(s->type, &m, n)))
                printf("  values of %s: row %zu, dim %zu of %zu: %a, not %a\n",
                       qsf_dtype_name(s->type), r, d, s->head_dim, (double)have[r * stride + d],
                       sum);
        }
}

static void check_values(qsf_dtype type, size_t head_dim, size_t n_rows, size_t range_idx, fill how)
{
    span s = span_make(type, head_dim, n_rows, range_idx, how);
    const size_t stride = blocks_of(head_dim) * QSF_BLOCK;
    const values_args of_all = {&s, 0, n_rows, false};
    char what[128];
    snprintf(what, sizeof what, "values %s, head_dim %zu, %zu rows, range %zu, fill %d",
             qsf_dtype_name(type), head_dim, n_rows, range_idx, (int)how);
    const output want = check_kernel(run_values, &of_all, NULL, n_rows * stride, what);
    n_compared += n_levels;
    if (s.has_keys) /* values in keys have the bits that V pages of them give */
        check_levels(&want, false, run_values, &(values_args){&s, 0, n_rows, true}, NULL, what);
    for (size_t r = 0; r < n_rows; r++) { /* each row as if it were alone */
        const values_args of_row = {&s, r, 1, false};
        const output alone = run_kernel(&scalar, run_values, &of_row, NULL, stride * sizeof(float));
        if (!CHECK_EQ(first_difference((float *)want.at + r * stride, alone.at, stride), stride))
            printf("  row %zu of %s\n", r, what);
        free(alone.block);
    }
    if (how == FILL_RANDOM)
        check_sums(&s, want.at);
    free(want.block);
    span_free(&s);
}

/* ---- merge ---- */

typedef struct merge_args {
    const float *next; /* [n] */
    qsf_span_sums first;
    qsf_span_sums second;
    size_t n;
    size_t n_out;
} merge_args;

/* out: what was before, which is merged [n]; normalised [n_out]; the sums */
static void run_merge(const qsf_kernels *k, const void *args, float *out)
{
    const merge_args *const a = args;
    qsf_span_sums sums = a->first;
    k->span_merge(&sums, out, &a->second, a->next, a->n);
    k->span_normalise(&sums, out, a->n_out, out + a->n);
    out[a->n + a->n_out] = sums.max;
    out[a->n + a->n_out + 1] = sums.total;
}

static void check_merge(size_t n, fill how)
{
    const size_t n_out = n - n / 3; /* it takes any number */
    float *const before = filled_floats(n + n_out + 2, how);
    float *const next = filled_floats(n, how);
    float maxima[4];
    fill_floats(maxima, 4, how);
    const merge_args a = {.next = next,
                          .first = {maxima[0] * 10.0F, fabsf(maxima[1]) + 1.0F},
                          .second = {maxima[2] * 10.0F, fabsf(maxima[3]) + 1.0F},
                          .n = n,
                          .n_out = n_out};
    const output want =
        check_kernel(run_merge, &a, before, n + n_out + 2, label("span_merge", n, how));
    const double max = fmax((double)a.first.max, (double)a.second.max);
    const double p = exp((double)a.first.max - max);
    const double q = exp((double)a.second.max - max);
    const double total = (double)a.first.total * p + (double)a.second.total * q;
    for (size_t d = 0; how == FILL_RANDOM && d < n_out; d++) {
        const double of_first = (double)before[d] * p / total;
        const double of_second = (double)next[d] * q / total;
        /* exp of a difference near 60 that rounded once, and six roundings more */
        CHECK(fabs((double)((float *)want.at)[n + d] - of_first - of_second) <=
              80.0 * (double)FLT_EPSILON * (fabs(of_first) + fabs(of_second)));
    }
    free(want.block);
    free(before);
    free(next);
}

typedef struct sink_args {
    qsf_span_sums sums;
    float sink;
    size_t n;
} sink_args;

/* out: values [n]; the sums */
static void run_sink(const qsf_kernels *k, const void *args, float *out)
{
    const sink_args *const a = args;
    qsf_span_sums sums = a->sums;
    k->span_sink(&sums, out, a->sink, a->n);
    out[a->n] = sums.max;
    out[a->n + 1] = sums.total;
}

/* A sink gives what merging the span into a position with the value zero gives. */
static void check_sink(size_t n, fill how)
{
    float *const values = filled_floats(n + 2, how);
    float *const merged = exact_floats(n);
    memset(merged, 0, n * sizeof *merged);
    float numbers[3];
    fill_floats(numbers, 3, how);
    const sink_args a = {{numbers[1] * 10.0F, fabsf(numbers[2]) + 1.0F}, numbers[0] * 10.0F, n};
    const output want = check_kernel(run_sink, &a, values, n + 2, label("span_sink", n, how));
    const float *const have = want.at;
    qsf_span_sums sums = {a.sink, 1.0F};
    scalar.span_merge(&sums, merged, &a.sums, values, n);
    CHECK_EQ(first_difference(&have[n], &sums.max, 1), 1);
    CHECK_EQ(first_difference(&have[n + 1], &sums.total, 1), 1);
    for (size_t d = 0; !isnan(sums.total) && d < n; d++) /* as numbers: a sum has no -0 */
        CHECK(have[d] == merged[d] || (isnan(have[d]) && isnan(merged[d])));
    free(want.block);
    free(values);
    free(merged);
}

static void check_types(void)
{
    size_t n_types = 0;
    for (qsf_dtype type = 0; type < QSF_DTYPE_COUNT; type++) {
        const bool is_page_type = qsf_kv_value_block_bytes(type) != 0;
        n_types += is_page_type;
        CHECK((scalar.k_store[type] != NULL) == is_page_type);
        CHECK((scalar.v_store[type] != NULL) == is_page_type);
        CHECK((scalar.add_values[type] != NULL) + (scalar.value_tiles[type] != NULL) ==
              is_page_type);
    }
    CHECK_EQ(n_types, COUNT_OF(types));
}

int check_attend(void)
{
    const size_t stride = check_stride();
    size_t n_cases = 0;
    random_restart(1);
    check_types();
    for (size_t i = 0; i <= n_levels; i++)
        check_every_half(i == 0 ? &scalar : &levels[i - 1]);
    for (size_t r = 0; r < COUNT_OF(ranges); r++)
        for (fill how = 0; how < FILL_COUNT; how++) {
            check_softmax(ranges[r], how, 1.0F);
            check_softmax(ranges[r], FILL_RANDOM, 40.0F * (float)how); /* exp to its subnormals */
        }
    for (size_t n = 16; n <= 256; n += 16)
        for (fill how = 0; how < FILL_COUNT; how++) {
            check_merge(n, how);
            check_sink(n, how);
        }
    for (size_t t = 0; t < COUNT_OF(types); t++)
        for (size_t d = 0; d < COUNT_OF(head_dims); d++) {
            for (fill how = 0; how < FILL_COUNT; how++)
                check_stores(types[t], head_dims[d], how);
            for (size_t r = 0; r < COUNT_OF(ranges); r++) {
                if (n_cases++ % stride != 0)
                    continue;
                const size_t n_rows = 1 + (r * 5 + d * 3 + t) % MAX_ROWS;
                check_values(types[t], head_dims[d], n_rows, r, FILL_RANDOM);
                check_values(types[t], head_dims[d], 1 + r % 5, r, (fill)((r + d) % FILL_COUNT));
            }
        }
    CHECK(n_compared * stride >= n_levels * COUNT_OF(types) * COUNT_OF(head_dims) * 40);
    return check_report("attend");
}
