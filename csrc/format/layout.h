/* layout.h - the constants of docs/format.md: magic, sizes, limits, tensor types. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#define QSF_FILE_VERSION 2
#define QSF_HEADER_BYTES 128
#define QSF_DIRECTORY_ENTRY_BYTES 32
#define QSF_UNIT_ENTRY_BYTES 48
#define QSF_TENSOR_ENTRY_BYTES 32
#define QSF_TENSOR_HEADER_BYTES 64
#define QSF_UNIT_ALIGN 4096 /* O_DIRECT alignment */
#define QSF_DATA_ALIGN 64
#define QSF_SECTION_REQUIRED 1U
#define QSF_COMPRESSED_BLOCK_BYTES (1U << 20)

#define QSF_MAX_LAYERS 4096U
#define QSF_MAX_DIM (1U << 20)
#define QSF_MAX_HEADS 4096U
#define QSF_MAX_HEAD_DIM 4096U
#define QSF_MAX_OWN_WIDTH 4096U /* times 4096 layers: columns of a tensor */
#define QSF_MAX_VOCAB (1U << 24)
#define QSF_MAX_TOKENS (1U << 24)
#define QSF_MAX_FFN_DIM (1U << 22)
#define QSF_MAX_EXTENT_ROWS (1U << 24) /* rows or columns of a tensor */
#define QSF_MAX_SECTIONS 256U
#define QSF_MAX_OUTLIERS (1U << 24) /* sparse outliers of a matrix */
#define QSF_LEAST_WEIGHTS_PER_OUTLIER 100U
#define QSF_MAX_TABLE_BYTES (64U << 20) /* ARCH, ROPE, KIND, TENS, EBND, UNIT */
#define QSF_MAX_LAYER_KINDS 128U
#define QSF_MAX_EXPERTS 65536U      /* of a file */
#define QSF_MAX_LAYER_EXPERTS 1024U /* of a layer */
#define QSF_MAX_CHOSEN 64U          /* experts of a token in a layer */
#define QSF_MAX_ROPE_SETS 64U
#define QSF_MAX_ROPE_PAIRS 2048U
#define QSF_KV_LENT 4294967295U /* as KV source: the keys and values of another model */
#define QSF_ROPE_NONE 255U      /* instead of the number of a RoPE set */

/* The role of a unit in the model. In a file units ascend by role, layer and expert. */
typedef enum qsf_unit_role {
    QSF_UNIT_EMBEDDING = 0,
    QSF_UNIT_LAYER = 1,
    QSF_UNIT_FINAL = 2, /* final norm and output head */
    QSF_UNIT_EXPERT = 3,
    QSF_UNIT_OWN_TABLE = 4, /* embeddings that each layer has of its own: read by rows */
    QSF_UNIT_ROLE_COUNT = 5
} qsf_unit_role;

typedef enum qsf_architecture {
    QSF_ARCHITECTURE_GPT2 = 0,
    QSF_ARCHITECTURE_LLAMA = 1,
    QSF_ARCHITECTURE_MISTRAL = 2,
    QSF_ARCHITECTURE_PHI = 3,
    QSF_ARCHITECTURE_OTHER = 4,
    QSF_ARCHITECTURE_COUNT = 5
} qsf_architecture;

typedef enum qsf_activation {
    QSF_ACTIVATION_GELU_TANH = 0,
    QSF_ACTIVATION_SILU = 1,
    QSF_ACTIVATION_RELU = 2,
    QSF_ACTIVATION_GELU_ERF = 3,
    QSF_ACTIVATION_RELU_SQUARED = 4,
    QSF_ACTIVATION_SILU_CLAMPED = 5,
    QSF_ACTIVATION_HEADER_COUNT = 6, /* those that the header can name */
    QSF_ACTIVATION_XIELU = 6,        /* with numbers of its own in KIND */
    QSF_ACTIVATION_SILU_CAPPED = 7,  /* the same */
    QSF_ACTIVATION_COUNT = 8
} qsf_activation;

typedef enum qsf_norm { QSF_NORM_LAYER = 0, QSF_NORM_RMS = 1, QSF_NORM_COUNT = 2 } qsf_norm;

typedef enum qsf_positions {
    QSF_POSITIONS_LEARNED = 0,
    QSF_POSITIONS_ROPE = 1,
    QSF_POSITIONS_ALIBI = 2, /* slopes: in the kinds */
    QSF_POSITIONS_COUNT = 3
} qsf_positions;

typedef enum qsf_compression {
    QSF_COMPRESSION_NONE = 0,
    QSF_COMPRESSION_LZ4 = 1,
    QSF_COMPRESSION_LZ4HC = 2,
    QSF_COMPRESSION_ZSTD = 3,
    QSF_COMPRESSION_COUNT = 4
} qsf_compression;

typedef enum qsf_layout {
    QSF_LAYOUT_VECTOR = 0,
    QSF_LAYOUT_TILES = 1,
    QSF_LAYOUT_OUTLIERS = 2
} qsf_layout;

/* How a token gets information from earlier tokens. */
typedef enum qsf_mixer_kind {
    QSF_MIXER_ATTENTION = 0,
    QSF_MIXER_SHORT_CONV = 1,        /* out(c * conv(b * x)) */
    QSF_MIXER_DELTA = 2,             /* the gated delta rule after a convolution of q, k and v */
    QSF_MIXER_SSD = 3,               /* the state space rule of Mamba-2 after a convolution */
    QSF_MIXER_ATTENTION_AND_SSD = 4, /* of the same input, added */
    QSF_MIXER_NONE = 5,              /* the layer is an FFN */
    QSF_MIXER_RELATIVE = 6, /* attention with learned biases of distance, between convolutions */
    QSF_MIXER_COUNT = 7
} qsf_mixer_kind;

#define QSF_MAX_TAPS 16U              /* of a convolution */
#define QSF_MAX_BLOCKS 64U            /* residual blocks */
#define QSF_MAX_PASSES 16U            /* over the looped layers */
#define QSF_MAX_MIXED_ROWS (1U << 20) /* of q, k and v together, which a convolution has */
#define QSF_LATENT_STEP 64U           /* the rank of a latent is a multiple: blocks are its own */
#define QSF_LATENT_VALUE_STEP 16U     /* so is the value dimension: tile rows are a head's own */

typedef enum qsf_rope_scaling {
    QSF_ROPE_SCALING_NONE = 0,
    QSF_ROPE_SCALING_LINEAR = 1,
    QSF_ROPE_SCALING_LLAMA3 = 2
} qsf_rope_scaling;

typedef enum qsf_output_gate {
    QSF_OUTPUT_GATE_NONE = 0,
    QSF_OUTPUT_GATE_OF_ELEMENTS = 1, /* attended * sigmoid(gate) */
    QSF_OUTPUT_GATE_OF_HEADS = 2,    /* one number a head */
    QSF_OUTPUT_GATE_COUNT
} qsf_output_gate;

typedef enum qsf_qk_norm {
    QSF_QK_NORM_NONE = 0,
    QSF_QK_NORM_PER_HEAD = 1,    /* one weight [head_dim] for all heads */
    QSF_QK_NORM_WHOLE_WIDTH = 2, /* all heads together */
    QSF_QK_NORM_OWN_WEIGHTS = 3, /* per head, weight [heads * head_dim] */
    QSF_QK_NORM_COUNT = 4
} qsf_qk_norm;

typedef enum qsf_ffn {
    QSF_FFN_NONE = 0,
    QSF_FFN_PLAIN = 1, /* down(activation(up)) */
    QSF_FFN_GATED = 2, /* down(activation(gate) * up) */
    QSF_FFN_COUNT = 3
} qsf_ffn;

/* The score of an expert, from the router's logits. */
typedef enum qsf_expert_score {
    QSF_EXPERT_SOFTMAX = 0, /* over all experts of the layer */
    QSF_EXPERT_SIGMOID = 1,
    QSF_EXPERT_LOGIT = 2,
    QSF_EXPERT_SCORE_COUNT = 3
} qsf_expert_score;

/* The weights of the chosen experts, from their scores. */
typedef enum qsf_expert_weights {
    QSF_EXPERT_WEIGHTS_AS_IS = 0,
    QSF_EXPERT_WEIGHTS_BY_SUM = 1,
    QSF_EXPERT_WEIGHTS_SOFTMAX = 2, /* over the chosen */
    QSF_EXPERT_WEIGHTS_COUNT = 3
} qsf_expert_weights;

typedef enum qsf_group_score {
    QSF_GROUP_LARGEST = 0,
    QSF_GROUP_TWO_LARGEST = 1, /* their sum */
    QSF_GROUP_SCORE_COUNT = 2
} qsf_group_score;

/* The tensors that a layer may have, in the order of the pass. Columns: number; name of the type,
 * and of its member of qsf_layer_tensor (config.h), of outliers those of their matrix; name in
 * errors; the layers that may have it, and whether all of these have it (config.c); columns of a
 * vector, or rows and columns. Q, K and V of a short convolution are C, B and x. Of K_TAPS and
 * V_TAPS the rows of a KV head go from the token itself backwards; PROFILES begin with the farthest
 * distance. */
/* clang-format off */
#define QSF_LAYER_TABLE(VECTOR, MATRIX, OUTLIERS)                                                  \
    VECTOR(80, MTP_TRUNK_NORM, "mtp_trunk_norm", IN_MTP, ALWAYS, OF_DIM)                           \
    VECTOR(81, MTP_TOKEN_NORM, "mtp_token_norm", IN_MTP, ALWAYS, OF_DIM)                           \
    VECTOR(82, MTP_HIDDEN_NORM, "mtp_hidden_norm", IN_MTP, ALWAYS, OF_DIM)                         \
    MATRIX(83, MTP_JOIN, "mtp_join", IN_MTP, ALWAYS, OF_DIM, OF_JOINED)                            \
    VECTOR(85, INPUT_SHIFT, "input_shift", IN_ALL, OPTIONAL, OF_DIM)                               \
    VECTOR(88, SECOND_SHIFT, "second_shift", IN_ENCODERS, OPTIONAL, OF_DIM)                        \
    VECTOR(67, INPUT_NORM, "input_norm", IN_ALL, OPTIONAL, OF_DIM)                                 \
    VECTOR(68, INPUT_NORM_BIAS, "input_norm_bias", IN_ALL, OPTIONAL, OF_DIM)                       \
    VECTOR(90, BLOCK_QUERIES, "block_queries", IN_RELATIVE, OPTIONAL, OF_QUERIED)                  \
    VECTOR(91, MESSAGE_QUERIES, "message_queries", IN_LOOPED, ALWAYS, OF_MESSAGES)                 \
    VECTOR(7, ATTN_NORM, "attn_norm", IN_MIXED, OPTIONAL, OF_DIM)                                  \
    VECTOR(14, ATTN_NORM_BIAS, "attn_norm_bias", IN_MIXED, OPTIONAL, OF_DIM)                       \
    VECTOR(92, K_INPUT_NORM, "k_input_norm", IN_OWN_INPUTS, ALWAYS, OF_DIM)                        \
    VECTOR(93, V_INPUT_NORM, "v_input_norm", IN_OWN_INPUTS, ALWAYS, OF_DIM)                        \
    VECTOR(118, Q_SCALE, "q_scale", IN_RELATIVE, ALWAYS, OF_Q)                                     \
    VECTOR(107, RELATIVE_SCALE, "relative_scale", IN_RELATIVE, ALWAYS, OF_RELATIVE)                \
    VECTOR(108, PROFILES, "profiles", IN_RELATIVE, ALWAYS, OF_PROFILES)                            \
    VECTOR(110, K_CONV, "k_conv", IN_RELATIVE, ALWAYS, OF_KV_CONV)                                 \
    VECTOR(111, V_CONV, "v_conv", IN_RELATIVE, ALWAYS, OF_KV_CONV)                                 \
    VECTOR(9, Q_BIAS, "q_bias", IN_BIASED, OPTIONAL, OF_Q)                                         \
    VECTOR(10, K_BIAS, "k_bias", IN_BIASED_KEYS, OPTIONAL, OF_K)                                   \
    VECTOR(11, V_BIAS, "v_bias", IN_BIASED_VALUES, OPTIONAL, OF_V)                                 \
    VECTOR(18, Q_NORM, "q_norm", IN_Q_NORMED, ALWAYS, OF_Q_NORM)                                   \
    VECTOR(19, K_NORM, "k_norm", IN_K_NORMED, ALWAYS, OF_K_NORM)                                   \
    VECTOR(36, SINKS, "sinks", IN_ATTENTION, OPTIONAL, OF_HEADS)                                   \
    VECTOR(52, DECAY_RATE, "decay_rate", IN_DELTA, ALWAYS, OF_DECAYS) /* e^A_log */                \
    VECTOR(53, DECAY_BIAS, "decay_bias", IN_DELTA, ALWAYS, OF_DECAYS)                              \
    VECTOR(55, MIX_NORM, "mix_norm", IN_DELTA, ALWAYS, OF_VALUE)                                   \
    MATRIX(94, Q_GATE_DOWN, "q_gate_down", IN_LOOPED, ALWAYS, OF_LOOPED, OF_JOINED)                \
    MATRIX(95, Q_FORGET, "q_forget", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                         \
    MATRIX(96, Q_GAIN, "q_gain", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                             \
    MATRIX(97, K_GATE_DOWN, "k_gate_down", IN_LOOPED, ALWAYS, OF_LOOPED, OF_JOINED)                \
    MATRIX(98, K_FORGET, "k_forget", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                         \
    MATRIX(99, K_GAIN, "k_gain", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                             \
    MATRIX(100, V_GATE_DOWN, "v_gate_down", IN_LOOPED, ALWAYS, OF_LOOPED, OF_JOINED)               \
    MATRIX(101, V_FORGET, "v_forget", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                        \
    MATRIX(102, V_GAIN, "v_gain", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                            \
    OUTLIERS(29, Q, "q_outliers", IN_Q, OPTIONAL, OF_Q, OF_DIM)                                    \
    OUTLIERS(30, K, "k_outliers", IN_KEYS, OPTIONAL, OF_K, OF_DIM)                                 \
    OUTLIERS(31, V, "v_outliers", IN_VALUES, OPTIONAL, OF_V, OF_DIM)                               \
    MATRIX(0, Q, "q", IN_Q, ALWAYS, OF_Q, OF_DIM)                                                  \
    MATRIX(1, K, "k", IN_KEYS, ALWAYS, OF_K, OF_DIM)                                               \
    MATRIX(2, V, "v", IN_VALUES, ALWAYS, OF_V, OF_DIM)                                             \
    MATRIX(112, K_TAPS, "k_taps", IN_OWN_INPUTS, ALWAYS, OF_TAPS, OF_DIM)                          \
    MATRIX(113, V_TAPS, "v_taps", IN_OWN_INPUTS, ALWAYS, OF_TAPS, OF_DIM)                          \
    MATRIX(38, Q_UP, "q_up", IN_QUERY_RANK, ALWAYS, OF_QUERIES, OF_QUERY_RANK)                     \
    MATRIX(39, K_UP, "k_up", IN_LATENT, ALWAYS, OF_LATENTS, OF_NOPE)                               \
    MATRIX(40, V_UP, "v_up", IN_LATENT, ALWAYS, OF_MIXED, OF_LATENT)                               \
    MATRIX(37, MIX_GATE, "mix_gate", IN_MIXER_GATED, ALWAYS, OF_GATE, OF_DIM)                      \
    MATRIX(106, RELATIVE, "relative", IN_RELATIVE, ALWAYS, OF_RELATIVE, OF_DIM)                    \
    MATRIX(109, TOKEN_SINKS, "token_sinks", IN_RELATIVE, ALWAYS, OF_HEADS, OF_DIM)                 \
    MATRIX(56, BETA, "beta", IN_DELTA, ALWAYS, OF_VALUE_HEADS, OF_DIM)                             \
    MATRIX(69, DECAY, "decay", IN_DELTA, ALWAYS, OF_DECAY, OF_DIM)                                 \
    MATRIX(41, GATE_UP, "gate_up", IN_GATE_RANK, ALWAYS, OF_MIXED, OF_RANK)                        \
    MATRIX(42, DECAY_UP, "decay_up", IN_GATE_RANK, ALWAYS, OF_DECAYS, OF_RANK)                     \
    VECTOR(50, CONV, "conv", IN_CONV, ALWAYS, OF_CONV) /* [taps * channels], the oldest first */   \
    VECTOR(51, CONV_BIAS, "conv_bias", IN_SHORT_CONV, OPTIONAL, OF_DIM)                            \
    VECTOR(23, ATTN_SUB_NORM, "attn_sub_norm", IN_ATTENTION, OPTIONAL, OF_MIXED)                   \
    VECTOR(12, ATTN_OUT_BIAS, "attn_out_bias", IN_Q, OPTIONAL, OF_DIM)                             \
    OUTLIERS(32, ATTN_OUT, "attn_out_outliers", IN_Q, OPTIONAL, OF_DIM, OF_MIXED)                  \
    MATRIX(3, ATTN_OUT, "attn_out", IN_Q, ALWAYS, OF_DIM, OF_MIXED)                                \
    VECTOR(20, POST_ATTN_NORM, "post_attn_norm", IN_Q, OPTIONAL, OF_DIM)                           \
    VECTOR(114, MIX_CONV, "mix_conv", IN_RELATIVE, ALWAYS, OF_DIM_CONV)                            \
    VECTOR(116, FFN_QUERY, "ffn_query", IN_RELATIVE, ALWAYS, OF_DIM)                               \
    MATRIX(103, FFN_GATE_DOWN, "ffn_gate_down", IN_LOOPED, ALWAYS, OF_LOOPED, OF_JOINED)           \
    MATRIX(104, FFN_FORGET, "ffn_forget", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                    \
    MATRIX(105, FFN_GAIN, "ffn_gain", IN_LOOPED, ALWAYS, OF_DIM, OF_LOOPED)                        \
    VECTOR(74, SSD_RATE, "ssd_rate", IN_SSD, ALWAYS, OF_VALUE_HEADS) /* e^A_log */                 \
    VECTOR(75, SSD_STEP_BIAS, "ssd_step_bias", IN_SSD, ALWAYS, OF_VALUE_HEADS)                     \
    VECTOR(54, SSD_SKIP, "ssd_skip", IN_SSD, ALWAYS, OF_VALUE_HEADS)                               \
    MATRIX(72, SSD_GATE, "ssd_gate", IN_SSD, ALWAYS, OF_VALUES, OF_DIM)                            \
    MATRIX(71, SSD_IN, "ssd_in", IN_SSD, ALWAYS, OF_CHANNELS, OF_DIM)                              \
    MATRIX(73, SSD_STEP, "ssd_step", IN_SSD, ALWAYS, OF_VALUE_HEADS, OF_DIM)                       \
    VECTOR(76, SSD_CONV, "ssd_conv", IN_SSD, ALWAYS, OF_CONV)                                      \
    VECTOR(77, SSD_CONV_BIAS, "ssd_conv_bias", IN_SSD, OPTIONAL, OF_CHANNELS)                      \
    VECTOR(78, SSD_NORM, "ssd_norm", IN_SSD, OPTIONAL, OF_VALUES)                                  \
    MATRIX(79, SSD_OUT, "ssd_out", IN_SSD, ALWAYS, OF_DIM, OF_VALUES)                              \
    VECTOR(47, ROUTER_NORM, "router_norm", IN_APART, OPTIONAL, OF_DIM)                             \
    VECTOR(8, FFN_NORM, "ffn_norm", IN_ANY_FFN, OPTIONAL, OF_DIM)                                  \
    VECTOR(15, FFN_NORM_BIAS, "ffn_norm_bias", IN_ANY_FFN, OPTIONAL, OF_DIM)                       \
    VECTOR(44, ROUTER_BIAS, "router_bias", IN_ROUTED, OPTIONAL, OF_EXPERTS)                        \
    VECTOR(45, SELECTION_BIAS, "selection_bias", IN_ROUTED, OPTIONAL, OF_EXPERTS)                  \
    VECTOR(48, EXPERT_SCALE, "expert_scale", IN_ROUTED, OPTIONAL, OF_EXPERTS)                      \
    MATRIX(22, EXPERT_ROUTER, "router", IN_ROUTED, ALWAYS, OF_EXPERTS, OF_DIM)                     \
    VECTOR(46, SHARED_GATE, "shared_gate", IN_SHARED, OPTIONAL, OF_DIM)                            \
    VECTOR(13, FFN_GATE_BIAS, "gate_bias", IN_GATED, OPTIONAL, OF_FFN)                             \
    VECTOR(16, FFN_UP_BIAS, "up_bias", IN_FFN, OPTIONAL, OF_FFN)                                   \
    OUTLIERS(33, FFN_GATE, "gate_outliers", IN_GATED, OPTIONAL, OF_FFN, OF_DIM)                    \
    OUTLIERS(34, FFN_UP, "up_outliers", IN_FFN, OPTIONAL, OF_FFN, OF_DIM)                          \
    MATRIX(4, FFN_GATE, "gate", IN_GATED, ALWAYS, OF_FFN, OF_DIM)                                  \
    MATRIX(5, FFN_UP, "up", IN_FFN, ALWAYS, OF_FFN, OF_DIM)                                        \
    VECTOR(24, FFN_SUB_NORM, "ffn_sub_norm", IN_FFN, OPTIONAL, OF_FFN)                             \
    VECTOR(17, FFN_DOWN_BIAS, "down_bias", IN_OUT, OPTIONAL, OF_DIM)                               \
    OUTLIERS(35, FFN_DOWN, "down_outliers", IN_FFN, OPTIONAL, OF_DIM, OF_FFN)                      \
    MATRIX(6, FFN_DOWN, "down", IN_FFN, ALWAYS, OF_DIM, OF_FFN)                                    \
    VECTOR(115, FFN_CONV, "ffn_conv", IN_RELATIVE, ALWAYS, OF_DIM_CONV)                            \
    VECTOR(64, DENSE_POST_NORM, "dense_post_norm", IN_SHARED_APART, OPTIONAL, OF_DIM)              \
    VECTOR(62, ROUTED_NORM, "routed_norm", IN_APART, OPTIONAL, OF_DIM)                             \
    VECTOR(63, ROUTED_POST_NORM, "routed_post_norm", IN_APART, OPTIONAL, OF_DIM)                   \
    VECTOR(21, POST_FFN_NORM, "post_ffn_norm", IN_ANY_FFN, OPTIONAL, OF_DIM)                       \
    VECTOR(59, OWN_IN_NORM, "own_in_norm", IN_PLE, ALWAYS, OF_PLE)                                 \
    MATRIX(58, OWN_IN, "own_in", IN_PLE, ALWAYS, OF_PLE, OF_DIM)                                   \
    MATRIX(57, OWN_GATE, "own_gate", IN_PLE, ALWAYS, OF_PLE, OF_DIM)                               \
    MATRIX(60, OWN_OUT, "own_out", IN_PLE, ALWAYS, OF_DIM, OF_PLE)                                 \
    VECTOR(61, OWN_NORM, "own_norm", IN_PLE, ALWAYS, OF_DIM)                                       \
    VECTOR(65, LAYER_SCALE, "layer_scale", IN_ALL, OPTIONAL, OF_ONE)                               \
    VECTOR(84, MTP_END_NORM, "mtp_end_norm", IN_MTP, ALWAYS, OF_DIM)
/* clang-format on */

#define QSF_NUMBER(number, name, ...) QSF_TENSOR_##name = number,
#define QSF_NUMBER_OF_OUTLIERS(number, name, ...) QSF_TENSOR_##name##_OUTLIERS = number,
typedef enum qsf_tensor_type {
    QSF_LAYER_TABLE(QSF_NUMBER, QSF_NUMBER, QSF_NUMBER_OF_OUTLIERS) QSF_TENSOR_EMBEDDING = 25,
    QSF_TENSOR_HEAD = 26,
    QSF_TENSOR_FINAL_NORM = 27,
    QSF_TENSOR_FINAL_NORM_BIAS = 28,
    QSF_TENSOR_FIRST_FREE = 43, /* and 49: kept for other mixers */
    QSF_TENSOR_HEAD_BIAS = 66,
    QSF_TENSOR_OWN_TABLE = 70,
    QSF_TENSOR_DENSE = 86,
    QSF_TENSOR_HEAD_REST = 87, /* the head's rows after those of 26 */
    QSF_TENSOR_JOIN = 89,      /* of a drafter that reads the keys and values of its model */
    QSF_TENSOR_FINAL_QUERY = 117,
    QSF_TENSOR_TYPE_COUNT = 119
} qsf_tensor_type;
#undef QSF_NUMBER
#undef QSF_NUMBER_OF_OUTLIERS
