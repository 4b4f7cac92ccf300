/* mix_ssd.c - the mixer of Mamba-2, a state space model (SSD).
 *
 *     x, B, C = silu(conv(IN h)); step = softplus(STEP h + bias), decay = exp(-rate * step)
 *     o = the SSD rule of C, B, x, step, decay (kernels.h); out(norm(o * silu(GATE h)))
 *
 * C, B and x are what queries, keys and values are to the delta rule; a group is a key head. The
 * norm is optional and computed for each group. The state is that of heads (state_heads.c).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mixers.h"

#include "base/status.h"
#include "model/linear.h"

static void make_gates(const qsf_heads_job *job, float *steps, float *decays)
{
    job->ops->kernels->ssd_gates(steps, decays, job->decay_rate, job->decay_bias,
                                 job->z.n_value_heads);
}

/* Items: rows times groups; gate = silu(gate) * o, normalised if there is a norm */
static void finish_groups(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const qsf_heads_job *const job = arg;
    const qsf_ops *const ops = job->ops;
    const size_t n_groups = job->z.n_key_heads;
    const size_t n = job->z.values / n_groups;
    (void)worker_idx;
    for (size_t i = begin; i < end; i++) {
        const size_t row = i / n_groups;
        const size_t col = i % n_groups * n;
        const float *const out = ops->scratch->q + row * job->conv.stride + col;
        float *const gate =
            ops->scratch->mix_gate + row * qsf_stride((uint32_t)job->z.values) + col;
        ops->kernels->silu_mul(gate, out, n);
        if (job->norm != NULL)
            ops->kernels->rmsnorm(gate, job->norm + col, ops->config->norm_epsilon, n, gate);
    }
}

/* Computes x, B and C in one row, the gate, and the steps, from the mixer's input. */
static qsf_status project(qsf_ops *o, const qsf_layer *l, const qsf_acts *in, qsf_heads_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_tensor *const *const t = l->tensors;
    const size_t gate_stride = qsf_stride((uint32_t)job->z.values);
    const qsf_linear parts[] = {
        qsf_linear_of(t[QSF_LAYER_SSD_GATE], s->mix_gate, gate_stride),
        qsf_linear_of(t[QSF_LAYER_SSD_IN], s->q, job->conv.stride),
        qsf_linear_of(t[QSF_LAYER_SSD_STEP], s->steps, job->z.n_steps),
    };
    QSF_TRY(qsf_block_load(o, t[QSF_LAYER_SSD_RATE], 0, &job->decay_rate));
    QSF_TRY(qsf_block_load(o, t[QSF_LAYER_SSD_STEP_BIAS], 1, &job->decay_bias));
    QSF_TRY(qsf_block_load(o, t[QSF_LAYER_SSD_SKIP], 2, &job->skip));
    QSF_TRY(qsf_linear_run(o, parts, sizeof parts / sizeof parts[0], in));
    QSF_TRY(qsf_ops_load_vector(o, t[QSF_LAYER_SSD_CONV], s->conv, &job->conv.w));
    QSF_TRY(qsf_block_load(o, t[QSF_LAYER_SSD_CONV_BIAS], 3, &job->conv.bias));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    return QSF_OK;
}

/* x += ssd(in) */
static qsf_status run_ssd(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                          uint32_t layer_idx, const qsf_acts *in)
{
    const qsf_block_end end = {.w = l->tensors[QSF_LAYER_SSD_OUT]};
    qsf_heads_job job = qsf_heads_begin(o, chunk, layer_idx);
    qsf_acts mixed;
    job.gates = make_gates;
    job.rule = o->kernels->ssd_rule;
    QSF_TRY(project(o, l, in, &job));
    qsf_heads_run(&job);
    QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_SSD_NORM], 0, &job.norm));
    qsf_pool_run(o->pool, o->n_tokens * job.z.n_key_heads,
                 qsf_ops_piece(8 * job.z.values / job.z.n_key_heads), finish_groups, &job);
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    QSF_TRY(qsf_block_sub_norm(o, o->scratch->mix_gate, (uint32_t)job.z.values, NULL, &mixed));
    QSF_TRY(qsf_block_add_product(o, &end, &mixed));
    qsf_ops_lap(o, QSF_PHASE_ATTN_OUT);
    return QSF_OK;
}

qsf_status qsf_mix_ssd(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk, uint32_t layer_idx)
{
    qsf_acts in;
    QSF_TRY(qsf_block_norm(o, o->scratch->x, l->tensors[QSF_LAYER_ATTN_NORM],
                           l->tensors[QSF_LAYER_ATTN_NORM_BIAS], &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    return run_ssd(o, l, chunk, layer_idx, &in);
}

/* Attention and SSD read the same norm(x). */
qsf_status qsf_mix_attention_and_ssd(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk,
                                     uint32_t layer_idx)
{
    float *const normed = o->scratch->normed; /* normalised by attention */
    QSF_TRY(qsf_mix_attention(o, l, chunk, layer_idx));
    const qsf_acts in = qsf_ops_prepare(o, normed, o->config->dim, NULL, NULL);
    return run_ssd(o, l, chunk, layer_idx, &in);
}
