/* scratch.c - the layout of the activations of one step. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ops.h"

#include "base/checked.h"
#include "types/dtype.h"
#include "kernels/kernels.h"

/* Returns the largest chunk for which splitting over spans pays: with fewer row groups, one per
 * KV head, than a few for each thread. */
static uint32_t split_tokens(const qsf_config *c, uint32_t chunk_tokens, uint32_t n_threads)
{
    const size_t n = qsf_ceil_div(4 * (size_t)n_threads, c->least_kv_heads);
    return n < chunk_tokens ? (uint32_t)n : chunk_tokens;
}

/* Integers of n_values values; n_described blocks are described. */
static void layout_acts(qsf_act_row *s, qsf_arena *a, size_t n_values, size_t n_described)
{
    const size_t n_blocks = n_values / QSF_BLOCK;
    s->q = qsf_arena_push(a, 2 * n_values, sizeof *s->q);
    s->q_low = s->q != NULL ? s->q + n_values : NULL;
    s->scale = qsf_arena_push(a, n_described, sizeof *s->scale);
    s->sum = qsf_arena_push(a, n_described, sizeof *s->sum);
    s->parts = qsf_arena_push(a, n_described, sizeof *s->parts);
    s->scaled_sum = qsf_arena_push(a, n_described, sizeof *s->scaled_sum);
    s->fine_sum = qsf_arena_push(a, n_blocks, sizeof *s->fine_sum);
}

static void layout_attention(qsf_attend_scratch *s, qsf_arena *a, const qsf_config *c,
                             const qsf_kv_pool *pool, const qsf_scratch_sizes *sizes)
{
    /* Spans are split only if no page of the layer is cold. */
    const uint32_t n_hot = pool->groups[0].n_places;
    const uint32_t n_all = pool->n_cold_records != 0 ? pool->n_cold_records : n_hot;
    const size_t n_carried =
        pool->n_cold_records != 0 ? (size_t)sizes->chunk_tokens * c->n_heads : 0;
    *s = (qsf_attend_scratch){
        .split_tokens = split_tokens(c, sizes->chunk_tokens, sizes->n_threads),
    };
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const qsf_layer_kind *const k = c->layers[i].kind;
        const size_t n_tokens =
            (size_t)(k->window_tokens == 0 ? n_hot : n_all) * QSF_KV_PAGE_TOKENS;
        s->n_spans =
            (uint32_t)QSF_MAX(s->n_spans, qsf_seen_most_spans(k, s->split_tokens, n_tokens));
    }
    const size_t n_rows = (size_t)sizes->n_threads * QSF_ATTEND_ROWS;
    const size_t head_stride = qsf_stride(c->head_dim);
    const size_t n_values = n_rows * head_stride;
    const size_t n_partials =
        s->n_spans > 1 ? (size_t)s->split_tokens * c->n_heads * s->n_spans : 0;
    s->q = qsf_arena_push(a, n_values, sizeof *s->q);
    layout_acts(&s->acts, a, n_values, n_values / QSF_BLOCK);
    s->scores = qsf_arena_push(a, n_rows * QSF_KV_SPAN_TOKENS, sizeof *s->scores);
    s->span_values = qsf_arena_push(a, n_values, sizeof *s->span_values);
    s->values = qsf_arena_push(a, n_values, sizeof *s->values);
    s->partial_values = qsf_arena_push(a, n_partials * head_stride, sizeof *s->partial_values);
    s->partial_sums = qsf_arena_push(a, n_partials, sizeof *s->partial_sums);
    s->carried = qsf_arena_push(a, n_carried, sizeof *s->carried);
    s->transit = qsf_arena_push(a, qsf_kv_transit_bytes(pool), 1);
}

/* Rows that experts compute together; 0 without experts. */
static size_t routed_rows(const qsf_config *c, size_t n)
{
    const size_t n_rows = c->n_experts != 0 ? n * c->n_chosen : 0;
    return QSF_MIN(n_rows, QSF_EXPERT_ROWS);
}

static void layout_routed(qsf_routed_scratch *s, qsf_arena *a, const qsf_config *c, size_t n,
                          size_t dim_stride)
{
    const size_t n_rows = routed_rows(c, n);
    *s = (qsf_routed_scratch){0};
    if (c->n_experts == 0)
        return;
    s->scores = qsf_arena_push(a, n * c->n_experts, sizeof *s->scores);
    for (size_t i = 0; i < sizeof s->biases / sizeof s->biases[0]; i++)
        s->biases[i] = qsf_arena_push(a, c->n_experts, sizeof *s->biases[i]);
    s->gates = qsf_arena_push(a, n, sizeof *s->gates);
    s->weights = qsf_arena_push(a, n * c->n_chosen, sizeof *s->weights);
    s->chosen = qsf_arena_push(a, n * c->n_chosen, sizeof *s->chosen);
    s->choices = qsf_arena_push(a, n * c->n_chosen, sizeof *s->choices);
    s->first = qsf_arena_push(a, (size_t)c->n_experts + 1, sizeof *s->first);
    s->units = qsf_arena_push(a, c->n_experts, sizeof *s->units);
    s->uses = qsf_arena_push(a, c->n_experts, sizeof *s->uses);
    s->likely = qsf_arena_push(a, c->n_experts, sizeof *s->likely);
    s->rows = qsf_arena_push(a, n_rows * dim_stride, sizeof *s->rows);
    s->outputs = qsf_arena_push(a, n_rows * dim_stride, sizeof *s->outputs);
}

void qsf_scratch_layout(qsf_scratch *s, qsf_arena *a, const qsf_config *c, const qsf_kv_pool *pool,
                        const qsf_scratch_sizes *sizes)
{
    const size_t n = sizes->chunk_tokens;
    const size_t n_wide = QSF_MAX(n, routed_rows(c, n));
    *s = (qsf_scratch){
        .chunk_tokens = sizes->chunk_tokens,
        .dim_stride = qsf_stride(c->dim),
        .ple_stride = qsf_stride(c->ple_cols),
        .kv_form = pool->form,
    };
    const size_t q_stride = qsf_stride(c->q_dim);
    const size_t kv_stride = qsf_stride(c->kv_dim);
    const size_t ffn_stride = qsf_stride(c->ffn_dim);
    const size_t gate_stride = qsf_stride(c->gate_dim);
    const size_t latent_stride = qsf_stride(c->latent_dim);
    const size_t widest = QSF_MAX(QSF_MAX(s->dim_stride, q_stride), ffn_stride);

    s->x = qsf_arena_push(a, n * s->dim_stride, sizeof *s->x);
    s->normed = qsf_arena_push(a, n * s->dim_stride, sizeof *s->normed);
    s->input = c->keeps_input ? qsf_arena_push(a, n * s->dim_stride, sizeof *s->input) : NULL;
    s->q = qsf_arena_push(a, n * q_stride, sizeof *s->q);
    s->k = qsf_arena_push(a, n * kv_stride, sizeof *s->k);
    s->v = qsf_arena_push(a, n * kv_stride, sizeof *s->v);
    s->attended = qsf_arena_push(a, n * q_stride, sizeof *s->attended);
    s->mix_gate = qsf_arena_push(a, n * gate_stride, sizeof *s->mix_gate);
    s->by_head = qsf_arena_push(a, n * latent_stride, sizeof *s->by_head);
    s->steps = qsf_arena_push(a, n * c->n_steps, sizeof *s->steps);
    s->gate = qsf_arena_push(a, n_wide * ffn_stride, sizeof *s->gate);
    s->up = c->has_gate ? qsf_arena_push(a, n_wide * ffn_stride, sizeof *s->up) : NULL;
    s->embedded = qsf_arena_push(a, c->ple_width != 0 ? n * s->dim_stride : 0, sizeof *s->embedded);
    s->ple = qsf_arena_push(a, n * s->ple_stride, sizeof *s->ple);
    s->y = qsf_arena_push(a, n * s->dim_stride, sizeof *s->y);
    s->positions = qsf_arena_push(a, n, sizeof *s->positions);
    s->rest = qsf_arena_push(a, c->n_storing_layers < c->n_layers ? n : 0, sizeof *s->rest);
    s->rope_cos = qsf_arena_push(a, n * c->n_rope_pairs, sizeof *s->rope_cos);
    s->rope_sin = qsf_arena_push(a, n * c->n_rope_pairs, sizeof *s->rope_sin);
    layout_attention(&s->attend, a, c, pool, sizes);
    for (size_t i = 0; i < sizeof s->tails / sizeof s->tails[0]; i++)
        s->tails[i] = qsf_arena_push(a, n_wide * QSF_TILE_ROWS, sizeof *s->tails[i]);
    for (size_t i = 0; i < sizeof s->vectors / sizeof s->vectors[0]; i++)
        s->vectors[i] = qsf_arena_push(a, QSF_MAX(widest, kv_stride), sizeof *s->vectors[i]);
    s->ones = c->ones > 0 ? qsf_arena_push(a, c->ones, sizeof *s->ones) : NULL;
    for (size_t i = 0; i < sizeof s->qk_norms / sizeof s->qk_norms[0]; i++)
        s->qk_norms[i] = qsf_arena_push(a, c->qk_norm_cols, sizeof *s->qk_norms[i]);
    s->conv = qsf_arena_push(a, (size_t)c->conv_cols + c->conv_channels, sizeof *s->conv);
    s->head_bias = qsf_arena_push(a, c->has_head_bias ? c->n_vocab : 0, sizeof *s->head_bias);
    s->blocks = qsf_arena_push(a, c->n_blocks * n * s->dim_stride, sizeof *s->blocks);
    s->messages = qsf_arena_push(a, c->n_loop_blocks * n * s->dim_stride, sizeof *s->messages);
    s->queries = qsf_arena_push(a, c->n_blocks != 0 ? 7 * (size_t)c->dim : 0, sizeof *s->queries);
    s->relative = qsf_arena_push(a, n * qsf_stride(c->n_relative), sizeof *s->relative);
    s->profiles = qsf_arena_push(a, c->n_profiles, sizeof *s->profiles);
    s->sinks =
        qsf_arena_push(a, c->n_blocks != 0 ? n * qsf_stride(c->n_heads) : 0, sizeof *s->sinks);
    s->outliers = qsf_arena_push(a, c->outliers_bytes, 1);
    s->low = qsf_arena_push(a, (uint64_t)3 * n * c->low_cols, sizeof *s->low);
    layout_routed(&s->routed, a, c, n, s->dim_stride);
    layout_acts(&s->acts, a, n_wide * widest,
                (c->has_fine_acts ? 2 : 1) * n_wide * widest / QSF_BLOCK);
    s->low_rows = c->has_fine_acts ? QSF_MAX(n_wide, 2 * QSF_MIN(n_wide, QSF_LOW_TOGETHER)) : 0;
    s->low_products =
        qsf_arena_push(a, sizes->n_threads * s->low_rows * QSF_LOW_COLS, sizeof *s->low_products);
}
