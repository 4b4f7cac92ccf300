/* routed.c - routing of a chunk, sorting by expert, running the experts. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/routed.h"

#include <string.h>

#include "base/status.h"
#include "model/linear.h"
#include "model/routing.h"

typedef struct choose_job {
    const qsf_ops *ops;
    const float *selection_bias; /* or NULL */
} choose_job;

static void choose_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const choose_job *const job = arg;
    const qsf_layer_kind *const k = job->ops->kind;
    const qsf_routed_scratch *const s = &job->ops->scratch->routed;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++)
        qsf_routing_choose(job->ops->kernels, k, s->scores + t * k->n_experts, job->selection_bias,
                           s->chosen + t * k->n_chosen, s->weights + t * k->n_chosen);
}

/* Sorts the choices of all rows by expert, those of an expert by row. */
static void sort_choices(const qsf_ops *o)
{
    const qsf_layer_kind *const k = o->kind;
    const qsf_routed_scratch *const s = &o->scratch->routed;
    const uint32_t n = o->n_tokens * k->n_chosen;
    memset(s->first, 0, (k->n_experts + 1) * sizeof *s->first);
    for (uint32_t i = 0; i < n; i++)
        s->first[s->chosen[i] + 1]++;
    for (uint32_t i = 0; i < k->n_experts; i++)
        s->first[i + 1] += s->first[i];
    for (uint32_t i = 0; i < n; i++)
        s->choices[s->first[s->chosen[i]]++] = i;
    for (uint32_t i = k->n_experts; i > 0; i--) /* each now begins where its next one did */
        s->first[i] = s->first[i - 1];
    s->first[0] = 0;
}

static void request(const qsf_ops *o, uint32_t layer_idx)
{
    const qsf_routed_scratch *const s = &o->scratch->routed;
    const uint32_t first_unit = o->experts->reader->units[layer_idx + 1].first_expert;
    uint32_t n = 0;
    for (uint32_t i = 0; i < o->kind->n_experts; i++) {
        if (s->first[i + 1] == s->first[i])
            continue;
        s->units[n] = first_unit + i;
        s->uses[n++] = s->first[i + 1] - s->first[i];
    }
    qsf_experts_request(o->experts, layer_idx, s->units, s->uses, n);
}

qsf_status qsf_routed_choose(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx, const qsf_acts *x)
{
    const qsf_scratch *const s = o->scratch;
    const uint32_t n_experts = o->kind->n_experts;
    choose_job job = {.ops = o};
    qsf_linear router = {l->router, NULL, s->routed.scores, n_experts, 1, NULL, NULL, {0}};
    QSF_TRY(qsf_ops_load_vector(o, l->router_bias, s->routed.biases[0], &router.bias));
    QSF_TRY(qsf_ops_load_vector(o, l->selection_bias, s->routed.biases[1], &job.selection_bias));
    QSF_TRY(qsf_linear_run(o, &router, 1, x));
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(n_experts * 16), choose_rows, &job);
    sort_choices(o);
    request(o, layer_idx);
    if (l->shared_gate == NULL)
        return QSF_OK;
    const float *gate;
    QSF_TRY(qsf_ops_load_vector(o, l->shared_gate, s->vectors[2], &gate));
    for (uint32_t t = 0; t < o->n_tokens; t++)
        s->routed.gates[t] =
            qsf_routing_gate(o->kernels, gate, x->f32 + t * s->dim_stride, o->config->dim);
    return QSF_OK;
}

/* The choices [n] that an expert computes together. */
typedef struct batch {
    const qsf_ops *ops;
    const uint32_t *choices; /* [n] */
    uint32_t n;
    uint32_t n_chosen;
} batch;

static void activate(const void *arg, size_t begin, size_t end)
{
    const batch *const b = arg;
    qsf_ops_activate(b->ops, begin, end);
}

/* y[row] += weight * output for rows [begin, end) of the result, of every choice */
static void add_weighted(const void *arg, size_t begin, size_t end)
{
    const batch *const b = arg;
    const qsf_scratch *const s = b->ops->scratch;
    for (uint32_t i = 0; i < b->n; i++) {
        const uint32_t choice = b->choices[i];
        const size_t row = choice / b->n_chosen * s->dim_stride;
        b->ops->kernels->add_scaled(s->y + row + begin,
                                    s->routed.outputs + i * s->dim_stride + begin,
                                    s->routed.weights[choice], end - begin);
    }
}

/* Runs an expert for a batch. The caller has set what `o` says of tokens, kind and expert. */
static qsf_status run_batch(qsf_ops *o, const qsf_expert *e, const float *x, const batch *b)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_norm_weights none = {0};
    const size_t stride = qsf_stride(o->kind->ffn_dim);
    qsf_linear gate = {e->gate, NULL, s->gate, stride, 1, NULL, NULL, {0}};
    qsf_linear up = {e->up, NULL, s->up, stride, 1, activate, b, {0}};
    qsf_linear down = {e->down, NULL, s->routed.outputs, s->dim_stride, 1, add_weighted, b, {0}};
    QSF_TRY(qsf_ops_load_vector(o, e->gate_bias, s->vectors[1], &gate.bias));
    QSF_TRY(qsf_ops_load_vector(o, e->up_bias, s->vectors[2], &up.bias));
    QSF_TRY(qsf_ops_load_vector(o, e->down_bias, s->vectors[3], &down.bias));
    for (uint32_t i = 0; i < b->n; i++)
        memcpy(s->routed.rows + i * s->dim_stride, x + b->choices[i] / b->n_chosen * s->dim_stride,
               s->dim_stride * sizeof *x);
    const qsf_acts in = qsf_ops_prepare(o, s->routed.rows, o->config->dim, &none, s->routed.rows);
    QSF_TRY(qsf_linear_run_pair(o, &gate, &up, &in));
    const qsf_acts activated = qsf_ops_prepare(o, s->gate, o->kind->ffn_dim, &none, s->gate);
    return qsf_linear_run(o, &down, 1, &activated);
}

static qsf_status run_experts(qsf_ops *o, const float *x)
{
    const qsf_routed_scratch *const s = &o->scratch->routed;
    qsf_experts *const experts = o->experts;
    const uint32_t n_chosen = o->kind->n_chosen;
    qsf_layer_kind kind = *o->kind; /* of an expert */
    kind.ffn = QSF_FFN_GATED;
    kind.ffn_dim = kind.expert_dim;
    o->kind = &kind;
    qsf_status status = QSF_OK;
    for (uint32_t i = 0, at = 0; status == QSF_OK && i < experts->n_wanted; i++) {
        const uint32_t end = at + s->uses[i];
        qsf_expert e;
        qsf_expert_find(experts->reader, s->units[i], &e);
        status = qsf_experts_take(experts, i, &o->expert);
        while (status == QSF_OK && at < end) {
            batch b = {o, s->choices + at, end - at, n_chosen};
            b.n = b.n < QSF_EXPERT_ROWS ? b.n : QSF_EXPERT_ROWS;
            o->n_tokens = b.n;
            status = run_batch(o, &e, x, &b);
            at += b.n;
        }
    }
    o->expert = NULL;
    return status;
}

qsf_status qsf_routed_add(qsf_ops *o, const qsf_layer *l, const float *x)
{
    const qsf_scratch *const s = o->scratch;
    const qsf_layer_kind *const kind = o->kind;
    const uint32_t n_tokens = o->n_tokens;
    if (l->up == NULL)
        memset(s->y, 0, n_tokens * s->dim_stride * sizeof *s->y);
    for (uint32_t t = 0; l->shared_gate != NULL && t < n_tokens; t++)
        o->kernels->scale(s->y + t * s->dim_stride, s->routed.gates[t], o->config->dim);
    const qsf_status status = run_experts(o, x);
    o->kind = kind;
    o->n_tokens = n_tokens;
    qsf_experts_end(o->experts);
    return status;
}
