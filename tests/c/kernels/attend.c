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
#define MAX_ROWS 16
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

static void check_same_page(const output *want, const output *have, const char *isa,
                            const char *what, qsf_dtype type, size_t head_dim, fill how)
{
    n_compared++;
    if (!CHECK(memcmp(want->at, have->at, want->n_bytes) == 0 && output_guards_intact(want) &&
               output_guards_intact(have)))
        printf("  %s page of %s on %s: head_dim %zu, fill %d\n", what, qsf_dtype_name(type), isa,
               head_dim, (int)how);
}

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

/* Fills a page slot by slot in a scattered order, each slot once before with something else. */
static void fill_page(const qsf_kernels *k, qsf_dtype type, size_t head_dim, const float *rows,
                      bool is_key, const output *page)
{
    qsf_kv_store_fn *const store = is_key ? k->k_store[type] : k->v_store[type];
    for (size_t i = 0; i < PAGE; i++)
        store(rows + (i + 1) % PAGE * head_dim, head_dim, i, page->at);
    for (size_t i = 0; i < PAGE; i++)
        store(rows + i * 7 % PAGE * head_dim, head_dim, i * 7 % PAGE, page->at);
}

static void check_stores(qsf_dtype type, size_t head_dim, fill how)
{
    float *const rows = exact_floats(PAGE * head_dim);
    fill_floats(rows, PAGE * head_dim, how);
    if (how == FILL_RANDOM) /* blocks of one value, and one that is off */
        for (size_t d = 0; d < head_dim; d++) {
            rows[d] = 0.7F;
            rows[head_dim + d] = -1e-3F;
            rows[2 * head_dim + d] += d == head_dim / 2 ? 1000.0F : 0.0F;
            rows[3 * head_dim + d] *= 1e-7F;
        }
    for (int is_key = 0; is_key < 2; is_key++) {
        const size_t n_bytes =
            is_key ? key_page_bytes(type, head_dim) : value_page_bytes(type, head_dim);
        const output want = output_make(n_bytes);
        fill_page(&scalar, type, head_dim, rows, is_key, &want);
        for (size_t i = 0; i < n_levels; i++) {
            const output have = output_make(n_bytes);
            fill_page(&levels[i], type, head_dim, rows, is_key, &have);
            check_same_page(&want, &have, levels[i].isa_name, is_key ? "K" : "V", type, head_dim,
                            how);
            free(have.block);
        }
        free(want.block);
    }
    const output k = output_make(key_page_bytes(type, head_dim));
    const output v = output_make(value_page_bytes(type, head_dim));
    fill_page(&scalar, type, head_dim, rows, true, &k);
    fill_page(&scalar, type, head_dim, rows, false, &v);
    for (size_t slot = 0; slot < PAGE; slot++)
        check_slot(type, head_dim, rows + slot * head_dim, &k, &v, slot);
    free(k.block);
    free(v.block);
    free(rows);
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

static void check_softmax(qsf_span_range range, fill how, float spread)
{
    if (range.begin == range.end)
        return;
    float *const scores = exact_floats(SPAN);
    memset(scores, 0xFF, SPAN * sizeof *scores); /* NaN */
    fill_floats(scores + range.begin, range.end - range.begin, how);
    for (size_t p = range.begin; how == FILL_RANDOM && p < range.end; p++)
        scores[p] *= spread;
    const float scale = 0.125F;
    const output want = output_make(SPAN * sizeof *scores);
    memcpy(want.at, scores, want.n_bytes);
    qsf_span_sums sums;
    scalar.span_softmax(want.at, &range, 1, scale, &sums);
    for (size_t i = 0; i < n_levels; i++) {
        const output have = output_make(SPAN * sizeof *scores);
        memcpy(have.at, scores, want.n_bytes);
        qsf_span_sums other;
        levels[i].span_softmax(have.at, &range, 1, scale, &other);
        check_outputs(&want, &have, levels[i].isa_name, "span_softmax");
        CHECK_EQ(first_difference(&sums.max, &other.max, 1), 1);
        CHECK_EQ(first_difference(&sums.total, &other.total, 1), 1);
        free(have.block);
        n_compared++;
    }
    if (how == FILL_RANDOM || how == FILL_ZEROS)
        check_softmax_values(scores, range, scale, want.at, sums);
    free(want.block);
    free(scores);
}

/* ---- values ---- */

typedef struct span {
    qsf_dtype type;
    size_t head_dim;
    size_t n_rows;
    qsf_span_range ranges[MAX_ROWS];
    float *stored; /* [256, head_dim], as decoded; of slots in use */
    float *e;      /* [n_rows, 256], NaN outside the ranges */
    void *pages[QSF_KV_SPAN_PAGES];
} span;

static span span_make(qsf_dtype type, size_t head_dim, size_t n_rows, size_t range_idx, fill how)
{
    span s = {.type = type, .head_dim = head_dim, .n_rows = n_rows};
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
    size_t first = SPAN;
    size_t last = 0;
    for (size_t p = 0; p < SPAN; p++)
        if (is_used[p]) {
            first = first < p ? first : p;
            last = p;
        }
    for (size_t i = first / PAGE; first <= last && i <= last / PAGE; i++) {
        s.pages[i] = exact_alloc(value_page_bytes(type, head_dim));
        memset(s.pages[i], 0xFF, value_page_bytes(type, head_dim)); /* NaNs */
    }
    for (size_t p = 0; p < SPAN; p++) {
        void *const page = s.pages[p / PAGE];
        if (!is_used[p])
            continue;
        float row[MAX_HEAD_DIM];
        float decoded[MAX_HEAD_DIM + QSF_BLOCK];
        fill_floats(row, head_dim, how);
        scalar.v_store[type](row, head_dim, p % PAGE, page);
        read_value(type, page, head_dim, p % PAGE, decoded);
        memcpy(s.stored + p * head_dim, decoded, head_dim * sizeof *decoded);
    }
    return s;
}

static void span_free(span *s)
{
    for (size_t i = 0; i < QSF_KV_SPAN_PAGES; i++)
        free(s->pages[i]);
    free(s->stored);
    free(s->e);
}

static void values_of_block(const qsf_kernels *k, const span *s, const qsf_value_blocks *blocks,
                            size_t first_row, size_t n_rows, float *out, size_t stride)
{
    const qsf_span_range *const row_ranges = s->ranges + first_row;
    const qsf_span_range all = qsf_union_of_ranges(row_ranges, n_rows);
    qsf_value_tiles tiles;
    qsf_span_values_prepare(k, s->type, blocks, all, &tiles);
    qsf_span_values(k, s->type, blocks, &tiles, all, s->e + first_row * SPAN, row_ranges, n_rows,
                    out, stride);
}

static output sum_values(const qsf_kernels *k, const span *s, size_t first_row, size_t n_rows)
{
    const size_t n_blocks = blocks_of(s->head_dim);
    const size_t stride = n_blocks * QSF_BLOCK;
    const output out = output_make(n_rows * stride * sizeof(float));
    for (size_t b = 0; b < n_blocks; b++) {
        qsf_value_blocks blocks = {0};
        for (size_t i = 0; i < QSF_KV_SPAN_PAGES; i++)
            if (s->pages[i] != NULL)
                blocks.pages[i] =
                    (const unsigned char *)s->pages[i] + b * qsf_kv_value_block_bytes(s->type);
        values_of_block(k, s, &blocks, first_row, n_rows, (float *)out.at + b * QSF_BLOCK, stride);
    }
    return out;
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
                    (const unsigned char *)s->pages[p / PAGE] +
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
    char what[128];
    snprintf(what, sizeof what, "values %s, head_dim %zu, %zu rows, range %zu, fill %d",
             qsf_dtype_name(type), head_dim, n_rows, range_idx, (int)how);
    const output want = sum_values(&scalar, &s, 0, n_rows);
    for (size_t i = 0; i < n_levels; i++) {
        const output have = sum_values(&levels[i], &s, 0, n_rows);
        check_outputs(&want, &have, levels[i].isa_name, what);
        free(have.block);
        n_compared++;
    }
    const size_t stride = blocks_of(head_dim) * QSF_BLOCK;
    for (size_t r = 0; r < n_rows; r++) { /* each row as if it were alone */
        const output alone = sum_values(&scalar, &s, r, 1);
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

static void check_merge(size_t n, fill how)
{
    float *const before = exact_floats(n);
    float *const next = exact_floats(n);
    fill_floats(before, n, how);
    fill_floats(next, n, how);
    float maxima[4];
    fill_floats(maxima, 4, how);
    const qsf_span_sums first = {maxima[0] * 10.0F, fabsf(maxima[1]) + 1.0F};
    const qsf_span_sums second = {maxima[2] * 10.0F, fabsf(maxima[3]) + 1.0F};
    const size_t n_out = n - n / 3; /* it takes any number */
    for (size_t i = 0; i <= n_levels; i++) {
        const qsf_kernels *const k = i == 0 ? &scalar : &levels[i - 1];
        static qsf_span_sums want_sums;
        static output want[2];
        qsf_span_sums sums = first;
        const output merged = output_make(n * sizeof *before);
        const output out = output_make(n_out * sizeof *before);
        memcpy(merged.at, before, n * sizeof *before);
        k->span_merge(&sums, merged.at, &second, next, n);
        k->span_normalise(&sums, merged.at, n_out, out.at);
        if (i == 0) {
            want_sums = sums;
            want[0] = merged;
            want[1] = out;
            continue;
        }
        check_outputs(&want[0], &merged, k->isa_name, "span_merge");
        check_outputs(&want[1], &out, k->isa_name, "span_normalise");
        CHECK_EQ(first_difference(&want_sums.max, &sums.max, 1), 1);
        CHECK_EQ(first_difference(&want_sums.total, &sums.total, 1), 1);
        free(merged.block);
        free(out.block);
        if (i < n_levels)
            continue;
        const double max = fmax((double)first.max, (double)second.max);
        const double a = exp((double)first.max - max);
        const double b = exp((double)second.max - max);
        const double total = (double)first.total * a + (double)second.total * b;
        for (size_t d = 0; how == FILL_RANDOM && d < n_out; d++) {
            const double p = (double)before[d] * a / total;
            const double q = (double)next[d] * b / total;
            /* exp of a difference near 60 that rounded once, and six roundings more */
            CHECK(fabs((double)((float *)want[1].at)[d] - p - q) <=
                  80.0 * (double)FLT_EPSILON * (fabs(p) + fabs(q)));
        }
        free(want[0].block);
        free(want[1].block);
    }
    free(before);
    free(next);
}

static output run_sink(const qsf_kernels *k, const float *values, float sink, qsf_span_sums *sums,
                       size_t n)
{
    const output out = output_make(n * sizeof *values);
    memcpy(out.at, values, n * sizeof *values);
    k->span_sink(sums, out.at, sink, n);
    return out;
}

/* A sink gives what merging the span into a position with the value zero gives. */
static void check_sink(size_t n, fill how)
{
    float *const values = exact_floats(n);
    float *const merged = exact_floats(n);
    fill_floats(values, n, how);
    memset(merged, 0, n * sizeof *merged);
    float numbers[3];
    fill_floats(numbers, 3, how);
    const float sink = numbers[0] * 10.0F;
    const qsf_span_sums next = {numbers[1] * 10.0F, fabsf(numbers[2]) + 1.0F};
    qsf_span_sums want_sums = next;
    const output want = run_sink(&scalar, values, sink, &want_sums, n);
    for (size_t i = 0; i < n_levels; i++) {
        qsf_span_sums sums = next;
        const output have = run_sink(&levels[i], values, sink, &sums, n);
        check_outputs(&want, &have, levels[i].isa_name, "span_sink");
        CHECK_EQ(first_difference(&want_sums.max, &sums.max, 1), 1);
        CHECK_EQ(first_difference(&want_sums.total, &sums.total, 1), 1);
        free(have.block);
    }
    qsf_span_sums sums = {sink, 1.0F};
    scalar.span_merge(&sums, merged, &next, values, n);
    CHECK_EQ(first_difference(&want_sums.max, &sums.max, 1), 1);
    CHECK_EQ(first_difference(&want_sums.total, &sums.total, 1), 1);
    for (size_t d = 0; !isnan(sums.total) && d < n; d++) /* as numbers: a sum has no -0 */
        CHECK(((float *)want.at)[d] == merged[d] ||
              (isnan(((float *)want.at)[d]) && isnan(merged[d])));
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
    CHECK(n_compared * stride >= n_levels * COUNT_OF(types) * COUNT_OF(head_dims) * 60);
    return check_report("attend");
}

/* ---- speed ---- */

static void run_values(const qsf_kernels *k, const void *args)
{
    const span *const s = args;
    static float out[MAX_ROWS * 64];
    qsf_value_blocks blocks = {0};
    for (size_t i = 0; i < QSF_KV_SPAN_PAGES; i++)
        blocks.pages[i] = s->pages[i];
    values_of_block(k, s, &blocks, 0, s->n_rows, out, QSF_BLOCK);
}

static void run_softmax(const qsf_kernels *k, const void *args)
{
    float scores[SPAN];
    memcpy(scores, args, sizeof scores);
    qsf_span_sums sums;
    k->span_softmax(scores, &(qsf_span_range){0, SPAN}, 1, 0.125F, &sums);
}

/* An element of values is one of V, whatever the number of rows that meet it. */
void bench_attend(void)
{
    for (size_t t = 0; t < COUNT_OF(types); t++)
        for (size_t n_rows = 1; n_rows <= 8; n_rows += 7) {
            span s = span_make(types[t], 64, n_rows, 18, FILL_RANDOM);
            char what[64];
            snprintf(what, sizeof what, "values %s, %zu rows", qsf_dtype_name(types[t]), n_rows);
            bench_line(what, (double)SPAN * 64, run_values, &s);
            span_free(&s);
        }
    float scores[SPAN];
    fill_floats(scores, SPAN, FILL_RANDOM);
    bench_line("span_softmax", SPAN, run_softmax, scores);
}
