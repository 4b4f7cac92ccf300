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

/* QSF_LAYER_Q and so on: QSF_LAYER_MATRICES matrices, then the vectors */
#define QSF_LAYER_MEMBER(number, name, ...) QSF_LAYER_##name,
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
    const qsf_tensor *outliers[QSF_LAYER_MATRICES];    /* NULL: the matrix has none */
    struct qsf_low_rank *low_rank[QSF_LAYER_MATRICES]; /* of adapters (adapter.h); the same */
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
    uint32_t low_cols;     /* numbers that adapters make of a row of a matrix's input; set later */
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
