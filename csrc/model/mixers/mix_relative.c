/* mix_relative.c - attention with learned biases of distance, and the residual blocks around it
 * (Inkling 2). docs/format.md, section 7, has the formulas.
 *
 * Four convolutions of a visit have one state: those of keys, of values, of what attention puts
 * out, and of what the FFN does. So has a row of the log.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mixers.h"

#include <math.h>
#include <string.h>

#include "base/status.h"
#include "model/linear.h"

/* ---- the convolutions: out = (sum of taps + the row itself) * factor ---- */

typedef enum part { PART_KEYS, PART_VALUES, PART_MIXER, PART_FFN, N_PARTS } part;

/* Channels of the convolutions before part i; i = N_PARTS: of all */
static size_t channels_before(const qsf_layer_kind *k, uint32_t dim, part i)
{
    const size_t kv_dim = qsf_kv_dim(k);
    return i <= PART_MIXER ? i * kv_dim : 2 * kv_dim + (size_t)(i - PART_MIXER) * dim;
}

static void replay(const qsf_state_layer *l, const qsf_state_tools *tools, const float *from,
                   const float *rows, size_t n_rows, float *to)
{
    (void)tools;
    const size_t n_kept = l->kind->n_taps - 1;
    const uint32_t dim = (uint32_t)(l->row_floats / 2) - qsf_kv_dim(l->kind);
    for (part i = PART_KEYS; i < N_PARTS; i++) {
        const size_t first = channels_before(l->kind, dim, i);
        qsf_convolution_replay(l, n_kept, channels_before(l->kind, dim, i + 1) - first,
                               from != NULL ? from + n_kept * first : NULL, rows + first, n_rows,
                               to + n_kept * first);
    }
}

void qsf_mix_relative_describe(const qsf_config *c, uint32_t layer, qsf_state_layer *out)
{
    const qsf_layer_kind *const k = c->layers[layer].kind;
    out->row_floats = channels_before(k, c->dim, N_PARTS);
    out->state_floats = qsf_convolution_floats(k, out->row_floats);
    out->replay = replay;
    out->kind = k;
}

/* The arguments of the parallel loops over channels */
typedef struct smooth_job {
    qsf_convolution conv;
    const qsf_chunk *chunk;
    const float *taps; /* of each token: [chunk, tap_stride], those of a head together; or NULL */
    size_t tap_stride;
    float *out; /* as the rows of conv */
    bool begins_block;
} smooth_job;

static smooth_job smooth_of(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer_idx, part i,
                            const float *w)
{
    const qsf_scratch *const s = o->scratch;
    const size_t first = channels_before(o->kind, o->config->dim, i);
    const bool is_of_heads = i == PART_KEYS || i == PART_VALUES;
    const bool has_taps = is_of_heads && o->kind->has_own_inputs != 0;
    const size_t n_taps = (size_t)o->kind->n_kv_heads * o->kind->n_taps;
    return (smooth_job){
        .conv = {.ops = o,
                 .layer_idx = layer_idx,
                 .rows = i == PART_KEYS     ? s->k
                         : i == PART_VALUES ? s->v
                                            : s->y,
                 .stride = is_of_heads ? qsf_stride(qsf_kv_dim(o->kind)) : s->dim_stride,
                 .n_channels = channels_before(o->kind, o->config->dim, i + 1) - first,
                 .first = first,
                 .w = w},
        .chunk = chunk,
        .taps = has_taps ? s->steps + (i == PART_VALUES ? n_taps : 0) : NULL,
        .tap_stride = 2 * n_taps,
        .out = is_of_heads ? s->attended : s->normed,
    };
}

/* Convolves channels begin .. end - 1, of one head if there are taps, and stores their state. */
static void smooth(const smooth_job *job, size_t begin, size_t end)
{
    const qsf_convolution *const c = &job->conv;
    const qsf_kernels *const k = c->ops->kernels;
    const size_t n_taps = c->ops->kind->n_taps;
    const size_t n_added = (job->taps != NULL ? 2 : 1) * n_taps + 1;
    const float factor = 1.0F / sqrtf((float)n_added);
    for (uint32_t i = 0; i < job->chunk->n_segments; i++) {
        const qsf_segment *const g = &job->chunk->segments[i];
        for (uint32_t t = 0; t < g->n_tokens; t++) {
            const size_t row = (size_t)g->first_row + t;
            float *const out = job->out + row * c->stride + begin;
            qsf_convolution_row(c, g, t, begin, end, out);
            for (size_t lag = 0; job->taps != NULL && lag < n_taps; lag++)
                k->add_scaled(
                    out,
                    qsf_convolution_at(c, g, (int64_t)g->first_position + t - (int64_t)lag) + begin,
                    job->taps[row * job->tap_stride + begin / c->ops->kind->head_dim * n_taps +
                              lag],
                    end - begin);
            k->add(out, c->rows + row * c->stride + begin, end - begin);
            k->scale(out, factor, end - begin);
        }
        qsf_convolution_keep(c, g, begin, end);
    }
}

/* Begins a residual with the convolved rows, after a block has ended, or adds them to it. */
static void add_smooth(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const smooth_job *const job = arg;
    const qsf_ops *const o = job->conv.ops;
    (void)worker_idx;
    smooth(job, begin, end);
    for (size_t t = 0; t < o->n_tokens; t++) {
        float *const x = o->scratch->x + t * job->conv.stride + begin;
        const float *const y = job->out + t * job->conv.stride + begin;
        if (job->begins_block)
            memcpy(x, y, (end - begin) * sizeof *x);
        else
            o->kernels->add(x, y, end - begin);
    }
}

static qsf_status run_smooth(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                             uint32_t layer_idx, part i, bool begins_block)
{
    const float *w;
    QSF_TRY(qsf_ops_load_vector(o,
                                l->tensors[i == PART_FFN ? QSF_LAYER_FFN_CONV : QSF_LAYER_MIX_CONV],
                                o->scratch->conv, &w));
    smooth_job job = smooth_of(o, chunk, layer_idx, i, w);
    job.begins_block = begins_block;
    qsf_pool_run(o->pool, o->config->dim, qsf_ops_piece(o->n_tokens * (size_t)o->kind->n_taps),
                 add_smooth, &job);
    return QSF_OK;
}

qsf_status qsf_relative_end(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                            uint32_t layer_idx)
{
    return run_smooth(o, l, chunk, layer_idx, PART_FFN, false);
}

/* ---- residual blocks ---- */

#define RETRIEVAL_EPSILON 1e-6F

/* Softmax over the rows of a token: those of the blocks that have ended, and the last one */
typedef struct retrieval {
    const qsf_ops *ops;
    const float *blocks; /* [n, chunk_tokens, dim_stride] */
    size_t n;
    const float *last;  /* [n_tokens, dim_stride]; likewise out */
    const float *query; /* [dim] */
    float *out;
} retrieval;

static void retrieve_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const retrieval *const job = arg;
    const qsf_ops *const o = job->ops;
    const size_t stride = o->scratch->dim_stride;
    const uint32_t dim = o->config->dim;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        const float *rows[QSF_MAX_BLOCKS + 1];
        float factors[QSF_MAX_BLOCKS + 1]; /* of the rows' norms */
        float scores[QSF_MAX_BLOCKS + 1];
        float e[QSF_MAX_BLOCKS + 1];
        float total;
        float max = -INFINITY;
        float *const out = job->out + t * stride;
        for (size_t i = 0; i <= job->n; i++) {
            rows[i] = i == job->n ? job->last + t * stride
                                  : job->blocks + (i * o->scratch->chunk_tokens + t) * stride;
            factors[i] =
                1.0F / sqrtf(qsf_ops_dot(rows[i], rows[i], dim) / (float)dim + RETRIEVAL_EPSILON);
            scores[i] = qsf_ops_dot(job->query, rows[i], dim) * factors[i] / sqrtf((float)dim);
            max = scores[i] > max ? scores[i] : max;
        }
        o->kernels->weigh(scores, job->n + 1, max, 1.0F, 0.0F, e, &total);
        memset(out, 0, stride * sizeof *out);
        for (size_t i = 0; i <= job->n; i++)
            o->kernels->add_scaled(out, rows[i], e[i] / total * factors[i], dim);
    }
}

static void retrieve(qsf_ops *o, retrieval *job)
{
    job->ops = o;
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece((job->n + 1) * 3 * (size_t)o->config->dim),
                 retrieve_rows, job);
}

/* out = what a query finds in the blocks before a layer, or after its mixer, and in x */
static void retrieve_blocks(qsf_ops *o, uint32_t end_layer, const float *query, float *out)
{
    const qsf_scratch *const s = o->scratch;
    retrieve(o,
             &(retrieval){.blocks = s->blocks,
                          .n = (end_layer + o->config->block_layers - 1) / o->config->block_layers,
                          .last = s->x,
                          .query = query,
                          .out = out});
}

qsf_status qsf_relative_final(qsf_ops *o, const qsf_tensor *query, uint32_t n_layers)
{
    const float *weight;
    QSF_TRY(qsf_ops_load_vector(o, query, o->scratch->queries, &weight));
    retrieve_blocks(o, n_layers, weight, o->scratch->y);
    return QSF_OK;
}

/* Keeps what the last pass over the looped layers made, and goes back to what was before it. */
static void begin_again(const qsf_ops *o)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_config *const c = o->config;
    const size_t block = (size_t)s->chunk_tokens * s->dim_stride;
    const size_t first = c->loop_begin / c->block_layers;
    const size_t n_bytes = o->n_tokens * s->dim_stride * sizeof *s->x;
    for (size_t i = 0; i < c->n_loop_blocks; i++)
        memcpy(s->messages + i * block,
               i + 1 < c->n_loop_blocks ? s->blocks + (first + 1 + i) * block : s->x, n_bytes);
    memcpy(s->x, s->blocks + first * block, n_bytes);
}

/* The argument of gate_rows */
typedef struct gate_job {
    const qsf_ops *ops;
    float *x;             /* [n_tokens, dim_stride], likewise the next three */
    const float *message; /* x = (1 - tanh(forget)) * x + tanh(gain) * message */
    float *forget;
    float *gain;
} gate_job;

/* gate = [norm(x) | norm(message)] */
static void join_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const gate_job *const job = arg;
    const qsf_scratch *const s = job->ops->scratch;
    const uint32_t dim = job->ops->config->dim;
    const qsf_norm_weights ones = {.weight = s->ones};
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        float *const to = s->gate + t * qsf_stride(2 * dim);
        qsf_ops_norm_row(job->ops, job->x + t * s->dim_stride, &ones, dim, to);
        qsf_ops_norm_row(job->ops, job->message + t * s->dim_stride, &ones, dim, to + dim);
    }
}

static void gate_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const gate_job *const job = arg;
    const qsf_kernels *const k = job->ops->kernels;
    const size_t stride = job->ops->scratch->dim_stride;
    const uint32_t dim = job->ops->config->dim;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        float *const x = job->x + t * stride;
        float *const forget = job->forget + t * stride;
        float *const gain = job->gain + t * stride;
        k->cap(forget, 1.0F, 1.0F, dim);
        k->cap(gain, 1.0F, 1.0F, dim);
        k->mul(forget, x, dim);
        k->mul(gain, job->message + t * stride, dim);
        k->add_scaled(x, forget, -1.0F, dim);
        k->add(x, gain, dim);
    }
}

/* Gates what message query i finds in the last pass into x [n_tokens, dim_stride], with the three
 * matrices from `down` on. */
static qsf_status add_message(qsf_ops *o, const qsf_layer *l, qsf_layer_tensor down,
                              const float *query, float *x)
{
    const qsf_scratch *const s = o->scratch;
    const uint32_t dim = o->config->dim;
    const size_t rank_stride = qsf_stride(o->kind->message_rank);
    const size_t block = (size_t)s->chunk_tokens * s->dim_stride;
    gate_job job = {o, x, s->attended, s->up, s->up + o->n_tokens * s->dim_stride};
    const qsf_linear first = qsf_linear_of(l->tensors[down], s->mix_gate, rank_stride);
    const qsf_linear gates[] = {
        qsf_linear_of(l->tensors[down + 1], job.forget, s->dim_stride),
        qsf_linear_of(l->tensors[down + 2], job.gain, s->dim_stride),
    };
    retrieve(o, &(retrieval){.blocks = s->messages,
                             .n = o->config->n_loop_blocks - 1,
                             .last = s->messages + (o->config->n_loop_blocks - 1) * block,
                             .query = query,
                             .out = s->attended});
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(4 * (size_t)dim), join_rows, &job);
    qsf_acts in = qsf_ops_prepare(o, s->gate, 2 * dim, NULL, NULL);
    QSF_TRY(qsf_linear_run(o, &first, 1, &in));
    in = qsf_ops_prepare(o, s->mix_gate, o->kind->message_rank, NULL, NULL);
    QSF_TRY(qsf_linear_run(o, gates, 2, &in));
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(8 * (size_t)dim), gate_rows, &job);
    return QSF_OK;
}

/* ---- projections ---- */

/* The vectors of a layer, and its rows */
typedef struct relative_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer_idx;
    const float *queries; /* [1 or 3, dim], or NULL */
    const float *messages;
    const float *norms[3]; /* of the inputs of q, k and v; the last two may be NULL */
    const float *q_scale;
    const float *relative_scale;
    const float *profiles;
    const float *convs[2];
    float *inputs[3]; /* [n_tokens, dim_stride] of q, k and v */
} relative_job;

static qsf_status load_vectors(qsf_ops *o, const qsf_layer *l, relative_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const size_t n_queries = 3 * (size_t)o->config->dim;
    const size_t n_conv = o->kind->n_taps * (size_t)qsf_kv_dim(o->kind);
    const struct {
        qsf_layer_tensor tensor;
        float *space;
        const float **out;
    } loads[] = {
        {QSF_LAYER_BLOCK_QUERIES, s->queries, &job->queries},
        {QSF_LAYER_MESSAGE_QUERIES, s->queries + n_queries, &job->messages},
        {QSF_LAYER_ATTN_NORM, s->vectors[0], &job->norms[0]},
        {QSF_LAYER_K_INPUT_NORM, s->vectors[1], &job->norms[1]},
        {QSF_LAYER_V_INPUT_NORM, s->vectors[2], &job->norms[2]},
        {QSF_LAYER_Q_SCALE, s->vectors[3], &job->q_scale},
        {QSF_LAYER_RELATIVE_SCALE, s->qk_norms[0], &job->relative_scale},
        {QSF_LAYER_PROFILES, s->profiles, &job->profiles},
        {QSF_LAYER_K_CONV, s->conv, &job->convs[0]},
        {QSF_LAYER_V_CONV, s->conv + n_conv, &job->convs[1]},
    };
    for (size_t i = 0; i < sizeof loads / sizeof loads[0]; i++)
        QSF_TRY(qsf_ops_load_vector(o, l->tensors[loads[i].tensor], loads[i].space, loads[i].out));
    return QSF_OK;
}

/* Fills the inputs: each of its own where the layer or a message makes them differ. */
static qsf_status make_inputs(qsf_ops *o, const qsf_layer *l, uint32_t layer, relative_job *job)
{
    static const qsf_layer_tensor gates[] = {QSF_LAYER_Q_GATE_DOWN, QSF_LAYER_K_GATE_DOWN,
                                             QSF_LAYER_V_GATE_DOWN};
    const qsf_scratch *const s = o->scratch;
    const size_t dim = o->config->dim;
    const bool is_own = o->kind->has_own_inputs != 0;
    float *const spaces[] = {s->input, s->normed, s->y};
    for (size_t i = 0; i < 3; i++) {
        job->inputs[i] = is_own || l->loop != 0 ? spaces[i] : spaces[0];
        if (job->inputs[i] != spaces[i])
            continue;
        const qsf_norm_weights norm = {.weight = job->norms[is_own ? i : 0]};
        if (job->queries != NULL)
            retrieve_blocks(o, layer, job->queries + (is_own ? i * dim : 0), spaces[i]);
        else
            memcpy(spaces[i], s->x, o->n_tokens * s->dim_stride * sizeof *s->x);
        if (l->loop != 0)
            QSF_TRY(add_message(o, l, gates[i], job->messages + i * dim, spaces[i]));
        if (norm.weight != NULL)
            qsf_ops_norm(o, spaces[i], &norm, spaces[i]);
    }
    return QSF_OK;
}

/* x [n] *= limit / its length, if that is above the limit */
static void limit_length(const qsf_ops *o, float *x, float limit, uint32_t n)
{
    const float factor = limit / (sqrtf(qsf_ops_dot(x, x, n)) + 1e-6F);
    if (factor < 1.0F)
        o->kernels->scale(x, factor, n);
}

static void q_epilogue(const void *arg, size_t begin, size_t end)
{
    const relative_job *const job = arg;
    const qsf_ops *const o = job->ops;
    const uint32_t head_dim = o->kind->head_dim;
    for (size_t at = begin; at < end; at += head_dim) {
        for (size_t t = 0; t < o->n_tokens; t++) {
            float *const q = o->scratch->q + t * qsf_stride(qsf_q_dim(o->kind)) + at;
            o->kernels->mul(q, job->q_scale + at, head_dim);
            limit_length(o, q, o->kind->length_limit, head_dim);
        }
        qsf_heads_finish_q(o, NULL, (uint32_t)(at / head_dim), 0, o->n_tokens);
    }
}

static size_t relative_stride(const qsf_layer_kind *k)
{
    return qsf_stride(k->n_heads * k->relative_dim);
}

static void relative_epilogue(const void *arg, size_t begin, size_t end)
{
    const relative_job *const job = arg;
    const qsf_ops *const o = job->ops;
    const uint32_t dim = o->kind->relative_dim;
    for (size_t at = begin; at < end; at += dim)
        for (size_t t = 0; t < o->n_tokens; t++) {
            float *const r = o->scratch->relative + t * relative_stride(o->kind) + at;
            o->kernels->mul(r, job->relative_scale + at, dim);
            limit_length(o, r, o->kind->relative_limit, dim);
            qsf_heads_heat(o, r, dim, t);
        }
}

/* Convolves keys and values of KV heads begin .. end - 1, and stores them. */
static void store_heads(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const relative_job *const job = arg;
    const qsf_ops *const o = job->ops;
    const size_t head_dim = o->kind->head_dim;
    const size_t stride = qsf_stride(qsf_kv_dim(o->kind));
    (void)worker_idx;
    for (size_t head = begin; head < end; head++)
        for (part i = PART_KEYS; i <= PART_VALUES; i++) {
            const smooth_job conv = smooth_of(o, job->chunk, job->layer_idx, i, job->convs[i]);
            float *const rows = (i == PART_KEYS ? o->scratch->k : o->scratch->v) + head * head_dim;
            smooth(&conv, head * head_dim, (head + 1) * head_dim);
            for (size_t t = 0; t < o->n_tokens; t++) {
                memcpy(rows + t * stride, conv.out + t * stride + head * head_dim,
                       head_dim * sizeof *rows);
                if (i == PART_KEYS)
                    limit_length(o, rows + t * stride, o->kind->length_limit, (uint32_t)head_dim);
            }
            if (i == PART_KEYS)
                qsf_heads_store_k(o, job->chunk, job->layer_idx, NULL, (uint32_t)head, 0,
                                  o->n_tokens);
            else
                qsf_heads_store_v(o, job->chunk, job->layer_idx, (uint32_t)head);
        }
}

/* Runs a matrix on an input. */
static qsf_status project(qsf_ops *o, const qsf_linear *linears, size_t n, float *input)
{
    const qsf_acts in = qsf_ops_prepare(o, input, o->config->dim, NULL, NULL);
    return qsf_linear_run(o, linears, n, &in);
}

/* Computes what attention reads; k and v go to the cache. */
static qsf_status project_all(qsf_ops *o, const qsf_layer *l, relative_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_tensor *const *const t = l->tensors;
    const qsf_layer_kind *const kind = o->kind;
    const size_t kv_stride = qsf_stride(qsf_kv_dim(kind));
    const size_t n_taps = (size_t)kind->n_kv_heads * kind->n_taps;
    qsf_linear qkv[] = {
        qsf_linear_of(t[QSF_LAYER_Q], s->q, qsf_stride(qsf_q_dim(kind))),
        qsf_linear_of(t[QSF_LAYER_K], s->k, kv_stride),
        qsf_linear_of(t[QSF_LAYER_V], s->v, kv_stride),
    };
    qsf_linear rest[] = {
        qsf_linear_of(t[QSF_LAYER_MIX_GATE], s->mix_gate, qsf_stride(qsf_q_dim(kind))),
        qsf_linear_of(t[QSF_LAYER_RELATIVE], s->relative, relative_stride(kind)),
        qsf_linear_of(t[QSF_LAYER_TOKEN_SINKS], s->sinks, qsf_stride(kind->n_heads)),
    };
    qkv[0].epilogue = q_epilogue;
    qkv[0].epilogue_arg = rest[1].epilogue_arg = job;
    qkv[0].group_rows = kind->head_dim;
    rest[1].epilogue = relative_epilogue;
    rest[1].group_rows = kind->relative_dim;
    QSF_TRY(qsf_block_load_side(o, l, QSF_LAYER_Q, 3, qkv));
    for (size_t i = 0; i < 3; i++)
        QSF_TRY(project(o, &qkv[i], 1, job->inputs[i]));
    for (size_t i = 0; kind->has_own_inputs != 0 && i < 2; i++) {
        const qsf_linear taps =
            qsf_linear_of(t[QSF_LAYER_K_TAPS + i], s->steps + i * n_taps, 2 * n_taps);
        QSF_TRY(project(o, &taps, 1, job->inputs[1 + i]));
    }
    QSF_TRY(project(o, rest, sizeof rest / sizeof rest[0], job->inputs[0]));
    qsf_pool_run(o->pool, kind->n_kv_heads,
                 qsf_ops_piece(2 * o->n_tokens * (size_t)kind->n_taps * kind->head_dim),
                 store_heads, job);
    return QSF_OK;
}

qsf_status qsf_mix_relative(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                            uint32_t layer_idx)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_config *const c = o->config;
    const uint32_t layer = l->pass_idx;
    const bool begins_block = layer % c->block_layers == 0;
    relative_job job = {.ops = o, .chunk = chunk, .layer_idx = layer_idx};
    for (size_t i = 0; i < c->ones; i++)
        s->ones[i] = 1.0F;
    if (l->loop != 0 && layer == c->loop_begin)
        begin_again(o);
    QSF_TRY(load_vectors(o, l, &job));
    QSF_TRY(make_inputs(o, l, layer, &job));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    QSF_TRY(project_all(o, l, &job));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    const qsf_score_terms terms = {
        .sinks = s->sinks,
        .sink_stride = qsf_stride(o->kind->n_heads),
        .relative = s->relative,
        .relative_stride = relative_stride(o->kind),
        .profiles = job.profiles,
    };
    QSF_TRY(qsf_attention_run(o, chunk, layer_idx, &terms));
    float *const attended = qsf_attention_gate(o);
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    const qsf_block_end end = {.w = l->tensors[QSF_LAYER_ATTN_OUT],
                               .bias = l->tensors[QSF_LAYER_ATTN_OUT_BIAS],
                               .outliers = l->outliers[QSF_LAYER_ATTN_OUT],
                               .low_rank = l->low_rank[QSF_LAYER_ATTN_OUT],
                               .is_kept = true};
    qsf_acts in;
    QSF_TRY(qsf_block_sub_norm(o, attended, qsf_q_dim(o->kind), NULL, &in));
    QSF_TRY(qsf_block_add_product(o, &end, &in));
    if (begins_block)
        memcpy(s->blocks + (size_t)layer / c->block_layers * s->chunk_tokens * s->dim_stride, s->x,
               o->n_tokens * s->dim_stride * sizeof *s->x);
    QSF_TRY(run_smooth(o, l, chunk, layer_idx, PART_MIXER, begins_block));
    const float *query;
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_FFN_QUERY], s->queries, &query));
    retrieve_blocks(o, layer + 1, query, s->input);
    if (l->loop != 0)
        QSF_TRY(add_message(o, l, QSF_LAYER_FFN_GATE_DOWN, job.messages + 3 * (size_t)c->dim,
                            s->input));
    qsf_ops_lap(o, QSF_PHASE_ATTN_OUT);
    return QSF_OK;
}
