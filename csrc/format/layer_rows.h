/* layer_rows.h - the tensors that a layer may have: a row each, with its shape and its layers.
 *
 * Of config.c alone, which includes config.h before it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "format/records.h"

typedef enum presence { NEVER, OPTIONAL, ALWAYS } presence;

/* Dimensions of tensors that depend on the layer */
typedef enum extent {
    OF_ONE,
    OF_DIM,
    OF_Q,
    OF_K,
    OF_V,
    OF_MIXED, /* columns of the matrix after the mixer */
    OF_GATE,
    OF_RANK,
    OF_DECAY, /* rows of the matrix that reads the input */
    OF_DECAYS,
    OF_VALUE_HEADS,
    OF_VALUE,
    OF_VALUES,
    OF_CHANNELS,
    OF_HEADS,
    OF_QUERIES, /* of latent attention; likewise the next four */
    OF_QUERY_RANK,
    OF_LATENTS,
    OF_LATENT,
    OF_NOPE,
    OF_Q_NORM,
    OF_K_NORM,
    OF_CONV,
    OF_FFN,
    OF_EXPERTS,
    OF_OWN,
    OF_JOINED,
    N_EXTENTS
} extent;

/* Layers that have a tensor: all of them or those of a kind (IN, WITH), or only some of them (IF)
 */
typedef enum condition {
    IF_ANY,
    IF_ENCODER,
    IF_MIXED, /* those with a mixer */
    WITH_Q,   /* those with Q, K and an output matrix; likewise the next */
    IF_Q,
    IF_ATTENTION,
    WITH_Q_NORM,
    WITH_K_NORM,
    WITH_LATENT,
    WITH_QUERY_RANK,
    WITH_CONV,
    IF_SHORT_CONV,
    WITH_DELTA,
    WITH_GATE_OF_MIXER,
    WITH_RANK,
    WITH_KEYS,
    IF_KEYS,
    WITH_VALUES,
    IF_VALUES,
    IF_BIASED_KEYS,
    IF_BIASED_VALUES,
    IF_BIASED,
    WITH_SSD,
    IF_SSD,
    WITH_ROUTER,
    IF_ROUTED,
    IF_SHARED, /* the dense part beside experts */
    IF_APART,  /* router and experts may read the residual with norms of their own */
    IF_SHARED_APART,
    IF_ANY_FFN,
    WITH_OWN, /* embeddings of its own */
    WITH_MTP, /* the MTP head */
    WITH_FFN, /* this and the next four: of the dense FFN, or of an expert's */
    IF_FFN,
    IF_OUT, /* also of the routed part alone */
    WITH_GATE,
    IF_GATE,
    N_CONDITIONS
} condition;

/* A tensor that a layer may have */
typedef struct layer_row {
    qsf_tensor_type type;
    qsf_layer_tensor tensor; /* of outliers: their matrix */
    const char *name;
    qsf_layout layout;
    condition when;
    extent rows;
    extent cols;
} layer_row;

#define ROW(type, tensor, name, layout, condition, rows, cols)                                  \
    {                                                                                           \
        QSF_TENSOR_##type, QSF_LAYER_##tensor, name, QSF_LAYOUT_##layout, condition, rows, cols \
    }
#define VECTOR(type, tensor, name, condition, n) \
    ROW(type, tensor, name, VECTOR, condition, OF_ONE, n)
#define MATRIX(type, tensor, name, condition, rows, cols) \
    ROW(type, tensor, name, TILES, condition, rows, cols)
#define OUTLIERS(type, matrix, name, condition, rows, cols) \
    ROW(type, matrix, name, OUTLIERS, condition, rows, cols)

/* In the order of the pass */
static const layer_row layer_rows[] = {
    VECTOR(MTP_TRUNK_NORM, MTP_TRUNK_NORM, "mtp_trunk_norm", WITH_MTP, OF_DIM),
    VECTOR(MTP_TOKEN_NORM, MTP_TOKEN_NORM, "mtp_token_norm", WITH_MTP, OF_DIM),
    VECTOR(MTP_HIDDEN_NORM, MTP_HIDDEN_NORM, "mtp_hidden_norm", WITH_MTP, OF_DIM),
    MATRIX(MTP_JOIN, MTP_JOIN, "mtp_join", WITH_MTP, OF_DIM, OF_JOINED),
    VECTOR(INPUT_SHIFT, INPUT_SHIFT, "input_shift", IF_ANY, OF_DIM),
    VECTOR(SECOND_SHIFT, SECOND_SHIFT, "second_shift", IF_ENCODER, OF_DIM),
    VECTOR(INPUT_NORM, INPUT_NORM, "input_norm", IF_ANY, OF_DIM),
    VECTOR(INPUT_NORM_BIAS, INPUT_NORM_BIAS, "input_norm_bias", IF_ANY, OF_DIM),
    VECTOR(ATTN_NORM, ATTN_NORM, "attn_norm", IF_MIXED, OF_DIM),
    VECTOR(ATTN_NORM_BIAS, ATTN_NORM_BIAS, "attn_norm_bias", IF_MIXED, OF_DIM),
    VECTOR(Q_BIAS, Q_BIAS, "q_bias", IF_BIASED, OF_Q),
    VECTOR(K_BIAS, K_BIAS, "k_bias", IF_BIASED_KEYS, OF_K),
    VECTOR(V_BIAS, V_BIAS, "v_bias", IF_BIASED_VALUES, OF_V),
    VECTOR(Q_NORM, Q_NORM, "q_norm", WITH_Q_NORM, OF_Q_NORM),
    VECTOR(K_NORM, K_NORM, "k_norm", WITH_K_NORM, OF_K_NORM),
    VECTOR(SINKS, SINKS, "sinks", IF_ATTENTION, OF_HEADS),
    VECTOR(DECAY_RATE, DECAY_RATE, "decay_rate", WITH_DELTA, OF_DECAYS),
    VECTOR(DECAY_BIAS, DECAY_BIAS, "decay_bias", WITH_DELTA, OF_DECAYS),
    VECTOR(MIX_NORM, MIX_NORM, "mix_norm", WITH_DELTA, OF_VALUE),
    OUTLIERS(Q_OUTLIERS, Q, "q_outliers", IF_Q, OF_Q, OF_DIM),
    OUTLIERS(K_OUTLIERS, K, "k_outliers", IF_KEYS, OF_K, OF_DIM),
    OUTLIERS(V_OUTLIERS, V, "v_outliers", IF_VALUES, OF_V, OF_DIM),
    MATRIX(Q, Q, "q", WITH_Q, OF_Q, OF_DIM),
    MATRIX(K, K, "k", WITH_KEYS, OF_K, OF_DIM),
    MATRIX(V, V, "v", WITH_VALUES, OF_V, OF_DIM),
    MATRIX(Q_UP, Q_UP, "q_up", WITH_QUERY_RANK, OF_QUERIES, OF_QUERY_RANK),
    MATRIX(K_UP, K_UP, "k_up", WITH_LATENT, OF_LATENTS, OF_NOPE),
    MATRIX(V_UP, V_UP, "v_up", WITH_LATENT, OF_MIXED, OF_LATENT),
    MATRIX(MIX_GATE, MIX_GATE, "mix_gate", WITH_GATE_OF_MIXER, OF_GATE, OF_DIM),
    MATRIX(BETA, BETA, "beta", WITH_DELTA, OF_VALUE_HEADS, OF_DIM),
    MATRIX(DECAY, DECAY, "decay", WITH_DELTA, OF_DECAY, OF_DIM),
    MATRIX(GATE_UP, GATE_UP, "gate_up", WITH_RANK, OF_MIXED, OF_RANK),
    MATRIX(DECAY_UP, DECAY_UP, "decay_up", WITH_RANK, OF_DECAYS, OF_RANK),
    VECTOR(CONV, CONV, "conv", WITH_CONV, OF_CONV),
    VECTOR(CONV_BIAS, CONV_BIAS, "conv_bias", IF_SHORT_CONV, OF_DIM),
    VECTOR(ATTN_SUB_NORM, ATTN_SUB_NORM, "attn_sub_norm", IF_ATTENTION, OF_MIXED),
    VECTOR(ATTN_OUT_BIAS, ATTN_OUT_BIAS, "attn_out_bias", IF_Q, OF_DIM),
    OUTLIERS(ATTN_OUT_OUTLIERS, ATTN_OUT, "attn_out_outliers", IF_Q, OF_DIM, OF_MIXED),
    MATRIX(ATTN_OUT, ATTN_OUT, "attn_out", WITH_Q, OF_DIM, OF_MIXED),
    VECTOR(POST_ATTN_NORM, POST_ATTN_NORM, "post_attn_norm", IF_Q, OF_DIM),
    VECTOR(SSD_RATE, SSD_RATE, "ssd_rate", WITH_SSD, OF_VALUE_HEADS),
    VECTOR(SSD_STEP_BIAS, SSD_STEP_BIAS, "ssd_step_bias", WITH_SSD, OF_VALUE_HEADS),
    VECTOR(SSD_SKIP, SSD_SKIP, "ssd_skip", WITH_SSD, OF_VALUE_HEADS),
    MATRIX(SSD_GATE, SSD_GATE, "ssd_gate", WITH_SSD, OF_VALUES, OF_DIM),
    MATRIX(SSD_IN, SSD_IN, "ssd_in", WITH_SSD, OF_CHANNELS, OF_DIM),
    MATRIX(SSD_STEP, SSD_STEP, "ssd_step", WITH_SSD, OF_VALUE_HEADS, OF_DIM),
    VECTOR(SSD_CONV, SSD_CONV, "ssd_conv", WITH_SSD, OF_CONV),
    VECTOR(SSD_CONV_BIAS, SSD_CONV_BIAS, "ssd_conv_bias", IF_SSD, OF_CHANNELS),
    VECTOR(SSD_NORM, SSD_NORM, "ssd_norm", IF_SSD, OF_VALUES),
    MATRIX(SSD_OUT, SSD_OUT, "ssd_out", WITH_SSD, OF_DIM, OF_VALUES),
    VECTOR(ROUTER_NORM, ROUTER_NORM, "router_norm", IF_APART, OF_DIM),
    VECTOR(FFN_NORM, FFN_NORM, "ffn_norm", IF_ANY_FFN, OF_DIM),
    VECTOR(FFN_NORM_BIAS, FFN_NORM_BIAS, "ffn_norm_bias", IF_ANY_FFN, OF_DIM),
    VECTOR(ROUTER_BIAS, ROUTER_BIAS, "router_bias", IF_ROUTED, OF_EXPERTS),
    VECTOR(SELECTION_BIAS, SELECTION_BIAS, "selection_bias", IF_ROUTED, OF_EXPERTS),
    VECTOR(EXPERT_SCALE, EXPERT_SCALE, "expert_scale", IF_ROUTED, OF_EXPERTS),
    MATRIX(EXPERT_ROUTER, ROUTER, "router", WITH_ROUTER, OF_EXPERTS, OF_DIM),
    VECTOR(SHARED_GATE, SHARED_GATE, "shared_gate", IF_SHARED, OF_DIM),
    VECTOR(FFN_GATE_BIAS, GATE_BIAS, "gate_bias", IF_GATE, OF_FFN),
    VECTOR(FFN_UP_BIAS, UP_BIAS, "up_bias", IF_FFN, OF_FFN),
    OUTLIERS(FFN_GATE_OUTLIERS, GATE, "gate_outliers", IF_GATE, OF_FFN, OF_DIM),
    OUTLIERS(FFN_UP_OUTLIERS, UP, "up_outliers", IF_FFN, OF_FFN, OF_DIM),
    MATRIX(FFN_GATE, GATE, "gate", WITH_GATE, OF_FFN, OF_DIM),
    MATRIX(FFN_UP, UP, "up", WITH_FFN, OF_FFN, OF_DIM),
    VECTOR(FFN_SUB_NORM, FFN_SUB_NORM, "ffn_sub_norm", IF_FFN, OF_FFN),
    VECTOR(FFN_DOWN_BIAS, DOWN_BIAS, "down_bias", IF_OUT, OF_DIM),
    OUTLIERS(FFN_DOWN_OUTLIERS, DOWN, "down_outliers", IF_FFN, OF_DIM, OF_FFN),
    MATRIX(FFN_DOWN, DOWN, "down", WITH_FFN, OF_DIM, OF_FFN),
    VECTOR(DENSE_POST_NORM, DENSE_POST_NORM, "dense_post_norm", IF_SHARED_APART, OF_DIM),
    VECTOR(ROUTED_NORM, ROUTED_NORM, "routed_norm", IF_APART, OF_DIM),
    VECTOR(ROUTED_POST_NORM, ROUTED_POST_NORM, "routed_post_norm", IF_APART, OF_DIM),
    VECTOR(POST_FFN_NORM, POST_FFN_NORM, "post_ffn_norm", IF_ANY_FFN, OF_DIM),
    VECTOR(OWN_IN_NORM, OWN_IN_NORM, "own_in_norm", WITH_OWN, OF_OWN),
    MATRIX(OWN_IN, OWN_IN, "own_in", WITH_OWN, OF_OWN, OF_DIM),
    MATRIX(OWN_GATE, OWN_GATE, "own_gate", WITH_OWN, OF_OWN, OF_DIM),
    MATRIX(OWN_OUT, OWN_OUT, "own_out", WITH_OWN, OF_DIM, OF_OWN),
    VECTOR(OWN_NORM, OWN_NORM, "own_norm", WITH_OWN, OF_DIM),
    VECTOR(LAYER_SCALE, SCALE, "layer_scale", IF_ANY, OF_ONE),
    VECTOR(MTP_END_NORM, MTP_END_NORM, "mtp_end_norm", WITH_MTP, OF_DIM),
};

#define N_LAYER_ROWS (sizeof layer_rows / sizeof layer_rows[0])

static presence presence_in(const qsf_layer_kind *k, bool has_own, condition when)
{
    const bool is_delta = k->mixer == QSF_MIXER_DELTA;
    const bool has_q = k->mixer != QSF_MIXER_SSD && k->mixer != QSF_MIXER_NONE;
    const bool is_latent = k->latent_rank != 0;
    const bool has_keys = has_q && k->kv_source == 0;
    const bool has_values = has_keys && !k->values_are_keys && !is_latent;
    const bool has_norm = k->qk_norm != QSF_QK_NORM_NONE;
    const bool is_routed = k->n_experts != 0;
    const bool has_ffn = k->ffn != QSF_FFN_NONE;
    const bool is_gated = k->ffn == QSF_FFN_GATED;
    const presence presences[N_CONDITIONS] = {
        [IF_ANY] = OPTIONAL,
        [IF_ENCODER] = k->is_encoder != 0 ? OPTIONAL : NEVER,
        [IF_MIXED] = k->mixer != QSF_MIXER_NONE ? OPTIONAL : NEVER,
        [WITH_Q] = has_q ? ALWAYS : NEVER,
        [IF_Q] = has_q ? OPTIONAL : NEVER,
        [IF_ATTENTION] = qsf_has_attention(k) ? OPTIONAL : NEVER,
        [WITH_CONV] = is_delta || k->mixer == QSF_MIXER_SHORT_CONV ? ALWAYS : NEVER,
        [IF_SHORT_CONV] = k->mixer == QSF_MIXER_SHORT_CONV ? OPTIONAL : NEVER,
        [WITH_DELTA] = is_delta ? ALWAYS : NEVER,
        [WITH_RANK] = k->gate_rank != 0 ? ALWAYS : NEVER,
        [WITH_GATE_OF_MIXER] = is_delta || k->output_gate ? ALWAYS : NEVER,
        [IF_BIASED] = has_q && !is_delta ? OPTIONAL : NEVER,
        [WITH_SSD] = qsf_has_ssd(k) ? ALWAYS : NEVER,
        [IF_SSD] = qsf_has_ssd(k) ? OPTIONAL : NEVER,
        [WITH_KEYS] = has_keys ? ALWAYS : NEVER,
        [IF_KEYS] = has_keys ? OPTIONAL : NEVER,
        [WITH_VALUES] = has_values ? ALWAYS : NEVER,
        [IF_VALUES] = has_values ? OPTIONAL : NEVER,
        [IF_BIASED_KEYS] = has_keys && !is_delta ? OPTIONAL : NEVER,
        [IF_BIASED_VALUES] = has_values && !is_delta ? OPTIONAL : NEVER,
        [WITH_Q_NORM] = has_norm || k->query_rank != 0 ? ALWAYS : NEVER,
        [WITH_K_NORM] = (has_norm && has_keys) || is_latent ? ALWAYS : NEVER,
        [WITH_LATENT] = is_latent ? ALWAYS : NEVER,
        [WITH_QUERY_RANK] = k->query_rank != 0 ? ALWAYS : NEVER,
        [WITH_OWN] = has_own ? ALWAYS : NEVER,
        [WITH_MTP] = k->is_mtp != 0 ? ALWAYS : NEVER,
        [WITH_ROUTER] = is_routed ? ALWAYS : NEVER,
        [IF_ROUTED] = is_routed ? OPTIONAL : NEVER,
        [IF_SHARED] = is_routed && has_ffn ? OPTIONAL : NEVER,
        [IF_APART] = is_routed && !k->is_parallel ? OPTIONAL : NEVER,
        [IF_SHARED_APART] = is_routed && has_ffn && !k->is_parallel ? OPTIONAL : NEVER,
        [IF_ANY_FFN] = is_routed || has_ffn ? OPTIONAL : NEVER,
        [WITH_FFN] = has_ffn ? ALWAYS : NEVER,
        [IF_FFN] = has_ffn ? OPTIONAL : NEVER,
        [IF_OUT] = is_routed || has_ffn ? OPTIONAL : NEVER,
        [WITH_GATE] = is_gated ? ALWAYS : NEVER,
        [IF_GATE] = is_gated ? OPTIONAL : NEVER,
    };
    return presences[when];
}
