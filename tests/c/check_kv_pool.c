/* check_kv_pool.c - a session of the KV cache against an array of its own: it finds what it has
 * stored, in memory and in its file, which may be full, fail, or have changed; blocks of another
 * session are zeroed and lie one behind the other. Sessions that grow, go back, share blocks and
 * end in any order, with and without windows: tests/python/api/test_same_bits.py, test_kv_pool.py,
 * test_kv_policy.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"
#include "kernels/kernel_data.h"
#include "memory/arena.h"
#include "cache/kv/kvcache.h"

#define N_SESSIONS 4
#define N_LAYERS 3
#define CTX_TOKENS 300
#define CHUNK_TOKENS 40
#define HEAD_DIM 16

uint64_t random_seed;
uint64_t random_state;

typedef struct layer_sees {
    uint32_t window;
    uint32_t pinned;
} layer_sees;

typedef struct rig {
    qsf_layer_kind kinds[N_LAYERS];
    qsf_layer layers[N_LAYERS];
    qsf_config config;
    qsf_kernels kernels;
    qsf_kv_pool pool;
    qsf_kvcache caches[N_SESSIONS];
    float stored[N_SESSIONS][CTX_TOKENS]; /* [n_held] what each position has */
    uint32_t n_held[N_SESSIONS];
    void *memory;
} rig;

static void layout(rig *g, qsf_arena *a, uint32_t ctx_tokens, uint32_t n_contexts,
                   uint32_t resident_tokens)
{
    const qsf_kv_form form = {QSF_DTYPE_F32, QSF_DTYPE_F32, false};
    const qsf_kv_sizes sizes = {ctx_tokens, CHUNK_TOKENS, N_SESSIONS, n_contexts, resident_tokens};
    qsf_kv_pool_layout(&g->pool, a, &g->config, &sizes, &form);
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        qsf_kvcache_layout(&g->caches[i], a, &g->pool, i);
}

static void rig_make(rig *g, const layer_sees *sees, uint32_t ctx_tokens, uint32_t n_contexts,
                     uint32_t resident_tokens)
{
    *g = (rig){.config = {.n_layers = N_LAYERS, .layers = g->layers}};
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        g->kinds[i] = (qsf_layer_kind){.n_kv_heads = 1 + i % 2,
                                       .head_dim = HEAD_DIM,
                                       .window_tokens = sees[i].window,
                                       .pinned_tokens = sees[i].pinned};
        g->layers[i] = (qsf_layer){.kind = &g->kinds[i], .kv_layer = i};
    }
    qsf_kernels_init(&g->kernels, QSF_ISA_SCALAR);
    qsf_arena a;
    qsf_arena_init_measuring(&a);
    layout(g, &a, ctx_tokens, n_contexts, resident_tokens);
    const size_t n_bytes = a.used_bytes;
    g->memory = exact_alloc(n_bytes);
    qsf_arena_init(&a, g->memory, n_bytes);
    layout(g, &a, ctx_tokens, n_contexts, resident_tokens);
    CHECK(!a.failed);
    CHECK_EQ(a.used_bytes, n_bytes);
    for (uint32_t i = 0; resident_tokens != 0 && i < N_SESSIONS; i++)
        CHECK_OK(qsf_kv_cold_open(&g->caches[i].cold, "."));
}

static void rig_free(rig *g)
{
    for (uint32_t i = 0; i < N_SESSIONS; i++)
        qsf_file_close(&g->caches[i].cold.file);
    free(g->memory);
}

/* What a position of a layer and head has, from the value of its session. */
static float value_at(float value, uint32_t layer, uint32_t head, bool is_key)
{
    return value + (float)(layer * 8 + head * 2 + is_key) / 64.0F;
}

static void store(rig *g, uint32_t session, uint32_t position, float value)
{
    float row[HEAD_DIM];
    for (uint32_t i = 0; i < N_LAYERS; i++)
        for (uint32_t head = 0; head < g->kinds[i].n_kv_heads; head++) {
            for (uint32_t is_key = 0; is_key < 2; is_key++) {
                for (size_t d = 0; d < HEAD_DIM; d++)
                    row[d] = value_at(value, i, head, is_key != 0);
                (is_key != 0 ? qsf_kvcache_store_k : qsf_kvcache_store_v)(
                    &g->caches[session], &g->kernels, i, head, position, row);
            }
        }
    g->stored[session][position] = value;
}

static bool is_seen(const rig *g, uint32_t layer, uint32_t position, uint32_t first)
{
    return position >= first || position < g->kinds[layer].pinned_tokens;
}

/* Finds the pages of a position, in memory or in the session's file. */
static void find_page(qsf_kvcache *kv, uint32_t layer, uint32_t head, uint32_t position,
                      const void **k, const void **v)
{
    static float pages[2][32 * 64];
    if (position / 32 >= qsf_kvcache_cold_pages(kv, layer)) {
        qsf_kvcache_find_pages(kv, layer, head, position / 32, 0, 1, k, v);
        return;
    }
    for (uint32_t is_key = 0; is_key < 2; is_key++) {
        const qsf_kv_cold_page page = {&kv->pool->layers[layer], position / 32, head, is_key != 0};
        CHECK_OK(qsf_kv_cold_read(&kv->cold, &page, 0, sizeof pages[0], pages[is_key]));
    }
    *k = pages[1];
    *v = pages[0];
}

/* Compares what a token behind the session's would see. */
static void check_stored(rig *g, uint32_t session)
{
    qsf_kvcache *const kv = &g->caches[session];
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        const uint32_t n = g->n_held[session];
        const uint32_t window = g->kinds[i].window_tokens;
        const uint32_t first = window != 0 && n >= window ? n + 1 - window : 0;
        for (uint32_t p = 0; p < n; p += kv->cold.n_records != 0 ? 13 : 1)
            for (uint32_t head = 0; head < g->kinds[i].n_kv_heads && is_seen(g, i, p, first);
                 head++) {
                const void *k;
                const void *v;
                find_page(kv, i, head, p, &k, &v);
                const float value = g->stored[session][p];
                const float *const keys = k; /* tiles [2, 1] of columns [64, 16] */
                const float *const values = v;
                CHECK(keys[(p % 32 / 16 * 64 + 3) * 16 + p % 16] == value_at(value, i, head, true));
                CHECK(values[p % 32 * 64 + 3] == value_at(value, i, head, false));
            }
    }
}

/* Sessions that share nothing have their blocks one behind the other, whoever grows first. */
static void check_neighbours(void)
{
    static const layer_sees no_windows[N_LAYERS] = {{0, 0}};
    static rig g;
    rig_make(&g, no_windows, CTX_TOKENS, N_SESSIONS, 0);
    for (uint32_t page = 0; page < 9; page++)
        for (uint32_t s = 0; s < N_SESSIONS; s++) {
            CHECK_OK(qsf_kvcache_reserve(&g.caches[s], page * 32, page * 32 + 32));
            CHECK_EQ(g.caches[s].blocks[page], g.caches[s].blocks[0] + page);
        }
    rig_free(&g);
}

/* A block that was another session's has none of its bytes: files of sessions have whole pages. */
static void check_zeroed(void)
{
    static const layer_sees no_windows[N_LAYERS] = {{0, 0}};
    static rig g;
    rig_make(&g, no_windows, 32, 1, 0);
    CHECK_EQ(g.pool.groups[0].n_blocks, 1);
    CHECK_OK(qsf_kvcache_reserve(&g.caches[0], 0, 32));
    for (uint32_t p = 0; p < 32; p++)
        store(&g, 0, p, 77.0F);
    CHECK_STATUS(qsf_kvcache_reserve(&g.caches[1], 0, 1), QSF_ERR_NOMEM);
    qsf_kvcache_trim(&g.caches[0], 0);
    CHECK_OK(qsf_kvcache_reserve(&g.caches[1], 0, 1));
    const size_t n_bytes = (size_t)qsf_kvcache_image_bytes(&g.caches[1], 1);
    unsigned char *const image = exact_alloc(n_bytes);
    CHECK_OK(qsf_kvcache_read_image(&g.caches[1], 1, 0, image, n_bytes));
    for (size_t i = 0; i < n_bytes; i++)
        if (!CHECK_EQ(image[i], 0))
            break;
    free(image);
    rig_free(&g);
}

/* Stores positions up to `end` - 1. */
static void grow_to(rig *g, uint32_t end)
{
    while (g->n_held[0] < end) {
        const uint32_t begin = g->n_held[0];
        const uint32_t next = end - begin < CHUNK_TOKENS ? end : begin + CHUNK_TOKENS;
        if (!CHECK_OK(qsf_kvcache_reserve(&g->caches[0], begin, next)))
            return;
        for (uint32_t p = begin; p < next; p++)
            store(g, 0, p, (float)p);
        g->n_held[0] = next;
    }
}

/* Each of these is an error, after which the session has what it had. */
static void check_faults(void)
{
    static const layer_sees no_windows[N_LAYERS] = {{0, 0}};
    static rig g;
    rig_make(&g, no_windows, CTX_TOKENS, N_SESSIONS, 32);
    qsf_kvcache *const kv = &g.caches[0];
    grow_to(&g, 200);
    const qsf_kv_cold_page page = {&g.pool.layers[1], 0, 1, false};
    float values[2 * 2 * 32 * 64];

    struct rlimit before;
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    const struct rlimit full = {1024, before.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
    CHECK_STATUS(qsf_kvcache_reserve(kv, 200, 240), QSF_ERR_IO);
    CHECK(strstr(qsf_error_detail(), "keys and values in .:") != NULL);
    CHECK_STATUS(qsf_kvcache_share(&g.caches[1], kv, 200), QSF_ERR_IO);
    qsf_kvcache_trim(&g.caches[1], 0);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    check_stored(&g, 0);
    grow_to(&g, 240);

    kv->cold.file.reads_until_fault = 0;
    CHECK_STATUS(qsf_kv_cold_read(&kv->cold, &page, 0, 64, values), QSF_ERR_IO);
    kv->cold.file.reads_until_fault = 0;
    CHECK_STATUS(qsf_kv_cold_read_records(&kv->cold, page.layer, 0, 1, (unsigned char *)values),
                 QSF_ERR_IO);
    kv->cold.file.reads_until_fault = 0;
    CHECK_STATUS(qsf_kvcache_reserve(kv, 40, 50), QSF_ERR_IO); /* reads the page again */
    check_stored(&g, 0);

    unsigned char bit;
    const off_t off = (off_t)g.pool.layers[1].cold_off + 77;
    CHECK_EQ(pread((int)kv->cold.file.handle, &bit, 1, off), 1);
    bit ^= 4;
    CHECK_EQ(pwrite((int)kv->cold.file.handle, &bit, 1, off), 1);
    const qsf_kv_cold_page changed = {&g.pool.layers[1], 0, 0, true};
    CHECK_STATUS(qsf_kv_cold_read(&kv->cold, &changed, 200, 201, values), QSF_ERR_DAMAGED);
    CHECK_STATUS(qsf_kv_cold_read_records(&kv->cold, page.layer, 0, 1, (unsigned char *)values),
                 QSF_ERR_DAMAGED);
    CHECK_OK(qsf_kv_cold_read(&kv->cold, &page, 0, 64, values));
    qsf_kvcache_trim(kv, 0);
    g.n_held[0] = 0;
    grow_to(&g, 240); /* over it */
    check_stored(&g, 0);
    CHECK_STATUS(qsf_kv_cold_open(&g.caches[3].cold, "no such folder"), QSF_ERR_IO);
    rig_free(&g);
}

/* Layers with windows and pinned positions, of which some take the same blocks. */
static void check_windows(void)
{
    static const layer_sees layers[][N_LAYERS] = {
        {{70, 0}, {50, 0}, {71, 0}},
        {{40, 64}, {9, 0}, {40, 64}},
        {{0, 0}, {72, 32}, {40, 64}},
    };
    for (size_t i = 0; i < COUNT_OF(layers); i++) {
        static rig g;
        rig_make(&g, layers[i], CTX_TOKENS, N_SESSIONS, 0);
        for (uint32_t end = 25; end <= CTX_TOKENS; end += 25) {
            grow_to(&g, end);
            check_stored(&g, 0);
        }
        /* A copy shares the blocks until it goes on. */
        CHECK_OK(qsf_kvcache_share(&g.caches[1], &g.caches[0], CTX_TOKENS));
        memcpy(g.stored[1], g.stored[0], sizeof g.stored[0]);
        g.n_held[1] = g.n_held[0];
        CHECK_OK(qsf_kvcache_reserve(&g.caches[1], CTX_TOKENS - 1, CTX_TOKENS));
        store(&g, 1, CTX_TOKENS - 1, -1.0F);
        check_stored(&g, 0);
        check_stored(&g, 1);
        qsf_kvcache_trim(&g.caches[0], 0);
        check_stored(&g, 1);
        qsf_kvcache_trim(&g.caches[1], 0);
        for (uint32_t k = 0; k < g.pool.n_groups; k++)
            CHECK_EQ(g.pool.groups[k].n_free, g.pool.groups[k].n_blocks);
        rig_free(&g);
    }
}

int main(void)
{
    check_windows();
    signal(SIGXFSZ, SIG_IGN);
    check_faults();
    check_neighbours();
    check_zeroed();
    return check_report("check_kv_pool");
}
