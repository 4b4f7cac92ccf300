/* ops.c - splits the operations of ops.h over the pool. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ops.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/fused.h"
#include "base/half.h"
#include "base/status.h"
#include "platform/clock.h"

#define PIECE_WORK 16384

void qsf_ops_lap(const qsf_ops *o, qsf_phase phase)
{
    const uint64_t known_ns = qsf_pool_end_ns(o->pool);
    if (o->stopwatch != NULL)
        qsf_stopwatch_lap_at(o->stopwatch, phase, known_ns != 0 ? known_ns : qsf_clock_ns());
}

size_t qsf_ops_piece(size_t work_per_item)
{
    return work_per_item >= PIECE_WORK ? 1 : PIECE_WORK / (work_per_item + 1) + 1;
}

/* True if f32 vectors can be read in place: on every machine that has kernels. */
static bool is_little_endian(void)
{
    const uint32_t probe = 1;
    unsigned char first;
    memcpy(&first, &probe, 1);
    return first == 1;
}

static bool is_resident(const qsf_ops *o, uint32_t unit_idx)
{
    return o->apart != NULL || qsf_stream_is_resident(o->stream, unit_idx);
}

size_t qsf_ops_range_bytes(const qsf_ops *o, uint32_t unit_idx, uint64_t off)
{
    return o->apart != NULL ? SIZE_MAX : qsf_stream_range_bytes(o->stream, unit_idx, off);
}

qsf_status qsf_ops_acquire(qsf_ops *o, uint64_t off, size_t n_bytes, const unsigned char **out)
{
    if (o->apart == NULL)
        return qsf_stream_acquire(o->stream, off, n_bytes, out);
    *out = o->apart + off;
    return QSF_OK;
}

qsf_status qsf_ops_load_vector(qsf_ops *o, const qsf_tensor *t, float *space, const float **out)
{
    *out = NULL;
    if (t == NULL)
        return QSF_OK;
    const unsigned char *bytes;
    QSF_TRY(qsf_ops_acquire(o, t->data_off, (size_t)t->data_bytes, &bytes));
    const bool stays = is_resident(o, t->unit_idx);
    if (stays && t->dtype == QSF_DTYPE_F32 && is_little_endian()) {
        *out = (const float *)(const void *)bytes; /* the address is a multiple of 64 */
        return QSF_OK;
    }
    for (size_t i = 0; i < t->n_cols; i++)
        space[i] = t->dtype == QSF_DTYPE_F16 ? qsf_half_to_float(qsf_load_u16(bytes + 2 * i))
                                             : qsf_load_f32(bytes + 4 * i);
    *out = space;
    return QSF_OK;
}

qsf_status qsf_ops_load_outliers(qsf_ops *o, const qsf_tensor *t, size_t *n_used, qsf_outliers *out)
{
    *out = (qsf_outliers){t, NULL};
    if (t == NULL)
        return QSF_OK;
    const size_t n_bytes = (size_t)t->data_bytes;
    if (qsf_stream_is_resident(o->stream, t->unit_idx))
        return qsf_stream_acquire(o->stream, t->data_off, n_bytes, &out->bytes);
    unsigned char *const to = o->scratch->outliers + *n_used;
    assert(*n_used + n_bytes <= o->config->outliers_bytes);
    for (size_t done = 0; done < n_bytes;) {
        const uint64_t off = t->data_off + done;
        const size_t cap_bytes = qsf_stream_range_bytes(o->stream, t->unit_idx, off);
        const size_t n = QSF_MIN(n_bytes - done, cap_bytes);
        const unsigned char *bytes;
        QSF_TRY(qsf_stream_acquire(o->stream, off, n, &bytes));
        memcpy(to + done, bytes, n);
        done += n;
    }
    *n_used += qsf_round_up(n_bytes, QSF_DATA_ALIGN);
    out->bytes = to;
    return QSF_OK;
}

/* Describes q_low of a row, as the kernels describe q: n_between blocks behind q's description. */
static void describe_low(const qsf_act_row *row, size_t n_blocks, size_t n_between)
{
    for (size_t b = 0; b < n_blocks; b++) {
        const size_t low = n_between + b;
        const int8_t *const q = row->q_low + b * QSF_BLOCK;
        qsf_act_parts *const parts = &row->parts[low];
        for (size_t i = 0; i < 2; i++)
            parts->scale[i] = row->parts[b].scale[i] * 0x1p-8F;
        for (size_t i = 0; i < 4; i++) {
            int16_t sum = 0;
            for (size_t c = 0; c < QSF_BLOCK / 4; c++)
                sum = (int16_t)(sum + q[i * (QSF_BLOCK / 4) + c]);
            parts->quarter[i] = sum;
        }
        row->scale[low] = row->scale[b] * 0x1p-8F;
        row->sum[low] = row->fine_sum[b] - 256 * row->sum[b];
        row->scaled_sum[low] = row->scale[low] * (float)row->sum[low];
    }
}

static void quantise_row(const qsf_ops *o, const float *x, size_t t, size_t stride)
{
    const size_t n_blocks = stride / QSF_BLOCK;
    qsf_act_row out = qsf_act_row_at(&o->scratch->acts, t * stride);
    out.q_low = out.q + o->n_tokens * stride;
    o->kernels->quantise(x, n_blocks, o->config->has_only_parts, &out);
    if (o->config->has_fine_acts)
        describe_low(&out, n_blocks, o->n_tokens * n_blocks);
}

#define DOT_LANES 16

float qsf_ops_dot(const float *a, const float *b, uint32_t n)
{
    float lanes[DOT_LANES] = {0.0F};
    for (uint32_t i = 0; i < n; i++)
        lanes[i % DOT_LANES] = qsf_fmaf(a[i], b[i], lanes[i % DOT_LANES]);
    for (uint32_t step = DOT_LANES / 2; step > 0; step /= 2)
        for (uint32_t i = 0; i < step; i++)
            lanes[i] += lanes[i + step];
    return lanes[0];
}

void qsf_ops_norm_row(const qsf_ops *o, const float *x, const qsf_norm_weights *norm, size_t n,
                      float *out)
{
    const float epsilon = o->config->norm_epsilon;
    if (o->config->is_rms_norm)
        o->kernels->rmsnorm(x, norm->weight, epsilon, n, out);
    else
        o->kernels->layernorm(x, norm->weight, norm->bias, epsilon, n, out);
}

/* Rows x [n_tokens, stride], of which the first `dim` columns are used */
typedef struct rows_job {
    const qsf_ops *ops;
    const qsf_norm_weights *norm;
    const float *x;
    float *out; /* of the norm */
    uint32_t dim;
    size_t stride;
} rows_job;

static void norm_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const rows_job *const job = arg;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++)
        qsf_ops_norm_row(job->ops, job->x + t * job->stride, job->norm, job->dim,
                         job->out + t * job->stride);
}

void qsf_ops_norm(qsf_ops *o, const float *x, const qsf_norm_weights *norm, float *out)
{
    const size_t stride = o->scratch->dim_stride;
    rows_job job = {o, norm, x, out, o->config->dim, stride};
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(stride), norm_rows, &job);
}

/* both while the row is in the first-level cache */
static void prepare_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const rows_job *const job = arg;
    const qsf_ops *const o = job->ops;
    if (job->norm != NULL)
        norm_rows(arg, begin, end, worker_idx);
    for (size_t t = begin; t < end; t++) {
        float *const row = job->out + t * job->stride;
        if (job->stride != job->dim)
            memset(row + job->dim, 0, (job->stride - job->dim) * sizeof *row);
        if (!o->exact)
            quantise_row(o, row, t, job->stride);
    }
}

/* The rows written by quantise_row; f32: as in qsf_acts, or NULL */
static qsf_acts acts_of(const qsf_ops *o, const float *f32, size_t stride)
{
    qsf_act_row rows = o->scratch->acts;
    rows.q_low = rows.q + o->n_tokens * stride;
    return qsf_acts_of(&rows, o->n_tokens, stride / QSF_BLOCK, f32);
}

qsf_acts qsf_ops_prepare(qsf_ops *o, float *x, uint32_t dim, const qsf_norm_weights *norm,
                         float *normed)
{
    const size_t stride = qsf_stride(dim);
    const bool has_norm = norm != NULL && norm->weight != NULL;
    float *const rows = has_norm ? normed : x;
    rows_job job = {o, has_norm ? norm : NULL, x, rows, dim, stride};
    if (has_norm || !o->exact || stride != dim)
        qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(stride), prepare_rows, &job);
    return acts_of(o, rows, stride);
}

typedef struct gather_job {
    const qsf_ops *ops;
    const float *x;
    const uint32_t *rows; /* of x */
    float *copies;        /* or NULL */
} gather_job;

static void gather_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const gather_job *const job = arg;
    const qsf_ops *const o = job->ops;
    const size_t stride = o->scratch->dim_stride;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        const float *const row = job->x + job->rows[t] * stride;
        if (job->copies != NULL)
            memcpy(job->copies + t * stride, row, stride * sizeof *row);
        if (!o->exact)
            quantise_row(o, row, t, stride);
    }
}

qsf_acts qsf_ops_gather(qsf_ops *o, const float *x, const uint32_t *rows, float *copies)
{
    const size_t stride = o->scratch->dim_stride;
    gather_job job = {o, x, rows, copies};
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(stride), gather_rows, &job);
    return acts_of(o, copies, stride);
}

static void xielu(const qsf_ops *o, float *x, size_t n)
{
    const qsf_layer_kind *const k = o->kind;
    const float by[] = {k->xielu_square, k->xielu_exp, k->xielu_line};
    o->kernels->xielu(x, by, n);
}

/* gate = cap(gate) * sigmoid(gate) * cap(up); up changes */
static void silu_capped(const qsf_ops *o, float *gate, float *up, size_t n)
{
    const qsf_kernels *const k = o->kernels;
    const qsf_layer_kind *const kind = o->kind;
    float capped[QSF_BLOCK];
    for (size_t i = 0; i < n; i += QSF_BLOCK) {
        const size_t m = QSF_MIN(n - i, QSF_BLOCK);
        memcpy(capped, gate + i, m * sizeof *capped);
        k->cap(capped, 1.0F / kind->gate_cap, kind->gate_cap, m);
        k->cap(up + i, 1.0F / kind->up_cap, kind->up_cap, m);
        k->mul(up + i, capped, m);
        k->sigmoid_mul(gate + i, up + i, m);
    }
}

/* gate [n] = activation(gate) * up, which may change */
static void activate_gated(const qsf_ops *o, float *gate, float *up, size_t n)
{
    const qsf_kernels *const k = o->kernels;
    qsf_gated_fn *const gated[QSF_ACTIVATION_COUNT] = {
        [QSF_ACTIVATION_GELU_TANH] = k->gelu_tanh_mul,
        [QSF_ACTIVATION_SILU] = k->silu_mul,
        [QSF_ACTIVATION_RELU] = k->relu_mul,
        [QSF_ACTIVATION_GELU_ERF] = k->gelu_erf_mul,
        [QSF_ACTIVATION_RELU_SQUARED] = k->relu_squared_mul,
        [QSF_ACTIVATION_SILU_CLAMPED] = k->silu_clamped_mul,
    };
    if (o->kind->activation == QSF_ACTIVATION_SILU_CAPPED) {
        silu_capped(o, gate, up, n);
        return;
    }
    if (o->kind->activation == QSF_ACTIVATION_XIELU) {
        xielu(o, gate, n);
        k->mul(gate, up, n);
        return;
    }
    gated[o->kind->activation](gate, up, n);
}

void qsf_ops_activate_gated(const qsf_ops *o, size_t stride, size_t begin, size_t end)
{
    const qsf_scratch *const s = o->scratch;
    for (size_t t = 0; t < o->n_tokens; t++)
        activate_gated(o, s->gate + t * stride + begin, s->up + t * stride + begin, end - begin);
}

void qsf_ops_activate(const qsf_ops *o, size_t first_row, size_t n, size_t begin, size_t end)
{
    const qsf_kernels *const k = o->kernels;
    const qsf_scratch *const s = o->scratch;
    const size_t stride = qsf_stride(o->kind->ffn_dim);
    qsf_activation_fn *const plain[QSF_ACTIVATION_COUNT] = {
        [QSF_ACTIVATION_GELU_TANH] = k->gelu_tanh,
        [QSF_ACTIVATION_SILU] = k->silu,
        [QSF_ACTIVATION_RELU] = k->relu,
        [QSF_ACTIVATION_GELU_ERF] = k->gelu_erf,
        [QSF_ACTIVATION_RELU_SQUARED] = k->relu_squared,
        [QSF_ACTIVATION_SILU_CLAMPED] = k->silu_clamped,
    };
    for (size_t t = first_row; t < first_row + n; t++) {
        const size_t i = t * stride + begin;
        if (o->kind->ffn == QSF_FFN_GATED)
            activate_gated(o, s->gate + i, s->up + i, end - begin);
        else if (o->kind->activation == QSF_ACTIVATION_XIELU)
            xielu(o, s->gate + i, end - begin);
        else
            plain[o->kind->activation](s->gate + i, end - begin);
    }
}

static void add_row(const qsf_ops *o, size_t i, size_t n)
{
    const qsf_scratch *const s = o->scratch;
    if (o->kind->residual_factor == 1.0F)
        o->kernels->add(s->x + i, s->y + i, n);
    else
        o->kernels->add_scaled(s->x + i, s->y + i, o->kind->residual_factor, n);
}

void qsf_ops_add_residual(const qsf_ops *o, size_t begin, size_t end)
{
    for (size_t t = 0; t < o->n_tokens; t++)
        add_row(o, t * o->scratch->dim_stride + begin, end - begin);
}

static void add_normed_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const rows_job *const job = arg;
    norm_rows(arg, begin, end, worker_idx);
    for (size_t t = begin; t < end; t++)
        add_row(job->ops, t * job->stride, job->dim);
}

void qsf_ops_add_normed(qsf_ops *o, const qsf_norm_weights *norm)
{
    const qsf_scratch *const s = o->scratch;
    rows_job job = {o, norm, s->y, s->y, o->config->dim, s->dim_stride};
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(s->dim_stride), add_normed_rows, &job);
}

qsf_acts qsf_acts_low(const qsf_acts *x)
{
    const size_t n_between = (size_t)(x->q_low - x->q) / QSF_BLOCK;
    qsf_acts low = *x;
    low.q = x->q_low;
    low.scale += n_between;
    low.sum += n_between;
    low.scaled_sum += n_between;
    low.parts += n_between;
    return low;
}

qsf_acts qsf_acts_rows(const qsf_acts *x, size_t first, size_t n)
{
    const size_t block = first * x->n_blocks;
    qsf_acts rows = *x;
    rows.n_tokens = n;
    if (rows.f32 != NULL)
        rows.f32 += block * QSF_BLOCK;
    rows.q += block * QSF_BLOCK;
    rows.q_low += block * QSF_BLOCK;
    rows.scale += block;
    rows.sum += block;
    rows.scaled_sum += block;
    rows.parts += block;
    rows.fine_sum += block;
    return rows;
}

/* ---- the angles of RoPE ---- */

/* Llama 3: divides long wavelengths by the factor, keeps short ones, and blends those in between.
 * Source: the rope_scaling rule published with the Llama 3.1 models. */
static double scale_llama3(const qsf_arch *a, double frequency)
{
    const double two_pi = 6.283185307179586;
    const double wavelength = two_pi / frequency;
    const double original = a->rope_original_tokens;
    if (wavelength > original / (double)a->rope_low_freq_factor)
        return frequency / (double)a->rope_factor;
    if (wavelength < original / (double)a->rope_high_freq_factor)
        return frequency;
    const double blend = (original / wavelength - (double)a->rope_low_freq_factor) /
                         ((double)a->rope_high_freq_factor - (double)a->rope_low_freq_factor);
    return (1.0 - blend) * frequency / (double)a->rope_factor + blend * frequency;
}

/* Makes the set of a file without the section ROPE. */
static void make_rope(const qsf_reader *r, uint32_t n_pairs, float *frequencies, qsf_rope *rope)
{
    const qsf_arch *const a = &r->arch;
    *rope = (qsf_rope){
        .is_interleaved = a->rope_interleaved != 0,
        .n_pairs = n_pairs,
        .factor = 1.0F,
        .frequencies = frequencies,
    };
    for (uint32_t i = 0; i < n_pairs; i++) {
        double frequency =
            1.0 / pow((double)r->header.rope_theta, 2.0 * (double)i / (double)(2 * n_pairs));
        if (a->rope_scaling == QSF_ROPE_SCALING_LINEAR)
            frequency /= (double)a->rope_factor;
        else if (a->rope_scaling == QSF_ROPE_SCALING_LLAMA3)
            frequency = scale_llama3(a, frequency);
        frequencies[i] = (float)frequency;
    }
}

void qsf_ropes_choose(const qsf_config *c, const qsf_reader *r, uint32_t ctx_tokens, float *made,
                      qsf_rope *ropes)
{
    if (c->n_made_pairs != 0)
        make_rope(r, c->n_made_pairs, made, &ropes[0]);
    size_t first_pair = 0;
    for (uint32_t i = 0; i < r->n_rope_sets; i++) { /* by number and least context */
        const qsf_rope_set *const s = &r->rope_sets[i];
        if (s->least_context > ctx_tokens)
            continue;
        if (s->least_context == 0 && i > 0)
            first_pair += r->rope_sets[i - 1].frequencies.n;
        ropes[s->number] = (qsf_rope){
            .is_interleaved = s->is_interleaved,
            .n_pairs = s->frequencies.n,
            .first_pair = first_pair,
            .factor = s->factor,
            .frequencies = s->frequencies.values,
        };
    }
}

/* A table of all positions would cost memory that weights can use. The product is rounded to f32,
 * as in the reference implementations. */
void qsf_ropes_fill(const qsf_rope *ropes, uint32_t n_ropes, const uint32_t *positions,
                    uint32_t n_tokens, size_t chunk_tokens, float *rope_cos, float *rope_sin)
{
    for (uint32_t i = 0; i < n_ropes; i++) {
        const qsf_rope *const rope = &ropes[i];
        for (uint32_t t = 0; t < n_tokens; t++) {
            const size_t row = chunk_tokens * rope->first_pair + t * rope->n_pairs;
            for (size_t j = 0; j < rope->n_pairs; j++) {
                const float angle = (float)positions[t] * rope->frequencies[j];
                rope_cos[row + j] = (float)cos((double)angle) * rope->factor;
                rope_sin[row + j] = (float)sin((double)angle) * rope->factor;
            }
        }
    }
}
