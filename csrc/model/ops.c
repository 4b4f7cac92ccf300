/* ops.c - splits the operations of ops.h over the pool. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ops.h"

#include <assert.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/half.h"

#define PIECE_WORK 16384

size_t qsf_ops_piece(size_t work_per_item)
{
    return work_per_item >= PIECE_WORK ? 1 : PIECE_WORK / (work_per_item + 1) + 1;
}

qsf_status qsf_ops_load_vector(qsf_ops *o, const qsf_tensor *t, float *out, bool *present)
{
    *present = t != NULL;
    if (t == NULL)
        return QSF_OK;
    const unsigned char *bytes;
    const qsf_status status =
        qsf_stream_acquire(o->stream, t->data_off, (size_t)t->data_bytes, &bytes);
    if (status != QSF_OK)
        return status;
    for (size_t i = 0; i < t->n_cols; i++)
        out[i] = t->dtype == QSF_DTYPE_F16 ? qsf_half_to_float(qsf_load_u16(bytes + 2 * i))
                                           : qsf_load_f32(bytes + 4 * i);
    return QSF_OK;
}

typedef struct quantise_job {
    qsf_ops *ops;
    const float *x;
    size_t stride;
} quantise_job;

static void quantise_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const quantise_job *const job = arg;
    const qsf_scratch *const s = job->ops->scratch;
    const size_t n_blocks = job->stride / QSF_BLOCK;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        const qsf_act_row out = {
            .q = s->act_q + t * job->stride,
            .q_low = s->act_q_low + t * job->stride,
            .scale = s->act_scale + t * n_blocks,
            .sum = s->act_sum + t * n_blocks,
            .scaled_sum = s->act_scaled_sum + t * n_blocks,
            .fine_sum = s->act_fine_sum + t * n_blocks,
        };
        job->ops->kernels->quantise(job->x + t * job->stride, n_blocks, &out);
    }
}

qsf_acts qsf_ops_prepare(qsf_ops *o, const float *x, size_t stride)
{
    const qsf_scratch *const s = o->scratch;
    if (!o->exact) {
        quantise_job job = {o, x, stride};
        qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(stride), quantise_rows, &job);
    }
    return (qsf_acts){
        .n_tokens = o->n_tokens,
        .n_blocks = stride / QSF_BLOCK,
        .f32 = x,
        .q = s->act_q,
        .q_low = s->act_q_low,
        .scale = s->act_scale,
        .sum = s->act_sum,
        .scaled_sum = s->act_scaled_sum,
        .fine_sum = s->act_fine_sum,
    };
}

typedef struct matmul_job {
    qsf_matmul_fn *matmul;
    const unsigned char *tiles; /* of the span's first tile row */
    size_t tile_row_bytes;
    const qsf_acts *x;
    const float *bias; /* [rows of the span], or NULL */
    float *y;          /* column of the span's first row */
    size_t y_stride;
    size_t n_rows; /* of the span; the last tile row may be cut short */
    float *tail;   /* [n_tokens, 16] */
} matmul_job;

/* The last rows of a matrix whose row count is no multiple of 16: computed aside, so
 * that nothing beyond them is written. Only one piece of a loop meets them. */
static void matmul_tail(const matmul_job *job, size_t tile_row)
{
    const size_t first = tile_row * QSF_TILE_ROWS;
    job->matmul(job->tiles + tile_row * job->tile_row_bytes, 1, job->x, job->tail, QSF_TILE_ROWS);
    for (size_t t = 0; t < job->x->n_tokens; t++)
        memcpy(job->y + t * job->y_stride + first, job->tail + t * QSF_TILE_ROWS,
               (job->n_rows - first) * sizeof *job->y);
}

static void matmul_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const matmul_job *const job = arg;
    (void)worker_idx;
    const size_t n_whole = job->n_rows / QSF_TILE_ROWS;
    const size_t whole_end = end < n_whole ? end : n_whole;
    if (begin < whole_end)
        job->matmul(job->tiles + begin * job->tile_row_bytes, whole_end - begin, job->x,
                    job->y + begin * QSF_TILE_ROWS, job->y_stride);
    if (end > n_whole)
        matmul_tail(job, n_whole);
    if (job->bias == NULL)
        return;
    const size_t row_end = end * QSF_TILE_ROWS < job->n_rows ? end * QSF_TILE_ROWS : job->n_rows;
    for (size_t t = 0; t < job->x->n_tokens; t++)
        for (size_t r = begin * QSF_TILE_ROWS; r < row_end; r++)
            job->y[t * job->y_stride + r] += job->bias[r];
}

qsf_status qsf_ops_linear(qsf_ops *o, const qsf_tensor *w, const qsf_acts *x, const float *bias,
                          float *y, size_t y_stride)
{
    const size_t tile_row_bytes = x->n_blocks * qsf_dtype_tile_bytes(w->dtype);
    const size_t n_tile_rows = qsf_ceil_div(w->n_rows, QSF_TILE_ROWS);
    const size_t span_tile_rows = qsf_stream_span_bytes(o->stream, w->unit_idx) / tile_row_bytes;
    assert(span_tile_rows > 0 && qsf_ceil_div(w->n_cols, QSF_BLOCK) == x->n_blocks);

    for (size_t first = 0; first < n_tile_rows; first += span_tile_rows) {
        const size_t left = n_tile_rows - first;
        const size_t n = left < span_tile_rows ? left : span_tile_rows;
        const unsigned char *tiles;
        const qsf_status status = qsf_stream_acquire(
            o->stream, w->data_off + first * tile_row_bytes, n * tile_row_bytes, &tiles);
        if (status != QSF_OK)
            return status;
        const size_t first_row = first * QSF_TILE_ROWS;
        const size_t rows_left = w->n_rows - first_row;
        matmul_job job = {
            .matmul = o->exact ? o->kernels->matmul_exact[w->dtype] : o->kernels->matmul[w->dtype],
            .tiles = tiles,
            .tile_row_bytes = tile_row_bytes,
            .x = x,
            .bias = bias == NULL ? NULL : bias + first_row,
            .y = y + first_row,
            .y_stride = y_stride,
            .n_rows = rows_left < n * QSF_TILE_ROWS ? rows_left : n * QSF_TILE_ROWS,
            .tail = o->scratch->tail,
        };
        qsf_pool_run(o->pool, n, qsf_ops_piece(tile_row_bytes * x->n_tokens), matmul_rows, &job);
    }
    return QSF_OK;
}

typedef struct norm_job {
    qsf_ops *ops;
    const float *x;
    const float *weight;
    const float *bias;
    size_t stride;
    float *out;
} norm_job;

static void norm_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const norm_job *const job = arg;
    const qsf_config *const c = job->ops->config;
    const qsf_kernels *const k = job->ops->kernels;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        const float *const x = job->x + t * job->stride;
        float *const out = job->out + t * job->stride;
        if (c->is_rms_norm)
            k->rmsnorm(x, job->weight, c->norm_epsilon, c->dim, out);
        else
            k->layernorm(x, job->weight, job->bias, c->norm_epsilon, c->dim, out);
    }
}

void qsf_ops_norm(qsf_ops *o, const float *x, const float *weight, const float *bias, size_t stride,
                  float *out)
{
    norm_job job = {o, x, weight, bias, stride, out};
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(stride), norm_rows, &job);
}

static void activate_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const qsf_ops *const o = arg;
    const qsf_kernels *const k = o->kernels;
    const qsf_scratch *const s = o->scratch;
    qsf_activation_fn *const functions[QSF_ACTIVATION_COUNT] = {
        [QSF_ACTIVATION_GELU_TANH] = k->gelu_tanh,
        [QSF_ACTIVATION_SILU] = k->silu,
        [QSF_ACTIVATION_RELU] = k->relu,
        [QSF_ACTIVATION_GELU_ERF] = k->gelu_erf,
        [QSF_ACTIVATION_RELU_SQUARED] = k->relu_squared,
    };
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        float *const row = s->gate + t * s->ffn_stride;
        if (o->config->is_gated)
            k->silu_mul(row, s->up + t * s->ffn_stride, o->config->ffn_dim);
        else
            functions[o->config->activation](row, o->config->ffn_dim);
    }
}

void qsf_ops_activate(qsf_ops *o)
{
    /* An exponential costs about ten multiply-adds. */
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(10 * o->scratch->ffn_stride), activate_rows,
                 o);
}

typedef struct add_job {
    qsf_ops *ops;
    float *x;
    const float *y;
    size_t stride;
} add_job;

static void add_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const add_job *const job = arg;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++)
        job->ops->kernels->add(job->x + t * job->stride, job->y + t * job->stride,
                               job->ops->config->dim);
}

void qsf_ops_add(qsf_ops *o, float *x, const float *y, size_t stride)
{
    add_job job = {o, x, y, stride};
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(stride), add_rows, &job);
}
