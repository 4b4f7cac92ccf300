/* config.h - the shapes and rules of a model for the forward pass, validated once.
 *
 * Built from the file's header, ARCH, kinds of layers and tensor table. Later code does not check
 * shapes again. Models that this build cannot run are refused here.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/checked.h"
#include "types/dtype.h"
#include "format/outliers.h"
#include "format/records.h"

/* The tensors of a layer. Optional ones may be NULL; layer_rows.h has a row for each: its
 * type in the file, its shape, and the layers that have it. */
typedef enum qsf_layer_tensor {
    QSF_LAYER_Q,                                /* [q_rows, dim]; C of a short convolution */
    QSF_LAYER_K,                                /* [k_rows, dim]; B of a short convolution */
    QSF_LAYER_V,                                /* [v_rows, dim]; x of a short convolution */
    QSF_LAYER_ATTN_OUT,                         /* [dim, out_cols] */
    QSF_LAYER_GATE,                             /* [ffn_dim, dim], gated FFNs */
    QSF_LAYER_UP,                               /* [ffn_dim, dim] */
    QSF_LAYER_DOWN,                             /* [dim, ffn_dim] */
    QSF_LAYER_ROUTER,                           /* [n_experts, dim], layers with experts */
    QSF_LAYER_MIX_GATE,                         /* [out_cols or gate_rank, dim] */
    QSF_LAYER_BETA,                             /* [value heads, dim]: delta rule */
    QSF_LAYER_DECAY,                            /* [decays or gate_rank, dim]: delta rule */
    QSF_LAYER_GATE_UP,                          /* [out_cols, gate_rank]: delta rule */
    QSF_LAYER_DECAY_UP,                         /* [decays, gate_rank]: delta rule */
    QSF_LAYER_Q_UP,                             /* [heads * (nope + rope), query_rank]: latents */
    QSF_LAYER_K_UP,                             /* [heads * latent_rank, nope_dim]: latents */
    QSF_LAYER_V_UP,                             /* [heads * value dim, latent_rank]: latents */
    QSF_LAYER_OWN_IN,                           /* [own_width, dim], own embeddings; the next two */
    QSF_LAYER_OWN_GATE,                         /* [own_width, dim] */
    QSF_LAYER_OWN_OUT,                          /* [dim, own_width] */
    QSF_LAYER_SSD_IN,                           /* [channels, dim]: x, B and C of SSD */
    QSF_LAYER_SSD_GATE,                         /* [values, dim]: SSD */
    QSF_LAYER_SSD_STEP,                         /* [value heads, dim]: SSD */
    QSF_LAYER_SSD_OUT,                          /* [dim, values]: SSD */
    QSF_LAYER_MTP_JOIN,                         /* [dim, 2 dim]: the MTP head */
    QSF_LAYER_MATRICES,                         /* how many are matrices; vectors follow */
    QSF_LAYER_INPUT_SHIFT = QSF_LAYER_MATRICES, /* [dim], optional: added to the residual */
    QSF_LAYER_SECOND_SHIFT,                     /* [dim], optional: of a pair's second text */
    QSF_LAYER_INPUT_NORM,                       /* [dim], optional: norm of the residual itself */
    QSF_LAYER_INPUT_NORM_BIAS,                  /* [dim], optional */
    QSF_LAYER_ATTN_NORM,                        /* [dim]; optional if there is another norm */
    QSF_LAYER_ATTN_NORM_BIAS,                   /* [dim], optional */
    QSF_LAYER_Q_BIAS,                           /* [q_rows], optional; not the delta rule */
    QSF_LAYER_K_BIAS,                           /* [k_rows], optional; likewise */
    QSF_LAYER_V_BIAS,                           /* [v_rows], optional; likewise */
    QSF_LAYER_Q_NORM,                           /* [head_dim], [q_dim] or [query_rank] */
    QSF_LAYER_K_NORM,                           /* [head_dim], [kv_dim] or [latent_rank] */
    QSF_LAYER_SINKS,                            /* [n_heads], optional */
    QSF_LAYER_DECAY_RATE,                       /* [decays], delta rule; likewise the next */
    QSF_LAYER_DECAY_BIAS,                       /* [decays] */
    QSF_LAYER_MIX_NORM,                         /* [value_dim] */
    QSF_LAYER_CONV,                             /* [n_taps * channels] */
    QSF_LAYER_CONV_BIAS,                        /* [dim], optional; short convolutions */
    QSF_LAYER_SSD_RATE,                         /* [value heads], SSD; likewise the next two */
    QSF_LAYER_SSD_STEP_BIAS,                    /* [value heads] */
    QSF_LAYER_SSD_SKIP,                         /* [value heads] */
    QSF_LAYER_SSD_CONV,                         /* [n_taps * channels] */
    QSF_LAYER_SSD_CONV_BIAS,                    /* [channels], optional */
    QSF_LAYER_SSD_NORM,                         /* [values], optional */
    QSF_LAYER_ATTN_SUB_NORM,                    /* [out_cols], optional */
    QSF_LAYER_ATTN_OUT_BIAS,                    /* [dim], optional */
    QSF_LAYER_POST_ATTN_NORM,                   /* [dim], optional */
    QSF_LAYER_FFN_NORM,         /* [dim]; optional if there is a post_ffn_norm, or parallel */
    QSF_LAYER_FFN_NORM_BIAS,    /* [dim], optional */
    QSF_LAYER_ROUTER_NORM,      /* [dim], optional: norm of the residual for the router */
    QSF_LAYER_ROUTER_BIAS,      /* [n_experts], optional */
    QSF_LAYER_SELECTION_BIAS,   /* [n_experts], optional */
    QSF_LAYER_EXPERT_SCALE,     /* [n_experts], optional: factors of the experts' weights */
    QSF_LAYER_SHARED_GATE,      /* [dim], optional, of the dense part beside experts */
    QSF_LAYER_GATE_BIAS,        /* [ffn_dim], optional */
    QSF_LAYER_UP_BIAS,          /* [ffn_dim], optional */
    QSF_LAYER_FFN_SUB_NORM,     /* [ffn_dim], optional */
    QSF_LAYER_DOWN_BIAS,        /* [dim], optional */
    QSF_LAYER_DENSE_POST_NORM,  /* [dim], optional, of the dense part beside experts */
    QSF_LAYER_ROUTED_NORM,      /* [dim], optional: norm of the residual for experts */
    QSF_LAYER_ROUTED_POST_NORM, /* [dim], optional: norm of the experts' sum */
    QSF_LAYER_POST_FFN_NORM,    /* [dim], optional */
    QSF_LAYER_OWN_IN_NORM,      /* [own_width]; likewise */
    QSF_LAYER_OWN_NORM,         /* [dim] */
    QSF_LAYER_SCALE,            /* [1], optional: factor of the residual after the layer */
    QSF_LAYER_MTP_TRUNK_NORM,   /* [dim]: the MTP head; likewise the next three */
    QSF_LAYER_MTP_TOKEN_NORM,
    QSF_LAYER_MTP_HIDDEN_NORM,
    QSF_LAYER_MTP_END_NORM,
    QSF_LAYER_TENSORS
} qsf_layer_tensor;

/* The computation of a layer, and its tensors. */
typedef struct qsf_layer {
    const qsf_layer_kind *kind;
    uint32_t unit_idx;
    uint32_t first_expert; /* the unit of expert 0, layers with experts */
    uint32_t kv_layer; /* whose keys and values it reads, in this array: its own index or less */
    uint32_t own_col;  /* of its own embeddings in a row of their table */
    const qsf_tensor *tensors[QSF_LAYER_TENSORS];
    const qsf_tensor *outliers[QSF_LAYER_MATRICES]; /* NULL: the matrix has none */
} qsf_layer;

typedef struct qsf_config {
    uint32_t n_layers;
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
    uint32_t ffn_dim;        /* or expert_dim, or own_width */
    uint32_t least_kv_heads; /* smallest of all layers */
    uint32_t qk_norm_cols;   /* of the widest Q or K norm; 0: none */
    uint32_t latent_dim;     /* columns of each head's latent values; 0: none */
    uint32_t ones;           /* weights of the widest V norm; 0: none */
    uint32_t own_width;      /* of the embeddings that each layer has of its own; 0: none */
    uint32_t own_cols;       /* of their table: those of all layers of the file */
    uint32_t conv_cols;      /* of the widest weights of a convolution; 0: none */
    uint32_t conv_channels;  /* of the widest convolution; 0: none */
    uint32_t n_ropes;        /* RoPE sets, for one context each */
    uint32_t n_rope_pairs;   /* of all of them */
    uint32_t n_own_pairs;    /* of the RoPE set made from header and ARCH */
    uint32_t n_experts; /* of the layer with the most; 0: no layer has any; likewise the next */
    uint32_t n_chosen;
    bool is_rms_norm;
    bool has_gate;    /* some layer has a gated FFN */
    bool keeps_input; /* some FFN needs its layer's input again, or a place for the dense part */
    bool has_learned_positions;
    bool has_tied_head;
    bool is_encoder; /* no head; a pass has whole texts, whose layers share their KV pages */
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
    const qsf_tensor *final_norm;      /* [dim] */
    const qsf_tensor *final_norm_bias; /* [dim], optional */
    const qsf_tensor *head_bias;       /* [n_vocab], optional; NULL when tied */
    const qsf_tensor *dense;           /* [dim, dim] after the final norm, optional */
    const qsf_tensor *head;            /* [n_vocab, dim]; the embedding when tied; or NULL */
    const qsf_tensor *head_rest;       /* the last rows of [n_vocab, dim], if `head` lacks them */
    const qsf_tensor *own_table;       /* [n_vocab, own_cols]; or NULL */
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
    return k->mixer == QSF_MIXER_ATTENTION || k->mixer == QSF_MIXER_ATTENTION_AND_SSD;
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

/* Fills *c, *ends and layers [n_pass_layers of the reader]. QSF_ERR_UNSUPPORTED: this build does
 * not run the architecture or an option of it. QSF_ERR_FORMAT: a tensor is missing, misplaced or
 * has the wrong shape. */
qsf_status qsf_config_init(qsf_config *c, const qsf_reader *r, qsf_layer *layers, qsf_ends *ends);

/* Fills `tensors` at the entries of gate, up, down and their biases, which are an expert's
 * tensors; qsf_config_init has checked their shapes, with expert_dim instead of ffn_dim. */
void qsf_expert_find(const qsf_reader *r, uint32_t unit_idx,
                     const qsf_tensor *tensors[QSF_LAYER_TENSORS]);

/* True if the FFN of a layer reads the layer's input, which attention has already changed. */
bool qsf_layer_keeps_input(const qsf_layer *l);
