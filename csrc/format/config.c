/* config.c - checks that this build's forward pass can run the file. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/config.h"

#include "base/checked.h"
#include "base/status.h"
#include "format/records.h"

typedef enum presence { NEVER, OPTIONAL, ALWAYS } presence;

/* The layers that may have a tensor, and whether one of kind k is among them: X(name, is_in) */
/* clang-format off */
#define LAYER_GROUPS(X)                                                                            \
    X(IN_ALL, true)                                                                                \
    X(IN_ENCODERS, k->is_encoder != 0)                                                             \
    X(IN_MIXED, k->mixer != QSF_MIXER_NONE)                                                        \
    X(IN_Q, has_q) /* with Q, K and an output matrix */                                            \
    X(IN_ATTENTION, qsf_has_attention(k) && !is_relative)                                          \
    X(IN_Q_NORMED, has_norm || k->query_rank != 0)                                                 \
    X(IN_K_NORMED, (has_norm && has_keys) || is_latent)                                            \
    X(IN_LATENT, is_latent)                                                                        \
    X(IN_QUERY_RANK, k->query_rank != 0)                                                           \
    X(IN_CONV, is_delta || k->mixer == QSF_MIXER_SHORT_CONV)                                       \
    X(IN_SHORT_CONV, k->mixer == QSF_MIXER_SHORT_CONV)                                             \
    X(IN_DELTA, is_delta)                                                                          \
    X(IN_MIXER_GATED, is_delta || k->output_gate)                                                  \
    X(IN_GATE_RANK, k->gate_rank != 0)                                                             \
    X(IN_KEYS, has_keys) /* of their own; likewise the next */                                     \
    X(IN_VALUES, has_values)                                                                       \
    X(IN_BIASED, has_q && !is_delta && !is_relative)                                               \
    X(IN_BIASED_KEYS, has_keys && !is_delta && !is_relative)                                       \
    X(IN_BIASED_VALUES, has_values && !is_delta && !is_relative)                                   \
    X(IN_SSD, qsf_has_ssd(k))                                                                      \
    X(IN_ROUTED, is_routed)                                                                        \
    X(IN_SHARED, is_routed && has_ffn) /* with a dense part beside experts */                      \
    X(IN_APART, is_routed && !k->is_parallel && !is_relative) /* experts may have own norms */     \
    X(IN_SHARED_APART, is_routed && has_ffn && !k->is_parallel)                                    \
    X(IN_ANY_FFN, is_routed || has_ffn)                                                            \
    X(IN_PLE, has_own) /* with an embedding of the layer */                                        \
    X(IN_MTP, k->is_mtp != 0)                                                                      \
    X(IN_RELATIVE, is_relative)                                                                    \
    X(IN_OWN_INPUTS, k->has_own_inputs != 0)                                                       \
    X(IN_LOOPED, k->message_rank != 0)                                                             \
    X(IN_FFN, has_ffn) /* this and the next two: of the dense FFN, or of an expert's */            \
    X(IN_OUT, is_routed || has_ffn)                                                                \
    X(IN_GATED, k->ffn == QSF_FFN_GATED)

/* The dimensions of tensors, in a layer of kind k in a file of header h: X(name, n) */
#define EXTENTS(X)                                                                                 \
    X(OF_ONE, 1)                                                                                   \
    X(OF_DIM, h->dim)                                                                              \
    X(OF_Q, dims.q)                                                                                \
    X(OF_K, dims.k)                                                                                \
    X(OF_V, dims.v)                                                                                \
    X(OF_MIXED, dims.out) /* columns of the matrix after the mixer */                              \
    X(OF_GATE, k->gate_rank != 0 ? k->gate_rank : by_heads ? k->n_heads : dims.out)                \
    X(OF_RANK, k->gate_rank)                                                                       \
    X(OF_DECAY, k->gate_rank != 0 ? k->gate_rank : qsf_n_decays(k)) /* of the input's matrix */    \
    X(OF_DECAYS, qsf_n_decays(k))                                                                  \
    X(OF_VALUE_HEADS, k->n_value_heads)                                                            \
    X(OF_VALUE, k->value_dim)                                                                      \
    X(OF_VALUES, dims.values)                                                                      \
    X(OF_CHANNELS, dims.channels)                                                                  \
    X(OF_CONV, k->n_taps * dims.channels)                                                          \
    X(OF_HEADS, k->n_heads)                                                                        \
    X(OF_QUERIES, k->n_heads * qsf_latent_query_dim(k)) /* of latent attention, like the next 4 */ \
    X(OF_QUERY_RANK, k->query_rank)                                                                \
    X(OF_LATENTS, k->n_heads * k->latent_rank)                                                     \
    X(OF_LATENT, k->latent_rank)                                                                   \
    X(OF_NOPE, k->nope_dim)                                                                        \
    X(OF_Q_NORM, per_head ? k->head_dim : is_latent ? k->query_rank : qsf_q_dim(k))                \
    X(OF_K_NORM, per_head ? k->head_dim : is_latent ? k->latent_rank : qsf_kv_dim(k))              \
    X(OF_FFN, k->ffn_dim)                                                                          \
    X(OF_EXPERTS, k->n_experts)                                                                    \
    X(OF_PLE, own_width)                                                                           \
    X(OF_JOINED, 2 * h->dim)                                                                       \
    X(OF_QUERIED, (k->has_own_inputs != 0 ? 3 : 1) * h->dim) /* relative, like the next 7 */       \
    X(OF_MESSAGES, 4 * h->dim)                                                                     \
    X(OF_LOOPED, k->message_rank)                                                                  \
    X(OF_RELATIVE, k->n_heads * k->relative_dim)                                                   \
    X(OF_PROFILES, k->relative_dim * k->relative_extent)                                           \
    X(OF_KV_CONV, k->n_taps * dims.k)                                                              \
    X(OF_DIM_CONV, k->n_taps * h->dim)                                                             \
    X(OF_TAPS, k->n_kv_heads * k->n_taps)
/* clang-format on */

#define NAME(name, value) name,
#define ENTRY(name, value) [name] = value,
typedef enum layer_group { LAYER_GROUPS(NAME) N_LAYER_GROUPS } layer_group;
typedef enum extent { EXTENTS(NAME) N_EXTENTS } extent;

/* A tensor that a layer may have */
typedef struct layer_row {
    qsf_tensor_type type;
    qsf_layer_tensor tensor; /* of outliers: their matrix */
    const char *name;
    qsf_layout layout;
    layer_group group;
    presence presence; /* in layers of the group */
    extent rows;
    extent cols;
} layer_row;

#define ROW(type, name, text, layout, group, presence, rows, cols) \
    {QSF_TENSOR_##type, QSF_LAYER_##name, text, QSF_LAYOUT_##layout, group, presence, rows, cols},
#define VECTOR(number, name, text, group, presence, n) \
    ROW(name, name, text, VECTOR, group, presence, OF_ONE, n)
#define MATRIX(number, name, text, group, presence, rows, cols) \
    ROW(name, name, text, TILES, group, presence, rows, cols)
#define OUTLIERS(number, name, text, group, presence, rows, cols) \
    ROW(name##_OUTLIERS, name, text, OUTLIERS, group, presence, rows, cols)

static const layer_row layer_rows[] = {QSF_LAYER_TABLE(VECTOR, MATRIX, OUTLIERS)};

#define N_LAYER_ROWS (sizeof layer_rows / sizeof layer_rows[0])

static presence presence_in(const qsf_layer_kind *k, bool has_own, const layer_row *row)
{
    const bool is_delta = k->mixer == QSF_MIXER_DELTA;
    const bool is_relative = k->mixer == QSF_MIXER_RELATIVE;
    const bool has_q = k->mixer != QSF_MIXER_SSD && k->mixer != QSF_MIXER_NONE;
    const bool is_latent = k->latent_rank != 0;
    const bool has_keys = has_q && k->kv_source == 0;
    const bool has_values = has_keys && !k->values_are_keys && !is_latent;
    const bool has_norm = k->qk_norm != QSF_QK_NORM_NONE;
    const bool is_routed = k->n_experts != 0;
    const bool has_ffn = k->ffn != QSF_FFN_NONE;
    const bool is_in[] = {LAYER_GROUPS(ENTRY)};
    return is_in[row->group] ? row->presence : NEVER;
}

/* A tensor that a unit may have */
typedef struct tensor_rule {
    qsf_tensor_type type;
    const char *name;
    qsf_layout layout;
    presence presence;
    uint32_t n_rows;
    uint32_t n_cols;
} tensor_rule;

static qsf_status check_tensor(const tensor_rule *rule, const qsf_tensor *t)
{
    const unsigned unit_idx = t->unit_idx;
    QSF_FAIL_IF(rule->presence == NEVER, FORMAT,
                "unit %u has %s, which layers of its kind do not have", unit_idx, rule->name);
    QSF_FAIL_IF(t->n_rows != rule->n_rows || t->n_cols != rule->n_cols, FORMAT,
                "unit %u: %s is %u x %u, expected %u x %u", unit_idx, rule->name, t->n_rows,
                t->n_cols, rule->n_rows, rule->n_cols);
    QSF_FAIL_IF(t->layout != rule->layout, FORMAT, "unit %u: %s has the wrong layout %u", unit_idx,
                rule->name, t->layout);
    return QSF_OK;
}

/* tensors[i] = the unit's tensor of rule i of n_rules, which are in the order of the pass, or NULL.
 * The file must have the tensors in that order, and no others. */
static qsf_status match_unit(const qsf_reader *r, uint32_t unit_idx, const tensor_rule *rules,
                             size_t n_rules, const qsf_tensor **tensors)
{
    uint32_t n_matched = 0;
    uint64_t last_off = 0;
    for (size_t i = 0; i < n_rules; i++) {
        const tensor_rule *const rule = &rules[i];
        const qsf_tensor *const t = qsf_reader_tensor(r, unit_idx, (uint32_t)rule->type);
        tensors[i] = t;
        if (t == NULL) {
            QSF_FAIL_IF(rule->presence == ALWAYS, FORMAT, "unit %u has no %s", unit_idx,
                        rule->name);
            continue;
        }
        QSF_TRY(check_tensor(rule, t));
        QSF_FAIL_IF(t->data_off < last_off, FORMAT, "unit %u: %s is not in the order of the pass",
                    unit_idx, rule->name);
        last_off = t->data_off;
        n_matched++;
    }
    QSF_FAIL_IF(n_matched != r->units[unit_idx].n_tensors, UNSUPPORTED,
                "unit %u has %u tensors, but this build can run only %u of them", unit_idx,
                r->units[unit_idx].n_tensors, n_matched);
    return QSF_OK;
}

/* ---- layers ---- */

static size_t outliers_bytes(const qsf_layer *l, qsf_layer_tensor matrix)
{
    const qsf_tensor *const t = l->outliers[matrix];
    return t != NULL ? qsf_round_up((size_t)t->data_bytes, QSF_DATA_ALIGN) : 0;
}

/* Matrices that run together need their outliers in memory together. */
static void raise_outliers_bytes(qsf_config *c, const qsf_layer *l)
{
    const size_t wanted_bytes[] = {
        outliers_bytes(l, QSF_LAYER_Q) + outliers_bytes(l, QSF_LAYER_K) +
            outliers_bytes(l, QSF_LAYER_V),
        outliers_bytes(l, QSF_LAYER_ATTN_OUT),
        outliers_bytes(l, QSF_LAYER_FFN_GATE) + outliers_bytes(l, QSF_LAYER_FFN_UP),
        outliers_bytes(l, QSF_LAYER_FFN_DOWN),
    };
    for (size_t i = 0; i < sizeof wanted_bytes / sizeof wanted_bytes[0]; i++)
        if (wanted_bytes[i] > c->outliers_bytes)
            c->outliers_bytes = wanted_bytes[i];
}

static tensor_rule rule_of(const layer_row *row, presence presence_of_row,
                           const uint32_t extents[N_EXTENTS])
{
    return (tensor_rule){
        .type = row->type,
        .name = row->name,
        .layout = row->layout,
        .presence = presence_of_row,
        .n_rows = extents[row->rows],
        .n_cols = extents[row->cols],
    };
}

/* True if two layers' keys and values fit into the same pages. */
static bool has_equal_pages(const qsf_layer_kind *a, const qsf_layer_kind *b)
{
    return a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim;
}

/* Finds the layer whose keys and values layer `idx` reads. Of an encoder only the layer that runs
 * needs its keys and values: it overwrites those of the first layer with equal pages. */
static qsf_status find_source(const qsf_reader *r, uint32_t idx, uint32_t *source)
{
    const qsf_layer_kind *const kind = qsf_reader_layer_kind(r, idx);
    const uint32_t wanted = kind->kv_source;
    *source = 0;
    if (r->arch.is_encoder != 0) {
        while (!has_equal_pages(qsf_reader_layer_kind(r, *source), kind))
            ++*source;
        return QSF_OK;
    }
    if (wanted == QSF_KV_LENT) {
        *source = QSF_KV_LENT; /* until there is the other model */
        return QSF_OK;
    }
    for (*source = wanted == 0 ? idx : 0; *source < idx; ++*source)
        if (qsf_reader_layer(r, *source)->layer + 1U == wanted)
            return QSF_OK;
    if (wanted == 0)
        return QSF_OK;
    return QSF_FAIL(ARG, "layer %u is left out, whose keys and values layer %u reads", wanted - 1,
                    qsf_reader_layer(r, idx)->layer);
}

/* Matches the tensors of layer `idx` against those that its kind has. */
static qsf_status match_layer(const qsf_reader *r, uint32_t idx, qsf_layer *l)
{
    const qsf_layer_kind *const k = qsf_reader_layer_kind(r, idx);
    const qsf_header *const h = &r->header;
    const uint32_t own_width = r->arch.own_width;
    const bool by_heads = k->output_gate == QSF_OUTPUT_GATE_OF_HEADS;
    const bool per_head = k->qk_norm == QSF_QK_NORM_PER_HEAD;
    const bool is_latent = k->latent_rank != 0;
    const qsf_mixer_dims dims = qsf_mixer_dims_of(k, h->dim);
    const uint32_t extents[] = {EXTENTS(ENTRY)};
    tensor_rule rules[N_LAYER_ROWS];
    const qsf_tensor *tensors[N_LAYER_ROWS];
    for (size_t i = 0; i < N_LAYER_ROWS; i++)
        rules[i] = rule_of(&layer_rows[i], presence_in(k, own_width != 0, &layer_rows[i]), extents);
    *l = (qsf_layer){.kind = k,
                     .unit_idx = r->layer_units[idx],
                     .first_expert = qsf_reader_layer(r, idx)->first_expert,
                     .ple_col = qsf_reader_layer(r, idx)->layer * own_width};
    QSF_TRY(find_source(r, idx, &l->kv_layer));
    QSF_TRY(match_unit(r, l->unit_idx, rules, N_LAYER_ROWS, tensors));
    for (size_t i = 0; i < N_LAYER_ROWS; i++) {
        const bool is_outliers = layer_rows[i].layout == QSF_LAYOUT_OUTLIERS;
        (is_outliers ? l->outliers : l->tensors)[layer_rows[i].tensor] = tensors[i];
    }
    return QSF_OK;
}

/* Matches the layer of a visit, which has keys, values and states of its own. */
static qsf_status match_visit(const qsf_reader *r, uint32_t visit, qsf_layer *l)
{
    const qsf_arch *const a = &r->arch;
    const uint32_t idx = qsf_reader_visited(r, visit);
    QSF_TRY(match_layer(r, idx, l));
    l->pass_idx = idx;
    if (qsf_reader_visits(r, qsf_reader_layer(r, idx)) > 1)
        l->loop = (visit - a->loop_begin) / (a->loop_end - a->loop_begin);
    if (a->block_layers != 0)
        l->kv_layer = visit;
    return QSF_OK;
}

/* ---- experts and the other units ---- */

/* An expert is an FFN without outliers and norms. */
static bool is_of_experts(const layer_row *row)
{
    return row->group >= IN_FFN && row->layout != QSF_LAYOUT_OUTLIERS &&
           row->tensor != QSF_LAYER_FFN_SUB_NORM;
}

/* Matches the tensors of the experts of a layer; those of a template are matched once. */
static qsf_status match_experts(const qsf_reader *r, const qsf_layer *l)
{
    const qsf_layer_kind *const k = l->kind;
    const qsf_layer_kind expert = {.ffn = k->expert_ffn};
    const uint32_t extents[N_EXTENTS] = {
        [OF_ONE] = 1, [OF_DIM] = r->header.dim, [OF_FFN] = k->expert_dim};
    tensor_rule rules[N_LAYER_ROWS];
    const qsf_tensor *tensors[N_LAYER_ROWS];
    size_t n_rules = 0;
    for (size_t i = 0; i < N_LAYER_ROWS; i++)
        if (is_of_experts(&layer_rows[i]))
            rules[n_rules++] =
                rule_of(&layer_rows[i], presence_in(&expert, false, &layer_rows[i]), extents);
    uint32_t last_template = 0;
    for (uint32_t i = l->first_expert; i < l->first_expert + k->n_experts; i++) {
        if (r->units[i].template_idx == last_template)
            continue;
        last_template = r->units[i].template_idx;
        QSF_TRY(match_unit(r, i, rules, n_rules, tensors));
    }
    return QSF_OK;
}

void qsf_expert_find(const qsf_reader *r, uint32_t unit_idx,
                     const qsf_tensor *tensors[QSF_LAYER_TENSORS])
{
    for (size_t i = 0; i < N_LAYER_ROWS; i++)
        if (is_of_experts(&layer_rows[i]))
            tensors[layer_rows[i].tensor] =
                qsf_reader_tensor(r, unit_idx, (uint32_t)layer_rows[i].type);
}

/* Attention and FFN must have a norm somewhere, and a bias of a norm its norm. */
static qsf_status check_norms(const qsf_layer *l)
{
    const bool is_post = l->tensors[QSF_LAYER_POST_ATTN_NORM] != NULL && !qsf_has_ssd(l->kind);
    const bool has_attn_norm =
        l->kind->mixer == QSF_MIXER_NONE || is_post || l->kind->is_post_norm != 0 ||
        l->tensors[QSF_LAYER_INPUT_NORM] != NULL || l->tensors[QSF_LAYER_ATTN_NORM] != NULL;
    const bool has_ffn_norm = l->tensors[QSF_LAYER_FFN_NORM] != NULL ||
                              l->tensors[QSF_LAYER_POST_FFN_NORM] != NULL || l->kind->is_parallel ||
                              (l->kind->ffn == QSF_FFN_NONE && l->kind->n_experts == 0);
    QSF_FAIL_IF(!has_attn_norm || !has_ffn_norm, FORMAT, "unit %u has no %s", l->unit_idx,
                has_attn_norm ? "ffn_norm" : "attn_norm");
    QSF_FAIL_IF(l->kind->mixer == QSF_MIXER_RELATIVE &&
                    (is_post || l->tensors[QSF_LAYER_POST_FFN_NORM] != NULL),
                FORMAT, "unit %u has mixer 6 with a norm behind attention or FFN", l->unit_idx);
    QSF_FAIL_IF(l->tensors[QSF_LAYER_SECOND_SHIFT] != NULL &&
                    l->tensors[QSF_LAYER_INPUT_SHIFT] == NULL,
                FORMAT, "unit %u has second_shift but not input_shift", l->unit_idx);
    QSF_FAIL_IF(
        (l->tensors[QSF_LAYER_INPUT_NORM] == NULL &&
         l->tensors[QSF_LAYER_INPUT_NORM_BIAS] != NULL) ||
            (l->tensors[QSF_LAYER_ATTN_NORM] == NULL &&
             l->tensors[QSF_LAYER_ATTN_NORM_BIAS] != NULL) ||
            (l->tensors[QSF_LAYER_FFN_NORM] == NULL && l->tensors[QSF_LAYER_FFN_NORM_BIAS] != NULL),
        FORMAT, "unit %u has the bias of a norm but not the norm", l->unit_idx);
    return QSF_OK;
}

/* Low-bit types would change the choice of experts and the decay of a state. */
static qsf_status check_exact(const qsf_layer *l, qsf_layer_tensor which, const char *name)
{
    const qsf_tensor *const t = l->tensors[which];
    QSF_FAIL_IF(t != NULL && t->dtype != QSF_DTYPE_F16 && t->dtype != QSF_DTYPE_F32, UNSUPPORTED,
                "unit %u: %s has type %s, expected f16 or f32", l->unit_idx, name,
                qsf_dtype_name(t->dtype));
    return QSF_OK;
}

bool qsf_layer_keeps_input(const qsf_layer *l)
{
    return l->kind->is_parallel &&
           (l->tensors[QSF_LAYER_FFN_NORM] != NULL || l->tensors[QSF_LAYER_ATTN_NORM] == NULL);
}

static void raise_to(uint32_t *most, uint32_t n)
{
    if (n > *most)
        *most = n;
}

/* Adds the buffers of latent attention: queries before and after K_UP, and the values that heads
 * read one by one. */
static void add_latent(qsf_config *c, const qsf_layer_kind *k)
{
    raise_to(&c->q_dim, k->n_heads * (uint32_t)qsf_stride(qsf_latent_query_dim(k)));
    raise_to(&c->q_dim, k->n_heads * k->latent_value_dim);
    raise_to(&c->q_dim, qsf_q_dim(k));
    raise_to(&c->kv_dim, k->query_rank);
    raise_to(&c->latent_dim, k->n_heads * (uint32_t)qsf_stride(k->nope_dim));
    raise_to(&c->qk_norm_cols, QSF_MAX(k->query_rank, k->latent_rank));
}

/* Adds the buffers of the relative mixer. */
static void add_relative(qsf_config *c, const qsf_layer_kind *k)
{
    const uint32_t kv_dim = qsf_kv_dim(k);
    const uint32_t n_channels = QSF_MAX(kv_dim, c->dim);
    raise_to(&c->n_relative, k->n_heads * k->relative_dim);
    raise_to(&c->qk_norm_cols, k->n_heads * k->relative_dim);
    raise_to(&c->n_profiles, k->relative_dim * k->relative_extent);
    raise_to(&c->conv_cols, k->n_taps * (2 * kv_dim > c->dim ? 2 * kv_dim : c->dim));
    raise_to(&c->conv_channels, n_channels);
    raise_to(&c->n_steps, 2 * k->n_kv_heads * k->n_taps); /* of keys and values */
    raise_to(&c->q_dim, kv_dim);                          /* convolved keys and values */
    raise_to(&c->gate_dim, k->message_rank);
    if (k->message_rank != 0) {
        raise_to(&c->q_dim, c->dim); /* messages, and their two gates */
        raise_to(&c->ffn_dim, 2 * (uint32_t)qsf_stride(c->dim));
    }
    raise_to(&c->ones, c->dim);
    c->keeps_input = true;
}

/* Raises the config's maxima over all layers to those of a layer. */
static void add_layer(qsf_config *c, const qsf_layer *l)
{
    const qsf_layer_kind *const k = l->kind;
    const qsf_mixer_dims dims = qsf_mixer_dims_of(k, c->dim);
    raise_to(&c->n_heads, k->n_heads);
    raise_to(&c->head_dim, k->head_dim);
    raise_to(&c->q_dim, k->n_value_heads != 0 ? dims.channels : 0);
    raise_to(&c->q_dim, dims.q);
    if (k->mixer != QSF_MIXER_DELTA)
        raise_to(&c->kv_dim, dims.k);
    if (k->latent_rank != 0)
        add_latent(c, k);
    if (k->mixer == QSF_MIXER_RELATIVE)
        add_relative(c, k);
    if (l->tensors[QSF_LAYER_MIX_GATE] != NULL)
        raise_to(&c->gate_dim, dims.out);
    raise_to(&c->gate_dim, dims.values);
    raise_to(&c->n_steps, k->n_value_heads + qsf_n_decays(k));
    raise_to(&c->q_dim, qsf_n_decays(k));
    raise_to(&c->q_dim, k->gate_rank);
    raise_to(&c->kv_dim, k->gate_rank);
    raise_to(&c->conv_cols, k->n_taps * dims.channels);
    raise_to(&c->conv_channels, dims.channels);
    raise_to(&c->ffn_dim, k->ffn_dim);
    if (k->n_kv_heads < c->least_kv_heads)
        c->least_kv_heads = k->n_kv_heads;
    if (l->tensors[QSF_LAYER_Q_NORM] != NULL)
        raise_to(&c->qk_norm_cols,
                 l->tensors[QSF_LAYER_Q_NORM]->n_cols); /* not below the K norm's */
    if (k->n_experts != 0)
        raise_to(&c->ffn_dim, k->expert_dim);
    raise_to(&c->n_experts, k->n_experts);
    raise_to(&c->n_chosen, k->n_chosen);
    c->has_gate |= l->tensors[QSF_LAYER_FFN_GATE] != NULL ||
                   (k->n_experts != 0 && k->expert_ffn == QSF_FFN_GATED);
    c->keeps_input |= qsf_layer_keeps_input(l) || l->tensors[QSF_LAYER_ROUTED_POST_NORM] != NULL;
    if (k->value_norm != 0)
        raise_to(&c->ones, k->head_dim);
    raise_to(&c->ffn_dim, c->ple_width);
    if (k->is_mtp != 0)
        raise_to(&c->ffn_dim, 2 * c->dim);
    c->has_gate |= c->ple_width != 0;
    raise_outliers_bytes(c, l);
}

static qsf_status match_ends(qsf_config *c, const qsf_reader *r, qsf_ends *ends)
{
    const presence head = c->has_tied_head || c->is_encoder ? NEVER : ALWAYS;
    const presence drafts = c->target_dim != 0 ? ALWAYS : NEVER;
    const presence dense = c->is_encoder ? OPTIONAL : drafts;
    const qsf_tensor *const rest = qsf_reader_tensor(r, r->final_unit, QSF_TENSOR_HEAD_REST);
    const uint32_t n_rest = rest == NULL ? 0 : rest->n_rows;
    const qsf_tensor *const product = qsf_reader_tensor(r, r->final_unit, QSF_TENSOR_DENSE);
    const uint32_t vector_dim = product == NULL ? c->dim : product->n_rows;
    const tensor_rule embedding[] = {
        {QSF_TENSOR_EMBEDDING, "embedding", QSF_LAYOUT_TILES, ALWAYS, c->n_vocab, c->dim},
    };
    const presence query = c->block_layers != 0 ? ALWAYS : NEVER;
    const tensor_rule final[] = {
        {QSF_TENSOR_FINAL_QUERY, "final_query", QSF_LAYOUT_VECTOR, query, 1, c->dim},
        {QSF_TENSOR_FINAL_NORM, "final_norm", QSF_LAYOUT_VECTOR, ALWAYS, 1, c->dim},
        {QSF_TENSOR_FINAL_NORM_BIAS, "final_norm_bias", QSF_LAYOUT_VECTOR, OPTIONAL, 1, c->dim},
        {QSF_TENSOR_DENSE, "dense", QSF_LAYOUT_TILES, dense, vector_dim, c->dim},
        {QSF_TENSOR_JOIN, "join", QSF_LAYOUT_TILES, drafts, c->dim, 2 * c->target_dim},
        {QSF_TENSOR_HEAD_BIAS, "head_bias", QSF_LAYOUT_VECTOR, OPTIONAL, 1, c->n_vocab},
        {QSF_TENSOR_HEAD, "head", QSF_LAYOUT_TILES, head, c->n_vocab - n_rest, c->dim},
        {QSF_TENSOR_HEAD_REST, "head_rest", QSF_LAYOUT_TILES, OPTIONAL, n_rest, c->dim},
    };
    const qsf_tensor *tensors[sizeof final / sizeof final[0]];
    QSF_TRY(match_unit(r, r->embedding_unit, embedding, 1, &ends->embedding));
    QSF_TRY(match_unit(r, r->final_unit, final, sizeof final / sizeof final[0], tensors));
    ends->final_query = tensors[0];
    ends->final_norm = tensors[1];
    ends->final_norm_bias = tensors[2];
    ends->dense = tensors[3];
    c->vector_dim = vector_dim;
    raise_to(&c->ffn_dim, ends->dense == NULL ? 0 : vector_dim);
    raise_to(&c->ffn_dim, 2 * c->target_dim);
    c->has_gate |= c->target_dim != 0;
    ends->join = tensors[4];
    ends->head_bias = tensors[5];
    ends->head = tensors[6];
    ends->head_rest = tensors[7];
    QSF_FAIL_IF(c->target_dim != 0 && vector_dim != c->target_dim, FORMAT,
                "unit %u: dense has %u rows, expected %u", r->final_unit, vector_dim,
                c->target_dim);
    if (c->has_tied_head)
        ends->head = ends->embedding;
    ends->ple_table = NULL;
    if (r->own_table_unit != 0)
        ends->ple_table = qsf_reader_tensor(r, r->own_table_unit, QSF_TENSOR_OWN_TABLE);
    return QSF_OK;
}

static qsf_status check_positions(const qsf_reader *r)
{
    const bool is_own_rope = r->header.positions == QSF_POSITIONS_ROPE && r->n_rope_sets == 0;
    const uint32_t rope_dims = r->arch.rope_dims;
    QSF_FAIL_IF(r->header.positions == QSF_POSITIONS_ALIBI && r->kind_table.bytes == NULL,
                UNSUPPORTED,
                "the positions are ALiBi, but there is no section KIND with its slopes");
    QSF_FAIL_IF(is_own_rope && (rope_dims == 0 || rope_dims % 2 != 0), FORMAT,
                "%u rotary dimensions; RoPE needs an even number", rope_dims);
    return QSF_OK;
}

/* Counts the RoPE sets that a pass may use at once: one of each number. */
static void count_ropes(qsf_config *c, const qsf_reader *r)
{
    for (uint32_t i = 0; i < r->n_rope_sets; i++)
        if (r->rope_sets[i].least_context == 0) {
            c->n_ropes++;
            c->n_rope_pairs += r->rope_sets[i].frequencies.n;
        }
    if (r->n_rope_sets == 0 && r->header.positions == QSF_POSITIONS_ROPE) {
        c->n_ropes = 1;
        c->n_made_pairs = r->arch.rope_dims / 2;
        c->n_rope_pairs = c->n_made_pairs;
    }
}

/* The embedding of an untied head and the own table are looked up, not multiplied. */
static bool has_only_parts(const qsf_reader *r, const qsf_ends *ends)
{
    for (uint32_t i = 0; i < r->n_tensors; i++) {
        const qsf_tensor *const t = &r->tensors[i];
        if (t->layout == QSF_LAYOUT_TILES && qsf_dtype_is_quantised(t->dtype) &&
            qsf_form_of(t->dtype).scale_cols == QSF_BLOCK && t->type != QSF_TENSOR_OWN_TABLE &&
            (t != ends->embedding || t == ends->head))
            return false;
    }
    return true;
}

qsf_status qsf_config_init(qsf_config *c, const qsf_reader *r, qsf_layer *layers, qsf_ends *ends)
{
    const qsf_header *const h = &r->header;
    QSF_TRY(check_positions(r));
    *c = (qsf_config){
        .n_layers = r->n_visits,
        .n_trunk_layers = r->n_visits - (r->has_mtp ? 1 : 0),
        .n_storing_layers = r->n_storing_layers + (r->n_visits - r->n_pass_layers),
        .layers = layers,
        .dim = h->dim,
        .n_vocab = h->n_vocab,
        .max_tokens = h->max_tokens,
        .least_kv_heads = UINT32_MAX,
        .is_rms_norm = h->norm == QSF_NORM_RMS,
        .has_learned_positions = h->positions == QSF_POSITIONS_LEARNED,
        .has_tied_head = r->arch.tied_head != 0,
        .is_encoder = r->arch.is_encoder != 0,
        .target_dim = r->arch.target_dim,
        .norm_epsilon = r->arch.norm_epsilon,
        .embedding_factor = r->arch.embedding_factor,
        .logit_cap = r->arch.logit_cap,
        .ple_width = r->arch.own_width,
        .ple_cols = r->own_table_unit != 0 ? h->n_layers * r->arch.own_width : 0,
        .has_fine_acts = r->arch.act_bits == 16,
        .block_layers = r->arch.block_layers,
        .loop_begin = r->arch.loop_begin,
    };
    if (c->block_layers != 0) {
        c->n_blocks = (uint32_t)qsf_ceil_div(h->n_layers, c->block_layers);
        c->n_loop_blocks = (r->arch.loop_end - r->arch.loop_begin) / c->block_layers;
    }
    count_ropes(c, r);
    for (uint32_t i = 0; i < c->n_layers; i++) {
        QSF_TRY(match_visit(r, i, &layers[i]));
        QSF_TRY(match_experts(r, &layers[i]));
        QSF_TRY(check_exact(&layers[i], QSF_LAYER_EXPERT_ROUTER, "the router"));
        QSF_TRY(check_exact(&layers[i], QSF_LAYER_BETA, "beta"));
        QSF_TRY(check_exact(&layers[i], QSF_LAYER_DECAY, "decay"));
        QSF_TRY(check_exact(&layers[i], QSF_LAYER_DECAY_UP, "decay_up"));
        QSF_TRY(check_exact(&layers[i], QSF_LAYER_SSD_STEP, "the step"));
        QSF_TRY(check_norms(&layers[i]));
        add_layer(c, &layers[i]);
    }
    QSF_TRY(match_ends(c, r, ends));
    c->has_head_bias = ends->head_bias != NULL;
    c->has_only_parts = has_only_parts(r, ends);
    return QSF_OK;
}
