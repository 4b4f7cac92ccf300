/* bench_attend.c - speed of attention over KV pages, without the rest of a model.
 *
 * One line of JSON per shape, KV type, depth and number of threads: microseconds for a layer,
 * nanoseconds for a position of a KV head, and gigabytes of pages per second (as if each tile of
 * query rows read them anew). Decode: one token; prompt: 64 tokens whose last one is at `depth`.
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

static void measure(const shape *s, qsf_dtype type, uint32_t n_threads, qsf_isa isa)
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
    qsf_kvcache kv;
    qsf_pool *pool;
    qsf_arena a;
    qsf_arena_init_measuring(&a);
    qsf_scratch_layout(&scratch, &a, &c, &form, 64, CTX_TOKENS, n_threads);
    qsf_kvcache_layout(&kv, &a, &c, CTX_TOKENS, 64, &form);
    const size_t n_bytes = a.used_bytes;
    void *const block = zeroed(n_bytes);
    qsf_arena_init(&a, block, n_bytes);
    qsf_scratch_layout(&scratch, &a, &c, &form, 64, CTX_TOKENS, n_threads);
    qsf_kvcache_layout(&kv, &a, &c, CTX_TOKENS, 64, &form);
    qsf_kvcache_link(&kv, &c, CTX_TOKENS, 64);
    fill_cache(&kv, &k, s, CTX_TOKENS);
    fill(scratch.q, 64 * qsf_stride(c.q_dim));
    void *const pool_block = zeroed(qsf_pool_bytes(n_threads));
    if (qsf_pool_init(pool_block, n_threads, false, &pool) != QSF_OK)
        exit(2);
    for (uint32_t n_tokens = 1; n_tokens <= 64; n_tokens += 63)
        for (size_t d = 0; d < sizeof depths / sizeof depths[0]; d++) {
            const uint32_t depth = depths[d];
            qsf_ops o = {.config = &c,
                         .kernels = &k,
                         .pool = pool,
                         .scratch = &scratch,
                         .kind = &kind,
                         .n_tokens = n_tokens};
            const qsf_segment g = {
                .kv = &kv, .n_tokens = n_tokens, .first_position = depth - n_tokens};
            const qsf_chunk chunk = {.n_tokens = n_tokens, .segments = &g, .n_segments = 1};
            double us[N_RUNS];
            const uint32_t n_repeats = 1 + 100000 / (depth * n_tokens);
            for (size_t run = 0; run < N_RUNS; run++) {
                const uint64_t start_ns = qsf_clock_ns();
                for (uint32_t i = 0; i < n_repeats; i++)
                    qsf_attention_run(&o, &chunk, 0);
                us[run] = (double)(qsf_clock_ns() - start_ns) / 1e3 / n_repeats;
            }
            qsort(us, N_RUNS, sizeof us[0], by_value);
            const double median = us[N_RUNS / 2];
            const double n_positions = (double)depth * s->n_kv_heads;
            const double page_bytes = (double)(kv.layers[0].k_page_bytes + kv.layers[0].v_page_bytes);
            printf("{\"shape\": \"%s\", \"kv\": \"%s\", \"isa\": \"%s\", \"threads\": %u, "
                   "\"tokens\": %u, \"depth\": %u, \"us\": %.1f, \"us_best\": %.1f, "
                   "\"ns_per_position\": %.2f, \"gb_s\": %.2f}\n",
                   s->name, qsf_dtype_name(type), k.isa_name, n_threads, n_tokens, depth, median,
                   us[0], median * 1e3 / n_positions / n_tokens,
                   n_positions / QSF_KV_PAGE_TOKENS * page_bytes / median / 1e3);
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
    qsf_isa isa;
    if (qsf_isa_choose(&isa) != QSF_OK) { /* QSF_ISA overrides */
        fprintf(stderr, "usage: bench_attend [shape]: 1.1B, GPT-2 or 7B; QSF_ISA must be known\n");
        return 2;
    }
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (size_t t = 0; t < sizeof types / sizeof types[0]; t++)
            for (uint32_t n_threads = 1; n_threads <= 2; n_threads++)
                if (*only_shape == '\0' || strcmp(only_shape, shapes[s].name) == 0)
                    measure(&shapes[s], types[t], n_threads, isa);
    return 0;
}
