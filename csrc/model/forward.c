/* forward.c - the transformer: its embeddings, its layers, its MTP head. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/forward.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/half.h"
#include "base/status.h"
#include "model/linear.h"
#include "model/mixers/mixers.h"
#include "model/ops.h"
#include "types/dtype.h"

/* ---- per-layer embeddings (Gemma 4 E2B, E4B; EmbeddingGemma 2) ---- */

/* A token has an embedding for the residual and one of ple_width numbers for each layer: a row of
 * their table has those of all layers. A pass needs few rows of the large table, so it stays in
 * the file: a row costs a read of its band of 16 rows. An encoder has no table: its layers read the
 * embedding for the residual alone. */

#define HALF_ROOT 0.70710678118654752F /* 1 / sqrt(2) */

/* Stores x, the embedding of tokens [n_tokens], and reads their rows of the table, unless it is
 * NULL. Errors of the stream. */
static qsf_status read_layer_embeddings(qsf_ops *o, const qsf_tensor *table, const uint32_t *tokens)
{
    const qsf_scratch *const s = o->scratch;
    memcpy(s->embedded, s->x, o->n_tokens * s->dim_stride * sizeof *s->x);
    for (uint32_t t = 0; table != NULL && t < o->n_tokens; t++)
        QSF_TRY(qsf_embedding_decode(o->stream, o->kernels, table, tokens[t],
                                     s->ple + t * s->ple_stride));
    return QSF_OK;
}

/* The argument of project_rows */
typedef struct embedding_job {
    const qsf_ops *ops;
    const qsf_layer *layer;
    qsf_norm_weights norm; /* of the projected embedding */
} embedding_job;

/* up = p, from up = in @ embedding */
static void project_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const embedding_job *const job = arg;
    const qsf_config *const c = job->ops->config;
    const qsf_scratch *const s = job->ops->scratch;
    const qsf_kernels *const k = job->ops->kernels;
    const float factor = 1.0F / sqrtf((float)c->dim);
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        float *const p = s->up + t * qsf_stride(c->ple_width);
        k->scale(p, factor, c->ple_width);
        qsf_ops_norm_row(job->ops, p, &job->norm, c->ple_width, p);
        if (c->ple_cols == 0)
            continue;
        k->add_scaled(p, s->ple + t * s->ple_stride + job->layer->ple_col,
                      sqrtf((float)c->ple_width), c->ple_width);
        k->scale(p, HALF_ROOT, c->ple_width);
    }
}

static void gate_epilogue(const void *arg, size_t begin, size_t end)
{
    const qsf_ops *const o = arg;
    qsf_ops_activate_gated(o, qsf_stride(o->config->ple_width), begin, end);
}

/* p = (norm(in @ embedding / sqrt(dim)) + layer embedding * sqrt(ple_width)) / sqrt(2), or the norm
 * alone without a table; x += norm(out @ (activation(gate @ x) * p)) for the rows of the chunk.
 * Errors of the stream. */
static qsf_status add_layer_embedding(qsf_ops *o, const qsf_layer *l)
{
    const qsf_scratch *const s = o->scratch;
    const uint32_t width = o->config->ple_width;
    const qsf_norm_weights none = {0};
    const qsf_block_end end = {.w = l->tensors[QSF_LAYER_OWN_OUT],
                               .post_norm = l->tensors[QSF_LAYER_OWN_NORM]};
    const qsf_linear in = qsf_linear_of(l->tensors[QSF_LAYER_OWN_IN], s->up, qsf_stride(width));
    const qsf_linear gate = {
        .w = l->tensors[QSF_LAYER_OWN_GATE],
        .y = s->gate,
        .y_stride = qsf_stride(width),
        .group_rows = 1,
        .epilogue = gate_epilogue,
        .epilogue_arg = o,
    };
    embedding_job job = {o, l, none};
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_OWN_IN_NORM], 2, &job.norm.weight));
    qsf_acts x = qsf_ops_prepare(o, s->embedded, o->config->dim, NULL, NULL);
    QSF_TRY(qsf_linear_run(o, &in, 1, &x));
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(8 * (size_t)width), project_rows, &job);
    x = qsf_ops_prepare(o, s->x, o->config->dim, NULL, NULL);
    QSF_TRY(qsf_linear_run(o, &gate, 1, &x));
    QSF_TRY(qsf_block_sub_norm(o, s->gate, width, NULL, &x));
    return qsf_block_add_product(o, &end, &x);
}

/* Writes the position of each row in its sequence, and its angles. */
static void place_rows(qsf_ops *o, const qsf_chunk *chunk)
{
    const qsf_scratch *const s = o->scratch;
    o->segments = chunk->segments;
    o->n_segments = chunk->n_segments;
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const qsf_segment *const g = &chunk->segments[i];
        for (uint32_t t = 0; t < g->n_tokens; t++)
            s->positions[g->first_row + t] = g->first_position + t;
    }
    qsf_ropes_fill(o->ropes, o->config->n_ropes, s->positions, chunk->n_tokens, s->chunk_tokens,
                   s->rope_cos, s->rope_sin);
}

/* x[t] = embedding[token] * factor (+ position[t]); x [n_tokens, dim_stride]. Of a stage that is
 * not the first, the rows of the layers before; per-layer embeddings need the tokens' own first. */
static qsf_status embed(qsf_forward *f, const qsf_chunk *chunk)
{
    const qsf_config *const c = f->ops.config;
    const qsf_scratch *const s = f->ops.scratch;
    const bool has_source = chunk->read_rows != NULL;
    for (uint32_t t = 0; t < chunk->n_tokens && (!has_source || c->ple_width != 0); t++) {
        float *const x = s->x + t * s->dim_stride;
        QSF_TRY(qsf_embedding_row(&f->embedding, f->ops.stream, f->ops.kernels, f->ends->embedding,
                                  chunk->tokens[t], x));
        if (c->embedding_factor != 1.0F)
            f->ops.kernels->scale(x, c->embedding_factor, c->dim);
        if (f->positions == NULL || has_source)
            continue;
        const size_t first = (size_t)s->positions[t] * c->dim;
        for (size_t i = 0; i < c->dim; i++)
            x[i] += f->has_f32_positions
                        ? qsf_load_f32(f->positions + 4 * (first + i))
                        : qsf_half_to_float(qsf_load_u16(f->positions + 2 * (first + i)));
    }
    if (c->ple_width != 0)
        QSF_TRY(read_layer_embeddings(&f->ops, f->ends->ple_table, chunk->tokens));
    return has_source ? chunk->read_rows(chunk->read_rows_arg, s->x, s->dim_stride) : QSF_OK;
}

/* Beginning a resident unit is too cheap to time. */
static qsf_status begin_unit(qsf_ops *o, uint32_t unit_idx)
{
    QSF_TRY(qsf_stream_begin_unit(o->stream, unit_idx));
    if (!qsf_stream_is_resident(o->stream, unit_idx))
        qsf_stopwatch_lap(o->stopwatch, QSF_PHASE_OTHER);
    return QSF_OK;
}

/* Ends the unit, and `phase` with it. */
static qsf_status end_unit(qsf_ops *o, qsf_phase phase)
{
    QSF_TRY(qsf_stream_end_unit(o->stream));
    qsf_stopwatch_lap_at(o->stopwatch, phase, o->stream->end_ns);
    return QSF_OK;
}

/* Adds `second`, unless NULL, to the second text of a pair: [CLS] first [SEP] second [SEP]. It
 * begins behind the first token that equals the last one. All other rows get `shift`. */
static void shift_rows(const qsf_ops *o, const qsf_chunk *chunk, const float *shift,
                       const float *second)
{
    for (uint32_t i = 0; i < chunk->n_segments; i++) {
        const qsf_segment *const g = &chunk->segments[i];
        const uint32_t *const tokens = chunk->tokens + g->first_row;
        bool is_second = false;
        for (uint32_t t = 0; t < g->n_tokens; t++) {
            o->kernels->add_scaled(o->scratch->x + (g->first_row + t) * o->scratch->dim_stride,
                                   is_second ? second : shift, 1.0F, o->config->dim);
            is_second = second != NULL && (is_second || tokens[t] == tokens[g->n_tokens - 1]);
        }
    }
}

/* The steps before attention: shift and norm of the residual, and a copy for a parallel FFN. */
static qsf_status begin_layer(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk)
{
    const qsf_scratch *const s = o->scratch;
    qsf_norm_weights weights;
    const float *shift;
    const float *second;
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_INPUT_SHIFT], 2, &shift));
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_SECOND_SHIFT], 1, &second));
    if (shift != NULL)
        shift_rows(o, chunk, shift, second);
    if (l->tensors[QSF_LAYER_INPUT_NORM] != NULL) {
        QSF_TRY(qsf_block_load_norm(o, l->tensors[QSF_LAYER_INPUT_NORM],
                                    l->tensors[QSF_LAYER_INPUT_NORM_BIAS], &weights));
        qsf_ops_norm(o, s->x, &weights, s->x);
    }
    if (qsf_layer_keeps_input(l))
        memcpy(s->input, s->x, o->n_tokens * s->dim_stride * sizeof *s->x);
    return QSF_OK;
}

/* The argument of scale_rows */
typedef struct scale_job {
    const qsf_ops *ops;
    float factor;
} scale_job;

static void scale_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const scale_job *const job = arg;
    const qsf_scratch *const s = job->ops->scratch;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++)
        job->ops->kernels->scale(s->x + t * s->dim_stride, job->factor, job->ops->config->dim);
}

/* x *= the layer's scale, if it has one */
static qsf_status end_layer(qsf_ops *o, const qsf_layer *l)
{
    const float *scale;
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_LAYER_SCALE], 0, &scale));
    if (scale == NULL)
        return QSF_OK;
    scale_job job = {o, *scale};
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(o->config->dim), scale_rows, &job);
    return QSF_OK;
}

static qsf_status run_layer(qsf_forward *f, const qsf_chunk *chunk, uint32_t layer_idx)
{
    qsf_ops *const o = &f->ops;
    const qsf_layer *const l = &o->config->layers[layer_idx];
    o->kind = l->kind;
    QSF_TRY(begin_unit(o, l->unit_idx));
    QSF_TRY(begin_layer(o, l, chunk));
    if (qsf_mixers[l->kind->mixer].run != NULL)
        QSF_TRY(qsf_mixers[l->kind->mixer].run(o, l, chunk, layer_idx));
    QSF_TRY(qsf_ffn_run(o, l, layer_idx));
    if (l->kind->mixer == QSF_MIXER_RELATIVE)
        QSF_TRY(qsf_relative_end(o, l, chunk, layer_idx));
    if (o->config->ple_width != 0)
        QSF_TRY(add_layer_embedding(o, l));
    QSF_TRY(end_layer(o, l));
    return end_unit(o, QSF_PHASE_DOWN);
}

/* The argument of head_epilogue */
typedef struct head_job {
    const qsf_ops *ops;
    float *logits; /* [n_tokens, n_vocab], from the first row of this part of the head */
} head_job;

static void head_epilogue(const void *arg, size_t begin, size_t end)
{
    const head_job *const job = arg;
    const qsf_config *const c = job->ops->config;
    for (size_t t = 0; t < job->ops->n_tokens; t++)
        job->ops->kernels->cap(job->logits + t * c->n_vocab + begin, 1.0F / c->logit_cap,
                               c->logit_cap, end - begin);
}

static uint32_t count_head_rows(const qsf_chunk *chunk)
{
    return chunk->n_logits_rows + chunk->n_hidden_rows;
}

/* Makes segments of the rows that the head is for, which are then rows 0, 1, ... Returns how many.
 */
static uint32_t cut_segments(const qsf_chunk *chunk, qsf_segment *rest)
{
    const qsf_segment *g = chunk->segments;
    uint32_t n = 0;
    for (uint32_t i = 0; i < count_head_rows(chunk); i++) {
        const uint32_t row = chunk->head_rows[i];
        while (row >= g->first_row + g->n_tokens)
            g++;
        const uint32_t position = g->first_position + (row - g->first_row);
        if (n > 0 && rest[n - 1].sequence == g->sequence &&
            rest[n - 1].first_position + rest[n - 1].n_tokens == position)
            rest[n - 1].n_tokens++;
        else
            rest[n++] = (qsf_segment){
                .sequence = g->sequence,
                .first_row = i,
                .n_tokens = 1,
                .first_position = position,
                .adapter_scales = g->adapter_scales,
            };
    }
    return n;
}

static void gather_rows(const qsf_chunk *chunk, float *rows, size_t stride)
{
    for (uint32_t i = 0; i < count_head_rows(chunk); i++)
        if (chunk->head_rows[i] != i)
            memcpy(rows + i * stride, rows + chunk->head_rows[i] * stride, stride * sizeof *rows);
}

/* Keeps only the rows that the head needs: the layers after this one store no keys and values, so
 * the other rows have no effect any more. */
static void end_rows(qsf_forward *f, qsf_chunk *chunk)
{
    const qsf_config *const c = f->ops.config;
    const qsf_scratch *const s = f->ops.scratch;
    const bool has_layers = c->n_storing_layers < c->n_layers;
    f->ops.n_tokens = count_head_rows(chunk);
    gather_rows(chunk, s->x, s->dim_stride);
    for (size_t i = 0; i < c->n_blocks; i++)
        gather_rows(chunk, s->blocks + i * s->chunk_tokens * s->dim_stride, s->dim_stride);
    if (!has_layers)
        return;
    if (c->ple_width != 0) {
        gather_rows(chunk, s->embedded, s->dim_stride);
        gather_rows(chunk, s->ple, s->ple_stride);
    }
    chunk->n_segments = cut_segments(chunk, s->rest);
    chunk->segments = s->rest;
    chunk->n_tokens = f->ops.n_tokens;
    place_rows(&f->ops, chunk);
}

/* logits = head(in) (+ bias [n_vocab] unless NULL); the head is one matrix or two. */
static qsf_status multiply_head(qsf_forward *f, const qsf_chunk *chunk, const float *bias,
                                const qsf_acts *in)
{
    const qsf_config *const c = f->ops.config;
    const qsf_tensor *const matrices[] = {f->ends->head, f->ends->head_rest};
    head_job jobs[2];
    qsf_linear parts[2];
    size_t n_parts = 0;
    for (size_t row = 0; row < c->n_vocab; row += matrices[n_parts++]->n_rows) {
        jobs[n_parts] = (head_job){&f->ops, chunk->logits + row};
        parts[n_parts] = (qsf_linear){
            .w = matrices[n_parts],
            .bias = bias == NULL ? NULL : bias + row,
            .y = chunk->logits + row,
            .y_stride = c->n_vocab,
            .group_rows = 1,
            .epilogue = c->logit_cap != 0.0F ? head_epilogue : NULL,
            .epilogue_arg = &jobs[n_parts],
        };
    }
    return qsf_linear_run(&f->ops, parts, n_parts, in);
}

/* logits = head(norm(x)) for the rows that get logits; hidden = norm(x) for the others. x is
 * `normed` if it is normalised already. */
static qsf_status run_head(qsf_forward *f, const qsf_chunk *chunk, bool is_normed)
{
    qsf_ops *const o = &f->ops;
    const qsf_scratch *const s = o->scratch;
    const qsf_config *const c = o->config;
    const float *bias;
    QSF_TRY(begin_unit(o, f->ends->final_norm->unit_idx));
    qsf_acts in;
    if (c->block_layers != 0)
        QSF_TRY(
            qsf_relative_final(o, f->ends->final_query, c->layers[c->n_layers - 1].pass_idx + 1));
    if (is_normed)
        in = qsf_ops_prepare(o, s->normed, c->dim, NULL, NULL);
    else
        QSF_TRY(qsf_block_norm(o, c->block_layers != 0 ? s->y : s->x, f->ends->final_norm,
                               f->ends->final_norm_bias, &in));
    f->hidden = s->normed + chunk->n_logits_rows * s->dim_stride;
    if (f->ends->dense != NULL) {
        const qsf_linear dense = qsf_linear_of(f->ends->dense, s->gate, qsf_stride(c->vector_dim));
        QSF_TRY(qsf_linear_run(o, &dense, 1, &in));
        f->hidden = s->gate;
    }
    if (c->is_encoder)
        return end_unit(o, QSF_PHASE_HEAD);
    in.n_tokens = chunk->n_logits_rows;
    o->n_tokens = chunk->n_logits_rows;
    QSF_TRY(qsf_ops_load_vector(o, f->ends->head_bias, s->head_bias, &bias));
    if (c->has_tied_head) {
        QSF_TRY(end_unit(o, QSF_PHASE_NORM));
        QSF_TRY(begin_unit(o, f->ends->embedding->unit_idx));
    } else {
        qsf_ops_lap(o, QSF_PHASE_NORM);
    }
    if (o->n_tokens > 0)
        QSF_TRY(multiply_head(f, chunk, bias, &in));
    return end_unit(o, QSF_PHASE_HEAD);
}

static void begin_pass(qsf_forward *f, const qsf_chunk *chunk)
{
    const bool is_whole = count_head_rows(chunk) > 0 || f->ops.stream->reader->is_without_head;
    qsf_stream_begin_pass(f->ops.stream, is_whole, chunk->cancel, chunk->stopwatch);
}

static qsf_status run_layers(qsf_forward *f, const qsf_chunk *chunk, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++) {
        QSF_FAIL_IF(qsf_cancel_is_set(chunk->cancel), CANCELLED,
                    "cancelled before running layer %u", i);
        if (chunk->before_layer != NULL && chunk->before_layer(chunk->before_layer_arg))
            begin_pass(f, chunk); /* the ring may have been replaced */
        QSF_TRY(run_layer(f, chunk, i));
    }
    return QSF_OK;
}

static qsf_mtp mtp_of(qsf_forward *f)
{
    return (qsf_mtp){&f->ops, &f->embedding, f->ends->embedding};
}

static qsf_status store_mtp(qsf_forward *f, const qsf_chunk *chunk)
{
    const qsf_mtp mtp = mtp_of(f);
    const qsf_layer *const l = &f->ops.config->layers[f->ops.config->n_trunk_layers];
    f->ops.kind = l->kind;
    QSF_TRY(begin_unit(&f->ops, l->unit_idx));
    QSF_TRY(qsf_mtp_store(&mtp, chunk));
    return end_unit(&f->ops, QSF_PHASE_OTHER);
}

static qsf_status run_units(qsf_forward *f, const qsf_chunk *whole)
{
    const qsf_config *const c = f->ops.config;
    qsf_chunk chunk = *whole;
    f->ops.n_tokens = chunk.n_tokens;
    place_rows(&f->ops, &chunk);
    QSF_TRY(embed(f, &chunk));
    qsf_stopwatch_lap(chunk.stopwatch, QSF_PHASE_EMBEDDING);
    const bool has_mtp = c->n_trunk_layers < c->n_layers;
    QSF_TRY(run_layers(f, &chunk, 0, has_mtp ? c->n_trunk_layers : c->n_storing_layers));
    if (has_mtp)
        QSF_TRY(store_mtp(f, &chunk));
    if (f->ops.stream->reader->is_without_head) /* the next stage needs all rows */
        return run_layers(f, &chunk, c->n_storing_layers, c->n_layers);
    if (count_head_rows(&chunk) == 0)
        return QSF_OK;
    end_rows(f, &chunk);
    QSF_TRY(run_layers(f, &chunk, c->n_storing_layers, c->n_layers));
    return run_head(f, &chunk, false);
}

qsf_status qsf_forward_run(qsf_forward *f, const qsf_chunk *chunk)
{
    f->ops.stopwatch = chunk->stopwatch;
    begin_pass(f, chunk);
    qsf_experts_begin_pass(f->ops.experts, chunk->n_tokens, chunk->cancel, chunk->stopwatch);
    const qsf_status status = run_units(f, chunk);
    if (status != QSF_OK)
        qsf_stream_abandon(f->ops.stream);
    qsf_experts_end_pass(f->ops.experts);
    qsf_stream_end_pass(f->ops.stream);
    f->ops.stopwatch = NULL;
    return status;
}

/* Runs the MTP head and the model's head for one token. */
static qsf_status run_guess(qsf_forward *f, const qsf_chunk *chunk, const float *hidden)
{
    qsf_ops *const o = &f->ops;
    const uint32_t layer_idx = o->config->n_trunk_layers;
    const qsf_layer *const l = &o->config->layers[layer_idx];
    const uint32_t n_seen =
        chunk->segments->first_position + 1 - chunk->segments->sequence->mtp_begin;
    qsf_layer_kind kind = *l->kind; /* sees only positions for which there are keys */
    if (kind.window_tokens == 0 || kind.window_tokens > n_seen)
        kind.window_tokens = n_seen;
    qsf_norm_weights end = {0};
    const qsf_mtp mtp = mtp_of(f);
    o->kind = &kind;
    o->n_tokens = 1;
    place_rows(o, chunk);
    QSF_TRY(begin_unit(o, l->unit_idx));
    QSF_TRY(qsf_mtp_begin(&mtp, chunk->tokens[0], hidden));
    QSF_TRY(qsf_mixers[kind.mixer].run(o, l, chunk, layer_idx));
    QSF_TRY(qsf_ffn_run(o, l, layer_idx));
    QSF_TRY(end_layer(o, l));
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_MTP_END_NORM], 0, &end.weight));
    qsf_ops_norm(o, o->scratch->x, &end, o->scratch->normed);
    QSF_TRY(end_unit(o, QSF_PHASE_OTHER));
    QSF_TRY(run_head(f, chunk, true));
    f->hidden = o->scratch->normed;
    return QSF_OK;
}

qsf_status qsf_forward_guess(qsf_forward *f, const qsf_segment *segment, uint32_t token,
                             const float *hidden, float *logits)
{
    const qsf_config *const c = f->ops.config;
    const qsf_chunk chunk = {.tokens = &token,
                             .n_tokens = 1,
                             .segments = segment,
                             .n_segments = 1,
                             .n_logits_rows = 1,
                             .logits = logits};
    const uint32_t units[] = {c->layers[c->n_trunk_layers].unit_idx, f->ends->final_norm->unit_idx,
                              f->ends->head->unit_idx};
    bool is_streamed = false;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        is_streamed |= !qsf_stream_is_resident(f->ops.stream, units[i]);
    if (is_streamed) /* else the stream goes on with reading for the next pass */
        begin_pass(f, &chunk);
    qsf_experts_begin_pass(f->ops.experts, 1, NULL, NULL);
    const qsf_status status = run_guess(f, &chunk, hidden);
    if (status != QSF_OK)
        qsf_stream_abandon(f->ops.stream);
    qsf_experts_end_pass(f->ops.experts);
    f->ops.kind = NULL;
    return status;
}

float *qsf_forward_joined(qsf_forward *f)
{
    return f->ops.scratch->up;
}

/* x = join @ the joined input; then the layers and the head, as of a pass of one token. */
static qsf_status run_lent(qsf_forward *f, const qsf_chunk *chunk)
{
    qsf_ops *const o = &f->ops;
    const qsf_scratch *const s = o->scratch;
    const qsf_linear join = qsf_linear_of(f->ends->join, s->x, s->dim_stride);
    o->n_tokens = 1;
    place_rows(o, chunk);
    QSF_TRY(begin_unit(o, f->ends->join->unit_idx));
    const qsf_acts in = qsf_ops_prepare(o, s->up, 2 * o->config->target_dim, NULL, NULL);
    QSF_TRY(qsf_linear_run(o, &join, 1, &in));
    QSF_TRY(end_unit(o, QSF_PHASE_OTHER));
    QSF_TRY(run_layers(f, chunk, 0, o->config->n_layers));
    return run_head(f, chunk, false);
}

qsf_status qsf_forward_lent(qsf_forward *f, const qsf_segment *segment, float *logits)
{
    static const uint32_t first_row = 0;
    const qsf_chunk chunk = {.n_tokens = 1,
                             .segments = segment,
                             .n_segments = 1,
                             .head_rows = &first_row,
                             .n_logits_rows = 1,
                             .logits = logits};
    qsf_experts_begin_pass(f->ops.experts, 1, NULL, NULL);
    const qsf_status status = run_lent(f, &chunk);
    if (status != QSF_OK)
        qsf_stream_abandon(f->ops.stream);
    qsf_experts_end_pass(f->ops.experts);
    f->ops.kind = NULL;
    return status;
}

/* ---- the MTP head: joins embeddings and hidden states, and stores what later guesses need ---- */

static const qsf_layer *layer_of(const qsf_mtp *m)
{
    return &m->ops->config->layers[m->ops->config->n_trunk_layers];
}

/* The norms of the input */
typedef struct input_norms {
    qsf_norm_weights trunk;
    qsf_norm_weights token;
    qsf_norm_weights hidden;
} input_norms;

static qsf_status load_norms(const qsf_mtp *m, input_norms *out)
{
    const qsf_tensor *const *const t = layer_of(m)->tensors;
    *out = (input_norms){0};
    QSF_TRY(qsf_block_load(m->ops, t[QSF_LAYER_MTP_TRUNK_NORM], 0, &out->trunk.weight));
    QSF_TRY(qsf_block_load(m->ops, t[QSF_LAYER_MTP_TOKEN_NORM], 1, &out->token.weight));
    return qsf_block_load(m->ops, t[QSF_LAYER_MTP_HIDDEN_NORM], 2, &out->hidden.weight);
}

/* gate[row] = [norm(embedding of the token) | norm(hidden)], zeros if hidden is NULL */
static qsf_status fill_row(const qsf_mtp *m, const input_norms *norms, size_t row, uint32_t token,
                           const float *hidden)
{
    qsf_ops *const o = m->ops;
    const size_t dim = o->config->dim;
    float *const to = o->scratch->gate + row * qsf_stride(2 * o->config->dim);
    QSF_TRY(qsf_embedding_row(m->embedding, o->stream, o->kernels, m->table, token, to));
    if (o->config->embedding_factor != 1.0F)
        o->kernels->scale(to, o->config->embedding_factor, dim);
    qsf_ops_norm_row(o, to, &norms->token, dim, to);
    if (hidden != NULL)
        qsf_ops_norm_row(o, hidden, &norms->hidden, dim, to + dim);
    else
        memset(to + dim, 0, dim * sizeof *to);
    return QSF_OK;
}

/* out [n_tokens, dim_stride] = join @ gate */
static qsf_status join(const qsf_mtp *m, float *out)
{
    qsf_ops *const o = m->ops;
    const qsf_linear product =
        qsf_linear_of(layer_of(m)->tensors[QSF_LAYER_MTP_JOIN], out, o->scratch->dim_stride);
    const qsf_acts in = qsf_ops_prepare(o, o->scratch->gate, 2 * o->config->dim, NULL, NULL);
    return qsf_linear_run(o, &product, 1, &in);
}

/* Makes the inputs of a segment's rows; hidden states of the trunk are in `normed`. */
static qsf_status fill_segment(const qsf_mtp *m, const qsf_chunk *chunk, const qsf_segment *g,
                               const input_norms *norms)
{
    const size_t stride = m->ops->scratch->dim_stride;
    const float *const rows = m->ops->scratch->normed + g->first_row * stride;
    const uint32_t *const tokens = chunk->tokens + g->first_row;
    qsf_sequence *const q = g->sequence;
    const float *hidden =
        g->first_position == 0 ? NULL : qsf_sequence_hidden(q, g->first_position - 1, stride);
    if (g->first_position == 0 || g->first_position < q->mtp_begin)
        q->mtp_begin = g->first_position + 1;
    for (uint32_t t = 0; t < g->n_tokens; t++, hidden = rows + (t - 1) * stride)
        QSF_TRY(fill_row(m, norms, g->first_row + t, tokens[t], hidden));
    qsf_sequence_keep_hidden(q, g->first_position + g->n_tokens, rows, g->n_tokens, stride);
    return QSF_OK;
}

qsf_status qsf_mtp_store(const qsf_mtp *m, const qsf_chunk *chunk)
{
    qsf_ops *const o = m->ops;
    qsf_scratch *const scratch = o->scratch;
    qsf_scratch apart = *scratch; /* the residual of the trunk stays */
    input_norms norms;
    QSF_TRY(load_norms(m, &norms));
    qsf_ops_norm(o, scratch->x, &norms.trunk, scratch->normed);
    for (uint32_t i = 0; i < chunk->n_segments; i++)
        QSF_TRY(fill_segment(m, chunk, &chunk->segments[i], &norms));
    QSF_TRY(join(m, scratch->y));
    apart.x = scratch->y;
    o->scratch = &apart;
    o->stores_only = true;
    const qsf_status status =
        qsf_mixers[o->kind->mixer].run(o, layer_of(m), chunk, o->config->n_trunk_layers);
    o->stores_only = false;
    o->scratch = scratch;
    return status;
}

qsf_status qsf_mtp_begin(const qsf_mtp *m, uint32_t token, const float *hidden)
{
    input_norms norms;
    QSF_TRY(load_norms(m, &norms));
    QSF_TRY(fill_row(m, &norms, 0, token, hidden));
    return join(m, m->ops->scratch->x);
}

/* ---- rows of the embedding table ---- */

void qsf_embedding_layout(qsf_embedding *e, qsf_arena *a, const qsf_config *c, uint32_t n_rows)
{
    *e = (qsf_embedding){.n_rows = QSF_MIN(n_rows, c->n_vocab),
                         .dim_stride = qsf_round_up(c->dim, QSF_BLOCK)};
    if (e->n_rows == 0)
        return;
    e->n_buckets = 1;
    while (e->n_buckets < e->n_rows)
        e->n_buckets *= 2;
    const size_t n_places = (size_t)e->n_rows + 1;
    e->rows = qsf_arena_push(a, e->n_rows, e->dim_stride * sizeof *e->rows);
    e->tokens = qsf_arena_push(a, n_places, sizeof *e->tokens);
    e->newer = qsf_arena_push(a, n_places, sizeof *e->newer);
    e->older = qsf_arena_push(a, n_places, sizeof *e->older);
    e->chain = qsf_arena_push(a, n_places, sizeof *e->chain);
    e->buckets = qsf_arena_push(a, e->n_buckets, sizeof *e->buckets);
}

/* Tokens are small dense numbers, so their low bits are a good hash. */
static uint32_t *bucket_of(const qsf_embedding *e, uint32_t token)
{
    return &e->buckets[token & (e->n_buckets - 1)];
}

static float *row_at(const qsf_embedding *e, uint32_t place)
{
    return e->rows + (size_t)(place - 1) * e->dim_stride;
}

/* Returns the place of a token; 0: not in the cache. */
static uint32_t find(const qsf_embedding *e, uint32_t token)
{
    uint32_t place = *bucket_of(e, token);
    while (place != 0 && e->tokens[place] != token)
        place = e->chain[place];
    return place;
}

/* Removes a place from the list. */
static void unlink_place(qsf_embedding *e, uint32_t place)
{
    e->newer[e->older[place]] = e->newer[place];
    e->older[e->newer[place]] = e->older[place];
}

/* Adds a place to the list, as the newest. */
static void link_newest(qsf_embedding *e, uint32_t place)
{
    const uint32_t next = e->older[0];
    e->older[place] = next;
    e->newer[place] = 0;
    e->newer[next] = place;
    e->older[0] = place;
}

/* Removes the oldest place from the list and from its bucket, and returns it. */
static uint32_t evict(qsf_embedding *e)
{
    const uint32_t place = e->newer[0];
    uint32_t *at = bucket_of(e, e->tokens[place]);
    while (*at != place)
        at = &e->chain[*at];
    *at = e->chain[place];
    unlink_place(e, place);
    return place;
}

static void keep(qsf_embedding *e, uint32_t token, const float *x)
{
    const uint32_t place = e->n_used < e->n_rows ? ++e->n_used : evict(e);
    uint32_t *const bucket = bucket_of(e, token);
    memcpy(row_at(e, place), x, e->dim_stride * sizeof *x);
    e->tokens[place] = token;
    e->chain[place] = *bucket;
    *bucket = place;
    link_newest(e, place);
}

qsf_status qsf_embedding_decode(qsf_stream *stream, const qsf_kernels *kernels,
                                const qsf_tensor *table, uint32_t token, float *x)
{
    const unsigned char *band;
    QSF_TRY(qsf_stream_table_band(stream, table, token / QSF_TILE_ROWS, &band));
    kernels->dequant_row[table->dtype](band, qsf_ceil_div(table->n_cols, QSF_BLOCK),
                                       token % QSF_TILE_ROWS, x);
    return QSF_OK;
}

qsf_status qsf_embedding_row(qsf_embedding *e, qsf_stream *stream, const qsf_kernels *kernels,
                             const qsf_tensor *table, uint32_t token, float *x)
{
    assert(e->n_rows == 0 || e->dim_stride == qsf_round_up(table->n_cols, QSF_BLOCK));
    if (stream->resident[0] != NULL)
        return qsf_embedding_decode(stream, kernels, table, token, x);
    const uint32_t place = e->n_rows > 0 ? find(e, token) : 0;
    if (place != 0) {
        memcpy(x, row_at(e, place), e->dim_stride * sizeof *x);
        unlink_place(e, place);
        link_newest(e, place);
    } else {
        QSF_TRY(qsf_embedding_decode(stream, kernels, table, token, x));
        if (e->n_rows > 0)
            keep(e, token, x);
    }
    e->n_requested++;
    e->n_hits += place != 0;
    return QSF_OK;
}
