/* config.c - checks a file's directory against what the forward pass can run. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/config.h"

#include <string.h>

#include "base/checked.h"
#include "base/status.h"

typedef enum presence { NEVER, OPTIONAL, ALWAYS } presence;

/* A tensor that a unit may have: the place of its pointer and its shape. */
typedef struct tensor_rule {
    qsf_tensor_type type;
    const char *name;
    size_t pointer_off; /* of the `const qsf_tensor *` in the record */
    qsf_layout layout;
    presence presence;
    uint32_t n_rows;
    uint32_t n_cols;
} tensor_rule;

static qsf_status check_tensor(const tensor_rule *rule, const qsf_tensor *t)
{
    const unsigned unit_idx = t->unit_idx;
    if (rule->presence == NEVER)
        return QSF_FAIL(QSF_ERR_FORMAT, "unit %u has %s, which layers of its kind do not have",
                        unit_idx, rule->name);
    if (t->n_rows != rule->n_rows || t->n_cols != rule->n_cols)
        return QSF_FAIL(QSF_ERR_FORMAT, "unit %u: %s is %u x %u, expected %u x %u", unit_idx,
                        rule->name, t->n_rows, t->n_cols, rule->n_rows, rule->n_cols);
    if (t->layout != rule->layout)
        return QSF_FAIL(QSF_ERR_FORMAT, "unit %u: %s has the wrong layout %u", unit_idx, rule->name,
                        t->layout);
    return QSF_OK;
}

/* Sets the pointers of `record` to the unit's tensors, by n_rules rules in the order of the pass.
 * The file must have the tensors in that order, and no others. */
static qsf_status match_unit(const qsf_reader *r, uint32_t unit_idx, const tensor_rule *rules,
                             size_t n_rules, void *record)
{
    uint32_t n_matched = 0;
    uint64_t last_off = 0;
    for (size_t i = 0; i < n_rules; i++) {
        const tensor_rule *const rule = &rules[i];
        const qsf_tensor *const t = qsf_reader_tensor(r, unit_idx, (uint32_t)rule->type);
        memcpy((unsigned char *)record + rule->pointer_off, &t, sizeof t);
        if (t == NULL) {
            if (rule->presence == ALWAYS)
                return QSF_FAIL(QSF_ERR_FORMAT, "unit %u has no %s", unit_idx, rule->name);
            continue;
        }
        QSF_TRY(check_tensor(rule, t));
        if (t->data_off < last_off)
            return QSF_FAIL(QSF_ERR_FORMAT, "unit %u: %s is not in the order of the pass", unit_idx,
                            rule->name);
        last_off = t->data_off;
        n_matched++;
    }
    if (n_matched != r->units[unit_idx].n_tensors)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED,
                        "unit %u has %u tensors, but this build can run only %u of them", unit_idx,
                        r->units[unit_idx].n_tensors, n_matched);
    return QSF_OK;
}

#define LAYER_VECTOR(type, field, presence, n)                                      \
    {                                                                               \
        type, #field, offsetof(qsf_layer, field), QSF_LAYOUT_VECTOR, presence, 1, n \
    }
#define LAYER_MATRIX(type, field, presence, rows, cols)                                  \
    {                                                                                    \
        type, #field, offsetof(qsf_layer, field), QSF_LAYOUT_TILES, presence, rows, cols \
    }
#define LAYER_OUTLIERS(type, field, presence, rows, cols)                                   \
    {                                                                                       \
        type, #field, offsetof(qsf_layer, field), QSF_LAYOUT_OUTLIERS, presence, rows, cols \
    }

static size_t table_bytes(const qsf_tensor *t)
{
    return t != NULL ? qsf_round_up((size_t)t->data_bytes, QSF_DATA_ALIGN) : 0;
}

/* Matrices that run together need their sparse outliers in memory together. */
static void raise_outliers_bytes(qsf_config *c, const qsf_layer *l)
{
    const size_t wanted_bytes[] = {
        table_bytes(l->q_outliers) + table_bytes(l->k_outliers) + table_bytes(l->v_outliers),
        table_bytes(l->attn_out_outliers),
        table_bytes(l->gate_outliers) + table_bytes(l->up_outliers),
        table_bytes(l->down_outliers),
    };
    for (size_t i = 0; i < sizeof wanted_bytes / sizeof wanted_bytes[0]; i++)
        if (wanted_bytes[i] > c->outliers_bytes)
            c->outliers_bytes = wanted_bytes[i];
}

/* Matches the tensors of layer `idx` against those that its kind has. */
static qsf_status match_layer(const qsf_reader *r, uint32_t idx, qsf_layer *l)
{
    const qsf_layer_kind *const k = qsf_reader_layer_kind(r, idx);
    const uint32_t dim = r->header.dim;
    const uint32_t q = qsf_q_dim(k);
    const uint32_t kv = qsf_kv_dim(k);
    const uint32_t ffn = k->ffn_dim;
    const bool is_per_head = k->qk_norm == QSF_QK_NORM_PER_HEAD;
    const presence qk_norm = k->qk_norm != QSF_QK_NORM_NONE ? ALWAYS : NEVER;
    const bool is_routed = k->n_experts != 0;
    const presence router = is_routed ? ALWAYS : NEVER;
    const presence by_router = is_routed ? OPTIONAL : NEVER;
    const presence any_ffn = is_routed || k->ffn != QSF_FFN_NONE ? OPTIONAL : NEVER;
    const presence shared = is_routed && k->ffn != QSF_FFN_NONE ? OPTIONAL : NEVER;
    const presence up = k->ffn != QSF_FFN_NONE ? ALWAYS : NEVER;
    const presence by_up = k->ffn != QSF_FFN_NONE ? OPTIONAL : NEVER;
    const presence gate = k->ffn == QSF_FFN_GATED ? ALWAYS : NEVER;
    const presence by_gate = k->ffn == QSF_FFN_GATED ? OPTIONAL : NEVER;
    const tensor_rule rules[] = {
        LAYER_VECTOR(QSF_TENSOR_INPUT_NORM, input_norm, OPTIONAL, dim),
        LAYER_VECTOR(QSF_TENSOR_INPUT_NORM_BIAS, input_norm_bias, OPTIONAL, dim),
        LAYER_VECTOR(QSF_TENSOR_ATTN_NORM, attn_norm, OPTIONAL, dim),
        LAYER_VECTOR(QSF_TENSOR_ATTN_NORM_BIAS, attn_norm_bias, OPTIONAL, dim),
        LAYER_VECTOR(QSF_TENSOR_Q_BIAS, q_bias, OPTIONAL, q),
        LAYER_VECTOR(QSF_TENSOR_K_BIAS, k_bias, OPTIONAL, kv),
        LAYER_VECTOR(QSF_TENSOR_V_BIAS, v_bias, OPTIONAL, kv),
        LAYER_VECTOR(QSF_TENSOR_Q_NORM, q_norm, qk_norm, is_per_head ? k->head_dim : q),
        LAYER_VECTOR(QSF_TENSOR_K_NORM, k_norm, qk_norm, is_per_head ? k->head_dim : kv),
        LAYER_VECTOR(QSF_TENSOR_SINKS, sinks, OPTIONAL, k->n_heads),
        LAYER_OUTLIERS(QSF_TENSOR_Q_OUTLIERS, q_outliers, OPTIONAL, q, dim),
        LAYER_OUTLIERS(QSF_TENSOR_K_OUTLIERS, k_outliers, OPTIONAL, kv, dim),
        LAYER_OUTLIERS(QSF_TENSOR_V_OUTLIERS, v_outliers, OPTIONAL, kv, dim),
        LAYER_MATRIX(QSF_TENSOR_Q, q, ALWAYS, q, dim),
        LAYER_MATRIX(QSF_TENSOR_K, k, ALWAYS, kv, dim),
        LAYER_MATRIX(QSF_TENSOR_V, v, ALWAYS, kv, dim),
        LAYER_VECTOR(QSF_TENSOR_ATTN_SUB_NORM, attn_sub_norm, OPTIONAL, q),
        LAYER_VECTOR(QSF_TENSOR_ATTN_OUT_BIAS, attn_out_bias, OPTIONAL, dim),
        LAYER_OUTLIERS(QSF_TENSOR_ATTN_OUT_OUTLIERS, attn_out_outliers, OPTIONAL, dim, q),
        LAYER_MATRIX(QSF_TENSOR_ATTN_OUT, attn_out, ALWAYS, dim, q),
        LAYER_VECTOR(QSF_TENSOR_POST_ATTN_NORM, post_attn_norm, OPTIONAL, dim),
        LAYER_VECTOR(QSF_TENSOR_FFN_NORM, ffn_norm, any_ffn, dim),
        LAYER_VECTOR(QSF_TENSOR_FFN_NORM_BIAS, ffn_norm_bias, any_ffn, dim),
        LAYER_VECTOR(QSF_TENSOR_ROUTER_BIAS, router_bias, by_router, k->n_experts),
        LAYER_VECTOR(QSF_TENSOR_SELECTION_BIAS, selection_bias, by_router, k->n_experts),
        LAYER_MATRIX(QSF_TENSOR_EXPERT_ROUTER, router, router, k->n_experts, dim),
        LAYER_VECTOR(QSF_TENSOR_SHARED_GATE, shared_gate, shared, dim),
        LAYER_VECTOR(QSF_TENSOR_FFN_GATE_BIAS, gate_bias, by_gate, ffn),
        LAYER_VECTOR(QSF_TENSOR_FFN_UP_BIAS, up_bias, by_up, ffn),
        LAYER_OUTLIERS(QSF_TENSOR_FFN_GATE_OUTLIERS, gate_outliers, by_gate, ffn, dim),
        LAYER_OUTLIERS(QSF_TENSOR_FFN_UP_OUTLIERS, up_outliers, by_up, ffn, dim),
        LAYER_MATRIX(QSF_TENSOR_FFN_GATE, gate, gate, ffn, dim),
        LAYER_MATRIX(QSF_TENSOR_FFN_UP, up, up, ffn, dim),
        LAYER_VECTOR(QSF_TENSOR_FFN_SUB_NORM, ffn_sub_norm, by_up, ffn),
        LAYER_VECTOR(QSF_TENSOR_FFN_DOWN_BIAS, down_bias, by_up, dim),
        LAYER_OUTLIERS(QSF_TENSOR_FFN_DOWN_OUTLIERS, down_outliers, by_up, dim, ffn),
        LAYER_MATRIX(QSF_TENSOR_FFN_DOWN, down, up, dim, ffn),
        LAYER_VECTOR(QSF_TENSOR_POST_FFN_NORM, post_ffn_norm, any_ffn, dim),
    };
    l->kind = k;
    l->unit_idx = r->layer_units[idx];
    l->first_expert = qsf_reader_layer(r, idx)->first_expert;
    return match_unit(r, l->unit_idx, rules, sizeof rules / sizeof rules[0], l);
}

#define EXPERT_VECTOR(type, field, n)                                                \
    {                                                                                \
        type, #field, offsetof(qsf_expert, field), QSF_LAYOUT_VECTOR, OPTIONAL, 1, n \
    }
#define EXPERT_MATRIX(type, field, rows, cols)                                          \
    {                                                                                   \
        type, #field, offsetof(qsf_expert, field), QSF_LAYOUT_TILES, ALWAYS, rows, cols \
    }

/* Matches the tensors of the experts of a layer; those of a template are matched once. */
static qsf_status match_experts(const qsf_reader *r, const qsf_layer *l)
{
    const qsf_layer_kind *const k = l->kind;
    const uint32_t dim = r->header.dim;
    const tensor_rule rules[] = {
        EXPERT_VECTOR(QSF_TENSOR_FFN_GATE_BIAS, gate_bias, k->expert_dim),
        EXPERT_VECTOR(QSF_TENSOR_FFN_UP_BIAS, up_bias, k->expert_dim),
        EXPERT_MATRIX(QSF_TENSOR_FFN_GATE, gate, k->expert_dim, dim),
        EXPERT_MATRIX(QSF_TENSOR_FFN_UP, up, k->expert_dim, dim),
        EXPERT_VECTOR(QSF_TENSOR_FFN_DOWN_BIAS, down_bias, dim),
        EXPERT_MATRIX(QSF_TENSOR_FFN_DOWN, down, dim, k->expert_dim),
    };
    uint32_t last_template = 0;
    for (uint32_t i = l->first_expert; i < l->first_expert + k->n_experts; i++) {
        qsf_expert e;
        if (r->units[i].template_idx == last_template)
            continue;
        last_template = r->units[i].template_idx;
        QSF_TRY(match_unit(r, i, rules, sizeof rules / sizeof rules[0], &e));
    }
    return QSF_OK;
}

void qsf_expert_find(const qsf_reader *r, uint32_t unit_idx, qsf_expert *out)
{
    *out = (qsf_expert){
        .gate_bias = qsf_reader_tensor(r, unit_idx, QSF_TENSOR_FFN_GATE_BIAS),
        .up_bias = qsf_reader_tensor(r, unit_idx, QSF_TENSOR_FFN_UP_BIAS),
        .gate = qsf_reader_tensor(r, unit_idx, QSF_TENSOR_FFN_GATE),
        .up = qsf_reader_tensor(r, unit_idx, QSF_TENSOR_FFN_UP),
        .down_bias = qsf_reader_tensor(r, unit_idx, QSF_TENSOR_FFN_DOWN_BIAS),
        .down = qsf_reader_tensor(r, unit_idx, QSF_TENSOR_FFN_DOWN),
    };
}

/* Attention and FFN must have a norm somewhere, and a bias of a norm its norm. */
static qsf_status check_norms(const qsf_layer *l)
{
    const bool has_attn_norm = l->attn_norm != NULL || l->post_attn_norm != NULL;
    const bool has_ffn_norm = l->ffn_norm != NULL || l->post_ffn_norm != NULL ||
                              l->kind->is_parallel ||
                              (l->kind->ffn == QSF_FFN_NONE && l->kind->n_experts == 0);
    if (!has_attn_norm || !has_ffn_norm)
        return QSF_FAIL(QSF_ERR_FORMAT, "unit %u has no %s", l->unit_idx,
                        has_attn_norm ? "ffn_norm" : "attn_norm");
    if ((l->input_norm == NULL && l->input_norm_bias != NULL) ||
        (l->attn_norm == NULL && l->attn_norm_bias != NULL) ||
        (l->ffn_norm == NULL && l->ffn_norm_bias != NULL))
        return QSF_FAIL(QSF_ERR_FORMAT, "unit %u has the bias of a norm but not the norm",
                        l->unit_idx);
    return QSF_OK;
}

/* The router is exact: few bits would change the choice of experts. */
static qsf_status check_router(const qsf_layer *l)
{
    const qsf_tensor *const t = l->router;
    if (t != NULL && t->dtype != QSF_DTYPE_F16 && t->dtype != QSF_DTYPE_F32)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED, "unit %u: the router has type %s, expected f16 or f32",
                        l->unit_idx, qsf_dtype_name(t->dtype));
    return QSF_OK;
}

bool qsf_layer_keeps_input(const qsf_layer *l)
{
    return l->kind->is_parallel && (l->ffn_norm != NULL || l->attn_norm == NULL);
}

static void raise_to(uint32_t *most, uint32_t n)
{
    if (n > *most)
        *most = n;
}

/* Raises what the config says of all layers to what a layer needs. */
static void add_layer(qsf_config *c, const qsf_layer *l)
{
    const qsf_layer_kind *const k = l->kind;
    raise_to(&c->n_heads, k->n_heads);
    raise_to(&c->head_dim, k->head_dim);
    raise_to(&c->q_dim, qsf_q_dim(k));
    raise_to(&c->kv_dim, qsf_kv_dim(k));
    raise_to(&c->ffn_dim, k->ffn_dim);
    if (k->n_kv_heads < c->least_kv_heads)
        c->least_kv_heads = k->n_kv_heads;
    if (l->q_norm != NULL)
        raise_to(&c->qk_norm_cols, l->q_norm->n_cols); /* not below the K norm's */
    if (k->n_experts != 0)
        raise_to(&c->ffn_dim, k->expert_dim);
    raise_to(&c->n_experts, k->n_experts);
    raise_to(&c->n_chosen, k->n_chosen);
    c->has_gate |= l->gate != NULL || k->n_experts != 0;
    c->keeps_input |= qsf_layer_keeps_input(l);
    raise_outliers_bytes(c, l);
}

static qsf_status match_ends(const qsf_config *c, const qsf_reader *r, qsf_ends *ends)
{
    const tensor_rule embedding[] = {
        {QSF_TENSOR_EMBEDDING, "embedding", offsetof(qsf_ends, embedding), QSF_LAYOUT_TILES, ALWAYS,
         c->n_vocab, c->dim},
    };
    const tensor_rule final[] = {
        {QSF_TENSOR_FINAL_NORM, "final_norm", offsetof(qsf_ends, final_norm), QSF_LAYOUT_VECTOR,
         ALWAYS, 1, c->dim},
        {QSF_TENSOR_FINAL_NORM_BIAS, "final_norm_bias", offsetof(qsf_ends, final_norm_bias),
         QSF_LAYOUT_VECTOR, OPTIONAL, 1, c->dim},
        {QSF_TENSOR_HEAD_BIAS, "head_bias", offsetof(qsf_ends, head_bias), QSF_LAYOUT_VECTOR,
         c->has_tied_head ? NEVER : OPTIONAL, 1, c->n_vocab},
        {QSF_TENSOR_HEAD, "head", offsetof(qsf_ends, head), QSF_LAYOUT_TILES,
         c->has_tied_head ? NEVER : ALWAYS, c->n_vocab, c->dim},
    };
    QSF_TRY(match_unit(r, r->embedding_unit, embedding, 1, ends));
    QSF_TRY(match_unit(r, r->final_unit, final, sizeof final / sizeof final[0], ends));
    if (c->has_tied_head)
        ends->head = ends->embedding;
    return QSF_OK;
}

static qsf_status check_positions(const qsf_reader *r)
{
    const bool is_own_rope = r->header.positions == QSF_POSITIONS_ROPE && r->n_rope_sets == 0;
    const uint32_t rope_dims = r->arch.rope_dims;
    if (r->header.positions == QSF_POSITIONS_ALIBI && r->kind_table.bytes == NULL)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED,
                        "the positions are ALiBi, but there is no section KIND with its slopes");
    if (is_own_rope && (rope_dims == 0 || rope_dims % 2 != 0))
        return QSF_FAIL(QSF_ERR_FORMAT, "%u rotary dimensions; RoPE needs an even number",
                        rope_dims);
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
        c->n_own_pairs = r->arch.rope_dims / 2;
        c->n_rope_pairs = c->n_own_pairs;
    }
}

qsf_status qsf_config_init(qsf_config *c, const qsf_reader *r, qsf_layer *layers, qsf_ends *ends)
{
    const qsf_header *const h = &r->header;
    QSF_TRY(check_positions(r));
    *c = (qsf_config){
        .n_layers = r->n_pass_layers,
        .layers = layers,
        .dim = h->dim,
        .n_vocab = h->n_vocab,
        .max_tokens = h->max_tokens,
        .least_kv_heads = UINT32_MAX,
        .is_rms_norm = h->norm == QSF_NORM_RMS,
        .has_learned_positions = h->positions == QSF_POSITIONS_LEARNED,
        .has_tied_head = r->arch.tied_head != 0,
        .norm_epsilon = r->arch.norm_epsilon,
        .embedding_factor = r->arch.embedding_factor,
        .logit_cap = r->arch.logit_cap,
    };
    count_ropes(c, r);
    for (uint32_t i = 0; i < c->n_layers; i++) {
        QSF_TRY(match_layer(r, i, &layers[i]));
        QSF_TRY(match_experts(r, &layers[i]));
        QSF_TRY(check_router(&layers[i]));
        QSF_TRY(check_norms(&layers[i]));
        add_layer(c, &layers[i]);
    }
    QSF_TRY(match_ends(c, r, ends));
    c->has_head_bias = ends->head_bias != NULL;
    return QSF_OK;
}
