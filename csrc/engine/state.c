/* state.c - the state of a session as bytes, and the part that two sessions share. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "engine/model.h"

/* ---- the key ---- */

/* Returns a checksum of results of the C library: RoPE uses its functions, whose last bits
 * differ between libraries. */
static uint32_t check_libm(void)
{
    uint32_t crc = 0;
    for (uint32_t i = 0; i < 64; i++) {
        const double angle = 37.1 * (double)i + 0.3;
        const double answers[] = {cos(angle), sin(angle), pow(1e4, -(double)i / 64.0),
                                  (double)logf(1.0F + (float)i)};
        crc = qsf_crc32(crc, answers, sizeof answers);
    }
    return crc;
}

/* Returns a checksum of the frequencies of RoPE, which depend on the context in some models. */
static uint32_t check_ropes(const qsf_model *m)
{
    uint32_t crc = 0;
    for (uint32_t i = 0; i < m->config.n_ropes; i++) {
        const qsf_rope *const rope = &m->forward.ops.ropes[i];
        crc = qsf_crc32(crc, rope->frequencies, rope->n_pairs * sizeof *rope->frequencies);
        crc = qsf_crc32(crc, &rope->factor, sizeof rope->factor);
    }
    return crc;
}

/* Latents are stored once; states that have them twice are other states. */
static bool has_latents(const qsf_model *m)
{
    bool has = false;
    for (uint32_t i = 0; i < m->config.n_layers; i++)
        has = has || m->config.layers[i].kind->latent_rank != 0;
    return has;
}

qsf_status qsf_model_state_key(qsf_model *m, unsigned char *key)
{
    QSF_REQUIRE(m, key);
    unsigned char header[QSF_HEADER_BYTES]; /* contains the checksum of the directory, and so of the
                                               whole file */
    const qsf_plan *const p = &m->plan;
    QSF_TRY(qsf_file_read_at(&m->reader.file, 0, header, sizeof header));
    const char *const version = qsf_version();
    const uint32_t policy[] = {m->options.kv_window_tokens, m->options.kv_pinned_tokens,
                               m->options.first_layer, m->options.n_layers, qsf_adapters_check(m)};
    const bool is_plain = m->options.first_layer + m->options.n_layers + m->n_adapters == 0;
    const size_t n_policy_bytes = is_plain ? 2 * sizeof *policy : sizeof policy;
    const uint32_t form = p->kv_k_bits | p->kv_v_bits << 8 | (uint32_t)p->kv_is_rotated << 16 |
                          (uint32_t)m->options.exact << 17 | (uint32_t)has_latents(m) << 18;
    const uint32_t words[QSF_STATE_KEY_BYTES / 4] = {
        qsf_crc32(0, header, 64),
        qsf_crc32(0, header + 64, sizeof header - 64),
        (uint32_t)m->reader.file.n_bytes,
        qsf_crc32(0, p->skipped_layers, sizeof p->skipped_layers),
        qsf_crc32(form, policy, n_policy_bytes),
        check_ropes(m),
        check_libm(),
        qsf_crc32(0, version, strlen(version)),
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        qsf_store_u32(key + 4 * i, words[i]);
    return QSF_OK;
}

/* ---- reading and writing ---- */

/* The bytes of the logits at the beginning of a state */
static size_t logits_bytes(const qsf_session *s, const qsf_state *state)
{
    return state->has_logits != 0 ? s->model->config.n_vocab * sizeof *s->buffers.logits : 0;
}

static uint64_t state_bytes(const qsf_session *s, const qsf_state *state)
{
    return logits_bytes(s, state) + qsf_sequence_image_bytes(&s->buffers.sequence, state->n_tokens);
}

qsf_status qsf_session_describe_state(const qsf_session *s, qsf_state *out)
{
    QSF_REQUIRE(s, out);
    *out = (qsf_state){0};
    out->n_tokens = qsf_sequence_nearest(&s->buffers.sequence, s->n_tokens);
    if (out->n_tokens == 0)
        return QSF_OK;
    out->has_logits = s->has_logits && out->n_tokens == s->n_tokens;
    out->n_bytes = state_bytes(s, out);
    return QSF_OK;
}

static qsf_status check_range(const qsf_state *state, uint64_t offset, size_t n_bytes)
{
    QSF_FAIL_IF(offset > state->n_bytes || n_bytes > state->n_bytes - offset, ARG,
                "%zu bytes at %llu are not inside a state of %llu bytes", n_bytes,
                (unsigned long long)offset, (unsigned long long)state->n_bytes);
    return QSF_OK;
}

/* Returns how many of n_bytes at `offset` are logits. */
static size_t count_logits(const qsf_session *s, const qsf_state *state, uint64_t offset,
                           size_t n_bytes)
{
    const size_t n_all = logits_bytes(s, state);
    const uint64_t n_left = offset < n_all ? n_all - offset : 0;
    return n_left < n_bytes ? (size_t)n_left : n_bytes;
}

qsf_status qsf_session_read_state(const qsf_session *s, uint64_t offset, void *dst, size_t n_bytes,
                                  uint32_t *crc32)
{
    QSF_REQUIRE(dst, crc32);
    qsf_state state;
    QSF_TRY(qsf_session_describe_state(s, &state));
    QSF_TRY(check_range(&state, offset, n_bytes));
    /* reading its file is counted */
    qsf_sequence *const sequence = (qsf_sequence *)&s->buffers.sequence;
    const size_t n = count_logits(s, &state, offset, n_bytes);
    if (n > 0)
        memcpy(dst, (const unsigned char *)s->buffers.logits + offset, n);
    if (n < n_bytes) {
        qsf_mutex_lock(&s->model->kv_lock); /* evaluated drafts become part of the state */
        const qsf_status status =
            qsf_sequence_save(sequence, state.n_tokens, offset + n - logits_bytes(s, &state),
                              (unsigned char *)dst + n, n_bytes - n);
        qsf_mutex_unlock(&s->model->kv_lock);
        QSF_TRY(status);
    }
    *crc32 = qsf_crc32(0, dst, n_bytes);
    return QSF_OK;
}

/* Empties the session, and begins to restore a state. */
static qsf_status begin_state(qsf_session *s, const qsf_state *state)
{
    QSF_FAIL_IF(state->n_tokens > s->model->plan.ctx_tokens, ARG,
                "the state has %u tokens, but the context holds %u", state->n_tokens,
                s->model->plan.ctx_tokens);
    QSF_FAIL_IF(state->has_logits > (state->n_tokens > 0) ||
                    state->n_bytes != state_bytes(s, state),
                ARG, "a state of %u tokens has %llu bytes here, not %llu", state->n_tokens,
                (unsigned long long)state_bytes(s, state), (unsigned long long)state->n_bytes);
    qsf_session_keep(s, 0);
    s->incoming = *state;
    s->n_incoming_bytes = 0;
    qsf_mutex_lock(&s->model->kv_lock);
    const qsf_status status = qsf_sequence_begin_load(&s->buffers.sequence, state->n_tokens);
    if (status != QSF_OK)
        qsf_sequence_trim(&s->buffers.sequence, 0);
    qsf_mutex_unlock(&s->model->kv_lock);
    return status;
}

qsf_status qsf_session_write_state(qsf_session *s, const qsf_state *state, uint64_t offset,
                                   const void *src, size_t n_bytes, uint32_t crc32)
{
    QSF_REQUIRE(s, state, src);
    if (offset == 0)
        QSF_TRY(begin_state(s, state));
    QSF_FAIL_IF(offset != s->n_incoming_bytes || memcmp(state, &s->incoming, sizeof *state) != 0,
                ARG, "the state was written up to byte %llu, and not to %llu",
                (unsigned long long)s->n_incoming_bytes, (unsigned long long)offset);
    QSF_TRY(check_range(state, offset, n_bytes));
    s->n_incoming_bytes = 0;
    if (qsf_crc32(0, src, n_bytes) != crc32) {
        qsf_session_trim(s, 0);
        return QSF_FAIL(DAMAGED,
                        "%zu bytes at %llu of the session's state do not have their checksum",
                        n_bytes, (unsigned long long)offset);
    }
    const size_t n = count_logits(s, state, offset, n_bytes);
    if (n > 0)
        memcpy((unsigned char *)s->buffers.logits + offset, src, n);
    if (n < n_bytes)
        QSF_TRY(qsf_sequence_load(&s->buffers.sequence, state->n_tokens,
                                  offset + n - logits_bytes(s, state),
                                  (const unsigned char *)src + n, n_bytes - n));
    s->n_incoming_bytes = offset + n_bytes;
    return QSF_OK;
}

qsf_status qsf_session_adopt_state(qsf_session *s, const uint32_t *tokens)
{
    QSF_REQUIRE(s, tokens);
    const qsf_state *const state = &s->incoming;
    QSF_FAIL_IF(s->n_tokens != 0 || s->n_incoming_bytes == 0 ||
                    s->n_incoming_bytes != state->n_bytes,
                ARG, "of %llu bytes of the state %llu were written",
                (unsigned long long)state->n_bytes, (unsigned long long)s->n_incoming_bytes);
    QSF_TRY(qsf_pass_check_tokens(s->model, tokens, state->n_tokens));
    memcpy(s->buffers.tokens, tokens, state->n_tokens * sizeof *tokens);
    qsf_sequence_adopt(&s->buffers.sequence, state->n_tokens);
    s->n_tokens = state->n_tokens;
    s->has_logits = state->has_logits != 0;
    s->n_incoming_bytes = 0;
    return QSF_OK;
}

qsf_status qsf_session_copy(qsf_session *to, const qsf_session *from, size_t n_tokens)
{
    QSF_REQUIRE(to, from);
    QSF_FAIL_IF(to == from || to->model != from->model, ARG,
                "a session is copied to another one of the same model");
    QSF_FAIL_IF(n_tokens > from->n_tokens, ARG, "cannot copy %zu tokens: only %u are held",
                n_tokens, from->n_tokens);
    const qsf_config *const c = &to->model->config;
    const uint32_t n = (uint32_t)n_tokens;
    QSF_FAIL_IF(!qsf_sequence_can_return(&from->buffers.sequence, n), ARG,
                "cannot copy %zu of %u tokens: layers with a window hold only the last ones",
                n_tokens, from->n_tokens);
    qsf_mutex_lock(&to->model->kv_lock);
    /* Counts the sessions that share the block. */
    qsf_sequence *const sequence = (qsf_sequence *)&from->buffers.sequence;
    const uint32_t nearest =
        qsf_sequence_nearest(sequence, n); /* the next pass evaluates the rest */
    const qsf_status status = qsf_sequence_share(&to->buffers.sequence, sequence, nearest);
    if (status != QSF_OK)
        qsf_sequence_trim(&to->buffers.sequence, 0);
    qsf_mutex_unlock(&to->model->kv_lock);
    if (status != QSF_OK) {
        qsf_session_keep(to, 0);
        return status;
    }
    memcpy(to->adapter_scales, from->adapter_scales, sizeof to->adapter_scales);
    memcpy(to->buffers.tokens, from->buffers.tokens, n * sizeof *to->buffers.tokens);
    qsf_session_keep(to, n);
    to->n_incoming_bytes = 0;
    to->has_logits = from->has_logits && n == from->n_tokens;
    if (to->has_logits)
        memcpy(to->buffers.logits, from->buffers.logits, c->n_vocab * sizeof *to->buffers.logits);
    return QSF_OK;
}
