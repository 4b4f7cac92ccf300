/* state_heads.c - the convolution, the rule by heads, and the states that are kept. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mixers.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"

#define KEY_EPSILON 1e-6F /* of the norm of q and k, in the root */

/* ---- sizes ---- */

static qsf_head_sizes sizes_of(const qsf_layer_kind *k)
{
    const size_t keys = (size_t)k->n_key_heads * k->key_dim;
    const size_t values = (size_t)k->n_value_heads * k->value_dim;
    const size_t channels = 2 * keys + values;
    const bool is_delta = k->mixer == QSF_MIXER_DELTA;
    return (qsf_head_sizes){
        .n_key_heads = k->n_key_heads,
        .n_value_heads = k->n_value_heads,
        .key_dim = k->key_dim,
        .value_dim = k->value_dim,
        .keys = keys,
        .values = values,
        .channels = channels,
        .q_off = is_delta ? 0 : values + keys,
        .k_off = is_delta ? keys : values,
        .v_off = is_delta ? 2 * keys : 0,
        .n_decays = qsf_n_decays(k),
        .n_steps = k->n_value_heads + qsf_n_decays(k),
        .n_blocks = qsf_ceil_div(k->value_dim, QSF_STATE_COLS),
        .block_floats = (size_t)k->key_dim * QSF_STATE_COLS,
        .first_block = qsf_round_up(qsf_convolution_floats(k, channels), QSF_BLOCK),
        .is_tiled = k->has_tiled_heads != 0,
    };
}

/* The key head that a value head uses */
static size_t key_head_of(const qsf_head_sizes *z, size_t head)
{
    return z->is_tiled ? head % z->n_key_heads : head / (z->n_value_heads / z->n_key_heads);
}

/* The first decay of a value head */
static size_t decay_at(const qsf_head_sizes *z, size_t head)
{
    return head * (z->n_decays / z->n_value_heads);
}

static size_t block_at(const qsf_head_sizes *z, size_t head, size_t block)
{
    return z->first_block + (head * z->n_blocks + block) * z->block_floats;
}

static size_t cols_of(const qsf_head_sizes *z, size_t block)
{
    const size_t n_left = z->value_dim - block * QSF_STATE_COLS;
    return QSF_MIN(n_left, QSF_STATE_COLS);
}

/* ---- the log ---- */

/* Offsets in a row of the log */
static size_t logged_keys(const qsf_head_sizes *z)
{
    return z->channels;
}

static size_t logged_deltas(const qsf_head_sizes *z)
{
    return z->channels + z->keys;
}

static size_t logged_decays(const qsf_head_sizes *z)
{
    return z->channels + z->keys + z->values;
}

typedef struct replay_job {
    qsf_head_sizes z;
    const qsf_state_layer *layer;
    const qsf_kernels *kernels;
    const float *from;
    const float *rows;
    size_t n_rows;
    float *to;
} replay_job;

static void replay_heads(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const replay_job *const job = arg;
    const qsf_head_sizes *const z = &job->z;
    (void)worker_idx;
    for (size_t h = begin; h < end; h++) {
        const size_t key_head = key_head_of(z, h);
        for (size_t b = 0; b < z->n_blocks; b++) {
            float *const to = job->to + block_at(z, h, b);
            const size_t col = h * z->value_dim + b * QSF_STATE_COLS;
            const qsf_state_rows rows = {
                .n_rows = job->n_rows,
                .key_dim = z->key_dim,
                .n_cols = cols_of(z, b),
                .k = job->rows + logged_keys(z) + key_head * z->key_dim,
                .v = (float *)job->rows + logged_deltas(z) + col, /* read by a replay */
                .stride = job->layer->row_floats,
                .decay = job->rows + logged_decays(z) + decay_at(z, h),
                .gate_stride = job->layer->row_floats,
                .has_channel_decays = job->layer->kind->has_channel_decays != 0,
            };
            if (job->from != NULL)
                memcpy(to, job->from + block_at(z, h, b), z->block_floats * sizeof *to);
            else
                memset(to, 0, z->block_floats * sizeof *to);
            job->kernels->state_replay(to, &rows);
        }
    }
}

static void replay(const qsf_state_layer *l, const qsf_state_tools *tools, const float *from,
                   const float *rows, size_t n_rows, float *to)
{
    replay_job job = {sizes_of(l->kind), l, tools->kernels, from, rows, n_rows, to};
    const qsf_head_sizes *const z = &job.z;
    qsf_convolution_replay(l, l->kind->n_taps - 1, z->channels, from, rows, n_rows, to);
    qsf_pool_run(tools->pool, z->n_value_heads,
                 qsf_ops_piece(n_rows * z->n_blocks * z->block_floats), replay_heads, &job);
}

void qsf_heads_describe(const qsf_config *c, uint32_t layer, qsf_state_layer *out)
{
    const qsf_layer_kind *const kind = c->layers[layer].kind;
    const qsf_head_sizes z = sizes_of(kind);
    out->state_floats = block_at(&z, z.n_value_heads, 0);
    out->row_floats = logged_decays(&z) + z.n_decays;
    out->replay = replay;
    out->kind = kind;
}

/* ---- a pass ---- */

/* The log's row of row t of a segment, or NULL if it is no draft */
static float *draft_row(const qsf_heads_job *job, const qsf_segment *g, uint32_t t)
{
    const qsf_statecache *const states = &g->sequence->states;
    const uint32_t position = g->first_position + t;
    return position < states->next_position
               ? NULL
               : qsf_statecache_row(states, job->conv.layer_idx, position);
}

static void run_gates(const qsf_heads_job *job, const qsf_segment *g)
{
    const qsf_head_sizes *const z = &job->z;
    for (uint32_t t = 0; t < g->n_tokens; t++) {
        float *const beta = job->ops->scratch->steps + (g->first_row + t) * z->n_steps;
        float *const decay = beta + z->n_value_heads;
        float *const logged = draft_row(job, g, t);
        job->gates(job, beta, decay);
        if (logged != NULL)
            memcpy(logged + logged_decays(z), decay, z->n_decays * sizeof *decay);
    }
}

/* Convolves head i of q, k and v, for all rows, because a row needs earlier ones. */
static void run_conv(const qsf_heads_job *job, const qsf_segment *g, size_t i)
{
    const qsf_head_sizes *const z = &job->z;
    const qsf_kernels *const k = job->ops->kernels;
    const size_t n_qk = 2 * z->n_key_heads;
    const bool is_key = i >= z->n_key_heads && i < n_qk;
    const size_t begin = is_key     ? z->k_off + (i - z->n_key_heads) * z->key_dim
                         : i < n_qk ? z->q_off + i * z->key_dim
                                    : z->v_off + (i - n_qk) * z->value_dim;
    const size_t n = i < n_qk ? z->key_dim : z->value_dim;
    const float factor = is_key ? 1.0F : 1.0F / sqrtf((float)z->key_dim);
    for (uint32_t t = 0; t < g->n_tokens; t++) {
        float *const out =
            job->ops->scratch->attended + (g->first_row + t) * job->conv.stride + begin;
        qsf_convolution_row(&job->conv, g, t, begin, begin + n, out);
        k->silu(out, n);
        if (i < n_qk && job->has_normed_keys)
            k->l2norm(out, KEY_EPSILON, factor, n);
        float *const logged = draft_row(job, g, t);
        if (is_key && logged != NULL)
            memcpy(logged + logged_keys(z) + begin - z->k_off, out, n * sizeof *out);
    }
    qsf_convolution_keep(&job->conv, g, begin, begin + n);
}

/* Items: heads of q, k and v; the last: the gates */
static void convolve(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const qsf_heads_job *const job = arg;
    (void)worker_idx;
    for (uint32_t s = 0; s < job->chunk->n_segments; s++)
        for (size_t i = begin; i < end; i++) {
            const qsf_segment *const g = &job->chunk->segments[s];
            if (i < 2 * job->z.n_key_heads + job->z.n_value_heads)
                run_conv(job, g, i);
            else
                run_gates(job, g);
        }
}

/* Rows first .. first + n - 1 of a segment for a block of a head */
static qsf_state_rows rows_of(const qsf_heads_job *job, const qsf_segment *g, size_t head,
                              size_t block, uint32_t first, uint32_t n)
{
    const qsf_head_sizes *const z = &job->z;
    const qsf_scratch *const s = job->ops->scratch;
    const size_t row = g->first_row + first;
    const size_t key_off = key_head_of(z, head) * z->key_dim;
    const size_t col = head * z->value_dim + block * QSF_STATE_COLS;
    float *const mixed = s->attended + row * job->conv.stride;
    const float *const steps = s->steps + row * z->n_steps;
    return (qsf_state_rows){
        .n_rows = n,
        .key_dim = z->key_dim,
        .n_cols = cols_of(z, block),
        .q = mixed + z->q_off + key_off,
        .k = mixed + z->k_off + key_off,
        .v = mixed + z->v_off + col,
        .stride = job->conv.stride,
        .o = s->q + row * job->conv.stride + col,
        .o_stride = job->conv.stride,
        .beta = steps + head,
        .decay = steps + z->n_value_heads + decay_at(z, head),
        .gate_stride = z->n_steps,
        .has_channel_decays = job->ops->kind->has_channel_decays != 0,
        .skip = job->skip != NULL ? job->skip[head] : 0.0F,
    };
}

/* Runs the drafts of a segment, from row t on, on a copy of the state after its own tokens, and
 * logs their changes. */
static void run_drafts(const qsf_heads_job *job, const qsf_segment *g, size_t head, size_t block,
                       uint32_t t, const float *state)
{
    const qsf_head_sizes *const z = &job->z;
    float copy[QSF_MAX_STATE_DIM * QSF_STATE_COLS];
    const qsf_state_rows rows = rows_of(job, g, head, block, t, g->n_tokens - t);
    memcpy(copy, state, z->block_floats * sizeof *copy);
    job->rule(copy, &rows);
    const size_t col = head * z->value_dim + block * QSF_STATE_COLS;
    for (uint32_t i = 0; i < rows.n_rows; i++)
        memcpy(draft_row(job, g, t + i) + logged_deltas(z) + col, rows.v + i * rows.stride,
               rows.n_cols * sizeof *rows.v);
}

/* Runs a block of a head over a segment: its own tokens with the states to be kept, then its
 * drafts. */
static void run_block(const qsf_heads_job *job, const qsf_segment *g, size_t head, size_t block)
{
    const qsf_head_sizes *const z = &job->z;
    const qsf_statecache *const states = &g->sequence->states;
    const uint32_t layer_idx = job->conv.layer_idx;
    const size_t off = block_at(z, head, block);
    const size_t n_bytes = z->block_floats * sizeof(float);
    const float *const before = qsf_statecache_before(states, layer_idx);
    uint32_t position;
    float *const state = qsf_statecache_after(states, layer_idx, states->n_stops, &position) + off;
    uint32_t t = 0;
    if (before != NULL)
        memcpy(state, before + off, n_bytes);
    else
        memset(state, 0, n_bytes);
    for (uint32_t i = 0; i <= states->n_stops; i++) {
        float *const to = qsf_statecache_after(states, layer_idx, i, &position) + off;
        const qsf_state_rows rows =
            rows_of(job, g, head, block, t, position - (g->first_position + t));
        if (rows.n_rows > 0)
            job->rule(state, &rows);
        if (i < states->n_stops)
            memcpy(to, state, n_bytes);
        t += (uint32_t)rows.n_rows;
    }
    if (t < g->n_tokens)
        run_drafts(job, g, head, block, t, state);
}

/* Items: segments times value heads */
static void run_heads(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const qsf_heads_job *const job = arg;
    (void)worker_idx;
    for (size_t i = begin; i < end; i++) {
        const qsf_segment *const g = &job->chunk->segments[i / job->z.n_value_heads];
        const size_t head = i % job->z.n_value_heads;
        for (size_t block = 0; block < job->z.n_blocks; block++)
            run_block(job, g, head, block);
        if (job->finish != NULL)
            job->finish(job, g, head);
    }
}

qsf_heads_job qsf_heads_begin(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer_idx)
{
    const qsf_head_sizes z = sizes_of(o->kind);
    return (qsf_heads_job){
        .z = z,
        .ops = o,
        .chunk = chunk,
        .conv = {.ops = o,
                 .layer_idx = layer_idx,
                 .rows = o->scratch->q,
                 .stride = qsf_stride((uint32_t)z.channels),
                 .n_channels = z.channels},
    };
}

void qsf_heads_run(qsf_heads_job *job)
{
    const qsf_head_sizes *const z = &job->z;
    const qsf_ops *const o = job->ops;
    qsf_pool_run(o->pool, 2 * z->n_key_heads + z->n_value_heads + 1,
                 qsf_ops_piece(job->chunk->n_tokens * 2 * z->value_dim * o->kind->n_taps), convolve,
                 job);
    qsf_pool_run(o->pool, job->chunk->n_segments * z->n_value_heads,
                 qsf_ops_piece(4 * z->block_floats * z->n_blocks), run_heads, job);
}
