/* kv_store.c - where K and V go in a page, on every level; and every half there and back. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/half.h"
#include "kernel_data.h"

static uint64_t n_compared;

static void check_store(const qsf_kernels *k, bool is_f16, size_t head_dim, size_t slot, fill how)
{
    const size_t elem_bytes = is_f16 ? 2 : 4;
    float *const key = exact_floats(head_dim);
    float *const value = exact_floats(head_dim);
    fill_floats(key, head_dim, how);
    fill_floats(value, head_dim, how);
    const output k_page = output_make(head_dim * QSF_KV_PAGE_TOKENS * elem_bytes);
    const output v_page = output_make(head_dim * QSF_KV_PAGE_TOKENS * elem_bytes);
    const output k_want = output_make(k_page.n_bytes);
    const output v_want = output_make(v_page.n_bytes);
    for (size_t d = 0; d < head_dim; d++) {
        const uint16_t halves[2] = {qsf_half_from_float(key[d]), qsf_half_from_float(value[d])};
        const void *const k_from = is_f16 ? (const void *)&halves[0] : (const void *)&key[d];
        const void *const v_from = is_f16 ? (const void *)&halves[1] : (const void *)&value[d];
        memcpy((char *)k_want.at + (d * 32 + slot) * elem_bytes, k_from, elem_bytes);
        memcpy((char *)v_want.at + (slot * head_dim + d) * elem_bytes, v_from, elem_bytes);
    }
    (is_f16 ? k->k_store_f16 : k->k_store_f32)(key, head_dim, slot, k_page.at);
    (is_f16 ? k->v_store_f16 : k->v_store_f32)(value, head_dim, slot, v_page.at);
    const bool same_k = CHECK_BYTES(k_want.at, k_page.at, k_page.n_bytes);
    const bool same_v = CHECK_BYTES(v_want.at, v_page.at, v_page.n_bytes);
    if (!CHECK(same_k && same_v && output_guards_intact(&k_page) && output_guards_intact(&v_page)))
        printf("  kv_store on %s: f16 %d, head_dim %zu, slot %zu, fill %d\n", k->isa_name,
               (int)is_f16, head_dim, slot, (int)how);
    free(k_page.block);
    free(v_page.block);
    free(k_want.block);
    free(v_want.block);
    free(key);
    free(value);
    n_compared++;
}

static void check_stores(void)
{
    static const size_t head_dims[] = {1, 2, 16, 32, 64, 80, 128};
    static const size_t slots[] = {0, 1, 15, 16, 31};
    for (size_t d = 0; d < COUNT_OF(head_dims); d++)
        for (size_t s = 0; s < COUNT_OF(slots); s++)
            for (fill how = FILL_RANDOM; how < FILL_COUNT; how++)
                for (int is_f16 = 0; is_f16 < 2; is_f16++) {
                    check_store(&scalar, is_f16, head_dims[d], slots[s], how);
                    for (size_t i = 0; i < n_levels; i++)
                        check_store(&levels[i], is_f16, head_dims[d], slots[s], how);
                }
}

/* Every half goes up and comes back, through each level's loads and stores. */
static void check_every_half(const qsf_kernels *k)
{
    enum { N = 64 };
    for (uint32_t first = 0; first < 0x10000; first += N) {
        float value[N];
        uint16_t page[N * QSF_KV_PAGE_TOKENS];
        uint16_t key_page[N * QSF_KV_PAGE_TOKENS];
        bool same = true;
        for (uint32_t i = 0; i < N; i++)
            value[i] = qsf_half_to_float((uint16_t)(first + i));
        k->k_store_f16(value, N, 0, key_page);
        k->v_store_f16(value, N, 0, page);
        for (uint32_t i = 0; i < N; i++) {
            const uint32_t half = first + i;
            const bool is_nan = (half & 0x7FFF) > 0x7C00; /* becomes quiet */
            same = same && page[i] == (is_nan ? half | 0x200 : half);
        }
        CHECK(same);
    }
}

int check_kv_store(void)
{
    check_stores();
    check_every_half(&scalar);
    for (size_t i = 0; i < n_levels; i++)
        check_every_half(&levels[i]);
    CHECK(n_compared > 100 * n_levels);
    return check_report("kv_store");
}

typedef struct store_args {
    bool is_f16;
    bool is_k;
} store_args;

static void run_store(const qsf_kernels *k, const void *args)
{
    enum { N = 128 };
    static const float x[N];
    static float page[N * QSF_KV_PAGE_TOKENS];
    const store_args *const a = args;
    qsf_kv_store_fn *const store = a->is_k ? (a->is_f16 ? k->k_store_f16 : k->k_store_f32)
                                           : (a->is_f16 ? k->v_store_f16 : k->v_store_f32);
    store(x, N, 7, page);
}

void bench_kv_store(void)
{
    for (int i = 0; i < 4; i++) {
        const store_args args = {i % 2 == 0, i / 2 == 0};
        char what[32];
        snprintf(what, sizeof what, "%c_store_f%s", args.is_k ? 'k' : 'v',
                 args.is_f16 ? "16" : "32");
        bench_line(what, 128, run_store, &args);
    }
}
