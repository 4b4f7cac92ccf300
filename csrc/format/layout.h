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

typedef enum qsf_tensor_type {
    QSF_TENSOR_Q = 0,
    QSF_TENSOR_K = 1,
    QSF_TENSOR_V = 2,
    QSF_TENSOR_ATTN_OUT = 3,
    QSF_TENSOR_FFN_GATE = 4,
    QSF_TENSOR_FFN_UP = 5,
    QSF_TENSOR_FFN_DOWN = 6,
    QSF_TENSOR_ATTN_NORM = 7,
    QSF_TENSOR_FFN_NORM = 8,
    QSF_TENSOR_Q_BIAS = 9,
    QSF_TENSOR_K_BIAS = 10,
    QSF_TENSOR_V_BIAS = 11,
    QSF_TENSOR_ATTN_OUT_BIAS = 12,
    QSF_TENSOR_FFN_GATE_BIAS = 13,
    QSF_TENSOR_ATTN_NORM_BIAS = 14,
    QSF_TENSOR_FFN_NORM_BIAS = 15,
    QSF_TENSOR_FFN_UP_BIAS = 16,
    QSF_TENSOR_FFN_DOWN_BIAS = 17,
    QSF_TENSOR_Q_NORM = 18,
    QSF_TENSOR_K_NORM = 19,
    QSF_TENSOR_POST_ATTN_NORM = 20,
    QSF_TENSOR_POST_FFN_NORM = 21,
    QSF_TENSOR_EXPERT_ROUTER = 22,
    QSF_TENSOR_ATTN_SUB_NORM = 23,
    QSF_TENSOR_FFN_SUB_NORM = 24,
    QSF_TENSOR_EMBEDDING = 25,
    QSF_TENSOR_HEAD = 26,
    QSF_TENSOR_FINAL_NORM = 27,
    QSF_TENSOR_FINAL_NORM_BIAS = 28,
    QSF_TENSOR_Q_OUTLIERS = 29, /* sparse outliers of types 0 .. 6 */
    QSF_TENSOR_K_OUTLIERS = 30,
    QSF_TENSOR_V_OUTLIERS = 31,
    QSF_TENSOR_ATTN_OUT_OUTLIERS = 32,
    QSF_TENSOR_FFN_GATE_OUTLIERS = 33,
    QSF_TENSOR_FFN_UP_OUTLIERS = 34,
    QSF_TENSOR_FFN_DOWN_OUTLIERS = 35,
    QSF_TENSOR_SINKS = 36,
    QSF_TENSOR_MIX_GATE = 37,
    QSF_TENSOR_Q_UP = 38,
    QSF_TENSOR_K_UP = 39,
    QSF_TENSOR_V_UP = 40,
    QSF_TENSOR_GATE_UP = 41,
    QSF_TENSOR_DECAY_UP = 42,
    QSF_TENSOR_FIRST_FREE = 43, /* and 49: kept for other mixers */
    QSF_TENSOR_ROUTER_BIAS = 44,
    QSF_TENSOR_SELECTION_BIAS = 45,
    QSF_TENSOR_SHARED_GATE = 46,
    QSF_TENSOR_ROUTER_NORM = 47,
    QSF_TENSOR_EXPERT_SCALE = 48,
    QSF_TENSOR_CONV = 50, /* [taps * channels], the oldest tap first */
    QSF_TENSOR_CONV_BIAS = 51,
    QSF_TENSOR_DECAY_RATE = 52, /* e^A_log */
    QSF_TENSOR_DECAY_BIAS = 53,
    QSF_TENSOR_SSD_SKIP = 54,
    QSF_TENSOR_MIX_NORM = 55,
    QSF_TENSOR_BETA = 56,
    QSF_TENSOR_OWN_GATE = 57, /* 57 .. 61: of layers with embeddings of their own */
    QSF_TENSOR_OWN_IN = 58,
    QSF_TENSOR_OWN_IN_NORM = 59,
    QSF_TENSOR_OWN_OUT = 60,
    QSF_TENSOR_OWN_NORM = 61,
    QSF_TENSOR_ROUTED_NORM = 62,
    QSF_TENSOR_ROUTED_POST_NORM = 63,
    QSF_TENSOR_DENSE_POST_NORM = 64,
    QSF_TENSOR_LAYER_SCALE = 65,
    QSF_TENSOR_HEAD_BIAS = 66,
    QSF_TENSOR_INPUT_NORM = 67,
    QSF_TENSOR_INPUT_NORM_BIAS = 68,
    QSF_TENSOR_DECAY = 69,
    QSF_TENSOR_OWN_TABLE = 70,
    QSF_TENSOR_SSD_IN = 71, /* 71 .. 79: of SSD */
    QSF_TENSOR_SSD_GATE = 72,
    QSF_TENSOR_SSD_STEP = 73,
    QSF_TENSOR_SSD_RATE = 74, /* e^A_log */
    QSF_TENSOR_SSD_STEP_BIAS = 75,
    QSF_TENSOR_SSD_CONV = 76, /* as 50 */
    QSF_TENSOR_SSD_CONV_BIAS = 77,
    QSF_TENSOR_SSD_NORM = 78,
    QSF_TENSOR_SSD_OUT = 79,
    QSF_TENSOR_MTP_TRUNK_NORM = 80, /* 80 .. 84: of the MTP head; 80 is a copy of 27 */
    QSF_TENSOR_MTP_TOKEN_NORM = 81,
    QSF_TENSOR_MTP_HIDDEN_NORM = 82,
    QSF_TENSOR_MTP_JOIN = 83,
    QSF_TENSOR_MTP_END_NORM = 84,
    QSF_TENSOR_INPUT_SHIFT = 85,
    QSF_TENSOR_DENSE = 86,
    QSF_TENSOR_HEAD_REST = 87, /* the head's rows after those of 26 */
    QSF_TENSOR_SECOND_SHIFT = 88,
    QSF_TENSOR_JOIN = 89,          /* of a drafter that reads the keys and values of its model */
    QSF_TENSOR_BLOCK_QUERIES = 90, /* 90 .. 118: of mixer 6 */
    QSF_TENSOR_MESSAGE_QUERIES = 91,
    QSF_TENSOR_K_INPUT_NORM = 92,
    QSF_TENSOR_V_INPUT_NORM = 93,
    QSF_TENSOR_Q_GATE_DOWN = 94, /* 94 .. 105: of message gates */
    QSF_TENSOR_Q_FORGET = 95,
    QSF_TENSOR_Q_GAIN = 96,
    QSF_TENSOR_K_GATE_DOWN = 97,
    QSF_TENSOR_K_FORGET = 98,
    QSF_TENSOR_K_GAIN = 99,
    QSF_TENSOR_V_GATE_DOWN = 100,
    QSF_TENSOR_V_FORGET = 101,
    QSF_TENSOR_V_GAIN = 102,
    QSF_TENSOR_FFN_GATE_DOWN = 103,
    QSF_TENSOR_FFN_FORGET = 104,
    QSF_TENSOR_FFN_GAIN = 105,
    QSF_TENSOR_RELATIVE = 106,
    QSF_TENSOR_RELATIVE_SCALE = 107,
    QSF_TENSOR_PROFILES = 108, /* [relative dimensions * extent], the farthest distance first */
    QSF_TENSOR_TOKEN_SINKS = 109,
    QSF_TENSOR_K_CONV = 110, /* 110, 111, 114, 115: as 50 */
    QSF_TENSOR_V_CONV = 111,
    QSF_TENSOR_K_TAPS = 112, /* rows of a KV head: from the token itself backwards */
    QSF_TENSOR_V_TAPS = 113,
    QSF_TENSOR_MIX_CONV = 114,
    QSF_TENSOR_FFN_CONV = 115,
    QSF_TENSOR_FFN_QUERY = 116,
    QSF_TENSOR_FINAL_QUERY = 117,
    QSF_TENSOR_Q_SCALE = 118,
    QSF_TENSOR_TYPE_COUNT = 119
} qsf_tensor_type;
