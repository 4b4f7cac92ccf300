/* routed.c - routing of a chunk, sorting by expert, running the experts. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/routed.h"

#include <string.h>

#include "base/status.h"
#include "model/block.h"
#include "model/ahead.h"
#include "model/linear.h"
#include "model/routing.h"

typedef struct choose_job {
    const qsf_ops *ops;
    const float *selection_bias; /* or NULL */
    const float *scales;         /* of the experts, or NULL */
} choose_job;

static void choose_rows(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const choose_job *const job = arg;
    const qsf_layer_kind *const k = job->ops->kind;
    const qsf_routed_scratch *const s = &job->ops->scratch->routed;
    (void)worker_idx;
    for (size_t t = begin; t < end; t++) {
        uint16_t *const chosen = s->chosen + t * k->n_chosen;
        float *const weights = s->weights + t * k->n_chosen;
        qsf_routing_choose(job->ops->kernels, k, s->scores + t * k->n_experts, job->selection_bias,
                           chosen, weights);
        for (uint32_t i = 0; job->scales != NULL && i < k->n_chosen; i++)
            weights[i] *= job->scales[chosen[i]];
    }
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
    /* Each entry is the next expert's first choice now: shifts them. */
    for (uint32_t i = k->n_experts; i > 0; i--)
        s->first[i] = s->first[i - 1];
    s->first[0] = 0;
}

static void request(const qsf_ops *o, uint32_t layer_idx)
{
    const qsf_routed_scratch *const s = &o->scratch->routed;
    const uint32_t first_unit = o->config->layers[layer_idx].first_expert;
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
    qsf_linear router = {
        l->tensors[QSF_LAYER_ROUTER], NULL, s->routed.scores, n_experts, 1, NULL, NULL, {0}};
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_ROUTER_BIAS], s->routed.biases[0],
                                &router.bias));
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_SELECTION_BIAS], s->routed.biases[1],
                                &job.selection_bias));
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_EXPERT_SCALE], s->routed.biases[2],
                                &job.scales));
    QSF_TRY(qsf_linear_run(o, &router, 1, x));
    qsf_pool_run(o->pool, o->n_tokens, qsf_ops_piece(n_experts * 16), choose_rows, &job);
    sort_choices(o);
    request(o, layer_idx);
    return QSF_OK;
}

qsf_status qsf_routed_gates(qsf_ops *o, const qsf_layer *l, const qsf_acts *x)
{
    const qsf_scratch *const s = o->scratch;
    if (l->tensors[QSF_LAYER_SHARED_GATE] == NULL)
        return QSF_OK;
    const float *gate;
    QSF_TRY(qsf_ops_load_vector(o, l->tensors[QSF_LAYER_SHARED_GATE], s->vectors[2], &gate));
    for (uint32_t t = 0; t < o->n_tokens; t++)
        s->routed.gates[t] =
            qsf_routing_gate(o->kernels, gate, x->f32 + t * s->dim_stride, o->config->dim);
    return QSF_OK;
}

/* Experts that run in the same parallel regions. */
#define WAVE_EXPERTS (QSF_LINEAR_APART_MAX / 2)

typedef struct member {
    const struct wave *wave;
    uint32_t i; /* in `units` */
    const unsigned char *unit;
    const qsf_tensor *tensors[QSF_LAYER_TENSORS]; /* of the FFN */
    uint32_t first_choice;
    uint32_t first_row; /* of the wave */
    uint32_t n;
    const float *biases[3]; /* of gate, up and down, or NULL */
} member;

typedef struct wave {
    qsf_ops *ops;
    const float *x;      /* rows of the chunk */
    uint32_t first_unit; /* of the layer's experts */
    uint32_t n_left;     /* experts with choices that have not run */
    bool keeps;          /* all choices have output rows, so that they may run in any order */
    uint32_t n_rows;
    uint32_t n;
    member members[WAVE_EXPERTS];
} wave;

static bool is_copied(const qsf_tensor *t)
{
    return t != NULL && t->dtype != QSF_DTYPE_F32;
}

/* Biases that are not f32 are converted into the space for one expert's biases. */
static bool is_last(const member *m)
{
    return is_copied(m->tensors[QSF_LAYER_GATE_BIAS]) || is_copied(m->tensors[QSF_LAYER_UP_BIAS]) ||
           is_copied(m->tensors[QSF_LAYER_DOWN_BIAS]);
}

static qsf_status load_biases(qsf_ops *o, member *m)
{
    float *const *const space = o->scratch->vectors;
    o->apart = m->unit;
    static const qsf_layer_tensor biases[] = {QSF_LAYER_GATE_BIAS, QSF_LAYER_UP_BIAS,
                                              QSF_LAYER_DOWN_BIAS};
    qsf_status status = QSF_OK;
    for (size_t i = 0; status == QSF_OK && i < 3; i++)
        status = qsf_ops_load_vector(o, m->tensors[biases[i]], space[i + 1], &m->biases[i]);
    o->apart = NULL;
    return status;
}

/* Adds the pending rows of expert i to the wave: all of them, except that a wave of a single expert
 * may take only some. */
static qsf_status add_member(wave *w, uint32_t i)
{
    const qsf_ops *const o = w->ops;
    const qsf_routed_scratch *const s = &o->scratch->routed;
    const uint32_t expert = s->units[i] - w->first_unit;
    const uint32_t left_rows = QSF_EXPERT_ROWS - w->n_rows;
    member *const m = &w->members[w->n++];
    *m = (member){.wave = w, .i = i, .first_row = w->n_rows};
    m->n = s->uses[i] < left_rows ? s->uses[i] : left_rows;
    m->first_choice = s->first[expert + 1] - s->uses[i];
    s->uses[i] -= m->n;
    w->n_rows += m->n;
    w->n_left -= s->uses[i] == 0;
    qsf_expert_find(o->experts->reader, s->units[i], m->tensors);
    QSF_TRY(qsf_experts_take(o->experts, i, &m->unit));
    return load_biases(w->ops, m);
}

/* Collects experts that are in memory; waits for one if none is. */
static qsf_status collect(wave *w)
{
    qsf_experts *const experts = w->ops->experts;
    const uint32_t *const uses = w->ops->scratch->routed.uses;
    w->n = w->n_rows = 0;
    for (uint32_t i = 0; i < experts->n_wanted; i++) {
        if (uses[i] == 0)
            continue;
        if (w->n == WAVE_EXPERTS ||
            (w->n > 0 && (w->n_rows + uses[i] > QSF_EXPERT_ROWS || is_last(&w->members[w->n - 1]))))
            break;
        if (qsf_experts_is_ready(experts, i))
            QSF_TRY(add_member(w, i));
        else if (!w->keeps)
            break;
    }
    if (w->n > 0)
        return QSF_OK;
    uint32_t first = 0;
    while (uses[first] == 0)
        first++;
    return add_member(w, w->keeps ? qsf_experts_next(experts) : first);
}

static void activate(const void *arg, size_t begin, size_t end)
{
    const member *const m = arg;
    qsf_ops_activate(m->wave->ops, m->first_row, m->n, begin, end);
}

/* Activated rows of all members, in s->gate: activation(gate x) * (up x), or activation(up x) */
static void run_gate_up(wave *w, const qsf_acts *x)
{
    const qsf_scratch *const s = w->ops->scratch;
    const size_t stride = qsf_stride(w->ops->kind->ffn_dim);
    const bool is_gated = w->ops->kind->ffn == QSF_FFN_GATED;
    size_t n = 0;
    qsf_linear_apart products[2 * WAVE_EXPERTS];
    for (uint32_t i = 0; i < w->n; i++) {
        const member *const m = &w->members[i];
        const size_t off = m->first_row * stride;
        const size_t tail_off = m->first_row * QSF_TILE_ROWS;
        const qsf_acts rows = x->n_tokens == w->n_rows ? qsf_acts_rows(x, m->first_row, m->n) : *x;
        float *const up = (is_gated ? s->up : s->gate) + off;
        if (is_gated)
            products[n++] = (qsf_linear_apart){{m->tensors[QSF_LAYER_GATE],
                                                m->biases[0],
                                                s->gate + off,
                                                stride,
                                                1,
                                                NULL,
                                                NULL,
                                                {0}},
                                               m->unit,
                                               rows,
                                               s->tails[0] + tail_off};
        products[n++] = (qsf_linear_apart){
            {m->tensors[QSF_LAYER_UP], m->biases[1], up, stride, 1, activate, m, {0}},
            m->unit,
            rows,
            s->tails[1] + tail_off};
    }
    qsf_linear_run_apart(w->ops, products, n, is_gated);
}

/* Outputs of all members, each at the place of its choice, or of its row in the wave. */
static void run_down(wave *w, const qsf_acts *activated)
{
    const qsf_scratch *const s = w->ops->scratch;
    qsf_linear_apart products[WAVE_EXPERTS];
    for (uint32_t i = 0; i < w->n; i++) {
        const member *const m = &w->members[i];
        float *const y =
            s->routed.outputs + (w->keeps ? m->first_choice : m->first_row) * s->dim_stride;
        products[i] = (qsf_linear_apart){
            {m->tensors[QSF_LAYER_DOWN], m->biases[2], y, s->dim_stride, 1, NULL, NULL, {0}},
            m->unit,
            qsf_acts_rows(activated, m->first_row, m->n),
            s->tails[2] + m->first_row * QSF_TILE_ROWS};
    }
    qsf_linear_run_apart(w->ops, products, w->n, false);
}

static bool is_float(const qsf_tensor *t)
{
    return t != NULL && (t->dtype == QSF_DTYPE_F16 || t->dtype == QSF_DTYPE_F32);
}

/* The input of a wave: its rows in order, or the only row of a chunk of one token. */
static qsf_acts gather(const wave *w)
{
    qsf_ops *const o = w->ops;
    const qsf_routed_scratch *const s = &o->scratch->routed;
    bool is_read_as_f32 = o->exact;
    uint32_t tokens[QSF_EXPERT_ROWS];
    for (uint32_t i = 0; i < w->n; i++) {
        const member *const m = &w->members[i];
        is_read_as_f32 |=
            is_float(m->tensors[QSF_LAYER_GATE]) || is_float(m->tensors[QSF_LAYER_UP]);
        for (uint32_t j = 0; j < m->n; j++)
            tokens[m->first_row + j] = s->choices[m->first_choice + j] / o->kind->n_chosen;
    }
    return qsf_ops_gather(o, w->x, tokens, is_read_as_f32 ? s->rows : NULL);
}

/* The choices whose outputs are computed: n of them from `first` on */
typedef struct add_job {
    const qsf_ops *ops;
    uint32_t first;
    uint32_t n;
} add_job;

/* y += weight * output in values [begin, end) of the rows [n_tokens, dim], choices ascending.
 * Nearly whole rows: memory is faster than with a few columns of all rows. */
static void add_weighted(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const add_job *const job = arg;
    const qsf_scratch *const s = job->ops->scratch;
    const qsf_routed_scratch *const r = &s->routed;
    const size_t dim = job->ops->config->dim;
    (void)worker_idx;
    for (uint32_t i = 0; i < job->n; i++) {
        const uint32_t choice = r->choices[job->first + i];
        const size_t row = choice / job->ops->kind->n_chosen;
        const size_t from = begin > row * dim ? begin - row * dim : 0;
        const size_t to = end < row * dim + dim ? end - row * dim : dim;
        if (row * dim < end && from < to)
            job->ops->kernels->add_scaled(s->y + row * s->dim_stride + from,
                                          r->outputs + i * s->dim_stride + from, r->weights[choice],
                                          to - from);
    }
}

static void add_outputs(const qsf_ops *o, uint32_t n_tokens, uint32_t first, uint32_t n)
{
    add_job job = {o, first, n};
    qsf_pool_run(o->pool, (size_t)n_tokens * o->config->dim, qsf_ops_piece(n / n_tokens),
                 add_weighted, &job);
}

/* Runs the collected experts. */
static void run_wave(wave *w, uint32_t n_tokens)
{
    qsf_ops *const o = w->ops;
    const qsf_norm_weights none = {0};
    o->n_tokens = n_tokens == 1 ? 1 : w->n_rows;
    const qsf_acts in = gather(w);
    run_gate_up(w, &in);
    o->n_tokens = w->n_rows;
    const qsf_acts activated =
        qsf_ops_prepare(o, o->scratch->gate, o->kind->ffn_dim, &none, o->scratch->gate);
    run_down(w, &activated);
    if (!w->keeps)
        add_outputs(o, n_tokens, w->members[0].first_choice, w->n_rows);
    for (uint32_t i = 0; i < w->n; i++)
        if (o->scratch->routed.uses[w->members[i].i] == 0)
            qsf_experts_release(o->experts, w->members[i].i);
}

static qsf_status run_experts(qsf_ops *o, const float *x)
{
    const uint32_t n_tokens = o->n_tokens;
    const uint32_t n_choices = n_tokens * o->kind->n_chosen;
    qsf_layer_kind kind = *o->kind; /* of an expert */
    kind.ffn = kind.expert_ffn;
    kind.ffn_dim = kind.expert_dim;
    o->kind = &kind;
    QSF_TRY(qsf_ahead_guess(o, o->experts->layer_idx));
    wave w = {.ops = o,
              .x = x,
              .first_unit = o->config->layers[o->experts->layer_idx].first_expert,
              .n_left = o->experts->n_wanted,
              .keeps = n_choices <= QSF_EXPERT_ROWS};
    while (w.n_left > 0) {
        QSF_TRY(collect(&w));
        run_wave(&w, n_tokens);
    }
    if (w.keeps)
        add_outputs(o, n_tokens, 0, n_choices);
    return QSF_OK;
}

/* y = the dense part, or without one its bias, to which experts are added. If the experts' sum has
 * its own norm, the dense part waits in `input`. */
static qsf_status begin_sums(qsf_ops *o, const qsf_layer *l)
{
    const qsf_scratch *const s = o->scratch;
    const size_t n_bytes = o->n_tokens * s->dim_stride * sizeof *s->y;
    const bool has_dense = l->tensors[QSF_LAYER_UP] != NULL;
    const bool is_apart = l->tensors[QSF_LAYER_ROUTED_POST_NORM] != NULL;
    qsf_norm_weights norm;
    const float *bias = NULL;
    if (!has_dense)
        QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_DOWN_BIAS], 0, &bias));
    for (uint32_t t = 0; l->tensors[QSF_LAYER_SHARED_GATE] != NULL && t < o->n_tokens; t++)
        o->kernels->scale(s->y + t * s->dim_stride, s->routed.gates[t], o->config->dim);
    QSF_TRY(qsf_block_load_norm(o, l->tensors[QSF_LAYER_DENSE_POST_NORM], NULL, &norm));
    if (norm.weight != NULL)
        qsf_ops_norm(o, s->y, &norm, s->y);
    if (has_dense && is_apart)
        memcpy(s->input, s->y, n_bytes);
    if (!has_dense || is_apart)
        memset(s->y, 0, n_bytes);
    for (uint32_t t = 0; bias != NULL && t < o->n_tokens; t++)
        memcpy(s->y + t * s->dim_stride, bias, o->config->dim * sizeof *bias);
    return QSF_OK;
}

/* Normalises the experts' sum, and adds the dense part, if these are separate. */
static qsf_status end_sums(qsf_ops *o, const qsf_layer *l)
{
    const qsf_scratch *const s = o->scratch;
    qsf_norm_weights norm;
    QSF_TRY(qsf_block_load_norm(o, l->tensors[QSF_LAYER_ROUTED_POST_NORM], NULL, &norm));
    if (norm.weight == NULL)
        return QSF_OK;
    qsf_ops_norm(o, s->y, &norm, s->y);
    for (uint32_t t = 0; l->tensors[QSF_LAYER_UP] != NULL && t < o->n_tokens; t++)
        o->kernels->add_scaled(s->y + t * s->dim_stride, s->input + t * s->dim_stride, 1.0F,
                               o->config->dim);
    return QSF_OK;
}

qsf_status qsf_routed_add(qsf_ops *o, const qsf_layer *l, const float *x)
{
    const qsf_layer_kind *const kind = o->kind;
    const uint32_t n_tokens = o->n_tokens;
    qsf_status status = begin_sums(o, l);
    if (status == QSF_OK && l->tensors[QSF_LAYER_ROUTED_NORM] != NULL) {
        qsf_acts in;
        status = qsf_block_norm(o, o->scratch->x, l->tensors[QSF_LAYER_ROUTED_NORM], NULL, &in);
        x = in.f32;
    }
    if (status == QSF_OK)
        status = run_experts(o, x);
    o->kind = kind;
    o->n_tokens = n_tokens;
    qsf_experts_end(o->experts);
    return status == QSF_OK ? end_sums(o, l) : status;
}
