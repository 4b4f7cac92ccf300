/* scratch.c - the layout of one step's activations. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/scratch.h"

#include "base/checked.h"
#include "base/dtype.h"
#include "kernels/kernels.h"

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

void qsf_scratch_layout(qsf_scratch *s, qsf_arena *a, const qsf_config *c, uint32_t chunk_tokens,
                        uint32_t ctx_tokens, uint32_t n_threads)
{
    const size_t n = chunk_tokens;
    *s = (qsf_scratch){
        .chunk_tokens = chunk_tokens,
        .dim_stride = qsf_round_up(c->dim, QSF_BLOCK),
        .q_stride = qsf_round_up(c->q_dim, QSF_BLOCK),
        .kv_stride = qsf_round_up(c->kv_dim, QSF_BLOCK),
        .ffn_stride = qsf_round_up(c->ffn_dim, QSF_BLOCK),
        .score_stride = (ctx_tokens / QSF_KV_PAGE_TOKENS + 1) * (size_t)QSF_KV_PAGE_TOKENS,
    };
    const size_t widest = larger(larger(s->dim_stride, s->q_stride), s->ffn_stride);
    const size_t n_blocks = widest / QSF_BLOCK;
    const size_t n_pairs = c->rope_dims / 2;

    s->x = qsf_arena_push(a, n * s->dim_stride, sizeof *s->x);
    s->normed = qsf_arena_push(a, n * s->dim_stride, sizeof *s->normed);
    s->q = qsf_arena_push(a, n * s->q_stride, sizeof *s->q);
    s->k = qsf_arena_push(a, n * s->kv_stride, sizeof *s->k);
    s->v = qsf_arena_push(a, n * s->kv_stride, sizeof *s->v);
    s->attended = qsf_arena_push(a, n * s->q_stride, sizeof *s->attended);
    s->gate = qsf_arena_push(a, n * s->ffn_stride, sizeof *s->gate);
    s->up = c->is_gated ? qsf_arena_push(a, n * s->ffn_stride, sizeof *s->up) : NULL;
    s->y = qsf_arena_push(a, n * s->dim_stride, sizeof *s->y);
    s->positions = qsf_arena_push(a, n, sizeof *s->positions);
    s->rope_cos = qsf_arena_push(a, n * n_pairs, sizeof *s->rope_cos);
    s->rope_sin = qsf_arena_push(a, n * n_pairs, sizeof *s->rope_sin);
    s->scores = qsf_arena_push(a, n_threads * s->score_stride, sizeof *s->scores);
    for (size_t i = 0; i < sizeof s->tails / sizeof s->tails[0]; i++)
        s->tails[i] = qsf_arena_push(a, n * QSF_TILE_ROWS, sizeof *s->tails[i]);
    for (size_t i = 0; i < sizeof s->vectors / sizeof s->vectors[0]; i++)
        s->vectors[i] = qsf_arena_push(a, larger(widest, s->kv_stride), sizeof *s->vectors[i]);
    s->act_q = qsf_arena_push(a, n * widest, sizeof *s->act_q);
    s->act_q_low = qsf_arena_push(a, n * widest, sizeof *s->act_q_low);
    s->act_scale = qsf_arena_push(a, n * n_blocks, sizeof *s->act_scale);
    s->act_sum = qsf_arena_push(a, n * n_blocks, sizeof *s->act_sum);
    s->act_scaled_sum = qsf_arena_push(a, n * n_blocks, sizeof *s->act_scaled_sum);
    s->act_fine_sum = qsf_arena_push(a, n * n_blocks, sizeof *s->act_fine_sum);
}
