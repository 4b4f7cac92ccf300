/* kv_store.c - every half goes into a page and comes back; and how fast pages are filled. What
 * a page holds is checked with what attention reads from it, in attend.c.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/half.h"
#include "kernel_data.h"

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

int check_kv_store(void)
{
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
