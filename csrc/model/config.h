/* config.h - the shapes and rules of a model for the forward pass, validated once.
 *
 * Built from the file's header, ARCH, kinds of layers and tensor table. Later code does not check
 * shapes again. Models that this build cannot run are refused here.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_CONFIG_H
#define QSF_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/checked.h"
#include "types/dtype.h"
#include "format/outliers.h"
#include "format/records.h"

/* What a layer computes, and its tensors in the order of the pass; optional ones may be NULL. */
typedef struct qsf_layer {
    const qsf_layer_kind *kind;
    uint32_t unit_idx;
    uint32_t first_expert;             /* the unit of expert 0, layers with experts */
    const qsf_tensor *input_norm;      /* [dim], optional: normalises the residual itself */
    const qsf_tensor *input_norm_bias; /* [dim], optional */
    const qsf_tensor *attn_norm;       /* [dim]; optional if there is a post_attn_norm */
    const qsf_tensor *attn_norm_bias;  /* [dim], optional */
    const qsf_tensor *q_bias;          /* [q_dim], optional */
    const qsf_tensor *k_bias;          /* [kv_dim], optional */
    const qsf_tensor *v_bias;          /* [kv_dim], optional */
    const qsf_tensor *q_norm;          /* [head_dim] or [q_dim], as the kind says */
    const qsf_tensor *k_norm;          /* [head_dim] or [kv_dim] */
    const qsf_tensor *sinks;           /* [n_heads], optional */
    const qsf_tensor *q_outliers;      /* sparse outliers of q, optional; likewise the others */
    const qsf_tensor *k_outliers;
    const qsf_tensor *v_outliers;
    const qsf_tensor *q;             /* [q_dim, dim] */
    const qsf_tensor *k;             /* [kv_dim, dim] */
    const qsf_tensor *v;             /* [kv_dim, dim] */
    const qsf_tensor *attn_sub_norm; /* [q_dim], optional */
    const qsf_tensor *attn_out_bias; /* [dim], optional */
    const qsf_tensor *attn_out_outliers;
    const qsf_tensor *attn_out;       /* [dim, q_dim] */
    const qsf_tensor *post_attn_norm; /* [dim], optional */
    const qsf_tensor *ffn_norm;       /* [dim]; optional if there is a post_ffn_norm, or parallel */
    const qsf_tensor *ffn_norm_bias;  /* [dim], optional */
    const qsf_tensor *router_bias;    /* [n_experts], optional */
    const qsf_tensor *selection_bias; /* [n_experts], optional */
    const qsf_tensor *router;         /* [n_experts, dim], layers with experts */
    const qsf_tensor *shared_gate;    /* [dim], optional, of the dense part beside experts */
    const qsf_tensor *gate_bias;      /* [ffn_dim], optional */
    const qsf_tensor *up_bias;        /* [ffn_dim], optional */
    const qsf_tensor *gate_outliers;
    const qsf_tensor *up_outliers;
    const qsf_tensor *gate;         /* [ffn_dim, dim], gated FFNs */
    const qsf_tensor *up;           /* [ffn_dim, dim] */
    const qsf_tensor *ffn_sub_norm; /* [ffn_dim], optional */
    const qsf_tensor *down_bias;    /* [dim], optional */
    const qsf_tensor *down_outliers;
    const qsf_tensor *down;          /* [dim, ffn_dim] */
    const qsf_tensor *post_ffn_norm; /* [dim], optional */
} qsf_layer;

/* The tensors of an expert in the order of the pass. */
typedef struct qsf_expert {
    const qsf_tensor *gate_bias; /* [expert_dim], optional */
    const qsf_tensor *up_bias;   /* [expert_dim], optional */
    const qsf_tensor *gate;      /* [expert_dim, dim] */
    const qsf_tensor *up;        /* [expert_dim, dim] */
    const qsf_tensor *down_bias; /* [dim], optional */
    const qsf_tensor *down;      /* [dim, expert_dim] */
} qsf_expert;

typedef struct qsf_config {
    uint32_t n_layers;
    const qsf_layer *layers; /* [n_layers] */
    uint32_t dim;
    uint32_t n_vocab;
    uint32_t max_tokens; /* longest sequence that the model allows */
    uint32_t n_heads;    /* the largest of all layers; likewise the next four */
    uint32_t head_dim;
    uint32_t q_dim;          /* heads * head_dim */
    uint32_t kv_dim;         /* KV heads * head_dim */
    uint32_t ffn_dim;        /* or expert_dim */
    uint32_t least_kv_heads; /* of all layers */
    uint32_t qk_norm_cols;   /* of the widest Q or K norm; 0: none */
    uint32_t n_ropes;        /* RoPE sets, for one context each */
    uint32_t n_rope_pairs;   /* of all of them */
    uint32_t n_own_pairs;    /* of the one that header and ARCH make */
    uint32_t n_experts; /* of the layer with the most; 0: no layer has any; likewise the next */
    uint32_t n_chosen;
    bool is_rms_norm;
    bool has_gate;    /* in some layer */
    bool keeps_input; /* some parallel layer needs its input again for the FFN */
    bool has_learned_positions;
    bool has_tied_head;
    bool has_head_bias;
    float norm_epsilon;
    float embedding_factor;
    float logit_cap;       /* 0: none */
    size_t outliers_bytes; /* most bytes of sparse outliers that are in use together */
} qsf_config;

/* The tensors outside the layers. */
typedef struct qsf_ends {
    const qsf_tensor *embedding;       /* [n_vocab, dim] */
    const qsf_tensor *final_norm;      /* [dim] */
    const qsf_tensor *final_norm_bias; /* [dim], optional */
    const qsf_tensor *head_bias;       /* [n_vocab], optional; NULL when tied */
    const qsf_tensor *head;            /* [n_vocab, dim]; the embedding when tied */
} qsf_ends;

static inline uint32_t qsf_q_dim(const qsf_layer_kind *k)
{
    return k->n_heads * k->head_dim; /* <= 2^24: limits of layout.h */
}

static inline uint32_t qsf_kv_dim(const qsf_layer_kind *k)
{
    return k->n_kv_heads * k->head_dim;
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

/* Fills *out with the tensors of an expert, whose shapes qsf_config_init has checked. */
void qsf_expert_find(const qsf_reader *r, uint32_t unit_idx, qsf_expert *out);

/* True if the FFN of a layer reads the layer's input, which attention has changed by then. */
bool qsf_layer_keeps_input(const qsf_layer *l);

#endif
