/* scratch.h - the activations of one step, shared by all sessions of a model.
 *
 * Rows are tokens of the chunk. Buffers have room for the widest layer; a layer's rows lie at its
 * own strides: q_stride is its q_dim padded to 64, likewise the others. Inputs of a matmul are
 * padded to 64 columns with zeros, results to 16. `wide` rows are the chunk's, or `routed` ones if
 * these are more.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "memory/arena.h"
#include "format/config.h"
#include "cache/kv/kvcache.h"
#include "model/chunk.h"

/* Most query rows of a row group, which share a pass over the pages: query heads of one KV head,
 * times tokens. */
#define QSF_ATTEND_ROWS 64

/* Buffers of attention, beside q, k and v. Each worker uses the part at its index. */
typedef struct qsf_attend_scratch {
    uint32_t n_spans; /* most that a chunk of split_tokens sees */
    /* Larger chunks are not split over spans. */
    uint32_t split_tokens;
    float *q;                    /* [threads, 64, head_stride] query rows of the row group */
    int8_t *act_q;               /* [threads, 64, head_stride] their integers, as in qsf_acts */
    int8_t *act_q_low;           /* [threads, 64, head_stride] */
    float *act_scale;            /* [threads, 64, head_stride / 64] */
    int32_t *act_sum;            /* [threads, 64, head_stride / 64] */
    qsf_act_parts *act_parts;    /* [threads, 64, head_stride / 64] */
    float *act_scaled_sum;       /* [threads, 64, head_stride / 64] */
    int32_t *act_fine_sum;       /* [threads, 64, head_stride / 64] */
    float *scores;               /* [threads, 64, 256] */
    float *span_values;          /* [threads, 64, head_stride] result of one span */
    float *values;               /* [threads, 64, head_stride] sums over the spans so far */
    float *partial_values;       /* [split_tokens, heads, n_spans, head_stride] */
    qsf_span_sums *partial_sums; /* [split_tokens, heads, n_spans] */
    qsf_span_sums *carried; /* [chunk, heads] sums over the spans so far, if pages may be cold */
    unsigned char *transit; /* [qsf_kv_transit_bytes()] cold pages being attended to */
} qsf_attend_scratch;

/* 16-bit activations are two products of 8-bit kernels: outputs for which both are computed while
 * their weights are in the cache, and most tokens for which one product computes both. */
#define QSF_LOW_COLS 128
#define QSF_LOW_TOGETHER 8

/* Rows that experts compute together. An expert with more rows unpacks its weights again. */
#define QSF_EXPERT_ROWS 256

/* Buffers of the routed part: `routed` rows are the chunk's times n_chosen, at most
 * QSF_EXPERT_ROWS. Empty if no layer has experts. */
typedef struct qsf_routed_scratch {
    float *scores;     /* [chunk, n_experts], rows at n_experts of the layer */
    float *biases[3];  /* [n_experts] of router and selection; scales of the experts */
    float *gates;      /* [chunk] of the dense part */
    float *weights;    /* [chunk, n_chosen] */
    uint16_t *chosen;  /* [chunk, n_chosen] */
    uint32_t *choices; /* [chunk * n_chosen] places in `chosen`, by expert */
    uint32_t *first;   /* [n_experts + 1]: the first entry of each expert in choices */
    uint32_t *units;   /* [n_experts] that some token chose */
    uint32_t *uses;    /* [n_experts] tokens that chose them */
    uint32_t *likely;  /* [n_experts] units that the next layer may want */
    float *rows;       /* [routed, dim_stride] inputs of experts that read f32 */
    float *outputs;    /* [routed, dim_stride] */
} qsf_routed_scratch;

typedef struct qsf_scratch {
    uint32_t chunk_tokens;
    size_t dim_stride; /* dim, padded to 64 */
    size_t own_stride; /* own_cols, padded to 64 */
    float *x;          /* [chunk, dim_stride] the residual stream */
    float *normed;     /* [chunk, dim_stride] */
    float *input; /* [chunk, dim_stride] for parallel layers, or dense parts; NULL if no layer needs
                     it */
    float *q;     /* [chunk, q_stride] queries, then the attention's result */
    float *k;     /* [chunk, kv_stride] */
    float *v;     /* [chunk, kv_stride] */
    float *attended; /* [chunk, q_stride] */
    float *mix_gate; /* [chunk, gate_stride] gates of a mixer's output */
    float *by_head;  /* [heads, chunk, nope_stride] queries that K_UP reads, of latent attention */
    float *steps;    /* [chunk, n_steps] betas, then decays, of states by heads */
    float *gate;     /* [wide, ffn_stride] input of the down projection */
    float *up;       /* [wide, ffn_stride]; NULL if the FFN has no gate */
    float *embedded; /* [chunk, dim_stride] the embedding, if layers have embeddings of their own */
    float *own;      /* [chunk, own_stride] these, of all layers */
    float *y; /* [chunk, dim_stride] output of attention or the FFN, before the residual add */
    uint32_t *positions; /* [chunk] positions of the rows in their sequences */
    qsf_segment *rest;   /* [chunk] segments of the rows that the head is for */
    float *rope_cos;     /* [chunk, pairs] of each RoPE set, one set after the other */
    float *rope_sin;     /* the same */
    qsf_kv_form kv_form; /* the same in all sessions */
    qsf_attend_scratch attend;
    float *tails[6];    /* [wide, 16] last tile rows that do not fit the output, one for each matrix
                           that runs at the same time */
    float *vectors[4];  /* [widest vector] norm weight, norm bias, and two more vectors */
    float *qk_norms[2]; /* [qk_norm_cols] weights of Q norm and K norm */
    float *ones;        /* [ones] of the config: weights of V norms */
    float *conv;        /* [conv_cols] weights, then zeros: [conv_channels] */
    float *head_bias;   /* [n_vocab], if the head has one */
    unsigned char *outliers; /* [config's outliers_bytes] those in use at the same time */
    qsf_routed_scratch routed;
    /* Matmul input as integers. q_low follows q of all rows; with 16-bit activations the
     * description of q_low (qsf_acts_low) follows that of q. */
    int8_t *act_q;    /* [2 wide, widest input] */
    float *act_scale; /* [wide or 2 wide, widest input / 64] */
    int32_t *act_sum; /* the same, and the next two */
    qsf_act_parts *act_parts;
    float *act_scaled_sum;
    int32_t *act_fine_sum; /* [wide, widest input / 64] */
    float *low_products;   /* [threads, low_rows, QSF_LOW_COLS], with 16-bit activations */
    size_t low_rows;
} qsf_scratch;

/* The sizes that the scratch depends on. */
typedef struct qsf_scratch_sizes {
    uint32_t chunk_tokens;
    uint32_t n_threads;
} qsf_scratch_sizes;

/* Call once on a measuring arena and once on the real one, whose memory is zeroed. Of the pool only
 * its sizes are read. */
void qsf_scratch_layout(qsf_scratch *s, qsf_arena *a, const qsf_config *c, const qsf_kv_pool *pool,
                        const qsf_scratch_sizes *sizes);
