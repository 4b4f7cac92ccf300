/* config.h - the shapes and rules of a model for the forward pass, validated once.
 *
 * Built from the file's header, ARCH and tensor table. Later code does not check shapes again.
 * Models that this build cannot run are refused here.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_CONFIG_H
#define QSF_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/outliers.h"

typedef struct qsf_config {
    uint32_t n_layers;
    uint32_t dim;
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t ffn_dim;
    uint32_t n_vocab;
    uint32_t max_tokens;    /* longest sequence that the model allows */
    uint32_t q_dim;         /* n_heads * head_dim */
    uint32_t kv_dim;        /* n_kv_heads * head_dim */
    uint32_t rope_dims;     /* 0: no RoPE */
    uint32_t window_tokens; /* 0: attends to all earlier positions */
    uint8_t activation;     /* qsf_activation */
    bool is_rms_norm;
    bool is_gated; /* FFN: activation(gate) * up */
    bool is_rope_interleaved;
    bool has_learned_positions;
    bool has_tied_head;
    float norm_epsilon;
    size_t outliers_bytes; /* most bytes of sparse outliers that are in use together */
} qsf_config;

/* The tensors of one layer in the order of the pass; optional ones may be NULL. */
typedef struct qsf_layer {
    const qsf_tensor *attn_norm;      /* [dim] */
    const qsf_tensor *attn_norm_bias; /* [dim], optional */
    const qsf_tensor *q_bias;         /* [q_dim], optional */
    const qsf_tensor *k_bias;         /* [kv_dim], optional */
    const qsf_tensor *v_bias;         /* [kv_dim], optional */
    const qsf_tensor *q_outliers;     /* sparse outliers of q, optional; likewise the others */
    const qsf_tensor *k_outliers;
    const qsf_tensor *v_outliers;
    const qsf_tensor *q;             /* [q_dim, dim] */
    const qsf_tensor *k;             /* [kv_dim, dim] */
    const qsf_tensor *v;             /* [kv_dim, dim] */
    const qsf_tensor *attn_out_bias; /* [dim], optional */
    const qsf_tensor *attn_out_outliers;
    const qsf_tensor *attn_out;      /* [dim, q_dim] */
    const qsf_tensor *ffn_norm;      /* [dim] */
    const qsf_tensor *ffn_norm_bias; /* [dim], optional */
    const qsf_tensor *gate_bias;     /* [ffn_dim], optional */
    const qsf_tensor *up_bias;       /* [ffn_dim], optional */
    const qsf_tensor *gate_outliers;
    const qsf_tensor *up_outliers;
    const qsf_tensor *gate;      /* [ffn_dim, dim], gated models */
    const qsf_tensor *up;        /* [ffn_dim, dim] */
    const qsf_tensor *down_bias; /* [dim], optional */
    const qsf_tensor *down_outliers;
    const qsf_tensor *down; /* [dim, ffn_dim] */
} qsf_layer;

/* The tensors outside the layers. */
typedef struct qsf_ends {
    const qsf_tensor *embedding;       /* [n_vocab, dim] */
    const qsf_tensor *final_norm;      /* [dim] */
    const qsf_tensor *final_norm_bias; /* [dim], optional */
    const qsf_tensor *head;            /* [n_vocab, dim]; the embedding when tied */
} qsf_ends;

/* Fills *c, *ends and layers [n_layers of the header]. QSF_ERR_UNSUPPORTED: this build does not run
 * the architecture or an option of it. QSF_ERR_FORMAT: a tensor is missing, misplaced or has the
 * wrong shape. */
qsf_status qsf_config_init(qsf_config *c, const qsf_reader *r, qsf_layer *layers, qsf_ends *ends);

/* Writes the inverse frequencies of RoPE, scaled: out [rope_dims / 2]. */
void qsf_config_rope_frequencies(const qsf_config *c, const qsf_reader *r, float *out);

#endif
