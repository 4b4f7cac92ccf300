/* routed.c - routes a chunk, sorts its rows by expert, runs the experts, and guesses those of the
 * next layer.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/ops.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "model/linear.h"

/* ---- the choice of one token ---- */

#define STRIPS (QSF_MAX_LAYER_EXPERTS / QSF_STRIP)

/* x [n] = softmax(x) */
static void softmax(const qsf_kernels *k, float *x, uint32_t n)
{
    float sums[STRIPS];
    float e[QSF_MAX_LAYER_EXPERTS];
    float max = x[0];
    float total = 0.0F;
    for (uint32_t i = 1; i < n; i++)
        max = QSF_MAX(x[i], max);
    k->weigh(x, n, max, 1.0F, 0.0F, e, sums);
    for (uint32_t i = 0; i * QSF_STRIP < n; i++)
        total += sums[i];
    for (uint32_t i = 0; i < n; i++)
        x[i] = e[i] / total;
}

/* x [n] = sigmoid(x), by exp(-|x|), which cannot overflow */
static void sigmoid(const qsf_kernels *k, float *x, uint32_t n)
{
    float sums[STRIPS];
    float below[QSF_MAX_LAYER_EXPERTS] = {0.0F};
    float e[QSF_MAX_LAYER_EXPERTS];
    for (uint32_t i = 0; i < n; i++)
        below[i] = -fabsf(x[i]);
    k->weigh(below, n, 0.0F, 1.0F, 0.0F, e, sums);
    for (uint32_t i = 0; i < n; i++)
        x[i] = (x[i] >= 0.0F ? 1.0F : e[i]) / (1.0F + e[i]);
}

/* Returns the largest of x [n] that is not taken yet; of equals, and if none is larger than NaN,
 * the first. */
static uint32_t find_largest(const float *x, const bool *is_taken, uint32_t n)
{
    uint32_t best = n;
    for (uint32_t i = 0; i < n; i++)
        if (!is_taken[i] && (best == n || x[i] > x[best]))
            best = i;
    return best;
}

static float score_group(const qsf_layer_kind *kind, const float *x, uint32_t n)
{
    bool is_taken[QSF_MAX_LAYER_EXPERTS] = {false};
    const uint32_t first = find_largest(x, is_taken, n);
    if (kind->group_score == QSF_GROUP_LARGEST)
        return x[first];
    is_taken[first] = true;
    return x[first] + x[find_largest(x, is_taken, n)];
}

/* Removes the experts of the groups that are not chosen. */
static void drop_groups(const qsf_layer_kind *kind, const float *selection, bool *is_taken)
{
    float scores[QSF_MAX_LAYER_EXPERTS];
    bool is_kept[QSF_MAX_LAYER_EXPERTS] = {false};
    const uint32_t n = kind->n_experts / kind->n_groups;
    for (uint32_t i = 0; i < kind->n_groups; i++)
        scores[i] = score_group(kind, selection + (size_t)i * n, n);
    for (uint32_t i = 0; i < kind->n_groups_kept; i++)
        is_kept[find_largest(scores, is_kept, kind->n_groups)] = true;
    for (uint32_t i = 0; i < kind->n_experts; i++)
        is_taken[i] = !is_kept[i / n];
}

/* Turns the scores of the chosen [n] into weights. */
static void make_weights(const qsf_kernels *k, const qsf_layer_kind *kind, float *weights)
{
    const uint32_t n = kind->n_chosen;
    float sum = 0.0F;
    if (kind->expert_weights == QSF_EXPERT_WEIGHTS_SOFTMAX)
        softmax(k, weights, n);
    for (uint32_t i = 0; i < n; i++)
        sum += weights[i];
    sum += kind->weights_epsilon;
    for (uint32_t i = 0; i < n; i++) {
        if (kind->expert_weights == QSF_EXPERT_WEIGHTS_BY_SUM)
            weights[i] /= sum;
        weights[i] *= kind->weights_factor;
    }
}

void qsf_routing_choose(const qsf_kernels *k, const qsf_layer_kind *kind, float *logits,
                        const float *selection_bias, uint16_t *chosen, float *weights)
{
    float biased[QSF_MAX_LAYER_EXPERTS];
    bool is_taken[QSF_MAX_LAYER_EXPERTS] = {false};
    bool is_chosen[QSF_MAX_LAYER_EXPERTS] = {false};
    const uint32_t n = kind->n_experts;
    if (kind->expert_score == QSF_EXPERT_SOFTMAX)
        softmax(k, logits, n);
    else if (kind->expert_score == QSF_EXPERT_SIGMOID)
        sigmoid(k, logits, n);
    for (uint32_t i = 0; selection_bias != NULL && i < n; i++)
        biased[i] = logits[i] + selection_bias[i];
    const float *const selection = selection_bias != NULL ? biased : logits;
    if (kind->n_groups > 1)
        drop_groups(kind, selection, is_taken);
    for (uint32_t i = 0; i < kind->n_chosen; i++) {
        const uint32_t best = find_largest(selection, is_taken, n);
        is_taken[best] = true;
        is_chosen[best] = true;
    }
    uint32_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!is_chosen[i])
            continue;
        chosen[at] = (uint16_t)i;
        weights[at++] = logits[i];
    }
    make_weights(k, kind, weights);
}

/* Returns sigmoid(w . x), n values. */
static float gate_of(const qsf_kernels *k, const float *w, const float *x, uint32_t n)
{
    float gate = qsf_ops_dot(w, x, n);
    sigmoid(k, &gate, 1);
    return gate;
}

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
    qsf_experts_request(o->experts, o->config->layers[layer_idx].pass_idx, s->units, s->uses, n);
}

qsf_status qsf_routed_choose(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx, const qsf_acts *x)
{
    const qsf_scratch *const s = o->scratch;
    const uint32_t n_experts = o->kind->n_experts;
    choose_job job = {.ops = o};
    qsf_linear router =
        qsf_linear_of(l->tensors[QSF_LAYER_EXPERT_ROUTER], s->routed.scores, n_experts);
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
        s->routed.gates[t] = gate_of(o->kernels, gate, x->f32 + t * s->dim_stride, o->config->dim);
    return QSF_OK;
}

/* ---- a guess: the next layer's router on this layer's state ---- */

#define LIKELY_EIGHTHS 3 /* of 8 experts that a token will choose, so many are read ahead */

/* Scores of the next layer's experts for the only row, before this layer's experts are added. */
static qsf_status score_next(qsf_ops *o, const qsf_layer *next, const float **selection_bias)
{
    const qsf_scratch *const s = o->scratch;
    qsf_norm_weights norm;
    const uint32_t n = next->kind->n_experts;
    qsf_linear router = qsf_linear_of(next->tensors[QSF_LAYER_EXPERT_ROUTER], s->routed.scores, n);
    const bool is_apart = next->tensors[QSF_LAYER_ROUTER_NORM] != NULL;
    const qsf_tensor *const weight =
        next->tensors[is_apart ? QSF_LAYER_ROUTER_NORM : QSF_LAYER_FFN_NORM];
    const qsf_tensor *const bias = is_apart ? NULL : next->tensors[QSF_LAYER_FFN_NORM_BIAS];
    QSF_TRY(qsf_ops_load_vector(o, weight, s->vectors[2], &norm.weight));
    QSF_TRY(qsf_ops_load_vector(o, bias, s->vectors[3], &norm.bias));
    QSF_TRY(qsf_ops_load_vector(o, next->tensors[QSF_LAYER_ROUTER_BIAS], s->routed.biases[0],
                                &router.bias));
    QSF_TRY(qsf_ops_load_vector(o, next->tensors[QSF_LAYER_SELECTION_BIAS], s->routed.biases[1],
                                selection_bias));
    const qsf_acts x = qsf_ops_prepare(o, s->x, o->config->dim, &norm, s->routed.rows);
    return qsf_linear_run(o, &router, 1, &x);
}

/* Writes the n experts with the largest weights for the only row, in descending order. */
static qsf_status find_likely(qsf_ops *o, const qsf_layer *next, uint32_t n, uint32_t *likely)
{
    const uint32_t n_chosen = next->kind->n_chosen;
    const float *selection_bias;
    uint16_t chosen[QSF_MAX_CHOSEN];
    float weights[QSF_MAX_CHOSEN];
    QSF_TRY(score_next(o, next, &selection_bias));
    qsf_routing_choose(o->kernels, next->kind, o->scratch->routed.scores, selection_bias, chosen,
                       weights);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t best = 0;
        for (uint32_t j = 1; j < n_chosen; j++)
            if (weights[j] > weights[best])
                best = j;
        likely[i] = chosen[best];
        weights[best] = -INFINITY;
    }
    return QSF_OK;
}

/* If the disk is the bottleneck, a wrong guess costs the time of reading its bytes. So only the
 * most probable experts are guessed, which are nearly always right, and only if most experts of
 * this layer had to be read: if most are in memory, half of the guesses for the missing ones are
 * wrong (bench/LOG.md). */
static bool can_guess(const qsf_ops *o, const qsf_layer *next)
{
    return o->n_tokens == 1 && !next->kind->is_parallel && o->config->block_layers == 0 &&
           2 * o->experts->n_missing > o->experts->n_wanted &&
           qsf_stream_resident(o->stream, next->unit_idx) != NULL;
}

/* Call it after the dense part of the layer whose experts are requested. Overwrites the scores,
 * biases and rows of the routed scratch. */
static qsf_status guess_next(qsf_ops *o, uint32_t layer_idx)
{
    if (layer_idx + 1 >= o->config->n_trunk_layers ||
        o->config->layers[layer_idx + 1].tensors[QSF_LAYER_EXPERT_ROUTER] == NULL)
        return QSF_OK;
    const qsf_layer *const next = &o->config->layers[layer_idx + 1];
    uint32_t *const likely = o->scratch->routed.likely;
    uint32_t n = 0;
    if (o->n_tokens * next->kind->n_chosen >=
        2 * next->kind->n_experts) { /* hardly any expert is left out */
        for (; n < next->kind->n_experts; n++)
            likely[n] = n;
    } else if (can_guess(o, next)) {
        n = (uint32_t)qsf_ceil_div(next->kind->n_chosen * LIKELY_EIGHTHS, 8);
        o->apart = qsf_stream_resident(o->stream, next->unit_idx);
        const qsf_status status = find_likely(o, next, n, likely);
        o->apart = NULL;
        QSF_TRY(status);
    }
    for (uint32_t i = 0; i < n; i++)
        likely[i] += next->first_expert;
    qsf_experts_guess(o->experts, likely, n);
    return QSF_OK;
}

/* ---- running the experts ---- */

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
    return is_copied(m->tensors[QSF_LAYER_FFN_GATE_BIAS]) ||
           is_copied(m->tensors[QSF_LAYER_FFN_UP_BIAS]) ||
           is_copied(m->tensors[QSF_LAYER_FFN_DOWN_BIAS]);
}

static qsf_status load_biases(qsf_ops *o, member *m)
{
    float *const *const space = o->scratch->vectors;
    o->apart = m->unit;
    static const qsf_layer_tensor biases[] = {QSF_LAYER_FFN_GATE_BIAS, QSF_LAYER_FFN_UP_BIAS,
                                              QSF_LAYER_FFN_DOWN_BIAS};
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
    m->n = QSF_MIN(s->uses[i], left_rows);
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

/* y [m->n, stride] = a matrix of a member on rows x, plus bias `bias_idx` of the member, which is
 * also the index of the buffer for the last tile row */
static qsf_linear_apart product_of(const member *m, qsf_layer_tensor matrix, size_t bias_idx,
                                   float *y, size_t stride, const qsf_acts *x, const qsf_scratch *s)
{
    qsf_linear linear = qsf_linear_of(m->tensors[matrix], y, stride);
    linear.bias = m->biases[bias_idx];
    return (qsf_linear_apart){
        .linear = linear,
        .unit = m->unit,
        .x = *x,
        .tail = s->tails[bias_idx] + m->first_row * QSF_TILE_ROWS,
    };
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
        const qsf_acts rows = x->n_tokens == w->n_rows ? qsf_acts_rows(x, m->first_row, m->n) : *x;
        float *const up = (is_gated ? s->up : s->gate) + off;
        if (is_gated)
            products[n++] = product_of(m, QSF_LAYER_FFN_GATE, 0, s->gate + off, stride, &rows, s);
        products[n] = product_of(m, QSF_LAYER_FFN_UP, 1, up, stride, &rows, s);
        products[n].linear.epilogue = activate;
        products[n++].linear.epilogue_arg = m;
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
        const qsf_acts rows = qsf_acts_rows(activated, m->first_row, m->n);
        products[i] = product_of(m, QSF_LAYER_FFN_DOWN, 2, y, s->dim_stride, &rows, s);
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
            is_float(m->tensors[QSF_LAYER_FFN_GATE]) || is_float(m->tensors[QSF_LAYER_FFN_UP]);
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
    o->n_tokens = n_tokens == 1 ? 1 : w->n_rows;
    const qsf_acts in = gather(w);
    run_gate_up(w, &in);
    o->n_tokens = w->n_rows;
    const qsf_acts activated = qsf_ops_prepare(o, o->scratch->gate, o->kind->ffn_dim, NULL, NULL);
    run_down(w, &activated);
    if (!w->keeps)
        add_outputs(o, n_tokens, w->members[0].first_choice, w->n_rows);
    for (uint32_t i = 0; i < w->n; i++)
        if (o->scratch->routed.uses[w->members[i].i] == 0)
            qsf_experts_release(o->experts, w->members[i].i);
}

static qsf_status run_experts(qsf_ops *o, const qsf_layer *l, const float *x)
{
    const uint32_t n_tokens = o->n_tokens;
    const uint32_t n_choices = n_tokens * o->kind->n_chosen;
    qsf_layer_kind kind = *o->kind; /* of an expert */
    kind.ffn = kind.expert_ffn;
    kind.ffn_dim = kind.expert_dim;
    o->kind = &kind;
    QSF_TRY(guess_next(o, (uint32_t)(l - o->config->layers)));
    wave w = {.ops = o,
              .x = x,
              .first_unit = l->first_expert,
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
    const bool has_dense = l->tensors[QSF_LAYER_FFN_UP] != NULL;
    const bool is_apart = l->tensors[QSF_LAYER_ROUTED_POST_NORM] != NULL;
    qsf_norm_weights norm;
    const float *bias = NULL;
    if (!has_dense)
        QSF_TRY(qsf_block_load(o, l->tensors[QSF_LAYER_FFN_DOWN_BIAS], 0, &bias));
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
    for (uint32_t t = 0; l->tensors[QSF_LAYER_FFN_UP] != NULL && t < o->n_tokens; t++)
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
        status = run_experts(o, l, x);
    o->kind = kind;
    o->n_tokens = n_tokens;
    qsf_experts_end(o->experts);
    return status == QSF_OK ? end_sums(o, l) : status;
}
