/* mix_delta.c - the mixer of the gated delta rule (Qwen 3.5, Olmo Hybrid).
 *
 *     q, k, v = silu(conv(Q h, K h, V h)); q, k normalised by head
 *     beta = factor * sigmoid(BETA h), decay = exp(-rate * softplus(a + bias)), a = DECAY h
 *     o = the delta rule of q, k, v, beta, decay (kernels.h); out(norm(o) * silu(GATE h))
 *
 * KDA (Kimi Linear): a decay for each channel of a head's keys, GATE_UP GATE h, DECAY_UP DECAY h,
 * and a sigmoid of the gate; of Ling 3 decay = exp(-limit * sigmoid(rate * (a + bias))).
 *
 * Its state is that of heads (state_heads.c).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mixers.h"

#include "base/status.h"
#include "model/linear.h"

static void make_gates(const qsf_heads_job *job, float *steps, float *decays)
{
    const qsf_kernels *const k = job->ops->kernels;
    k->betas(steps, job->ops->kind->beta_factor, job->z.n_value_heads);
    const float limit = job->ops->kind->decay_limit;
    if (limit != 0.0F)
        k->bounded_decays(decays, job->decay_rate, job->decay_bias, limit, job->z.n_decays);
    else
        k->decays(decays, job->decay_rate, job->decay_bias, job->z.n_decays);
}

/* gate = silu(gate) * norm(o), or sigmoid(gate), for a head in all rows of a segment */
static void finish_head(const qsf_heads_job *job, const qsf_segment *g, size_t head)
{
    const size_t n = job->z.value_dim;
    const size_t gate_stride = qsf_stride((uint32_t)job->z.values);
    const qsf_ops *const ops = job->ops;
    qsf_gated_fn *const gate_by =
        ops->kind->has_sigmoid_gate != 0 ? ops->kernels->sigmoid_mul : ops->kernels->silu_mul;
    const float epsilon =
        ops->kind->value_epsilon != 0.0F ? ops->kind->value_epsilon : ops->config->norm_epsilon;
    for (size_t row = g->first_row; row < (size_t)g->first_row + g->n_tokens; row++) {
        float *const out = ops->scratch->q + row * job->conv.stride + head * n;
        ops->kernels->rmsnorm(out, job->norm, epsilon, n, out);
        gate_by(ops->scratch->mix_gate + row * gate_stride + head * n, out, n);
    }
}

/* Computes gate and decays of their products of a low rank, which are in the place of keys and
 * values. */
static qsf_status raise_ranks(qsf_ops *o, const qsf_layer *l, qsf_linear gate, qsf_linear decay)
{
    const qsf_scratch *const s = o->scratch;
    gate.w = l->tensors[QSF_LAYER_GATE_UP];
    decay.w = l->tensors[QSF_LAYER_DECAY_UP];
    qsf_acts in = qsf_ops_prepare(o, s->k, o->kind->gate_rank, NULL, NULL);
    QSF_TRY(qsf_linear_run(o, &gate, 1, &in));
    in = qsf_ops_prepare(o, s->v, o->kind->gate_rank, NULL, NULL);
    return qsf_linear_run(o, &decay, 1, &in);
}

/* Computes q, k, v in one row, the gate, and the steps, of norm(x). */
static qsf_status project(qsf_ops *o, const qsf_layer *l, qsf_heads_job *job)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_tensor *const *const t = l->tensors;
    const size_t stride = job->conv.stride;
    const size_t steps_stride = job->z.n_steps;
    const bool has_rank = o->kind->gate_rank != 0;
    const size_t rank_stride = qsf_stride(o->kind->gate_rank);
    const size_t gate_stride = qsf_stride((uint32_t)job->z.values);
    float *const decays = s->steps + job->z.n_value_heads;
    qsf_acts in;
    qsf_linear parts[] = {
        qsf_linear_of(t[QSF_LAYER_Q], s->q + job->z.q_off, stride),
        qsf_linear_of(t[QSF_LAYER_K], s->q + job->z.k_off, stride),
        qsf_linear_of(t[QSF_LAYER_V], s->q + job->z.v_off, stride),
        qsf_linear_of(t[QSF_LAYER_MIX_GATE], s->mix_gate, gate_stride),
        qsf_linear_of(t[QSF_LAYER_BETA], s->steps, steps_stride),
        qsf_linear_of(t[QSF_LAYER_DECAY], decays, steps_stride),
    };
    qsf_linear *const gate = &parts[3];
    qsf_linear *const decay = &parts[5];
    const qsf_linear ups[] = {*gate, *decay};
    if (has_rank) {
        gate->y = s->k;
        decay->y = s->v;
        gate->y_stride = decay->y_stride = rank_stride;
    }
    QSF_TRY(qsf_block_norm(o, s->x, t[QSF_LAYER_ATTN_NORM], t[QSF_LAYER_ATTN_NORM_BIAS], &in));
    qsf_ops_lap(o, QSF_PHASE_NORM);
    QSF_TRY(qsf_block_load(o, t[QSF_LAYER_DECAY_RATE], 1, &job->decay_rate));
    QSF_TRY(qsf_block_load(o, t[QSF_LAYER_DECAY_BIAS], 2, &job->decay_bias));
    QSF_TRY(qsf_block_load(o, t[QSF_LAYER_MIX_NORM], 3, &job->norm));
    QSF_TRY(qsf_block_load_side(o, l, QSF_LAYER_Q, 3, parts));
    QSF_TRY(qsf_linear_run(o, parts, sizeof parts / sizeof parts[0], &in));
    if (has_rank)
        QSF_TRY(raise_ranks(o, l, ups[0], ups[1]));
    QSF_TRY(qsf_ops_load_vector(o, t[QSF_LAYER_CONV], s->conv, &job->conv.w));
    qsf_ops_lap(o, QSF_PHASE_QKV);
    return QSF_OK;
}

qsf_status qsf_mix_delta(qsf_ops *o, const qsf_layer *l, const qsf_chunk *chunk, uint32_t layer_idx)
{
    qsf_heads_job job = qsf_heads_begin(o, chunk, layer_idx);
    job.gates = make_gates;
    job.rule = o->kernels->delta_rule;
    job.has_normed_keys = true;
    job.finish = finish_head;
    QSF_TRY(project(o, l, &job));
    qsf_heads_run(&job);
    qsf_ops_lap(o, QSF_PHASE_ATTENTION);
    return qsf_block_end_mixer(o, l, o->scratch->mix_gate, (uint32_t)job.z.values);
}
