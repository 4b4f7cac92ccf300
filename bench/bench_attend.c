/* bench_attend.c - speed of attention over KV pages, without the rest of a model.
 *
 * One line of JSON per shape, KV type, depth and number of threads: microseconds for a layer,
 * nanoseconds for a position of a KV head, and gigabytes of pages per second (as if each tile of
 * query rows read them anew). Decode: one token; prompt: 64 tokens whose last one is at `depth`;
 * tree: of 64 tokens 16 are a chain, the others branches of it. The three are measured in turns.
 * Scattered: no page lies behind the one before it, as in a pool that many sessions have used.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory/arena.h"
#include "model/attention.h"
#include "platform/clock.h"
#include "platform/cpu.h"

#define CTX_TOKENS 8192
#define N_RUNS 15

typedef struct shape {
    const char *name;
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
} shape;

static void *zeroed(size_t n_bytes)
{
    void *const p = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    if (p == NULL) {
        fprintf(stderr, "bench_attend: no memory for %zu bytes\n", n_bytes);
        exit(2);
    }
    memset(p, 0, n_bytes);
    return p;
}

static void fill(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(i * 7919 % 2001) / 1000.0F - 1.0F;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Positions 0 .. n_tokens - 1 of all heads */
static void fill_cache(qsf_kvcache *kv, const qsf_kernels *k, const shape *s, uint32_t n_tokens)
{
    float row[256];
    fill(row, s->head_dim);
    for (uint32_t h = 0; h < s->n_kv_heads; h++)
        for (uint32_t p = 0; p < n_tokens; p++) {
            row[p % s->head_dim] = (float)(p % 37) / 18.0F - 1.0F;
            qsf_kvcache_store_k(kv, k, 0, h, p, row);
            qsf_kvcache_store_v(kv, k, 0, h, p, row);
        }
}

/* Turns the order of the blocks round, so that no pages are neighbours. */
static void scatter(const qsf_kvcache *kv)
{
    const uint32_t n = kv->pool->n_places;
    for (uint32_t i = 0; i < n / 2; i++) {
        const uint32_t block = kv->blocks[i];
        kv->blocks[i] = kv->blocks[n - 1 - i];
        kv->blocks[n - 1 - i] = block;
    }
}

/* Lays out what attention needs, and stores CTX_TOKENS positions. Returns the memory. */
static void *prepare(const qsf_config *c, const qsf_kv_form *form, uint32_t n_threads,
                     bool is_scattered, qsf_scratch *scratch, qsf_kv_pool *pages, qsf_kvcache *kv)
{
    const qsf_kv_sizes sizes = {CTX_TOKENS, 64, 1, 1, 0};
    qsf_arena a;
    void *block = NULL;
    qsf_arena_init_measuring(&a);
    for (int pass = 0; pass < 2; pass++) {
        qsf_kv_pool_layout(pages, &a, c, &sizes, form);
        qsf_scratch_layout(scratch, &a, c, pages, &(qsf_scratch_sizes){64, n_threads});
        qsf_kvcache_layout(kv, &a, pages, 0);
        if (pass == 1)
            break;
        const size_t n_bytes = a.used_bytes;
        block = zeroed(n_bytes);
        qsf_arena_init(&a, block, n_bytes);
    }
    if (qsf_kvcache_reserve(kv, 0, CTX_TOKENS) != QSF_OK)
        exit(2);
    if (is_scattered)
        scatter(kv);
    return block;
}

/* The first n_chain rows follow each other, the others are branches. */
typedef struct rows {
    const char *name;
    uint32_t n_rows;
    uint32_t n_chain;
} rows;

#define N_CASES 3
static const rows cases[N_CASES] = {{"decode", 1, 1}, {"prompt", 64, 64}, {"tree", 64, 16}};

/* Rows that end at `depth`. */
static qsf_chunk make_chunk(const rows *r, qsf_kvcache *kv, uint32_t depth, uint32_t *positions,
                            qsf_segment *segments)
{
    const uint32_t first = depth - r->n_rows;
    uint32_t n = 0;
    segments[n++] = (qsf_segment){kv, 0, r->n_chain, first, r->n_rows - r->n_chain, 0, NULL};
    for (uint32_t i = 0; i < r->n_rows; i++)
        positions[i] = first + (i < r->n_chain ? i : 1 + i % r->n_chain);
    for (uint32_t i = r->n_chain; i < r->n_rows; i++)
        segments[n++] =
            (qsf_segment){kv, i, 1, positions[i], 0, first + i - positions[i], &segments[0]};
    return (qsf_chunk){.n_tokens = r->n_rows, .segments = segments, .n_segments = n};
}

/* Returns microseconds. */
static double time_chunk(qsf_ops *o, const qsf_chunk *chunk, uint32_t n_repeats)
{
    const uint64_t start_ns = qsf_clock_ns();
    for (uint32_t i = 0; i < n_repeats; i++)
        if (qsf_attention_run(o, chunk, 0, NULL) != QSF_OK)
            exit(2);
    return (double)(qsf_clock_ns() - start_ns) / 1e3 / n_repeats;
}

static void measure(const shape *s, qsf_dtype type, uint32_t n_threads, qsf_isa isa,
                    bool is_scattered)
{
    static const uint32_t depths[] = {128, 512, 2048, 8192};
    const qsf_kv_form form = {type, type, false};
    const qsf_layer_kind kind = {.n_heads = s->n_heads,
                                 .n_kv_heads = s->n_kv_heads,
                                 .head_dim = s->head_dim,
                                 .rope_set = QSF_ROPE_NONE,
                                 .score_scale = 1.0F / sqrtf((float)s->head_dim)};
    const qsf_layer layer = {.kind = &kind};
    qsf_config c = {.n_layers = 1,
                    .layers = &layer,
                    .dim = 64,
                    .n_heads = s->n_heads,
                    .least_kv_heads = s->n_kv_heads,
                    .head_dim = s->head_dim,
                    .ffn_dim = 64,
                    .q_dim = s->n_heads * s->head_dim,
                    .kv_dim = s->n_kv_heads * s->head_dim};
    qsf_kernels k;
    qsf_kernels_init(&k, isa);
    qsf_scratch scratch;
    qsf_kv_pool pages;
    qsf_kvcache kv;
    qsf_pool *pool;
    void *const block = prepare(&c, &form, n_threads, is_scattered, &scratch, &pages, &kv);
    fill_cache(&kv, &k, s, CTX_TOKENS);
    fill(scratch.q, 64 * qsf_stride(c.q_dim));
    void *const pool_block = zeroed(qsf_pool_bytes(n_threads));
    if (qsf_pool_init(pool_block, n_threads, false, &pool) != QSF_OK)
        exit(2);
    for (size_t d = 0; d < sizeof depths / sizeof depths[0]; d++) {
        double us[N_CASES][N_RUNS];
        for (size_t run = 0; run < N_RUNS; run++) /* in turns */
            for (size_t i = 0; i < N_CASES; i++) {
                qsf_segment segments[64];
                const qsf_chunk chunk =
                    make_chunk(&cases[i], &kv, depths[d], scratch.positions, segments);
                qsf_ops o = {.config = &c,
                             .kernels = &k,
                             .pool = pool,
                             .scratch = &scratch,
                             .kind = &kind,
                             .n_tokens = chunk.n_tokens};
                us[i][run] = time_chunk(&o, &chunk, 1 + 100000 / (depths[d] * chunk.n_tokens));
            }
        for (size_t i = 0; i < N_CASES; i++) {
            qsort(us[i], N_RUNS, sizeof us[i][0], by_value);
            const double median = us[i][N_RUNS / 2];
            const double n_positions = (double)depths[d] * s->n_kv_heads;
            const double page_bytes =
                (double)(pages.layers[0].k_page_bytes + pages.layers[0].v_page_bytes);
            printf("{\"shape\": \"%s\", \"kv\": \"%s\", \"isa\": \"%s\", \"threads\": %u, "
                   "\"rows\": \"%s\", \"depth\": %u, \"us\": %.1f, \"us_best\": %.1f, "
                   "\"ns_per_position\": %.2f, \"gb_s\": %.2f}\n",
                   s->name, qsf_dtype_name(type), k.isa_name, n_threads, cases[i].name, depths[d],
                   median, us[i][0], median * 1e3 / n_positions / cases[i].n_rows,
                   n_positions / QSF_KV_PAGE_TOKENS * page_bytes / median / 1e3);
        }
        fflush(stdout);
    }
    qsf_pool_destroy(pool);
    free(pool_block);
    free(block);
}

int main(int argc, char **argv)
{
    static const shape shapes[] = {{"1.1B", 32, 4, 64}, {"GPT-2", 12, 12, 64}, {"7B", 32, 32, 128}};
    static const qsf_dtype types[] = {QSF_DTYPE_F16, QSF_DTYPE_8BIT, QSF_DTYPE_4BIT,
                                      QSF_DTYPE_2BIT};
    const char *const only_shape = argc > 1 ? argv[1] : "";
    const bool is_scattered = argc > 2 && strcmp(argv[2], "scattered") == 0;
    qsf_isa isa;
    if (qsf_isa_choose(&isa) != QSF_OK) { /* QSF_ISA overrides */
        fprintf(stderr, "usage: bench_attend [shape [scattered]]: 1.1B, GPT-2 or 7B; QSF_ISA must "
                        "be known\n");
        return 2;
    }
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (size_t t = 0; t < sizeof types / sizeof types[0]; t++)
            for (uint32_t n_threads = 1; n_threads <= 2; n_threads++)
                if (*only_shape == '\0' || strcmp(only_shape, shapes[s].name) == 0)
                    measure(&shapes[s], types[t], n_threads, isa, is_scattered);
    return 0;
}
