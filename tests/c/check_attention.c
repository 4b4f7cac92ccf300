/* check_attention.c - attention without the rest of a model: the same bits for any number of
 * threads, any split of a sequence into chunks, any blocks of the pool, and pages in a file; and
 * near the formula in double. Contexts of several spans.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernel_data.h"
#include "memory/arena.h"
#include "model/ops.h"
#include "system.h"

#define CTX_TOKENS 700
#define MAX_SEQUENCES 3

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

/* Exchanges the blocks of all sequences: no result may depend on where they are. */
static void shuffle_blocks(rig *g)
{
    const qsf_kv_group *const group = &g->kv_pool.groups[g->kv_pool.layers[0].group_idx];
    random_restart(7);
    for (uint32_t i = g->resident_tokens == 0 ? group->n_blocks : 0; i-- > 1;) {
        const uint32_t j = random_u32() % (i + 1);
        uint32_t *const a =
            &g->sequences[i / group->n_places].kv.blocks[group->first_place + i % group->n_places];
        uint32_t *const b =
            &g->sequences[j / group->n_places].kv.blocks[group->first_place + j % group->n_places];
        const uint32_t block = *a;
        *a = *b;
        *b = block;
    }
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

/* q, k or v of a position of a sequence: anything, but always the same. */
static void fill_row(uint64_t which, uint32_t sequence, uint32_t position, float *row, size_t n)
{
    random_restart(1000 * which + sequence + ((uint64_t)position << 20));
    fill_floats(row, n, FILL_RANDOM);
}

/* Evaluates the segments as one chunk. */
static void run_chunk(rig *g, qsf_segment *segments, const uint32_t *sequences, uint32_t n_segments)
{
    const qsf_config *const c = &g->config;
    const qsf_scratch *const s = &g->scratch;
    qsf_chunk chunk = {.segments = segments, .n_segments = n_segments};
    for (uint32_t i = 0; i < n_segments; i++) {
        segments[i].sequence = &g->sequences[sequences[i]];
        segments[i].first_row = chunk.n_tokens;
        if (g->resident_tokens != 0)
            CHECK_OK(qsf_kvcache_reserve(&segments[i].sequence->kv, segments[i].first_position,
                                         segments[i].first_position + segments[i].n_tokens));
        for (uint32_t t = 0; t < segments[i].n_tokens; t++) {
            const uint32_t row = chunk.n_tokens + t;
            const uint32_t position = segments[i].first_position + t;
            const size_t n_pairs = g->rope.n_pairs;
            s->positions[row] = position;
            fill_row(1, sequences[i], position, s->q + row * qsf_stride(c->q_dim), c->q_dim);
            fill_row(2, sequences[i], position, s->k + row * qsf_stride(c->kv_dim), c->kv_dim);
            fill_row(3, sequences[i], position, s->v + row * qsf_stride(c->kv_dim), c->kv_dim);
            for (size_t p = 0; p < n_pairs; p++) {
                s->rope_cos[row * n_pairs + p] = (float)cos((double)position / (double)(p + 1));
                s->rope_sin[row * n_pairs + p] = (float)sin((double)position / (double)(p + 1));
            }
        }
        chunk.n_tokens += segments[i].n_tokens;
    }
    g->ops.n_tokens = chunk.n_tokens;
    for (uint32_t h = 0; h < c->n_heads; h++)
        qsf_heads_finish_q(&g->ops, NULL, h, 0, chunk.n_tokens);
    for (uint32_t h = 0; h < g->kind.n_kv_heads; h++) {
        qsf_heads_store_k(&g->ops, &chunk, 0, NULL, h, 0, chunk.n_tokens);
        qsf_heads_store_v(&g->ops, &chunk, 0, h);
    }
    CHECK_OK(qsf_attention_run(&g->ops, &chunk, 0, g->sinks));
}

/* Evaluates n_tokens of a sequence in chunks; out [n_tokens, q_dim] */
static void run_sequence(rig *g, uint32_t sequence, uint32_t n_tokens, uint32_t chunk_tokens,
                         float *out)
{
    const size_t q_dim = g->config.q_dim;
    for (uint32_t at = 0; at < n_tokens; at += chunk_tokens) {
        const uint32_t left = n_tokens - at;
        qsf_segment segment = {.n_tokens = left < chunk_tokens ? left : chunk_tokens,
                               .first_position = at};
        run_chunk(g, &segment, &sequence, 1);
        for (uint32_t t = 0; t < segment.n_tokens; t++)
            memcpy(out + (at + t) * q_dim, g->scratch.attended + t * qsf_stride(g->config.q_dim),
                   q_dim * sizeof *out);
    }
}

static const float *page_of(const qsf_kvcache *kv, uint32_t kv_head, uint32_t position, bool is_key)
{
    const void *k;
    const void *v;
    qsf_kvcache_find_pages(kv, 0, kv_head, position / 32, 0, 1, &k, &v);
    return is_key ? k : v;
}

/* The formula for one token, f32 keys and values; rope and rotation taken from what is stored. */
static void check_formula(const rig *g, uint32_t n_tokens, const float *attended)
{
    const qsf_config *const c = &g->config;
    const uint32_t t = n_tokens - 1;
    const size_t n_pairs = g->rope.n_pairs;
    float *const row = exact_floats(c->q_dim);
    double *const e = exact_alloc(n_tokens * sizeof *e);
    fill_row(1, 0, t, row, c->q_dim);
    for (uint32_t h = 0; h < c->n_heads; h++) {
        float *const q = row + (size_t)h * c->head_dim;
        float angles[2][64];
        for (size_t p = 0; p < n_pairs; p++) {
            angles[0][p] = (float)cos((double)t / (double)(p + 1));
            angles[1][p] = (float)sin((double)t / (double)(p + 1));
        }
        g->kernels.rope_split(q, angles[0], angles[1], n_pairs);
        const uint32_t kv_head = h / (c->n_heads / g->kind.n_kv_heads);
        const qsf_kvcache *const kv = &g->sequences[0].kv;
        const uint32_t window = g->kind.window_tokens;
        const uint32_t first = window != 0 && n_tokens > window ? n_tokens - window : 0;
        const uint32_t pinned = g->kind.pinned_tokens;
        const size_t n_cols = qsf_stride(c->head_dim);
        double max = -HUGE_VAL;
        double total = 0.0;
        for (uint32_t p = 0; p < n_tokens; p++) {
            e[p] = -HUGE_VAL;
            if (p >= pinned && p < first)
                continue;
            const float *const page = page_of(kv, kv_head, p, true);
            e[p] = 0.0;
            for (size_t d = 0; d < c->head_dim; d++)
                e[p] += (double)q[d] * (double)page[(p % 32 / 16 * n_cols + d) * 16 + p % 16];
            e[p] /= sqrt((double)c->head_dim);
            max = fmax(max, e[p]);
        }
        if (g->sinks != NULL) {
            max = fmax(max, (double)g->sinks[h]);
            total = exp((double)g->sinks[h] - max);
        }
        for (uint32_t p = 0; p < n_tokens; p++)
            total += e[p] = exp(e[p] - max);
        for (size_t d = 0; d < c->head_dim; d++) {
            double want = 0.0;
            for (uint32_t p = 0; p < n_tokens; p++) {
                if (p >= pinned && p < first)
                    continue;
                const float *const page = page_of(kv, kv_head, p, false);
                want += e[p] * (double)page[(d / 64 * 32 + p % 32) * 64 + d % 64];
            }
            /* |v| <= 3 and |score| <= 9 sqrt(head_dim): far above what rounding does, far below
             * what a wrong position does */
            CHECK(fabs((double)attended[(size_t)h * c->head_dim + d] - want / total) <= 1e-4);
        }
    }
    free(row);
    free(e);
}

static void check_bits(const float *want, const float *have, size_t n, const char *what,
                       const shape *s, qsf_kv_form form)
{
    const size_t i = first_difference(want, have, n);
    if (!CHECK_EQ(i, n))
        printf(
            "  %s: %u heads of %u, %u KV heads, window %u + %u, K %s, V %s: [%zu] is %a, not %a\n",
            what, s->n_heads, s->head_dim, s->n_kv_heads, s->window_tokens, s->pinned_tokens,
            qsf_dtype_name(form.k_type), qsf_dtype_name(form.v_type), i, (double)have[i],
            (double)want[i]);
}

static void check_shape(const shape *s, qsf_kv_form form)
{
    static const uint32_t n_tokens = 600;
    const size_t n = (size_t)n_tokens * s->n_heads * s->head_dim;
    float *const want = exact_floats(n);
    float *const have = exact_floats(n);
    rig g;
    rig_make(&g, s, form, best, 1, 64, 0);
    run_sequence(&g, 0, n_tokens, 64, want);
    if (form.k_type == QSF_DTYPE_F32 && form.v_type == QSF_DTYPE_F32 && !form.is_rotated)
        check_formula(&g, n_tokens, want + (n_tokens - 1) * (size_t)s->n_heads * s->head_dim);
    for (size_t i = 0; i < n; i++)
        if (!CHECK(isfinite(want[i])))
            break;
    rig_free(&g);
    static const struct {
        uint32_t n_threads;
        uint32_t chunk_tokens;
        uint32_t resident_tokens;
    } splits[] = {{1, 1, 0}, {3, 64, 0}, {2, 3, 0}, {3, 50, 0}, {3, 64, 1}, {2, 7, 130}};
    for (size_t i = 0; i < COUNT_OF(splits); i++) {
        /* Small shapes also on every instruction set; of others, the kernels' checks tell. */
        const bool is_small = n < 100000;
        const qsf_isa isa = is_small && qsf_isa_has((qsf_isa)i) ? (qsf_isa)i : best;
        if (splits[i].resident_tokens != 0 && s->pinned_tokens != 0)
            continue; /* what is pinned belongs to a policy that keeps nothing else */
        rig_make(&g, s, form, isa, splits[i].n_threads, splits[i].chunk_tokens,
                 splits[i].resident_tokens);
        if (i > 0)
            shuffle_blocks(&g);
        run_sequence(&g, 0, n_tokens, splits[i].chunk_tokens, have);
        check_bits(want, have, n, qsf_isa_name(isa), s, form);
        if (splits[i].resident_tokens != 0)
            CHECK((g.sequences[0].kv.cold.read_bytes > 0) == (s->window_tokens != 20));
        rig_free(&g);
    }
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
    for (size_t i = 0; i < COUNT_OF(shapes); i++)
        for (size_t f = 0; f < COUNT_OF(forms); f++) {
            if ((i * COUNT_OF(forms) + f) % stride != 0)
                continue;
            check_shape(&shapes[i], forms[f]);
        }
    return check_report("check_attention");
}
