/* tiny_model.h - builds a small .qsf file in memory that the engine runs: LLaMA- or GPT-2-shaped.
 *
 * The weights are noise, tamed so that the logits are finite.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_TINY_MODEL_H
#define QSF_TESTS_TINY_MODEL_H

#include "tiny_file.h"

#ifndef TINY_MODEL_DIM
#define TINY_MODEL_DIM 32
#endif
#define TINY_MODEL_HEADS 2
#define TINY_MODEL_KV_HEADS 1
#define TINY_MODEL_HEAD_DIM 16
#ifndef TINY_MODEL_FFN
#define TINY_MODEL_FFN 40
#endif
#define TINY_MODEL_VOCAB 24
#ifndef TINY_MODEL_TOKENS
#define TINY_MODEL_TOKENS 40 /* more than a page of the KV cache */
#endif

typedef struct tiny_model {
    uint32_t n_layers;
    uint8_t dtype; /* of the matrices */
    uint8_t compression;
    bool is_gpt2; /* learned positions, biases, LayerNorm, no gate, one KV head per head */
    bool is_tied;
    uint32_t window_tokens;
    bool is_k_before_q; /* against the order of the pass */
    bool has_outliers;  /* side tables of the matrices that have 100 weights */
} tiny_model;

/* Scales of 2^-7 and mins that centre 4-bit codes; vectors near 1 or of 2^-7. */
static inline void tiny_tame(unsigned char *data, size_t n_bytes, uint8_t dtype, uint8_t layout)
{
    const size_t tile_bytes = layout == QSF_LAYOUT_TILES ? qsf_dtype_tile_bytes(dtype) : n_bytes;
    for (size_t at = 0; at + tile_bytes <= n_bytes; at += tile_bytes) {
        unsigned char *const tile = data + at;
        for (size_t i = 0; dtype == QSF_DTYPE_F32 && i < tile_bytes; i += 4)
            qsf_store_f32(tile + i, 1.0F + (float)tile[i] / 1024.0F);
        for (size_t i = 0; dtype == QSF_DTYPE_F16 && i < tile_bytes; i += 2)
            tile[i + 1] = (unsigned char)(0x2C | (tile[i + 1] & 0x80)); /* 2^-4, any sign */
        for (size_t r = 0; qsf_dtype_is_quantised(dtype) && r < QSF_TILE_ROWS; r++) {
            qsf_store_u16(tile + 2 * r, 0x2000); /* 2^-7 */
            if (dtype == QSF_DTYPE_4BIT)
                qsf_store_u16(tile + 32 + 2 * r, 0xAB80); /* -7.5 * 2^-7 */
        }
    }
}

static inline void tiny_add_tame(tiny_file *f, uint32_t unit_idx, uint32_t type, uint32_t n_rows,
                                 uint32_t n_cols, uint8_t dtype, uint8_t layout)
{
    const size_t data_off = f->unit_bytes + QSF_TENSOR_HEADER_BYTES;
    tiny_add_tensor(f, unit_idx, type, n_rows, n_cols, dtype, layout);
    const size_t n_bytes = layout == QSF_LAYOUT_VECTOR ? n_cols * qsf_dtype_scalar_bytes(dtype)
                                                       : f->unit_bytes - data_off;
    tiny_tame(f->unit + data_off, n_bytes, dtype, layout);
}

static inline void tiny_build_layer(tiny_file *f, const tiny_model *m, uint32_t unit_idx)
{
    const uint32_t dim = TINY_MODEL_DIM;
    const uint32_t q_dim = TINY_MODEL_HEADS * TINY_MODEL_HEAD_DIM;
    const uint32_t kv_dim =
        (m->is_gpt2 ? TINY_MODEL_HEADS : TINY_MODEL_KV_HEADS) * TINY_MODEL_HEAD_DIM;
    const struct {
        uint32_t type;
        uint32_t n_rows; /* 0: a vector */
        uint32_t n_cols;
        bool is_gpt2;
        bool is_llama;
    } tensors[] = {
        {QSF_TENSOR_ATTN_NORM, 0, dim, true, true},
        {QSF_TENSOR_ATTN_NORM_BIAS, 0, dim, true, false},
        {QSF_TENSOR_Q_BIAS, 0, q_dim, true, false},
        {QSF_TENSOR_K_BIAS, 0, kv_dim, true, false},
        {QSF_TENSOR_V_BIAS, 0, kv_dim, true, false},
        {QSF_TENSOR_Q_OUTLIERS, q_dim, dim, m->has_outliers, m->has_outliers},
        {QSF_TENSOR_K_OUTLIERS, kv_dim, dim, m->has_outliers, m->has_outliers},
        {QSF_TENSOR_V_OUTLIERS, kv_dim, dim, m->has_outliers, m->has_outliers},
        {m->is_k_before_q ? QSF_TENSOR_K : QSF_TENSOR_Q, m->is_k_before_q ? kv_dim : q_dim, dim,
         true, true},
        {m->is_k_before_q ? QSF_TENSOR_Q : QSF_TENSOR_K, m->is_k_before_q ? q_dim : kv_dim, dim,
         true, true},
        {QSF_TENSOR_V, kv_dim, dim, true, true},
        {QSF_TENSOR_ATTN_OUT_BIAS, 0, dim, true, false},
        {QSF_TENSOR_ATTN_OUT_OUTLIERS, dim, q_dim, m->has_outliers, m->has_outliers},
        {QSF_TENSOR_ATTN_OUT, dim, q_dim, true, true},
        {QSF_TENSOR_FFN_NORM, 0, dim, true, true},
        {QSF_TENSOR_FFN_NORM_BIAS, 0, dim, true, false},
        {QSF_TENSOR_FFN_UP_BIAS, 0, TINY_MODEL_FFN, true, false},
        {QSF_TENSOR_FFN_GATE_OUTLIERS, TINY_MODEL_FFN, dim, false, m->has_outliers},
        {QSF_TENSOR_FFN_UP_OUTLIERS, TINY_MODEL_FFN, dim, m->has_outliers, m->has_outliers},
        {QSF_TENSOR_FFN_GATE, TINY_MODEL_FFN, dim, false, true},
        {QSF_TENSOR_FFN_UP, TINY_MODEL_FFN, dim, true, true},
        {QSF_TENSOR_FFN_DOWN_BIAS, 0, dim, true, false},
        {QSF_TENSOR_FFN_DOWN_OUTLIERS, dim, TINY_MODEL_FFN, m->has_outliers, m->has_outliers},
        {QSF_TENSOR_FFN_DOWN, dim, TINY_MODEL_FFN, true, true},
    };
    size_t n_plain = SIZE_MAX; /* the index among those that are no side tables */
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        n_plain += tensors[i].type < QSF_TENSOR_Q_OUTLIERS;
        if (!(m->is_gpt2 ? tensors[i].is_gpt2 : tensors[i].is_llama))
            continue;
        if (tensors[i].type >= QSF_TENSOR_Q_OUTLIERS) {
            tiny_add_outliers(f, unit_idx, tensors[i].type, tensors[i].n_rows, tensors[i].n_cols,
                              113); /* fewer than one in 100 weights */
            continue;
        }
        const bool is_vector = tensors[i].n_rows == 0;
        tiny_add_tame(f, unit_idx, tensors[i].type, is_vector ? 1 : tensors[i].n_rows,
                      tensors[i].n_cols,
                      is_vector ? (n_plain % 2 == 0 ? QSF_DTYPE_F32 : QSF_DTYPE_F16) : m->dtype,
                      is_vector ? QSF_LAYOUT_VECTOR : QSF_LAYOUT_TILES);
    }
}

static inline void tiny_model_arch(tiny_file *f, const tiny_model *m)
{
    unsigned char arch[24] = {0};
    qsf_store_u16(arch, 1); /* norm epsilon */
    arch[2] = 2;
    qsf_store_f32(arch + 4, 1e-5F);
    qsf_store_u16(arch + 8, 9); /* tied head */
    arch[10] = 1;
    qsf_store_u32(arch + 12, m->is_tied);
    qsf_store_u16(arch + 16, 10); /* sliding window */
    arch[18] = 1;
    qsf_store_u32(arch + 20, m->window_tokens);
    tiny_add_section(f, "ARCH", 8, arch, sizeof arch);
}

static inline void tiny_model_header(tiny_file *f, const tiny_model *m)
{
    tiny_fill_header(f, &(tiny_options){.is_learned = m->is_gpt2});
    unsigned char *const h = f->bytes;
    qsf_store_u32(h + 12, m->is_gpt2 ? QSF_ARCHITECTURE_GPT2 : QSF_ARCHITECTURE_LLAMA);
    qsf_store_u32(h + 16, m->n_layers);
    qsf_store_u32(h + 20, TINY_MODEL_DIM);
    qsf_store_u32(h + 24, TINY_MODEL_HEADS);
    qsf_store_u32(h + 28, m->is_gpt2 ? TINY_MODEL_HEADS : TINY_MODEL_KV_HEADS);
    qsf_store_u32(h + 32, TINY_MODEL_VOCAB);
    qsf_store_u32(h + 36, TINY_MODEL_TOKENS);
    qsf_store_u32(h + 40, TINY_MODEL_FFN);
    qsf_store_u32(h + 44, TINY_MODEL_HEAD_DIM);
    h[48] = m->dtype;
    h[49] = m->is_gpt2 ? QSF_ACTIVATION_GELU_TANH : QSF_ACTIVATION_SILU;
    h[50] = m->is_gpt2 ? QSF_NORM_LAYER : QSF_NORM_RMS;
}

/* At most TINY_LAYERS layers. */
static inline void tiny_model_build(tiny_file *f, const tiny_model *m)
{
    assert(m->n_layers >= 1 && m->n_layers <= TINY_LAYERS);
    memset(f, 0, sizeof *f);
    f->n_bytes = TINY_TABLES_OFF + 10 * QSF_DIRECTORY_ENTRY_BYTES;
    tiny_model_arch(f, m);
    const unsigned char ebnd[(TINY_MODEL_VOCAB + 15) / 16 * 4] = {0};
    tiny_add_section(f, "EBND", 8, ebnd, sizeof ebnd);
    const unsigned char wpos[TINY_MODEL_TOKENS * TINY_MODEL_DIM * 2] = {0, 60};
    if (m->is_gpt2)
        tiny_add_section(f, "WPOS", 64, wpos, sizeof wpos);
    tiny_add_tame(f, 0, QSF_TENSOR_EMBEDDING, TINY_MODEL_VOCAB, TINY_MODEL_DIM, QSF_DTYPE_8BIT, 1);
    tiny_end_unit(f, QSF_UNIT_EMBEDDING, 0);
    for (uint32_t i = 0; i < m->n_layers; i++) {
        tiny_build_layer(f, m, i + 1);
        tiny_end_unit(f, QSF_UNIT_LAYER, m->compression);
    }
    const uint32_t final_idx = m->n_layers + 1;
    tiny_add_tame(f, final_idx, QSF_TENSOR_FINAL_NORM, 1, TINY_MODEL_DIM, QSF_DTYPE_F32, 0);
    if (m->is_gpt2)
        tiny_add_tame(f, final_idx, QSF_TENSOR_FINAL_NORM_BIAS, 1, TINY_MODEL_DIM, QSF_DTYPE_F16,
                      0);
    if (!m->is_tied)
        tiny_add_tame(f, final_idx, QSF_TENSOR_HEAD, TINY_MODEL_VOCAB, TINY_MODEL_DIM, m->dtype, 1);
    tiny_end_unit(f, QSF_UNIT_FINAL, 0);
    tiny_add_tables(f);
    tiny_model_header(f, m);
    repair_checksums(f->bytes, f->n_bytes);
}

#endif
