/* check_attention.c - attention without the rest of a model, over contexts of several spans: the
 * same bits for any number of threads, any split of a sequence into chunks, pages in a file, and
 * every instruction set. The formula: tests/python/api/test_families.py, and kernels/attend.c.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernel_data.h"
#include "memory/arena.h"
#include "model/ops.h"
#include "system.h"

#define CTX_TOKENS 400
#define MAX_SEQUENCES 2

uint64_t random_seed = 20260; /* argv[1] overrides */
uint64_t random_state;
static qsf_isa best;

typedef struct shape {
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window_tokens;
    bool has_sinks;
    uint32_t pinned_tokens;
} shape;

typedef struct rig {
    qsf_layer_kind kind;
    const float *sinks; /* or NULL */
    qsf_layer layer;
    qsf_config config;
    qsf_rope rope;
    qsf_kernels kernels;
    qsf_scratch scratch;
    qsf_kv_pool kv_pool;
    qsf_sequence sequences[MAX_SEQUENCES];
    qsf_pool *pool;
    qsf_ops ops;
    uint32_t resident_tokens; /* 0: all */
    void *blocks[3];
} rig;

/* Below all scores, among them, above them. */
static const float some_sinks[] = {-30.0F, 0.3F, 12.0F, 90.0F};

static void *zeroed(size_t n_bytes)
{
    void *const p = check_alloc(64, (n_bytes + 63) / 64 * 64);
    if (p == NULL)
        exit(2);
    memset(p, 0, n_bytes);
    return p;
}

static void rig_make(rig *g, const shape *s, qsf_kv_form form, qsf_isa isa, uint32_t n_threads,
                     uint32_t chunk_tokens, uint32_t resident_tokens)
{
    *g = (rig){.kind = {.n_heads = s->n_heads,
                        .n_kv_heads = s->n_kv_heads,
                        .head_dim = s->head_dim,
                        .window_tokens = s->window_tokens,
                        .pinned_tokens = s->pinned_tokens,
                        .score_scale = 1.0F / sqrtf((float)s->head_dim)},
               .sinks = s->has_sinks ? some_sinks : NULL,
               .rope = {.n_pairs = s->head_dim / 2},
               .resident_tokens = resident_tokens};
    g->layer.kind = &g->kind;
    g->config = (qsf_config){.n_layers = 1,
                             .layers = &g->layer,
                             .dim = 16,
                             .n_heads = s->n_heads,
                             .least_kv_heads = s->n_kv_heads,
                             .head_dim = s->head_dim,
                             .ffn_dim = 16,
                             .q_dim = s->n_heads * s->head_dim,
                             .kv_dim = s->n_kv_heads * s->head_dim,
                             .n_ropes = 1,
                             .n_rope_pairs = s->head_dim / 2};
    qsf_kernels_init(&g->kernels, isa);
    const qsf_scratch_sizes scratch_sizes = {chunk_tokens, n_threads};
    qsf_arena a;
    g->blocks[1] = zeroed(qsf_pool_bytes(n_threads));
    CHECK_OK(qsf_pool_init(g->blocks[1], n_threads, false, &g->pool));
    const qsf_kv_sizes sizes = {CTX_TOKENS, chunk_tokens, MAX_SEQUENCES, MAX_SEQUENCES,
                                resident_tokens};
    qsf_arena_init_measuring(&a);
    qsf_kv_pool_layout(&g->kv_pool, &a, &g->config, &sizes, &form);
    for (uint32_t i = 0; i < MAX_SEQUENCES; i++)
        qsf_kvcache_layout(&g->sequences[i].kv, &a, &g->kv_pool, i);
    const size_t n_bytes = a.used_bytes;
    qsf_arena_init(&a, g->blocks[2] = zeroed(n_bytes), n_bytes);
    qsf_kv_pool_layout(&g->kv_pool, &a, &g->config, &sizes, &form);
    const qsf_kv_layer *const l = &g->kv_pool.layers[0];
    const size_t n_pages = (size_t)l->n_kv_heads * g->kv_pool.groups[l->group_idx].n_blocks;
    for (uint32_t i = 0; i < MAX_SEQUENCES; i++) {
        qsf_kvcache_layout(&g->sequences[i].kv, &a, &g->kv_pool, i);
        if (resident_tokens == 0)
            CHECK_OK(qsf_kvcache_reserve(&g->sequences[i].kv, 0, CTX_TOKENS));
        else
            CHECK_OK(qsf_kv_cold_open(&g->sequences[i].kv.cold, "."));
    }
    CHECK(!a.failed);
    qsf_arena_init_measuring(&a);
    qsf_scratch_layout(&g->scratch, &a, &g->config, &g->kv_pool, &scratch_sizes);
    const size_t scratch_bytes = a.used_bytes;
    qsf_arena_init(&a, g->blocks[0] = zeroed(scratch_bytes), scratch_bytes);
    qsf_scratch_layout(&g->scratch, &a, &g->config, &g->kv_pool, &scratch_sizes);
    CHECK(!a.failed);
    /* What no token has written may be anything. */
    memset(l->pages, 0xFF, n_pages * (l->k_page_bytes + l->v_page_bytes));
    g->ops = (qsf_ops){.config = &g->config,
                       .kernels = &g->kernels,
                       .pool = g->pool,
                       .scratch = &g->scratch,
                       .ropes = &g->rope,
                       .kind = &g->kind};
}

static void rig_free(rig *g)
{
    for (size_t i = 0; i < MAX_SEQUENCES; i++)
        qsf_file_close(&g->sequences[i].kv.cold.file);
    qsf_pool_destroy(g->pool);
    for (size_t i = 0; i < COUNT_OF(g->blocks); i++)
        check_free(g->blocks[i]);
}

/* q, k or v of a position: anything, but always the same. */
static void fill_row(uint64_t which, uint32_t position, float *row, size_t n)
{
    random_restart(which + ((uint64_t)position << 20));
    fill_floats(row, n, FILL_RANDOM);
}

/* Evaluates n_tokens of the first sequence in chunks; out [n_tokens, q_dim] */
static void run_sequence(rig *g, uint32_t n_tokens, uint32_t chunk_tokens, float *out)
{
    const qsf_config *const c = &g->config;
    const qsf_scratch *const s = &g->scratch;
    const size_t n_pairs = g->rope.n_pairs;
    for (uint32_t at = 0; at < n_tokens; at += chunk_tokens) {
        const uint32_t left = n_tokens - at;
        qsf_segment segment = {.sequence = &g->sequences[0],
                               .n_tokens = left < chunk_tokens ? left : chunk_tokens,
                               .first_position = at};
        const qsf_chunk chunk = {
            .segments = &segment, .n_segments = 1, .n_tokens = segment.n_tokens};
        if (g->resident_tokens != 0)
            CHECK_OK(qsf_kvcache_reserve(&g->sequences[0].kv, at, at + segment.n_tokens));
        for (uint32_t t = 0; t < segment.n_tokens; t++) {
            s->positions[t] = at + t;
            fill_row(1, at + t, s->q + t * qsf_stride(c->q_dim), c->q_dim);
            fill_row(2, at + t, s->k + t * qsf_stride(c->kv_dim), c->kv_dim);
            fill_row(3, at + t, s->v + t * qsf_stride(c->kv_dim), c->kv_dim);
            for (size_t p = 0; p < n_pairs; p++) {
                s->rope_cos[t * n_pairs + p] = (float)cos((double)(at + t) / (double)(p + 1));
                s->rope_sin[t * n_pairs + p] = (float)sin((double)(at + t) / (double)(p + 1));
            }
        }
        g->ops.n_tokens = chunk.n_tokens;
        for (uint32_t h = 0; h < c->n_heads; h++)
            qsf_heads_finish_q(&g->ops, NULL, h, 0, chunk.n_tokens);
        for (uint32_t h = 0; h < g->kind.n_kv_heads; h++) {
            qsf_heads_store_k(&g->ops, &chunk, 0, NULL, h, 0, chunk.n_tokens);
            qsf_heads_store_v(&g->ops, &chunk, 0, h);
        }
        CHECK_OK(qsf_attention_run(&g->ops, &chunk, 0, g->sinks));
        for (uint32_t t = 0; t < segment.n_tokens; t++)
            memcpy(out + (at + t) * (size_t)c->q_dim, s->attended + t * qsf_stride(c->q_dim),
                   c->q_dim * sizeof *out);
    }
}

static void check_shape(const shape *s, qsf_kv_form form)
{
    static const uint32_t n_tokens = 330;
    static const struct {
        uint32_t n_threads;
        uint32_t chunk_tokens;
        uint32_t resident_tokens;
    } splits[] = {{1, 64, 0}, {1, 1, 0}, {3, 64, 0}, {2, 3, 0}, {3, 64, 1}, {2, 7, 130}};
    const size_t n = (size_t)n_tokens * s->n_heads * s->head_dim;
    float *const want = exact_floats(n);
    float *const have = exact_floats(n);
    for (size_t i = 0; i < COUNT_OF(splits); i++) {
        /* Small shapes also on every instruction set; of others, the kernels' checks tell. */
        const bool has_isa = i > 0 && n < 60000 && qsf_isa_has((qsf_isa)(i - 1));
        const qsf_isa isa = has_isa ? (qsf_isa)(i - 1) : best;
        rig g;
        if (splits[i].resident_tokens != 0 && s->pinned_tokens != 0)
            continue; /* what is pinned belongs to a policy that keeps nothing else */
        rig_make(&g, s, form, isa, splits[i].n_threads, splits[i].chunk_tokens,
                 splits[i].resident_tokens);
        run_sequence(&g, n_tokens, splits[i].chunk_tokens, i == 0 ? want : have);
        const size_t at = i == 0 ? n : first_difference(want, have, n);
        if (!CHECK_EQ(at, n))
            printf("  split %zu on %s: %u heads of %u, window %u + %u, K %s, V %s: [%zu] is %a, "
                   "not %a\n",
                   i, qsf_isa_name(isa), s->n_heads, s->head_dim, s->window_tokens,
                   s->pinned_tokens, qsf_dtype_name(form.k_type), qsf_dtype_name(form.v_type), at,
                   (double)have[at], (double)want[at]);
        if (splits[i].resident_tokens != 0)
            CHECK((g.sequences[0].kv.cold.read_bytes > 0) == (s->window_tokens != 20));
        rig_free(&g);
    }
    for (size_t i = 0; i < n; i++)
        if (!CHECK(isfinite(want[i])))
            break;
    free(want);
    free(have);
}

int main(int argc, char **argv)
{
    static const shape shapes[] = {
        {2, 2, 16, 0, false, 0},    {8, 1, 64, 0, false, 0},  {6, 2, 80, 0, false, 0},
        {3, 1, 128, 300, false, 0}, {4, 4, 32, 20, false, 0}, {4, 2, 64, 0, true, 0},
        {4, 1, 16, 300, true, 0},   {4, 2, 16, 150, true, 4}, {4, 1, 32, 140, false, 270},
        {2, 1, 16, 33, false, 33},
    };
    static const qsf_kv_form forms[] = {
        {QSF_DTYPE_F32, QSF_DTYPE_F32, false},   {QSF_DTYPE_F16, QSF_DTYPE_F16, false},
        {QSF_DTYPE_8BIT, QSF_DTYPE_8BIT, false}, {QSF_DTYPE_4BIT, QSF_DTYPE_4BIT, true},
        {QSF_DTYPE_2BIT, QSF_DTYPE_F16, true},   {QSF_DTYPE_8BIT, QSF_DTYPE_2BIT, false},
    };
    if (argc > 1)
        random_seed = strtoull(argv[1], NULL, 10);
    printf("check_attention: seed %" PRIu64 "\n", random_seed);
    best = qsf_isa_detect();
    const size_t stride = check_stride();
    for (size_t i = 0; i < COUNT_OF(shapes); i++) /* each with two of the forms */
        for (size_t f = i % 3; f < COUNT_OF(forms); f += 3)
            if ((i * 2 + f / 3) % stride == 0)
                check_shape(&shapes[i], forms[f]);
    return check_report("check_attention");
}
