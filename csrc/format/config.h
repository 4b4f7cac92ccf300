/* config.h - the shapes and rules of a model for the forward pass, validated once.
 *
 * Built from the file's header, ARCH, kinds of layers and tensor table. Later code does not check
 * shapes again. Models that this build cannot run are refused here.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/checked.h"
#include "types/dtype.h"
#include "format/records.h"

/* The tensors that a layer may have, in the order of the pass. Columns: type in the file
 * (qsf_tensor_type); member of qsf_layer_tensor, of outliers that of their matrix; name in errors;
 * the layers that may have it, and whether all of these have it (config.c); columns of a vector, or
 * rows and columns. Q, K and V of a short convolution are C, B and x.
 */
/* clang-format off */
#define QSF_LAYER_TABLE(VECTOR, MATRIX, OUTLIERS)                                                  \
    VECTOR(MTP_TRUNK_NORM, MTP_TRUNK_NORM, "mtp_trunk_norm", IN_MTP, ALWAYS, OF_DIM)               \
    VECTOR(MTP_TOKEN_NORM, MTP_TOKEN_NORM, "mtp_token_norm", IN_MTP, ALWAYS, OF_DIM)               \
    VECTOR(MTP_HIDDEN_NORM, MTP_HIDDEN_NORM, "mtp_hidden_norm", IN_MTP, ALWAYS, OF_DIM)            \
    MATRIX(MTP_JOIN, MTP_JOIN, "mtp_join", IN_MTP, ALWAYS, OF_DIM, OF_JOINED)                      \
    VECTOR(INPUT_SHIFT, INPUT_SHIFT, "input_shift", IN_ALL, OPTIONAL, OF_DIM)                      \
    VECTOR(SECOND_SHIFT, SECOND_SHIFT, "second_shift", IN_ENCODERS, OPTIONAL, OF_DIM)              \
    VECTOR(INPUT_NORM, INPUT_NORM, "input_norm", IN_ALL, OPTIONAL, OF_DIM)                         \
    VECTOR(INPUT_NORM_BIAS, INPUT_NORM_BIAS, "input_norm_bias", IN_ALL, OPTIONAL, OF_DIM)          \
    VECTOR(BLOCK_QUERIES, BLOCK_QUERIES, "block_queries", IN_RELATIVE, OPTIONAL, OF_QUERIED)       \
    VECTOR(MESSAGE_QUERIES, MESSAGE_QUERIES, "message_queries", IN_LOOPED, ALWAYS, OF_MESSAGES)    \
    VECTOR(ATTN_NORM, ATTN_NORM, "attn_norm", IN_MIXED, OPTIONAL, OF_DIM)                          \
    VECTOR(ATTN_NORM_BIAS, ATTN_NORM_BIAS, "attn_norm_bias", IN_MIXED, OPTIONAL, OF_DIM)           \
    VECTOR(K_INPUT_NORM, K_INPUT_NORM, "k_input_norm", IN_OWN_INPUTS, ALWAYS, OF_DIM)              \
    VECTOR(V_INPUT_NORM, V_INPUT_NORM, "v_input_norm", IN_OWN_INPUTS, ALWAYS, OF_DIM)              \
    VECTOR(Q_SCALE, Q_SCALE, "q_scale", IN_RELATIVE, ALWAYS, OF_Q)                                 \
    VECTOR(RELATIVE_SCALE, RELATIVE_SCALE, "relative_scale", IN_RELATIVE, ALWAYS, OF_RELATIVE)     \
    VECTOR(PROFILES, PROFILES, "profiles", IN_RELATIVE, ALWAYS, OF_PROFILES)                       \
    VECTOR(K_CONV, K_CONV, "k_conv", IN_RELATIVE, ALWAYS, OF_KV_CONV)                              \
    VECTOR(V_CONV, V_CONV, "v_conv", IN_RELATIVE, ALWAYS, OF_KV_CONV)                              \
    VECTOR(Q_BIAS, Q_BIAS, "q_bias", IN_BIASED, OPTIONAL, OF_Q)                                    \
    VECTOR(K_BIAS, K_BIAS, "k_bias", IN_BIASED_KEYS, OPTIONAL, OF_K)                               \
    VECTOR(V_BIAS, V_BIAS, "v_bias", IN_BIASED_VALUES, OPTIONAL, OF_V)                             \
    VECTOR(Q_NORM, Q_NORM, "q_norm", IN_Q_NORMED, ALWAYS, OF_Q_NORM)                               \
    VECTOR(K_NORM, K_NORM, "k_norm", IN_K_NORMED, ALWAYS, OF_K_NORM)                               \
    VECTOR(SINKS, SINKS, "sinks", IN_ATTENTION, OPTIONAL, OF_HEADS)                                \
    VECTOR(DECAY_RATE, DECAY_RATE, "decay_rate", IN_DELTA, ALWAYS, OF_DECAYS)                      \
    VECTOR(DECAY_BIAS, DECAY_BIAS, "decay_bias", IN_DELTA, ALWAYS, OF_DECAYS)                      \
    VECTOR(MIX_NORM, MIX_NORM, "mix_norm", IN_DELTA, ALWAYS, OF_VALUE)                             \
    MATRIX(Q_GATE_DOWN, Q_GATE_DOWN, "q_gate_down", IN_LOOPED, ALWAYS, OF_LOOPED, OF_JOINED)       \
    MATRIX(Q_FORGET, Q_FORGET, "q_forget", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                   \
    MATRIX(Q_GAIN, Q_GAIN, "q_gain", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                         \
    MATRIX(K_GATE_DOWN, K_GATE_DOWN, "k_gate_down", IN_LOOPED, ALWAYS, OF_LOOPED, OF_JOINED)       \
    MATRIX(K_FORGET, K_FORGET, "k_forget", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                   \
    MATRIX(K_GAIN, K_GAIN, "k_gain", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                         \
    MATRIX(V_GATE_DOWN, V_GATE_DOWN, "v_gate_down", IN_LOOPED, ALWAYS, OF_LOOPED, OF_JOINED)       \
    MATRIX(V_FORGET, V_FORGET, "v_forget", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                   \
    MATRIX(V_GAIN, V_GAIN, "v_gain", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                         \
    OUTLIERS(Q_OUTLIERS, Q, "q_outliers", IN_Q, OPTIONAL, OF_Q, OF_DIM)                            \
    OUTLIERS(K_OUTLIERS, K, "k_outliers", IN_KEYS, OPTIONAL, OF_K, OF_DIM)                         \
    OUTLIERS(V_OUTLIERS, V, "v_outliers", IN_VALUES, OPTIONAL, OF_V, OF_DIM)                       \
    MATRIX(Q, Q, "q", IN_Q, ALWAYS, OF_Q, OF_DIM)                                                  \
    MATRIX(K, K, "k", IN_KEYS, ALWAYS, OF_K, OF_DIM)                                               \
    MATRIX(V, V, "v", IN_VALUES, ALWAYS, OF_V, OF_DIM)                                             \
    MATRIX(K_TAPS, K_TAPS, "k_taps", IN_OWN_INPUTS, ALWAYS, OF_TAPS, OF_DIM)                       \
    MATRIX(V_TAPS, V_TAPS, "v_taps", IN_OWN_INPUTS, ALWAYS, OF_TAPS, OF_DIM)                       \
    MATRIX(Q_UP, Q_UP, "q_up", IN_QUERY_RANK, ALWAYS, OF_QUERIES, OF_QUERY_RANK)                   \
    MATRIX(K_UP, K_UP, "k_up", IN_LATENT, ALWAYS, OF_LATENTS, OF_NOPE)                             \
    MATRIX(V_UP, V_UP, "v_up", IN_LATENT, ALWAYS, OF_MIXED, OF_LATENT)                             \
    MATRIX(MIX_GATE, MIX_GATE, "mix_gate", IN_MIXER_GATED, ALWAYS, OF_GATE, OF_DIM)                \
    MATRIX(RELATIVE, RELATIVE, "relative", IN_RELATIVE, ALWAYS, OF_RELATIVE, OF_DIM)               \
    MATRIX(TOKEN_SINKS, TOKEN_SINKS, "token_sinks", IN_RELATIVE, ALWAYS, OF_HEADS, OF_DIM)         \
    MATRIX(BETA, BETA, "beta", IN_DELTA, ALWAYS, OF_VALUE_HEADS, OF_DIM)                           \
    MATRIX(DECAY, DECAY, "decay", IN_DELTA, ALWAYS, OF_DECAY, OF_DIM)                              \
    MATRIX(GATE_UP, GATE_UP, "gate_up", IN_GATE_RANK, ALWAYS, OF_MIXED, OF_RANK)                   \
    MATRIX(DECAY_UP, DECAY_UP, "decay_up", IN_GATE_RANK, ALWAYS, OF_DECAYS, OF_RANK)               \
    VECTOR(CONV, CONV, "conv", IN_CONV, ALWAYS, OF_CONV)                                           \
    VECTOR(CONV_BIAS, CONV_BIAS, "conv_bias", IN_SHORT_CONV, OPTIONAL, OF_DIM)                     \
    VECTOR(ATTN_SUB_NORM, ATTN_SUB_NORM, "attn_sub_norm", IN_ATTENTION, OPTIONAL, OF_MIXED)        \
    VECTOR(ATTN_OUT_BIAS, ATTN_OUT_BIAS, "attn_out_bias", IN_Q, OPTIONAL, OF_DIM)                  \
    OUTLIERS(ATTN_OUT_OUTLIERS, ATTN_OUT, "attn_out_outliers", IN_Q, OPTIONAL, OF_DIM, OF_MIXED)   \
    MATRIX(ATTN_OUT, ATTN_OUT, "attn_out", IN_Q, ALWAYS, OF_DIM, OF_MIXED)                         \
    VECTOR(POST_ATTN_NORM, POST_ATTN_NORM, "post_attn_norm", IN_Q, OPTIONAL, OF_DIM)               \
    VECTOR(MIX_CONV, MIX_CONV, "mix_conv", IN_RELATIVE, ALWAYS, OF_DIM_CONV)                       \
    VECTOR(FFN_QUERY, FFN_QUERY, "ffn_query", IN_RELATIVE, ALWAYS, OF_DIM)                         \
    MATRIX(FFN_GATE_DOWN, FFN_GATE_DOWN, "ffn_gate_down", IN_LOOPED, ALWAYS, OF_LOOPED, OF_JOINED) \
    MATRIX(FFN_FORGET, FFN_FORGET, "ffn_forget", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)             \
    MATRIX(FFN_GAIN, FFN_GAIN, "ffn_gain", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                   \
    VECTOR(SSD_RATE, SSD_RATE, "ssd_rate", IN_SSD, ALWAYS, OF_VALUE_HEADS)                         \
    VECTOR(SSD_STEP_BIAS, SSD_STEP_BIAS, "ssd_step_bias", IN_SSD, ALWAYS, OF_VALUE_HEADS)          \
    VECTOR(SSD_SKIP, SSD_SKIP, "ssd_skip", IN_SSD, ALWAYS, OF_VALUE_HEADS)                         \
    MATRIX(SSD_GATE, SSD_GATE, "ssd_gate", IN_SSD, ALWAYS, OF_VALUES, OF_DIM)                      \
    MATRIX(SSD_IN, SSD_IN, "ssd_in", IN_SSD, ALWAYS, OF_CHANNELS, OF_DIM)                          \
    MATRIX(SSD_STEP, SSD_STEP, "ssd_step", IN_SSD, ALWAYS, OF_VALUE_HEADS, OF_DIM)                 \
    VECTOR(SSD_CONV, SSD_CONV, "ssd_conv", IN_SSD, ALWAYS, OF_CONV)                                \
    VECTOR(SSD_CONV_BIAS, SSD_CONV_BIAS, "ssd_conv_bias", IN_SSD, OPTIONAL, OF_CHANNELS)           \
    VECTOR(SSD_NORM, SSD_NORM, "ssd_norm", IN_SSD, OPTIONAL, OF_VALUES)                            \
    MATRIX(SSD_OUT, SSD_OUT, "ssd_out", IN_SSD, ALWAYS, OF_DIM, OF_VALUES)                         \
    VECTOR(ROUTER_NORM, ROUTER_NORM, "router_norm", IN_APART, OPTIONAL, OF_DIM)                    \
    VECTOR(FFN_NORM, FFN_NORM, "ffn_norm", IN_ANY_FFN, OPTIONAL, OF_DIM)                           \
    VECTOR(FFN_NORM_BIAS, FFN_NORM_BIAS, "ffn_norm_bias", IN_ANY_FFN, OPTIONAL, OF_DIM)            \
    VECTOR(ROUTER_BIAS, ROUTER_BIAS, "router_bias", IN_ROUTED, OPTIONAL, OF_EXPERTS)               \
    VECTOR(SELECTION_BIAS, SELECTION_BIAS, "selection_bias", IN_ROUTED, OPTIONAL, OF_EXPERTS)      \
    VECTOR(EXPERT_SCALE, EXPERT_SCALE, "expert_scale", IN_ROUTED, OPTIONAL, OF_EXPERTS)            \
    MATRIX(EXPERT_ROUTER, ROUTER, "router", IN_ROUTED, ALWAYS, OF_EXPERTS, OF_DIM)                 \
    VECTOR(SHARED_GATE, SHARED_GATE, "shared_gate", IN_SHARED, OPTIONAL, OF_DIM)                   \
    VECTOR(FFN_GATE_BIAS, GATE_BIAS, "gate_bias", IN_GATED, OPTIONAL, OF_FFN)                      \
    VECTOR(FFN_UP_BIAS, UP_BIAS, "up_bias", IN_FFN, OPTIONAL, OF_FFN)                              \
    OUTLIERS(FFN_GATE_OUTLIERS, GATE, "gate_outliers", IN_GATED, OPTIONAL, OF_FFN, OF_DIM)         \
    OUTLIERS(FFN_UP_OUTLIERS, UP, "up_outliers", IN_FFN, OPTIONAL, OF_FFN, OF_DIM)                 \
    MATRIX(FFN_GATE, GATE, "gate", IN_GATED, ALWAYS, OF_FFN, OF_DIM)                               \
    MATRIX(FFN_UP, UP, "up", IN_FFN, ALWAYS, OF_FFN, OF_DIM)                                       \
    VECTOR(FFN_SUB_NORM, FFN_SUB_NORM, "ffn_sub_norm", IN_FFN, OPTIONAL, OF_FFN)                   \
    VECTOR(FFN_DOWN_BIAS, DOWN_BIAS, "down_bias", IN_OUT, OPTIONAL, OF_DIM)                        \
    OUTLIERS(FFN_DOWN_OUTLIERS, DOWN, "down_outliers", IN_FFN, OPTIONAL, OF_DIM, OF_FFN)           \
    MATRIX(FFN_DOWN, DOWN, "down", IN_FFN, ALWAYS, OF_DIM, OF_FFN)                                 \
    VECTOR(FFN_CONV, FFN_CONV, "ffn_conv", IN_RELATIVE, ALWAYS, OF_DIM_CONV)                       \
    VECTOR(DENSE_POST_NORM, DENSE_POST_NORM, "dense_post_norm", IN_SHARED_APART, OPTIONAL, OF_DIM) \
    VECTOR(ROUTED_NORM, ROUTED_NORM, "routed_norm", IN_APART, OPTIONAL, OF_DIM)                    \
    VECTOR(ROUTED_POST_NORM, ROUTED_POST_NORM, "routed_post_norm", IN_APART, OPTIONAL, OF_DIM)     \
    VECTOR(POST_FFN_NORM, POST_FFN_NORM, "post_ffn_norm", IN_ANY_FFN, OPTIONAL, OF_DIM)            \
    VECTOR(OWN_IN_NORM, PLE_IN_NORM, "own_in_norm", IN_PLE, ALWAYS, OF_PLE)                   \
    MATRIX(OWN_IN, PLE_IN, "own_in", IN_PLE, ALWAYS, OF_PLE, OF_DIM)                          \
    MATRIX(OWN_GATE, PLE_GATE, "own_gate", IN_PLE, ALWAYS, OF_PLE, OF_DIM)                    \
    MATRIX(OWN_OUT, PLE_OUT, "own_out", IN_PLE, ALWAYS, OF_DIM, OF_PLE)                       \
    VECTOR(OWN_NORM, PLE_NORM, "own_norm", IN_PLE, ALWAYS, OF_DIM)                            \
    VECTOR(LAYER_SCALE, SCALE, "layer_scale", IN_ALL, OPTIONAL, OF_ONE)                            \
    VECTOR(MTP_END_NORM, MTP_END_NORM, "mtp_end_norm", IN_MTP, ALWAYS, OF_DIM)
/* clang-format on */

/* QSF_LAYER_Q and so on: QSF_LAYER_MATRICES matrices, then the vectors */
#define QSF_LAYER_MEMBER(type, tensor, ...) QSF_LAYER_##tensor,
#define QSF_LAYER_OTHER(...)
typedef enum qsf_layer_tensor {
    QSF_LAYER_TABLE(QSF_LAYER_OTHER, QSF_LAYER_MEMBER, QSF_LAYER_OTHER) QSF_LAYER_MATRICES,
    QSF_LAYER_LAST_MATRIX = QSF_LAYER_MATRICES - 1,
    QSF_LAYER_TABLE(QSF_LAYER_MEMBER, QSF_LAYER_OTHER, QSF_LAYER_OTHER) QSF_LAYER_TENSORS
} qsf_layer_tensor;
#undef QSF_LAYER_MEMBER
#undef QSF_LAYER_OTHER

/* The computation of a layer, and its tensors. */
typedef struct qsf_layer {
    const qsf_layer_kind *kind;
    uint32_t unit_idx;
    uint32_t pass_idx;     /* among the layers of a pass, where visits count once */
    uint32_t loop;         /* the pass over the looped layers that the visit is of, from 0 */
    uint32_t first_expert; /* the unit of expert 0, layers with experts */
    uint32_t kv_layer; /* whose keys and values it reads, in this array: its own index or less; of a
                          drafter that of the model that it guesses for */
    uint32_t ple_col;  /* of its per-layer embedding in a row of their table */
    const qsf_tensor *tensors[QSF_LAYER_TENSORS];
    const qsf_tensor *outliers[QSF_LAYER_MATRICES]; /* NULL: the matrix has none */
} qsf_layer;

typedef struct qsf_config {
    uint32_t n_layers;         /* visits: those of a looped layer are layers of their own here */
    uint32_t n_trunk_layers;   /* without the MTP head, which is the last layer if there is one */
    uint32_t n_storing_layers; /* layers after these compute only rows that the head needs */
    const qsf_layer *layers;   /* [n_layers] */
    uint32_t dim;
    uint32_t n_vocab;
    uint32_t max_tokens; /* longest sequence that the model allows */
    uint32_t n_heads;    /* the largest of all layers; likewise the next six */
    uint32_t head_dim;
    uint32_t q_dim;          /* heads * head_dim, or channels of a convolution by heads */
    uint32_t kv_dim;         /* KV heads * head_dim */
    uint32_t gate_dim;       /* rows of a gate; 0: none */
    uint32_t n_steps;        /* a token's betas and decays, of states by heads; 0: none */
    uint32_t ffn_dim;        /* or expert_dim, ple_width, or vector_dim */
    uint32_t vector_dim;     /* of the hidden states that a caller gets */
    uint32_t target_dim;     /* of the model that a drafter guesses for; 0: it is none */
    uint32_t least_kv_heads; /* smallest of all layers */
    uint32_t qk_norm_cols;   /* of the widest Q or K norm; 0: none */
    uint32_t latent_dim;     /* columns of each head's latent values; 0: none */
    uint32_t ones;           /* weights of the widest V norm; 0: none */
    uint32_t ple_width;      /* of a per-layer embedding; 0: none */
    uint32_t ple_cols;       /* of their table: those of all layers of the file; 0: no table */
    uint32_t conv_cols;      /* of the widest weights of a convolution; 0: none */
    uint32_t conv_channels;  /* of the widest convolution; 0: none */
    uint32_t block_layers;   /* layers of a residual block; 0: none, and so the next three */
    uint32_t n_blocks;
    uint32_t loop_begin; /* the first looped layer of the file, and how many blocks are looped */
    uint32_t n_loop_blocks;
    uint32_t n_relative; /* numbers of the widest relative vectors of all heads; 0: none */
    uint32_t n_profiles;
    uint32_t n_ropes;      /* RoPE sets, for one context each */
    uint32_t n_rope_pairs; /* of all of them */
    uint32_t n_made_pairs; /* of the RoPE set made from header and ARCH */
    uint32_t n_experts;    /* of the layer with the most; 0: no layer has any; likewise the next */
    uint32_t n_chosen;
    bool is_rms_norm;
    bool has_gate;    /* some layer has a gated FFN */
    bool keeps_input; /* some FFN needs its layer's input again, or a place for the dense part */
    bool has_learned_positions;
    bool has_tied_head;
    bool keeps_hidden; /* a drafter reads the last tokens' hidden states; set by the engine */
    bool is_encoder;   /* no head; a pass has whole texts, whose layers share their KV pages */
    bool has_head_bias;
    bool has_fine_acts;  /* 16-bit activations for all weights with codes */
    bool has_only_parts; /* every quantised matrix has scales of fewer than 64 columns */
    float norm_epsilon;
    float embedding_factor;
    float logit_cap;       /* 0: none */
    size_t outliers_bytes; /* most bytes of sparse outliers in use at the same time */
} qsf_config;

/* The tensors outside the layers. */
typedef struct qsf_ends {
    const qsf_tensor *embedding;       /* [n_vocab, dim] */
    const qsf_tensor *final_query;     /* [dim], of residual blocks; else NULL */
    const qsf_tensor *final_norm;      /* [dim] */
    const qsf_tensor *final_norm_bias; /* [dim], optional */
    const qsf_tensor *head_bias;       /* [n_vocab], optional; NULL when tied */
    const qsf_tensor *dense;           /* [vector_dim, dim] after the final norm, optional */
    const qsf_tensor *join;            /* [dim, 2 target_dim], of drafters with target_dim */
    const qsf_tensor *head;            /* [n_vocab, dim]; the embedding when tied; or NULL */
    const qsf_tensor *head_rest;       /* the last rows of [n_vocab, dim], if `head` lacks them */
    const qsf_tensor *ple_table;       /* [n_vocab, ple_cols]; or NULL */
} qsf_ends;

/* Sizes of layers with attention */
static inline uint32_t qsf_q_dim(const qsf_layer_kind *k)
{
    return k->n_heads * k->head_dim; /* <= 2^24: limits of layout.h */
}

static inline uint32_t qsf_kv_dim(const qsf_layer_kind *k)
{
    return k->n_kv_heads * k->head_dim;
}

/* Dimensions of a value that attention adds up */
static inline uint32_t qsf_value_dim(const qsf_layer_kind *k)
{
    return k->latent_rank != 0 ? k->latent_rank : k->head_dim;
}

/* Dimensions of a query of latent attention, before K_UP */
static inline uint32_t qsf_latent_query_dim(const qsf_layer_kind *k)
{
    return k->nope_dim + k->head_dim - k->latent_rank;
}

/* Decays of a token: one for each value head, or for each channel of its keys */
static inline uint32_t qsf_n_decays(const qsf_layer_kind *k)
{
    return k->n_value_heads * (k->has_channel_decays != 0 ? k->key_dim : 1);
}

/* Do tokens attend to keys and values? */
static inline bool qsf_has_attention(const qsf_layer_kind *k)
{
    return k->mixer == QSF_MIXER_ATTENTION || k->mixer == QSF_MIXER_ATTENTION_AND_SSD ||
           k->mixer == QSF_MIXER_RELATIVE;
}

static inline bool qsf_has_ssd(const qsf_layer_kind *k)
{
    return k->mixer == QSF_MIXER_SSD || k->mixer == QSF_MIXER_ATTENTION_AND_SSD;
}

/* Dimensions of a mixer's tensors */
typedef struct qsf_mixer_dims {
    uint32_t q; /* rows of the matrices stored as Q, K and V */
    uint32_t k;
    uint32_t v;
    uint32_t out;      /* columns of the matrix after the mixer */
    uint32_t values;   /* of all heads of a state, likewise the next */
    uint32_t channels; /* of a convolution */
} qsf_mixer_dims;

static inline qsf_mixer_dims qsf_mixer_dims_of(const qsf_layer_kind *k, uint32_t dim)
{
    const uint32_t keys = k->n_key_heads * k->key_dim;
    const uint32_t values = k->n_value_heads * k->value_dim;
    const uint32_t channels = 2 * keys + values;
    if (k->mixer == QSF_MIXER_SHORT_CONV)
        return (qsf_mixer_dims){dim, dim, dim, dim, 0, dim};
    if (k->mixer == QSF_MIXER_DELTA)
        return (qsf_mixer_dims){keys, keys, values, values, values, channels};
    if (!qsf_has_attention(k))
        return (qsf_mixer_dims){0, 0, 0, 0, values, channels};
    if (k->latent_rank != 0)
        return (qsf_mixer_dims){k->query_rank != 0 ? k->query_rank
                                                   : k->n_heads * qsf_latent_query_dim(k),
                                qsf_kv_dim(k),
                                0,
                                k->n_heads * k->latent_value_dim,
                                values,
                                channels};
    return (qsf_mixer_dims){qsf_q_dim(k), qsf_kv_dim(k), qsf_kv_dim(k),
                            qsf_q_dim(k), values,        channels};
}

/* Returns the columns of a row of a matrix's input, padded. */
static inline size_t qsf_stride(uint32_t dim)
{
    return qsf_round_up(dim, QSF_BLOCK);
}

/* Fills *c, *ends and layers [n_visits of the reader]. QSF_ERR_UNSUPPORTED: this build does
 * not run the architecture or an option of it. QSF_ERR_FORMAT: a tensor is missing, misplaced or
 * has the wrong shape. */
qsf_status qsf_config_init(qsf_config *c, const qsf_reader *r, qsf_layer *layers, qsf_ends *ends);

/* Fills `tensors` at the entries of gate, up, down and their biases, which are an expert's
 * tensors; qsf_config_init has checked their shapes, with expert_dim instead of ffn_dim. */
void qsf_expert_find(const qsf_reader *r, uint32_t unit_idx,
                     const qsf_tensor *tensors[QSF_LAYER_TENSORS]);

/* True if the FFN of a layer reads the layer's input, which attention has already changed. */
bool qsf_layer_keeps_input(const qsf_layer *l);
