/* kinds.c - reads and checks KIND: docs/format.md, section 7. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sections.h"

#include <math.h>
#include <stdio.h>

#include "base/bytes.h"
#include "base/status.h"
#include "format/config.h"
#include "types/dtype.h"

#define LAYERS_OFF 4 /* offset of the layers' kinds in the section */

#define U32(number, name, field, least, most)                                     \
    {                                                                             \
        number, QSF_VALUE_U32, name, offsetof(qsf_layer_kind, field), least, most \
    }
#define F32(number, name, field)                                           \
    {                                                                      \
        number, QSF_VALUE_F32, name, offsetof(qsf_layer_kind, field), 0, 0 \
    }

/* The header has the maximum of each number over all kinds. */
static qsf_status parse_kind(const qsf_header *h, const char *where, unsigned char *bytes,
                             size_t n_bytes, qsf_layer_kind *out)
{
    const qsf_key keys[] = {
        U32(1, "mixer", mixer, 0, QSF_MIXER_COUNT - 1),
        U32(16, "parallel", is_parallel, 0, 1),
        U32(17, "MTP head", is_mtp, 0, 1),
        U32(18, "post-norm", is_post_norm, 0, 1),
        U32(32, "heads", n_heads, 1, h->n_heads),
        U32(33, "KV heads", n_kv_heads, 1, h->n_kv_heads),
        U32(34, "head dimension", head_dim, 1, h->head_dim),
        U32(36, "sliding window", window_tokens, 0, UINT32_MAX),
        U32(37, "RoPE set", rope_set, 0, QSF_ROPE_NONE),
        F32(38, "scale of scores", score_scale),
        F32(39, "cap of scores", score_cap),
        F32(40, "query temperature", temperature_beta),
        U32(41, "step of the query temperature", temperature_step, 1, UINT32_MAX),
        {43, QSF_VALUE_F32_ARRAY, "ALiBi slopes", offsetof(qsf_layer_kind, alibi_slopes), 0, 0},
        U32(44, "rank of the latent", latent_rank, 1, h->head_dim),
        U32(45, "query dimension without RoPE", nope_dim, 1, QSF_MAX_HEAD_DIM),
        U32(46, "value dimension of latents", latent_value_dim, 1, QSF_MAX_HEAD_DIM),
        U32(47, "rank of the query", query_rank, 1, QSF_MAX_DIM),
        U32(48, "Q and K norm", qk_norm, 0, QSF_QK_NORM_COUNT - 1),
        U32(49, "KV source", kv_source, 0, QSF_KV_LENT),
        U32(50, "late Q and K norm", has_late_qk_norm, 0, 1),
        F32(51, "limit of Q, K and V", qkv_limit),
        U32(52, "normalised dimensions of the latent", latent_norm_dim, 1, h->head_dim),
        U32(53, "relative dimensions", relative_dim, 1, QSF_MAX_HEAD_DIM),
        U32(54, "extent of relative biases", relative_extent, 1, QSF_MAX_TOKENS),
        F32(55, "limit of lengths", length_limit),
        U32(56, "output gate", output_gate, 0, QSF_OUTPUT_GATE_COUNT - 1),
        U32(57, "V norm", value_norm, 0, 1),
        F32(58, "limit of relative lengths", relative_limit),
        U32(59, "values", values_are_keys, 0, 1),
        U32(60, "own inputs", has_own_inputs, 0, 1),
        U32(61, "rank of message gates", message_rank, 1, QSF_MAX_DIM),
        U32(64, "form of the FFN", ffn, 0, QSF_FFN_COUNT - 1),
        U32(65, "FFN dimension", ffn_dim, 1, h->ffn_dim),
        U32(66, "activation", activation, 0, QSF_ACTIVATION_COUNT - 1),
        F32(67, "xIELU's factor of squares", xielu_square),
        F32(68, "xIELU's factor of exponentials", xielu_exp),
        F32(69, "xIELU's factor of x", xielu_line),
        F32(70, "cap of the gate", gate_cap),
        F32(71, "cap of up", up_cap),
        U32(80, "experts", n_experts, 1, QSF_MAX_LAYER_EXPERTS),
        U32(81, "chosen experts", n_chosen, 1, QSF_MAX_CHOSEN),
        U32(82, "FFN dimension of an expert", expert_dim, 1, h->ffn_dim),
        U32(83, "score of experts", expert_score, 0, QSF_EXPERT_SCORE_COUNT - 1),
        U32(84, "weights of experts", expert_weights, 0, QSF_EXPERT_WEIGHTS_COUNT - 1),
        F32(85, "epsilon of the weights", weights_epsilon),
        F32(86, "factor of the weights", weights_factor),
        U32(87, "groups of experts", n_groups, 1, QSF_MAX_LAYER_EXPERTS),
        U32(88, "groups kept", n_groups_kept, 1, QSF_MAX_LAYER_EXPERTS),
        U32(89, "score of groups", group_score, 0, QSF_GROUP_SCORE_COUNT - 1),
        U32(91, "form of experts", expert_ffn, QSF_FFN_PLAIN, QSF_FFN_GATED),
        U32(112, "key heads", n_key_heads, 1, QSF_MAX_HEADS),
        U32(113, "value heads", n_value_heads, 1, QSF_MAX_HEADS),
        U32(114, "key dimension", key_dim, 1, QSF_MAX_STATE_DIM),
        U32(115, "value dimension", value_dim, 1, QSF_MAX_STATE_DIM),
        U32(116, "taps", n_taps, 2, QSF_MAX_TAPS),
        U32(117, "rank of gate and decay", gate_rank, 1, QSF_MAX_DIM),
        U32(118, "decays", has_channel_decays, 0, 1),
        F32(119, "factor of beta", beta_factor),
        F32(120, "limit of decays", decay_limit),
        U32(123, "function of the gate", has_sigmoid_gate, 0, 1),
        F32(125, "epsilon of the norm of values", value_epsilon),
        U32(126, "order of value heads", has_tiled_heads, 0, 1),
        F32(128, "residual factor", residual_factor),
    };
    return qsf_keyvalues_parse(where, bytes, n_bytes, keys, sizeof keys / sizeof keys[0], out);
}

static qsf_layer_kind plain_kind(const qsf_reader *r)
{
    const qsf_header *const h = &r->header;
    return (qsf_layer_kind){
        .n_heads = h->n_heads,
        .n_kv_heads = h->n_kv_heads,
        .head_dim = h->head_dim,
        .window_tokens = r->arch.window_tokens,
        .is_encoder = r->arch.is_encoder,
        .rope_set = h->positions == QSF_POSITIONS_ROPE ? 0 : QSF_ROPE_NONE,
        .ffn = QSF_FFN_GATED,
        .ffn_dim = h->ffn_dim,
        .activation = h->activation,
        .beta_factor = 1.0F,
        .residual_factor = 1.0F,
        .weights_factor = 1.0F,
        .n_groups = 1,
        .n_groups_kept = 1,
        .expert_ffn = QSF_FFN_GATED,
    };
}

/* Sets *dims to the rotary dimensions of a set; false if there is no such set. */
static bool find_rotary_dims(const qsf_reader *r, uint32_t number, uint32_t *dims)
{
    if (r->n_rope_sets == 0) {
        *dims = r->arch.rope_dims;
        return number == 0 && r->header.positions == QSF_POSITIONS_ROPE;
    }
    for (uint32_t i = 0; i < r->n_rope_sets; i++)
        if (r->rope_sets[i].number == number) {
            *dims = 2 * r->rope_sets[i].frequencies.n;
            return true;
        }
    return false;
}

/* Checks the fields of the routed part, or that there are none without experts. */
static qsf_status check_experts(const char *where, const qsf_layer_kind *k)
{
    const uint32_t least = k->group_score == QSF_GROUP_TWO_LARGEST ? 2 : 1;
    if (k->n_experts == 0) {
        QSF_FAIL_IF(k->n_chosen != 0 || k->expert_dim != 0 || k->expert_score != 0 ||
                        k->expert_weights != 0 || k->weights_epsilon != 0.0F ||
                        k->weights_factor != 1.0F || k->n_groups != 1 || k->n_groups_kept != 1 ||
                        k->group_score != 0 || k->expert_ffn != QSF_FFN_GATED,
                    FORMAT, "%s: keys 81 .. 91 without experts (key 80)", where);
        return QSF_OK;
    }
    QSF_FAIL_IF(k->n_chosen == 0 || k->expert_dim == 0, FORMAT,
                "%s: experts (key 80) without those chosen (81) or their FFN dimension (82)",
                where);
    QSF_FAIL_IF(
        k->n_experts % k->n_groups != 0 || k->n_groups_kept > k->n_groups ||
            k->n_experts / k->n_groups < least,
        FORMAT,
        "%s: %u experts in %u groups, %u kept, allowed: groups of the same size, %u or more", where,
        k->n_experts, k->n_groups, k->n_groups_kept, least);
    const uint32_t n_left = k->n_experts / k->n_groups * k->n_groups_kept;
    QSF_FAIL_IF(k->n_chosen > n_left, FORMAT,
                "%s: %u experts are chosen of %u, allowed: at most all", where, k->n_chosen,
                n_left);
    QSF_FAIL_IF(k->expert_weights == QSF_EXPERT_WEIGHTS_BY_SUM &&
                    k->expert_score == QSF_EXPERT_LOGIT,
                FORMAT, "%s: logits (key 83) divided by their sum (key 84)", where);
    return QSF_OK;
}

/* Checks the fields of states by heads, or that other mixers have none. */
static qsf_status check_state(const char *where, const qsf_layer_kind *k)
{
    const bool is_delta = k->mixer == QSF_MIXER_DELTA;
    const bool has_heads = is_delta || qsf_has_ssd(k);
    const uint32_t *const fields[] = {&k->n_key_heads, &k->n_value_heads, &k->key_dim,
                                      &k->value_dim};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        QSF_FAIL_IF(has_heads != (*fields[i] != 0), FORMAT,
                    "%s: mixer %u (key 1) with a key %zu of %u, allowed: 1 or more for the delta "
                    "rule (2) and SSD (3, 4), else none",
                    where, k->mixer, 112 + i, *fields[i]);
    QSF_FAIL_IF(!is_delta &&
                    (k->gate_rank != 0 || k->has_channel_decays != 0 || k->has_sigmoid_gate != 0 ||
                     k->has_tiled_heads != 0 || k->beta_factor != 1.0F ||
                     k->value_epsilon != 0.0F || k->decay_limit != 0.0F),
                FORMAT, "%s: mixer %u (key 1) with keys 117 .. 126", where, k->mixer);
    if (!has_heads)
        return QSF_OK;
    const uint32_t n_rows = 2 * k->n_key_heads * k->key_dim + k->n_value_heads * k->value_dim;
    QSF_FAIL_IF(k->n_value_heads % k->n_key_heads != 0 || n_rows > QSF_MAX_MIXED_ROWS, FORMAT,
                "%s: %u value heads, %u key heads, %u rows of q, k and v, allowed: a multiple of "
                "the key heads, at most %u rows",
                where, k->n_value_heads, k->n_key_heads, n_rows, QSF_MAX_MIXED_ROWS);
    return QSF_OK;
}

/* Checks the fields of latent attention, which other attention does not have. */
static qsf_status check_latent(const char *where, const qsf_layer_kind *k)
{
    const bool is_plain = k->n_kv_heads == 1 && k->qk_norm == QSF_QK_NORM_NONE &&
                          k->qkv_limit == 0.0F && k->output_gate != QSF_OUTPUT_GATE_OF_ELEMENTS &&
                          k->value_norm == 0 && k->values_are_keys == 0 &&
                          k->latent_norm_dim <= k->latent_rank;
    if (k->latent_rank == 0) {
        QSF_FAIL_IF(k->nope_dim != 0 || k->latent_value_dim != 0 || k->query_rank != 0 ||
                        k->latent_norm_dim != 0,
                    FORMAT, "%s: keys 45 .. 47, 52 without a latent (key 44)", where);
        return QSF_OK;
    }
    QSF_FAIL_IF(k->latent_rank % QSF_LATENT_STEP != 0 || k->latent_rank >= k->head_dim ||
                    k->nope_dim == 0 || k->latent_value_dim == 0 ||
                    k->latent_value_dim % QSF_LATENT_VALUE_STEP != 0 || !is_plain,
                FORMAT,
                "%s: a latent of %u in keys of %u, queries of %u, values of %u, %u KV heads, "
                "allowed: a multiple of %u below the keys, 1 or more, a multiple of %u, 1, without "
                "keys 48 .. 59 but a gate of heads (56), and a norm (52) of at most all",
                where, k->latent_rank, k->head_dim, k->nope_dim, k->latent_value_dim, k->n_kv_heads,
                QSF_LATENT_STEP, QSF_LATENT_VALUE_STEP);
    return QSF_OK;
}

/* Checks the fields of the relative mixer, which others do not have. */
static qsf_status check_relative(const char *where, const qsf_layer_kind *k)
{
    const bool is_relative = k->mixer == QSF_MIXER_RELATIVE;
    QSF_FAIL_IF((k->relative_dim != 0) != is_relative || (k->relative_extent != 0) != is_relative ||
                    (k->length_limit != 0.0F) != is_relative ||
                    (k->relative_limit != 0.0F) != is_relative ||
                    (!is_relative && (k->has_own_inputs != 0 || k->message_rank != 0)),
                FORMAT,
                "%s: mixer %u (key 1), allowed: 6 with keys 53 .. 55 and 58, others without these, "
                "60 and 61",
                where, k->mixer);
    if (!is_relative)
        return QSF_OK;
    const uint64_t n_profiles = (uint64_t)k->relative_dim * k->relative_extent;
    const bool is_plain = k->rope_set == QSF_ROPE_NONE && k->score_cap == 0.0F &&
                          k->alibi_slopes.n == 0 && k->qk_norm == QSF_QK_NORM_NONE &&
                          k->qkv_limit == 0.0F && k->kv_source == 0 && k->values_are_keys == 0 &&
                          k->latent_rank == 0 && k->is_post_norm == 0 && k->is_parallel == 0;
    QSF_FAIL_IF(!is_plain || k->output_gate != QSF_OUTPUT_GATE_OF_ELEMENTS || k->value_norm == 0 ||
                    k->n_experts == 0 || k->ffn != QSF_FFN_NONE || k->residual_factor != 1.0F ||
                    n_profiles > QSF_MAX_EXTENT_ROWS,
                FORMAT,
                "%s: mixer 6 (key 1), allowed: a gate of elements (key 56), a V norm (57), experts "
                "without a dense part (64), RoPE set 255 (37), profiles of at most %u numbers, "
                "and of other keys of attention 32 .. 34, 36, 38, 40, 41, 53 .. 55, 58, 60, 61",
                where, QSF_MAX_EXTENT_ROWS);
    return QSF_OK;
}

/* Checks that a kind has the fields of its mixer, and no others. */
static qsf_status check_mixer(const qsf_reader *r, const char *where, const qsf_layer_kind *k)
{
    const bool is_parallel = k->is_parallel != 0;
    const bool is_empty = k->ffn == QSF_FFN_NONE && k->n_experts == 0;
    const bool has_conv = k->mixer != QSF_MIXER_ATTENTION && k->mixer != QSF_MIXER_NONE;
    const bool is_plain =
        k->n_heads == r->header.n_heads && k->n_kv_heads == r->header.n_kv_heads &&
        k->head_dim == r->header.head_dim && k->window_tokens == 0 &&
        k->rope_set == QSF_ROPE_NONE && k->score_scale == 0.0F && k->score_cap == 0.0F &&
        k->temperature_beta == 0.0F && k->alibi_slopes.n == 0 && k->qk_norm == QSF_QK_NORM_NONE &&
        k->qkv_limit == 0.0F && k->kv_source == 0 && k->output_gate == 0 && k->value_norm == 0 &&
        k->values_are_keys == 0 && k->latent_rank == 0;
    QSF_FAIL_IF(!qsf_has_attention(k) && !is_plain, FORMAT,
                "%s: mixer %u (key 1) with attention's keys 32 .. 59, allowed: a window (36) of 0, "
                "RoPE set (37) 255",
                where, k->mixer);
    QSF_FAIL_IF(qsf_has_ssd(k) && k->kv_source != 0, FORMAT,
                "%s: SSD (key 1) with another layer's keys (key 49)", where);
    QSF_FAIL_IF(has_conv != (k->n_taps != 0), FORMAT,
                "%s: mixer %u (key 1) has %u taps (key 116), allowed: 2 .. %u for a convolution (1 "
                ".. 4, 6), else none",
                where, k->mixer, k->n_taps, QSF_MAX_TAPS);
    QSF_TRY(check_latent(where, k));
    QSF_TRY(check_relative(where, k));
    QSF_FAIL_IF(k->mixer == QSF_MIXER_NONE && (is_parallel || is_empty), FORMAT,
                "%s: mixer 5 (key 1), which is none, %s, allowed: an FFN or experts", where,
                is_parallel ? "with a parallel FFN (key 16)" : "without an FFN");
    return check_state(where, k);
}

/* Checks the fields that depend on each other. */
static qsf_status check_kind(const qsf_reader *r, const char *where, const qsf_layer_kind *k)
{
    uint32_t rotary_dims = 0;
    QSF_TRY(check_mixer(r, where, k));
    QSF_FAIL_IF(k->n_heads % k->n_kv_heads != 0, FORMAT, "%s: %u KV heads do not divide %u heads",
                where, k->n_kv_heads, k->n_heads);
    QSF_FAIL_IF(k->rope_set != QSF_ROPE_NONE && !find_rotary_dims(r, k->rope_set, &rotary_dims),
                FORMAT, "%s: there is no RoPE set %u", where, k->rope_set);
    QSF_FAIL_IF(rotary_dims > k->head_dim - k->latent_rank, FORMAT,
                "%s: RoPE set %u rotates %u dimensions, the heads have %u", where, k->rope_set,
                rotary_dims, k->head_dim - k->latent_rank);
    QSF_FAIL_IF(k->is_encoder != 0 && (k->mixer != QSF_MIXER_ATTENTION || k->latent_rank != 0 ||
                                       k->kv_source != 0 || k->alibi_slopes.n != 0),
                FORMAT,
                "%s: of an encoder (ARCH, key 14), allowed: attention without keys 43, 44, 49",
                where);
    QSF_FAIL_IF(k->is_post_norm != 0 && k->is_parallel != 0, FORMAT,
                "%s: post-norm (key 18) with a parallel FFN (key 16)", where);
    QSF_FAIL_IF((k->temperature_beta != 0.0F) != (k->temperature_step != 0), FORMAT,
                "%s: a query temperature has both a beta and a step", where);
    const bool is_by_head =
        k->qk_norm == QSF_QK_NORM_PER_HEAD || k->qk_norm == QSF_QK_NORM_OWN_WEIGHTS;
    QSF_FAIL_IF(k->has_late_qk_norm != 0 && (!is_by_head || k->temperature_step != 0), FORMAT,
                "%s: a late norm of Q and K (key 50), allowed: by heads (key 48 of 1 or 3) without "
                "a query temperature (40, 41)",
                where);
    QSF_FAIL_IF(k->qkv_limit != 0.0F && k->qk_norm == QSF_QK_NORM_WHOLE_WIDTH, FORMAT,
                "%s: a limit of Q, K and V (key 51), whose heads have one norm (key 48)", where);
    const bool is_xielu = k->activation == QSF_ACTIVATION_XIELU;
    const float xielu[] = {k->xielu_square, k->xielu_exp, k->xielu_line};
    for (size_t i = 0; i < sizeof xielu / sizeof xielu[0]; i++)
        QSF_FAIL_IF(
            (xielu[i] != 0.0F) != is_xielu, FORMAT,
            "%s: activation %u (key 66), allowed: 6 with all of keys 67 .. 69, others with none",
            where, k->activation);
    const bool is_capped = k->activation == QSF_ACTIVATION_SILU_CAPPED;
    QSF_FAIL_IF((k->gate_cap != 0.0F) != is_capped || (k->up_cap != 0.0F) != is_capped ||
                    (is_capped && (k->ffn == QSF_FFN_PLAIN || k->expert_ffn != QSF_FFN_GATED)),
                FORMAT,
                "%s: activation %u (key 66), allowed: 7 of gated FFNs with both of keys 70, 71, "
                "others with none",
                where, k->activation);
    QSF_FAIL_IF(k->values_are_keys != 0 && k->qk_norm == QSF_QK_NORM_WHOLE_WIDTH, FORMAT,
                "%s: values that are keys (key 59), whose heads have one norm (key 48)", where);
    QSF_FAIL_IF(k->kv_source != 0 &&
                    (k->latent_rank != 0 || k->value_norm != 0 || k->values_are_keys != 0 ||
                     k->qk_norm == QSF_QK_NORM_WHOLE_WIDTH),
                FORMAT,
                "%s: keys and values of another layer (key 49) with a latent or norms of its own "
                "(keys 44, 48, 57, 59), allowed: of queries, per head",
                where);
    QSF_FAIL_IF(k->alibi_slopes.n != 0 && k->alibi_slopes.n != k->n_heads, FORMAT,
                "%s: %u slopes for %u heads", where, k->alibi_slopes.n, k->n_heads);
    return check_experts(where, k);
}

/* Checks the head of the section and gives the layers their kinds. */
static qsf_status parse_layers(qsf_reader *r, size_t *head_bytes)
{
    const qsf_table *const t = &r->kind_table;
    const uint32_t n_layers = r->header.n_layers;
    *head_bytes = LAYERS_OFF + ((size_t)n_layers + 3) / 4 * 4;
    QSF_FAIL_IF(t->n_bytes < *head_bytes, FORMAT, "KIND: %zu bytes, its head alone has %zu",
                t->n_bytes, *head_bytes);
    r->n_kinds = qsf_load_u16(t->bytes);
    const uint32_t reserved = qsf_load_u16(t->bytes + 2);
    QSF_FAIL_IF(r->n_kinds == 0 || r->n_kinds > QSF_MAX_LAYER_KINDS || reserved != 0, FORMAT,
                "KIND: %u kinds, reserved %u, allowed: 1 .. %u, reserved 0", r->n_kinds, reserved,
                QSF_MAX_LAYER_KINDS);
    for (uint32_t i = 0; i < n_layers; i++) {
        const uint8_t kind = t->bytes[LAYERS_OFF + i];
        QSF_FAIL_IF(kind >= r->n_kinds, FORMAT, "KIND: layer %u is of kind %d, there are %u", i,
                    kind, r->n_kinds);
        r->units[r->layer_units[i]].kind = kind;
    }
    for (size_t i = LAYERS_OFF + n_layers; i < *head_bytes; i++)
        QSF_FAIL_IF(t->bytes[i] != 0, FORMAT, "KIND: the padding behind the layers is not zero");
    return QSF_OK;
}

/* Parses the kinds from `at` on, after the layers' entries. */
static qsf_status parse_kinds(qsf_reader *r, size_t at)
{
    const qsf_table *const t = &r->kind_table;
    for (uint32_t i = 0; i < r->n_kinds; i++) {
        char where[24];
        (void)snprintf(where, sizeof where, "KIND: kind %u", i);
        const size_t n_left = t->n_bytes - at;
        const uint32_t n_bytes = n_left >= 4 ? qsf_load_u32(t->bytes + at) : UINT32_MAX;
        QSF_FAIL_IF(n_left < 4 || n_bytes > n_left - 4, FORMAT,
                    "%s has more bytes than are left, %zu", where, n_left);
        r->kinds[i] = plain_kind(r);
        QSF_TRY(parse_kind(&r->header, where, t->bytes + at + 4, n_bytes, &r->kinds[i]));
        QSF_TRY(check_kind(r, where, &r->kinds[i]));
        at += 4 + (size_t)n_bytes;
    }
    QSF_FAIL_IF(at != t->n_bytes, FORMAT, "KIND: %zu bytes behind the last kind", t->n_bytes - at);
    return QSF_OK;
}

/* A layer reads keys and values of an earlier one that has the same heads and positions. */
static qsf_status check_sources(const qsf_reader *r)
{
    for (uint32_t i = 0; i < r->n_pass_layers; i++) {
        const qsf_layer_kind *const k = qsf_reader_layer_kind(r, i);
        const bool is_lent = k->kv_source == QSF_KV_LENT;
        QSF_FAIL_IF(is_lent != (r->arch.target_dim != 0), FORMAT,
                    "KIND: layer %u reads %s keys and values (key 49), and ARCH has a hidden "
                    "dimension of another model (key 15) of %u",
                    i, is_lent ? "another model's" : "this model's", r->arch.target_dim);
        if (k->kv_source == 0 || is_lent)
            continue;
        const uint32_t source = k->kv_source - 1;
        const qsf_layer_kind *const from = qsf_reader_layer_kind(r, source < i ? source : i);
        QSF_FAIL_IF(source >= i || from->kv_source != 0 || from->mixer != QSF_MIXER_ATTENTION ||
                        from->latent_rank != 0 || from->n_kv_heads != k->n_kv_heads ||
                        from->head_dim != k->head_dim || from->window_tokens != k->window_tokens,
                    FORMAT,
                    "KIND: layer %u reads keys and values of layer %u, allowed: an earlier layer "
                    "with keys of its own, as many KV heads, the same head dimension and window",
                    i, source);
    }
    return QSF_OK;
}

/* Only the last layer can be an MTP head. */
static qsf_status check_mtp(const qsf_reader *r)
{
    for (uint32_t i = 0; i < r->n_pass_layers; i++) {
        const qsf_layer_kind *const k = qsf_reader_layer_kind(r, i);
        QSF_FAIL_IF(k->is_mtp != 0 && (i == 0 || i + 1 != r->n_pass_layers ||
                                       k->mixer != QSF_MIXER_ATTENTION || k->kv_source != 0),
                    FORMAT,
                    "KIND: layer %u of %u is an MTP head (key 17), allowed: the last of 2 or more, "
                    "with attention to keys of its own",
                    i, r->n_pass_layers);
    }
    return QSF_OK;
}

/* All layers have residual blocks, or none; looped ones are whole blocks with message gates. */
static qsf_status check_blocks(const qsf_reader *r)
{
    const qsf_arch *const a = &r->arch;
    const uint32_t n_layers = r->header.n_layers;
    const bool has_blocks = a->block_layers != 0;
    QSF_FAIL_IF(has_blocks && n_layers > QSF_MAX_BLOCKS * a->block_layers, FORMAT,
                "ARCH: %u layers in blocks of %u (key 16), allowed: %u blocks", n_layers,
                a->block_layers, QSF_MAX_BLOCKS);
    const bool is_loop = a->loop_end != 0;
    QSF_FAIL_IF(is_loop != (a->loop_begin != 0) || is_loop != (a->loop_passes > 1) ||
                    (is_loop &&
                     (!has_blocks || a->loop_begin >= a->loop_end || a->loop_end > n_layers ||
                      a->loop_begin % a->block_layers != 0 || a->loop_end % a->block_layers != 0)),
                FORMAT,
                "ARCH: layers %u .. %u of %u run %u times (keys 17 .. 19), allowed: none, or whole "
                "blocks (key 16) behind the first, 2 times or more",
                a->loop_begin, a->loop_end, n_layers, a->loop_passes);
    for (uint32_t i = 0; i < n_layers; i++) {
        const qsf_layer_kind *const k = qsf_reader_layer_kind(r, i);
        const bool is_looped = i >= a->loop_begin && i < a->loop_end;
        QSF_FAIL_IF((k->mixer == QSF_MIXER_RELATIVE) != has_blocks ||
                        (k->message_rank != 0) != is_looped,
                    FORMAT,
                    "KIND: layer %u has mixer %u and message gates of rank %u, allowed: mixer 6 "
                    "with residual blocks (ARCH, key 16), a rank (key 61) in looped layers alone",
                    i, k->mixer, k->message_rank);
    }
    return QSF_OK;
}

qsf_status qsf_kinds_read(qsf_reader *r)
{
    size_t head_bytes = 0;
    QSF_TRY(qsf_reader_keep_section(r, "KIND", &r->kind_table));
    const bool has_section = r->kind_table.bytes != NULL;
    r->n_kinds = 1;
    if (has_section)
        QSF_TRY(parse_layers(r, &head_bytes));
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, r->n_kinds * sizeof *r->kinds,
                            "kinds of layers", &r->kinds));
    r->kinds[0] = plain_kind(r);
    if (has_section)
        QSF_TRY(parse_kinds(r, head_bytes));
    for (uint32_t i = 0; i < r->n_kinds; i++)
        if (r->kinds[i].score_scale == 0.0F)
            r->kinds[i].score_scale = 1.0F / sqrtf((float)r->kinds[i].head_dim);
    QSF_TRY(check_mtp(r));
    QSF_TRY(check_blocks(r));
    return check_sources(r);
}
