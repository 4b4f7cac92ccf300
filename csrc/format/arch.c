/* arch.c - the keys of ARCH: docs/format.md, section 6. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sections.h"

#include "base/status.h"
#include "format/keyvalues.h"

#define ABSENT UINT32_MAX

#define U32(number, name, field, least, most)                               \
    {                                                                       \
        number, QSF_VALUE_U32, name, offsetof(qsf_arch, field), least, most \
    }
#define F32(number, name, field)                                     \
    {                                                                \
        number, QSF_VALUE_F32, name, offsetof(qsf_arch, field), 0, 0 \
    }

static const qsf_key keys[] = {
    F32(1, "norm epsilon", norm_epsilon),
    U32(2, "RoPE scaling", rope_scaling, 0, QSF_ROPE_SCALING_LLAMA3),
    F32(3, "RoPE scaling factor", rope_factor),
    F32(4, "llama3 low frequency factor", rope_low_freq_factor),
    F32(5, "llama3 high frequency factor", rope_high_freq_factor),
    U32(6, "llama3 original context", rope_original_tokens, 1, UINT32_MAX),
    U32(7, "rotary dimensions", rope_dims, 0, QSF_MAX_HEAD_DIM),
    U32(8, "RoPE pairing", rope_interleaved, 0, 1),
    U32(9, "tied head", tied_head, 0, 1),
    U32(10, "sliding window", window_tokens, 0, UINT32_MAX),
    F32(11, "embedding factor", embedding_factor),
    F32(12, "logit cap", logit_cap),
    U32(13, "width of own embeddings", own_width, 0, QSF_MAX_OWN_WIDTH),
    U32(14, "encoder", is_encoder, 0, 1),
    U32(0x8010, "bits of keys", kv_k_bits, 2, 32),
    U32(0x8011, "bits of values", kv_v_bits, 2, 32),
    U32(0x8012, "bits of activations", act_bits, 8, 16),
};

static qsf_status check_act_bits(uint32_t bits)
{
    if (bits != 8 && bits != 16)
        return QSF_FAIL(QSF_ERR_FORMAT, "ARCH: bits of activations are %u, allowed: 8, 16", bits);
    return QSF_OK;
}

static qsf_status check_kv_bits(const char *name, uint32_t bits)
{
    if ((bits & (bits - 1)) != 0)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ARCH: bits of %s in the KV cache are %u, allowed: 2, 4, 8, 16, 32", name,
                        bits);
    return QSF_OK;
}

qsf_status qsf_arch_parse(unsigned char *bytes, size_t n_bytes, const qsf_header *h, qsf_arch *out)
{
    *out = (qsf_arch){
        .norm_epsilon = 1e-5F,
        .rope_scaling = QSF_ROPE_SCALING_NONE,
        .rope_factor = 1.0F,
        .rope_low_freq_factor = 1.0F,
        .rope_high_freq_factor = 4.0F,
        .rope_original_tokens = 8192,
        .rope_dims = ABSENT,
        .embedding_factor = 1.0F,
        .act_bits = 8,
    };
    QSF_TRY(qsf_keyvalues_parse("ARCH", bytes, n_bytes, keys, sizeof keys / sizeof keys[0], out));
    QSF_TRY(check_kv_bits("keys", out->kv_k_bits));
    QSF_TRY(check_kv_bits("values", out->kv_v_bits));
    QSF_TRY(check_act_bits(out->act_bits));
    if (out->rope_dims == ABSENT)
        out->rope_dims = h->head_dim;
    else if (out->rope_dims % 2 != 0 || out->rope_dims > h->head_dim)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ARCH: %u rotary dimensions, allowed: even, up to the head's %u",
                        out->rope_dims, h->head_dim);
    if (!(out->rope_high_freq_factor > out->rope_low_freq_factor))
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ARCH: llama3 high frequency factor is %g, allowed: above the low one, %g",
                        (double)out->rope_high_freq_factor, (double)out->rope_low_freq_factor);
    return QSF_OK;
}
