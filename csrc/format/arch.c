/* arch.c - keys and values, and those of ARCH: docs/format.md, section 6. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sections.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/status.h"

#define ABSENT UINT32_MAX

#define U32(number, name, field, least, most)                               \
    {                                                                       \
        number, QSF_VALUE_U32, name, offsetof(qsf_arch, field), least, most \
    }
#define F32(number, name, field)                                     \
    {                                                                \
        number, QSF_VALUE_F32, name, offsetof(qsf_arch, field), 0, 0 \
    }

static const qsf_key arch_keys[] = {
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
    U32(15, "hidden dimension of the model that is guessed for", target_dim, 0, QSF_MAX_DIM),
    U32(16, "layers of a residual block", block_layers, 1, QSF_MAX_LAYERS),
    U32(17, "first looped layer", loop_begin, 1, QSF_MAX_LAYERS),
    U32(18, "end of the looped layers", loop_end, 1, QSF_MAX_LAYERS),
    U32(19, "passes over the looped layers", loop_passes, 1, QSF_MAX_PASSES),
    U32(0x8010, "bits of keys", kv_key_bits, 2, 32),
    U32(0x8011, "bits of values", kv_value_bits, 2, 32),
    U32(0x8012, "bits of activations", act_bits, 8, 16),
};

static qsf_status check_act_bits(uint32_t bits)
{
    QSF_FAIL_IF(bits != 8 && bits != 16, FORMAT, "ARCH: bits of activations are %u, allowed: 8, 16",
                bits);
    return QSF_OK;
}

static qsf_status check_kv_bits(const char *name, uint32_t bits)
{
    QSF_FAIL_IF((bits & (bits - 1)) != 0, FORMAT,
                "ARCH: bits of %s in the KV cache are %u, allowed: 2, 4, 8, 16, 32", name, bits);
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
        .loop_passes = 1,
    };
    QSF_TRY(qsf_keyvalues_parse("ARCH", bytes, n_bytes, arch_keys,
                                sizeof arch_keys / sizeof arch_keys[0], out));
    QSF_TRY(check_kv_bits("keys", out->kv_key_bits));
    QSF_TRY(check_kv_bits("values", out->kv_value_bits));
    QSF_TRY(check_act_bits(out->act_bits));
    if (out->rope_dims == ABSENT)
        out->rope_dims = h->head_dim;
    else if (out->rope_dims % 2 != 0 || out->rope_dims > h->head_dim)
        return QSF_FAIL(FORMAT, "ARCH: %u rotary dimensions, allowed: even, up to the head's %u",
                        out->rope_dims, h->head_dim);
    QSF_FAIL_IF(!(out->rope_high_freq_factor > out->rope_low_freq_factor), FORMAT,
                "ARCH: llama3 high frequency factor is %g, allowed: above the low one, %g",
                (double)out->rope_high_freq_factor, (double)out->rope_low_freq_factor);
    return QSF_OK;
}

/* ---- the scaling of RoPE ---- */

#define HEAD_BYTES 4
#define SET_HEAD_BYTES 12

/* Checks a set by itself, and against the one before it, which may be NULL. */
static qsf_status check_set(const qsf_rope_set *s, const qsf_rope_set *last, uint32_t idx)
{
    const uint32_t next_number = last != NULL ? last->number + 1 : 0;
    const bool is_same = last != NULL && s->number == last->number;
    QSF_FAIL_IF(!is_same && s->number != next_number, FORMAT,
                "ROPE: set %u has number %u, allowed: ascending from 0 without gaps", idx,
                s->number);
    QSF_FAIL_IF(is_same ? s->least_context <= last->least_context : s->least_context != 0, FORMAT,
                "ROPE: set %u is for contexts from %u on, allowed: 0 for the first of a number, "
                "then ascending",
                idx, s->least_context);
    QSF_FAIL_IF(is_same && (s->is_interleaved != last->is_interleaved ||
                            s->frequencies.n != last->frequencies.n),
                FORMAT, "ROPE: set %u has other pairs than the one before it, of the same number",
                idx);
    QSF_FAIL_IF(!isfinite(s->factor) || !(s->factor > 0.0F), FORMAT,
                "ROPE: set %u has the factor %g, allowed: finite, above 0", idx, (double)s->factor);
    for (uint32_t i = 0; i < s->frequencies.n; i++) {
        const float frequency = s->frequencies.values[i];
        QSF_FAIL_IF(!isfinite(frequency) || frequency < 0.0F, FORMAT,
                    "ROPE: set %u has the frequency %g, allowed: finite, 0 or more", idx,
                    (double)frequency);
    }
    return QSF_OK;
}

/* Parses set `idx` at *at, and moves *at after it. */
static qsf_status parse_set(qsf_reader *r, uint32_t idx, size_t *at)
{
    const qsf_table *const t = &r->rope_table;
    unsigned char *const set = t->bytes + *at;
    const size_t n_left = t->n_bytes - *at;
    QSF_FAIL_IF(n_left < SET_HEAD_BYTES, FORMAT, "ROPE: %zu bytes left, set %u begins with %d",
                n_left, idx, SET_HEAD_BYTES);
    const uint32_t n_pairs = qsf_load_u16(set + 2);
    QSF_FAIL_IF(set[1] > 1 || n_pairs == 0 || n_pairs > QSF_MAX_ROPE_PAIRS ||
                    4 * (size_t)n_pairs > n_left - SET_HEAD_BYTES,
                FORMAT,
                "ROPE: set %u has pairing %d and %u pairs, with %zu bytes left; allowed: pairing "
                "0, 1; 1 .. %u pairs of 4 bytes",
                idx, set[1], n_pairs, n_left - SET_HEAD_BYTES, QSF_MAX_ROPE_PAIRS);
    r->rope_sets[idx] = (qsf_rope_set){
        .number = set[0],
        .is_interleaved = set[1] != 0,
        .least_context = qsf_load_u32(set + 4),
        .factor = qsf_load_f32(set + 8),
        .frequencies = qsf_floats_in_place(set + SET_HEAD_BYTES, n_pairs),
    };
    *at += SET_HEAD_BYTES + 4 * (size_t)n_pairs;
    return check_set(&r->rope_sets[idx], idx > 0 ? &r->rope_sets[idx - 1] : NULL, idx);
}

qsf_status qsf_rope_read(qsf_reader *r)
{
    const qsf_table *const t = &r->rope_table;
    QSF_TRY(qsf_reader_keep_section(r, "ROPE", &r->rope_table));
    if (t->bytes == NULL)
        return QSF_OK;
    const uint32_t n_sets = t->n_bytes >= HEAD_BYTES ? qsf_load_u16(t->bytes) : 0;
    const uint32_t reserved = t->n_bytes >= HEAD_BYTES ? qsf_load_u16(t->bytes + 2) : 0;
    QSF_FAIL_IF(n_sets == 0 || n_sets > QSF_MAX_ROPE_SETS || reserved != 0, FORMAT,
                "ROPE: %u sets in %zu bytes, reserved %u, allowed: 1 .. %u, reserved 0", n_sets,
                t->n_bytes, reserved, QSF_MAX_ROPE_SETS);
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, n_sets * sizeof *r->rope_sets, "RoPE sets",
                            &r->rope_sets));
    r->n_rope_sets = n_sets;
    size_t at = HEAD_BYTES;
    for (uint32_t i = 0; i < n_sets; i++)
        QSF_TRY(parse_set(r, i, &at));
    QSF_FAIL_IF(at != t->n_bytes, FORMAT, "ROPE: %zu bytes behind the last set", t->n_bytes - at);
    return QSF_OK;
}

/* ---- pairs of keys and values ---- */

#define ENTRY_HEAD_BYTES 4
#define FIRST_OPTIONAL_KEY 0x8000U /* a reader may skip this key and higher ones */
#define MAX_ARRAY_VALUES 65536U

qsf_floats qsf_floats_in_place(unsigned char *bytes, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const float value = qsf_load_f32(bytes + (size_t)i * 4);
        memcpy(bytes + (size_t)i * 4, &value, sizeof value);
    }
    return (qsf_floats){(const float *)(const void *)bytes, n};
}

/* Sets *value_bytes for the value at `value`, of which n_left bytes are in the section. */
static qsf_status measure_value(const char *where, uint32_t key, uint32_t type,
                                const unsigned char *value, size_t n_left, size_t *value_bytes)
{
    size_t n = 4;
    QSF_FAIL_IF(type < QSF_VALUE_U32 || type > QSF_VALUE_F32_ARRAY, FORMAT,
                "%s: key %u has value type %u, allowed: 1 .. 3", where, key, type);
    if (type == QSF_VALUE_F32_ARRAY && n_left >= 4) {
        const uint32_t n_values = qsf_load_u32(value);
        QSF_FAIL_IF(n_values > MAX_ARRAY_VALUES, FORMAT,
                    "%s: key %u has %u values, allowed: 0 .. %u", where, key, n_values,
                    MAX_ARRAY_VALUES);
        n += (size_t)n_values * 4;
    }
    QSF_FAIL_IF(n > n_left, FORMAT, "%s: the value of key %u needs %zu bytes, %zu are left", where,
                key, n, n_left);
    *value_bytes = n;
    return QSF_OK;
}

static qsf_status check_finite(const char *where, uint32_t key, uint32_t type,
                               const unsigned char *value, size_t value_bytes)
{
    if (type == QSF_VALUE_U32)
        return QSF_OK;
    for (size_t at = type == QSF_VALUE_F32 ? 0 : 4; at < value_bytes; at += 4)
        QSF_FAIL_IF(!isfinite(qsf_load_f32(value + at)), FORMAT,
                    "%s: key %u has a value that is not finite", where, key);
    return QSF_OK;
}

/* Stores a value of the key's type, whose floats are finite. */
static qsf_status store_value(const char *where, const qsf_key *key, unsigned char *value,
                              void *record)
{
    unsigned char *const field = (unsigned char *)record + key->field_off;
    const uint32_t u = qsf_load_u32(value);
    const float f = qsf_load_f32(value);
    if (key->type == QSF_VALUE_U32) {
        QSF_FAIL_IF(u < key->least || u > key->most, FORMAT,
                    "%s: %s (key %d) is %u, allowed: %u .. %u", where, key->name, key->number, u,
                    key->least, key->most);
        memcpy(field, &u, sizeof u);
        return QSF_OK;
    }
    if (key->type == QSF_VALUE_F32) {
        QSF_FAIL_IF(!(f > 0.0F), FORMAT, "%s: %s (key %d) is %g, allowed: above 0", where,
                    key->name, key->number, (double)f);
        memcpy(field, &f, sizeof f);
        return QSF_OK;
    }
    const qsf_floats floats = qsf_floats_in_place(value + 4, u);
    for (uint32_t i = 0; i < floats.n; i++)
        QSF_FAIL_IF(!(floats.values[i] >= 0.0F), FORMAT,
                    "%s: %s (key %d) has the value %g, allowed: 0 or more", where, key->name,
                    key->number, (double)floats.values[i]);
    memcpy(field, &floats, sizeof floats);
    return QSF_OK;
}

static const qsf_key *find_key(const qsf_key *keys, size_t n_keys, uint32_t number)
{
    for (size_t i = 0; i < n_keys; i++)
        if (keys[i].number == number)
            return &keys[i];
    return NULL;
}

/* Checks the head of the entry at `at`, which lies inside the section, against the previous key. */
static qsf_status check_head(const char *where, const unsigned char *head, int64_t last_key)
{
    const uint32_t number = qsf_load_u16(head);
    QSF_FAIL_IF(head[3] != 0, FORMAT, "%s: reserved byte of key %u is %d, allowed: 0", where,
                number, head[3]);
    QSF_FAIL_IF((int64_t)number <= last_key, FORMAT,
                "%s: key %u after key %" PRId64 ", allowed: ascending", where, number, last_key);
    return QSF_OK;
}

qsf_status qsf_keyvalues_parse(const char *where, unsigned char *bytes, size_t n_bytes,
                               const qsf_key *keys, size_t n_keys, void *record)
{
    int64_t last_key = -1;
    for (size_t at = 0; at < n_bytes;) {
        QSF_FAIL_IF(n_bytes - at < ENTRY_HEAD_BYTES, FORMAT,
                    "%s: %zu bytes left at %zu, an entry begins with %d", where, n_bytes - at, at,
                    ENTRY_HEAD_BYTES);
        const uint32_t number = qsf_load_u16(bytes + at);
        const uint32_t type = bytes[at + 2];
        QSF_TRY(check_head(where, bytes + at, last_key));
        last_key = number;
        const qsf_key *const key = find_key(keys, n_keys, number);
        /* Checked before the value, because a newer key may have a type of unknown size. */
        QSF_FAIL_IF(key == NULL && number < FIRST_OPTIONAL_KEY, UNSUPPORTED,
                    "%s: this build does not know key %u", where, number);
        at += ENTRY_HEAD_BYTES;
        size_t value_bytes = 0;
        QSF_TRY(measure_value(where, number, type, bytes + at, n_bytes - at, &value_bytes));
        QSF_TRY(check_finite(where, number, type, bytes + at, value_bytes));
        QSF_FAIL_IF(key != NULL && type != key->type, FORMAT,
                    "%s: %s (key %d) has value type %u, allowed: %d", where, key->name, key->number,
                    type, key->type);
        if (key != NULL)
            QSF_TRY(store_value(where, key, bytes + at, record));
        at += value_bytes;
    }
    return QSF_OK;
}
