/* config.c - checks a file's directory against what the forward pass can run. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/config.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"

/* A tensor that a unit may have: the place of its pointer and its shape. */
typedef struct tensor_rule {
    qsf_tensor_type type;
    const char *name;
    size_t pointer_off; /* of the `const qsf_tensor *` in the record */
    qsf_layout layout;
    bool is_required;
    uint32_t n_rows;
    uint32_t n_cols;
} tensor_rule;

static qsf_status check_tensor(const tensor_rule *rule, const qsf_tensor *t)
{
    const unsigned unit_idx = t->unit_idx;
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
            if (rule->is_required)
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

#define LAYER_VECTOR(type, field, required, n)                                      \
    {                                                                               \
        type, #field, offsetof(qsf_layer, field), QSF_LAYOUT_VECTOR, required, 1, n \
    }
#define LAYER_MATRIX(type, field, required, rows, cols)                                  \
    {                                                                                    \
        type, #field, offsetof(qsf_layer, field), QSF_LAYOUT_TILES, required, rows, cols \
    }
#define LAYER_OUTLIERS(type, field, rows, cols)                                          \
    {                                                                                    \
        type, #field, offsetof(qsf_layer, field), QSF_LAYOUT_OUTLIERS, false, rows, cols \
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

static qsf_status match_layers(qsf_config *c, const qsf_reader *r, qsf_layer *layers)
{
    const tensor_rule rules[] = {
        LAYER_VECTOR(QSF_TENSOR_ATTN_NORM, attn_norm, true, c->dim),
        LAYER_VECTOR(QSF_TENSOR_ATTN_NORM_BIAS, attn_norm_bias, false, c->dim),
        LAYER_VECTOR(QSF_TENSOR_Q_BIAS, q_bias, false, c->q_dim),
        LAYER_VECTOR(QSF_TENSOR_K_BIAS, k_bias, false, c->kv_dim),
        LAYER_VECTOR(QSF_TENSOR_V_BIAS, v_bias, false, c->kv_dim),
        LAYER_OUTLIERS(QSF_TENSOR_Q_OUTLIERS, q_outliers, c->q_dim, c->dim),
        LAYER_OUTLIERS(QSF_TENSOR_K_OUTLIERS, k_outliers, c->kv_dim, c->dim),
        LAYER_OUTLIERS(QSF_TENSOR_V_OUTLIERS, v_outliers, c->kv_dim, c->dim),
        LAYER_MATRIX(QSF_TENSOR_Q, q, true, c->q_dim, c->dim),
        LAYER_MATRIX(QSF_TENSOR_K, k, true, c->kv_dim, c->dim),
        LAYER_MATRIX(QSF_TENSOR_V, v, true, c->kv_dim, c->dim),
        LAYER_VECTOR(QSF_TENSOR_ATTN_OUT_BIAS, attn_out_bias, false, c->dim),
        LAYER_OUTLIERS(QSF_TENSOR_ATTN_OUT_OUTLIERS, attn_out_outliers, c->dim, c->q_dim),
        LAYER_MATRIX(QSF_TENSOR_ATTN_OUT, attn_out, true, c->dim, c->q_dim),
        LAYER_VECTOR(QSF_TENSOR_FFN_NORM, ffn_norm, true, c->dim),
        LAYER_VECTOR(QSF_TENSOR_FFN_NORM_BIAS, ffn_norm_bias, false, c->dim),
        LAYER_VECTOR(QSF_TENSOR_FFN_GATE_BIAS, gate_bias, false, c->ffn_dim),
        LAYER_VECTOR(QSF_TENSOR_FFN_UP_BIAS, up_bias, false, c->ffn_dim),
        LAYER_OUTLIERS(QSF_TENSOR_FFN_GATE_OUTLIERS, gate_outliers, c->ffn_dim, c->dim),
        LAYER_OUTLIERS(QSF_TENSOR_FFN_UP_OUTLIERS, up_outliers, c->ffn_dim, c->dim),
        LAYER_MATRIX(QSF_TENSOR_FFN_GATE, gate, c->is_gated, c->ffn_dim, c->dim),
        LAYER_MATRIX(QSF_TENSOR_FFN_UP, up, true, c->ffn_dim, c->dim),
        LAYER_VECTOR(QSF_TENSOR_FFN_DOWN_BIAS, down_bias, false, c->dim),
        LAYER_OUTLIERS(QSF_TENSOR_FFN_DOWN_OUTLIERS, down_outliers, c->dim, c->ffn_dim),
        LAYER_MATRIX(QSF_TENSOR_FFN_DOWN, down, true, c->dim, c->ffn_dim),
    };
    for (uint32_t i = 0; i < c->n_layers; i++) {
        QSF_TRY(match_unit(r, i + 1, rules, sizeof rules / sizeof rules[0], &layers[i]));
        if ((layers[i].gate != NULL) != c->is_gated)
            return QSF_FAIL(QSF_ERR_FORMAT, "layer %u has %s, unlike layer 0", i,
                            c->is_gated ? "no gate" : "a gate");
        if (layers[i].gate_bias != NULL && !c->is_gated)
            return QSF_FAIL(QSF_ERR_FORMAT, "layer %u has the bias of a gate but no gate", i);
        if (layers[i].gate_outliers != NULL && !c->is_gated)
            return QSF_FAIL(QSF_ERR_FORMAT, "layer %u has outliers of a gate but no gate", i);
        raise_outliers_bytes(c, &layers[i]);
    }
    return QSF_OK;
}

static qsf_status match_ends(const qsf_config *c, const qsf_reader *r, qsf_ends *ends)
{
    const tensor_rule embedding[] = {
        {QSF_TENSOR_EMBEDDING, "embedding", offsetof(qsf_ends, embedding), QSF_LAYOUT_TILES, true,
         c->n_vocab, c->dim},
    };
    const tensor_rule final[] = {
        {QSF_TENSOR_FINAL_NORM, "final_norm", offsetof(qsf_ends, final_norm), QSF_LAYOUT_VECTOR,
         true, 1, c->dim},
        {QSF_TENSOR_FINAL_NORM_BIAS, "final_norm_bias", offsetof(qsf_ends, final_norm_bias),
         QSF_LAYOUT_VECTOR, false, 1, c->dim},
        {QSF_TENSOR_HEAD, "head", offsetof(qsf_ends, head), QSF_LAYOUT_TILES, !c->has_tied_head,
         c->n_vocab, c->dim},
    };
    QSF_TRY(match_unit(r, 0, embedding, 1, ends));
    QSF_TRY(match_unit(r, r->n_units - 1, final, c->has_tied_head ? 2 : 3, ends));
    if (c->has_tied_head)
        ends->head = ends->embedding;
    return QSF_OK;
}

static qsf_status check_runnable(const qsf_header *h, const qsf_arch *arch, bool is_gated)
{
    if (h->architecture > QSF_ARCHITECTURE_MISTRAL)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED,
                        "this build does not run architecture %u "
                        "(it runs 0 GPT-2, 1 LLaMA, 2 Mistral)",
                        h->architecture);
    if (h->positions == QSF_POSITIONS_ALIBI)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED, "this build does not support ALiBi positions");
    if (is_gated && h->activation != QSF_ACTIVATION_SILU)
        return QSF_FAIL(
            QSF_ERR_UNSUPPORTED,
            "this build does not support a gated FFN with activation %u, only with SiLU",
            h->activation);
    if (h->positions == QSF_POSITIONS_ROPE && (arch->rope_dims == 0 || arch->rope_dims % 2 != 0))
        return QSF_FAIL(QSF_ERR_FORMAT, "%u rotary dimensions; RoPE needs an even number",
                        arch->rope_dims);
    return QSF_OK;
}

qsf_status qsf_config_init(qsf_config *c, const qsf_reader *r, qsf_layer *layers, qsf_ends *ends)
{
    const qsf_header *const h = &r->header;
    const bool is_gated = qsf_reader_tensor(r, 1, QSF_TENSOR_FFN_GATE) != NULL;
    QSF_TRY(check_runnable(h, &r->arch, is_gated));
    *c = (qsf_config){
        .n_layers = h->n_layers,
        .dim = h->dim,
        .n_heads = h->n_heads,
        .n_kv_heads = h->n_kv_heads,
        .head_dim = h->head_dim,
        .ffn_dim = h->ffn_dim,
        .n_vocab = h->n_vocab,
        .max_tokens = h->max_tokens,
        .q_dim = h->n_heads * h->head_dim, /* <= 2^24: limits of layout.h */
        .kv_dim = h->n_kv_heads * h->head_dim,
        .rope_dims = h->positions == QSF_POSITIONS_ROPE ? r->arch.rope_dims : 0,
        .window_tokens = r->arch.window_tokens,
        .activation = h->activation,
        .is_rms_norm = h->norm == QSF_NORM_RMS,
        .is_gated = is_gated,
        .is_rope_interleaved = r->arch.rope_interleaved,
        .has_learned_positions = h->positions == QSF_POSITIONS_LEARNED,
        .has_tied_head = r->arch.tied_head,
        .norm_epsilon = r->arch.norm_epsilon,
    };
    QSF_TRY(match_layers(c, r, layers));
    return match_ends(c, r, ends);
}

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

void qsf_config_rope_frequencies(const qsf_config *c, const qsf_reader *r, float *out)
{
    const qsf_arch *const a = &r->arch;
    for (uint32_t i = 0; i < c->rope_dims / 2; i++) {
        double frequency =
            1.0 / pow((double)r->header.rope_theta, 2.0 * (double)i / (double)c->rope_dims);
        if (a->rope_scaling == QSF_ROPE_SCALING_LINEAR)
            frequency /= (double)a->rope_factor;
        else if (a->rope_scaling == QSF_ROPE_SCALING_LLAMA3)
            frequency = scale_llama3(a, frequency);
        out[i] = (float)frequency;
    }
}
