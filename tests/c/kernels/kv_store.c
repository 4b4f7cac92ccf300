/* kv_store.c - every half goes into a page and comes back; K pages serve as V pages; and how fast
 * pages are filled. What a page holds is checked with what attention reads from it, in attend.c.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/half.h"
#include "kernel_data.h"
#include "kernels/kernels.h"

/* Through each level's loads and stores. */
static void check_every_half(const qsf_kernels *k)
{
    enum { N = 64 };
    for (uint32_t first = 0; first < 0x10000; first += N) {
        float value[N];
        uint16_t page[N * QSF_KV_PAGE_TOKENS];
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

enum { KEY_DIM = 192, VALUE_DIM = 128, ROWS = 19 };

/* Pages of a span, keys and values of the same floats */
typedef struct kv_span {
    qsf_dtype type;
    unsigned char *pages[2][QSF_KV_SPAN_PAGES]; /* of K, of V */
    qsf_span_range ranges[ROWS];
    float e[ROWS * QSF_KV_SPAN_TOKENS];
} kv_span;

/* Stores positions begin .. end - 1; the other slots of their pages are NaN. */
static void fill_span(kv_span *s, qsf_span_range all, fill how)
{
    const size_t key_bytes = 2 * (KEY_DIM / QSF_BLOCK) * qsf_dtype_tile_bytes(s->type);
    const size_t value_bytes = VALUE_DIM / QSF_BLOCK * qsf_kv_value_block_bytes(s->type);
    for (size_t i = 0; i < QSF_KV_SPAN_PAGES; i++) {
        const size_t first = i * QSF_KV_PAGE_TOKENS;
        const bool is_used = all.begin < first + QSF_KV_PAGE_TOKENS && first < all.end;
        for (size_t part = 0; part < 2; part++) {
            const size_t n_bytes = part == 0 ? key_bytes : value_bytes;
            s->pages[part][i] = is_used ? exact_alloc(n_bytes) : NULL;
            if (is_used)
                memset(s->pages[part][i], 0xFF, n_bytes);
        }
    }
    for (size_t p = all.begin; p < all.end; p++) {
        float row[KEY_DIM];
        fill_floats(row, KEY_DIM, how);
        scalar.k_store[s->type](row, KEY_DIM, p % QSF_KV_PAGE_TOKENS,
                                s->pages[0][p / QSF_KV_PAGE_TOKENS]);
        scalar.v_store[s->type](row, VALUE_DIM, p % QSF_KV_PAGE_TOKENS,
                                s->pages[1][p / QSF_KV_PAGE_TOKENS]);
    }
}

/* Returns the values of block `block`, from pages of K or of V. */
static output sum_span(const qsf_kernels *k, const kv_span *s, bool is_key, size_t block,
                       size_t n_rows)
{
    const size_t tile_bytes = qsf_dtype_tile_bytes(s->type);
    const size_t block_bytes = is_key ? tile_bytes : qsf_kv_value_block_bytes(s->type);
    const qsf_span_range all = qsf_union_of_ranges(s->ranges, n_rows);
    const output out = output_make(n_rows * QSF_BLOCK * sizeof(float));
    qsf_value_blocks blocks = {.tile_step = is_key ? KEY_DIM / QSF_BLOCK * tile_bytes : 0};
    qsf_value_tiles tiles;
    for (size_t i = 0; i < QSF_KV_SPAN_PAGES; i++)
        if (s->pages[!is_key][i] != NULL)
            blocks.pages[i] = s->pages[!is_key][i] + block * block_bytes;
    qsf_span_values_prepare(k, s->type, &blocks, all, &tiles);
    qsf_span_values(k, s->type, &blocks, &tiles, all, s->e, s->ranges, n_rows, out.at, QSF_BLOCK);
    return out;
}

/* Values that are the first dimensions of keys have the bits that V pages of them would give. */
static void check_values_in_keys(qsf_dtype type, qsf_span_range all, size_t n_rows, fill how)
{
    kv_span s = {.type = type};
    for (size_t r = 0; r < n_rows; r++) {
        s.ranges[r] = (qsf_span_range){all.begin, all.end - (uint32_t)(r % (all.end - all.begin))};
        for (size_t p = 0; p < QSF_KV_SPAN_TOKENS; p++)
            s.e[r * QSF_KV_SPAN_TOKENS + p] = (random_unit() + 1.0F) / 2.0F;
    }
    fill_span(&s, all, how);
    for (size_t block = 0; block < VALUE_DIM / QSF_BLOCK; block++) {
        const output want = sum_span(&scalar, &s, false, block, n_rows);
        for (size_t i = 0; i <= n_levels; i++) {
            const qsf_kernels *const k = i < n_levels ? &levels[i] : &scalar;
            const output have = sum_span(k, &s, true, block, n_rows);
            check_outputs(&want, &have, k->isa_name, qsf_dtype_name(type));
            free(have.block);
        }
        free(want.block);
    }
    for (size_t i = 0; i < 2 * (size_t)QSF_KV_SPAN_PAGES; i++)
        free(s.pages[i % 2][i / 2]);
}

static void check_all_in_keys(qsf_dtype type)
{
    static const qsf_span_range ranges[] = {{0, 256}, {0, 1}, {37, 38}, {15, 50}, {100, 255}};
    static const size_t n_rows[] = {1, 2, 5, 16, ROWS};
    for (size_t r = 0; r < COUNT_OF(ranges); r++)
        for (size_t i = 0; i < COUNT_OF(n_rows); i++)
            for (fill how = 0; how < FILL_COUNT; how++)
                check_values_in_keys(type, ranges[r], n_rows[i], how);
}

int check_kv_store(void)
{
    random_restart(7);
    for (qsf_dtype type = 0; type < QSF_DTYPE_COUNT; type++)
        if (scalar.k_store[type] != NULL)
            check_all_in_keys(type);
    check_every_half(&scalar);
    for (size_t i = 0; i < n_levels; i++)
        check_every_half(&levels[i]);
    return check_report("kv_store");
}

typedef struct store_args {
    qsf_dtype dtype;
    bool is_key;
} store_args;

static void run_store(const qsf_kernels *k, const void *args)
{
    enum { N = 128 };
    static float x[N];
    static float page[N * QSF_KV_PAGE_TOKENS];
    const store_args *const a = args;
    for (size_t i = 0; i < N; i++)
        x[i] = (float)(i * 37 % 101) - 50.0F;
    (a->is_key ? k->k_store : k->v_store)[a->dtype](x, N, 7, page);
}

void bench_kv_store(void)
{
    for (qsf_dtype dtype = 0; dtype < QSF_DTYPE_COUNT; dtype++)
        for (int is_key = 1; is_key >= 0 && scalar.k_store[dtype] != NULL; is_key--) {
            const store_args args = {dtype, is_key != 0};
            char what[32];
            snprintf(what, sizeof what, "%c_store %s", is_key ? 'k' : 'v', qsf_dtype_name(dtype));
            bench_line(what, 128, run_store, &args);
        }
}
