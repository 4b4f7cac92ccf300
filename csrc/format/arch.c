/* arch.c - reads and checks the architecture key-values: docs/format.md, section 6. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/arch.h"

#include <inttypes.h>
#include <math.h>

#include "base/bytes.h"
#include "base/status.h"

#define ENTRY_HEAD_BYTES 4
#define FIRST_OPTIONAL_KEY 0x8000U /* a reader may skip this key and higher ones */
#define MAX_ARRAY_VALUES 65536U

enum value_type { VALUE_U32 = 1, VALUE_F32 = 2, VALUE_F32_ARRAY = 3 };

enum key {
    KEY_NORM_EPSILON = 1,
    KEY_ROPE_SCALING = 2,
    KEY_ROPE_FACTOR = 3,
    KEY_ROPE_LOW_FREQ_FACTOR = 4,
    KEY_ROPE_HIGH_FREQ_FACTOR = 5,
    KEY_ROPE_ORIGINAL_TOKENS = 6,
    KEY_ROPE_DIMS = 7,
    KEY_ROPE_INTERLEAVED = 8,
    KEY_TIED_HEAD = 9,
    KEY_WINDOW_TOKENS = 10,
    KEY_COUNT = 11
};

typedef struct key_row {
    const char *name;
    uint8_t type; /* enum value_type */
} key_row;

static const key_row keys[KEY_COUNT] = {
    [KEY_NORM_EPSILON] = {"norm epsilon", VALUE_F32},
    [KEY_ROPE_SCALING] = {"RoPE scaling", VALUE_U32},
    [KEY_ROPE_FACTOR] = {"RoPE scaling factor", VALUE_F32},
    [KEY_ROPE_LOW_FREQ_FACTOR] = {"llama3 low frequency factor", VALUE_F32},
    [KEY_ROPE_HIGH_FREQ_FACTOR] = {"llama3 high frequency factor", VALUE_F32},
    [KEY_ROPE_ORIGINAL_TOKENS] = {"llama3 original context", VALUE_U32},
    [KEY_ROPE_DIMS] = {"rotary dimensions", VALUE_U32},
    [KEY_ROPE_INTERLEAVED] = {"RoPE pairing", VALUE_U32},
    [KEY_TIED_HEAD] = {"tied head", VALUE_U32},
    [KEY_WINDOW_TOKENS] = {"sliding window", VALUE_U32},
};

/* Sets *value_bytes for the value at `value`, of which n_left bytes are in the section. */
static qsf_status measure_value(uint32_t key, uint32_t type, const unsigned char *value,
                                size_t n_left, size_t *value_bytes)
{
    size_t n = 4;
    if (type < VALUE_U32 || type > VALUE_F32_ARRAY)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ARCH: key %" PRIu32 " has value type %" PRIu32 ", allowed: 1 .. 3", key,
                        type);
    if (type == VALUE_F32_ARRAY && n_left >= 4) {
        const uint32_t n_values = qsf_load_u32(value);
        if (n_values > MAX_ARRAY_VALUES)
            return QSF_FAIL(QSF_ERR_FORMAT,
                            "ARCH: key %" PRIu32 " has %" PRIu32 " values, allowed: 0 .. %u", key,
                            n_values, MAX_ARRAY_VALUES);
        n += (size_t)n_values * 4;
    }
    if (n > n_left)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ARCH: the value of key %" PRIu32
                        " needs %zu bytes, the section has %zu left",
                        key, n, n_left);
    *value_bytes = n;
    return QSF_OK;
}

static qsf_status check_finite(uint32_t key, uint32_t type, const unsigned char *value,
                               size_t value_bytes)
{
    if (type == VALUE_U32)
        return QSF_OK;
    for (size_t at = type == VALUE_F32 ? 0 : 4; at < value_bytes; at += 4)
        if (!isfinite(qsf_load_f32(value + at)))
            return QSF_FAIL(QSF_ERR_FORMAT, "ARCH: key %" PRIu32 " has a value that is not finite",
                            key);
    return QSF_OK;
}

static qsf_status check_most(uint32_t key, uint32_t value, uint32_t most)
{
    if (value > most)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ARCH: %s (key %" PRIu32 ") is %" PRIu32 ", allowed: 0 .. %" PRIu32,
                        keys[key].name, key, value, most);
    return QSF_OK;
}

static qsf_status check_positive(uint32_t key, float value)
{
    if (!(value > 0.0F))
        return QSF_FAIL(QSF_ERR_FORMAT, "ARCH: %s (key %" PRIu32 ") is %g, allowed: above 0",
                        keys[key].name, key, (double)value);
    return QSF_OK;
}

/* Stores the value of a known key; its type has been checked. */
static qsf_status store_value(uint32_t key, const unsigned char *value, const qsf_header *h,
                              qsf_arch *a)
{
    const uint32_t u = qsf_load_u32(value);
    const float f = qsf_load_f32(value);
    if (keys[key].type == VALUE_F32)
        QSF_TRY(check_positive(key, f));
    switch (key) {
    case KEY_NORM_EPSILON:
        a->norm_epsilon = f;
        return QSF_OK;
    case KEY_ROPE_SCALING:
        a->rope_scaling = u;
        return check_most(key, u, QSF_ROPE_SCALING_LLAMA3);
    case KEY_ROPE_FACTOR:
        a->rope_factor = f;
        return QSF_OK;
    case KEY_ROPE_LOW_FREQ_FACTOR:
        a->rope_low_freq_factor = f;
        return QSF_OK;
    case KEY_ROPE_HIGH_FREQ_FACTOR:
        a->rope_high_freq_factor = f;
        return QSF_OK;
    case KEY_ROPE_ORIGINAL_TOKENS:
        a->rope_original_tokens = u;
        if (u == 0)
            return QSF_FAIL(QSF_ERR_FORMAT, "ARCH: %s (key %" PRIu32 ") is 0, allowed: from 1 on",
                            keys[key].name, key);
        return QSF_OK;
    case KEY_ROPE_DIMS:
        a->rope_dims = u;
        if (u % 2 != 0)
            return QSF_FAIL(QSF_ERR_FORMAT,
                            "ARCH: %s (key %" PRIu32 ") is %" PRIu32 ", allowed: even numbers",
                            keys[key].name, key, u);
        return check_most(key, u, h->head_dim);
    case KEY_ROPE_INTERLEAVED:
        a->rope_interleaved = u != 0;
        return check_most(key, u, 1);
    case KEY_TIED_HEAD:
        a->tied_head = u != 0;
        return check_most(key, u, 1);
    default: /* KEY_WINDOW_TOKENS, the last of the table */
        a->window_tokens = u;
        return QSF_OK;
    }
}

static qsf_status parse_entry(uint32_t key, uint32_t type, const unsigned char *value,
                              const qsf_header *h, qsf_arch *out)
{
    if (key >= FIRST_OPTIONAL_KEY)
        return QSF_OK;
    if (type != keys[key].type)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ARCH: %s (key %" PRIu32 ") has value type %" PRIu32 ", allowed: %d",
                        keys[key].name, key, type, keys[key].type);
    return store_value(key, value, h, out);
}

qsf_status qsf_arch_parse(const unsigned char *bytes, size_t n_bytes, const qsf_header *h,
                          qsf_arch *out)
{
    *out = (qsf_arch){
        .norm_epsilon = 1e-5F,
        .rope_scaling = QSF_ROPE_SCALING_NONE,
        .rope_factor = 1.0F,
        .rope_low_freq_factor = 1.0F,
        .rope_high_freq_factor = 4.0F,
        .rope_original_tokens = 8192,
        .rope_dims = h->head_dim,
    };
    int64_t last_key = -1;
    for (size_t at = 0; at < n_bytes;) {
        if (n_bytes - at < ENTRY_HEAD_BYTES)
            return QSF_FAIL(QSF_ERR_FORMAT, "ARCH: %zu bytes left at %zu, an entry begins with %d",
                            n_bytes - at, at, ENTRY_HEAD_BYTES);
        const uint32_t key = qsf_load_u16(bytes + at);
        const uint32_t type = bytes[at + 2];
        if (bytes[at + 3] != 0)
            return QSF_FAIL(QSF_ERR_FORMAT,
                            "ARCH: reserved byte of key %" PRIu32 " is %d, allowed: 0", key,
                            bytes[at + 3]);
        if ((int64_t)key <= last_key)
            return QSF_FAIL(QSF_ERR_FORMAT,
                            "ARCH: key %" PRIu32 " after key %" PRId64 ", allowed: ascending", key,
                            last_key);
        last_key = key;
        /* Checked before the value, because a newer key may have a type of unknown size. */
        if (key == 0 || (key >= KEY_COUNT && key < FIRST_OPTIONAL_KEY))
            return QSF_FAIL(QSF_ERR_UNSUPPORTED, "ARCH: key %" PRIu32 ", this build knows 1 .. %d",
                            key, KEY_COUNT - 1);
        at += ENTRY_HEAD_BYTES;
        size_t value_bytes = 0;
        QSF_TRY(measure_value(key, type, bytes + at, n_bytes - at, &value_bytes));
        QSF_TRY(check_finite(key, type, bytes + at, value_bytes));
        QSF_TRY(parse_entry(key, type, bytes + at, h, out));
        at += value_bytes;
    }
    if (!(out->rope_high_freq_factor > out->rope_low_freq_factor))
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ARCH: llama3 high frequency factor is %g, allowed: above the low one, %g",
                        (double)out->rope_high_freq_factor, (double)out->rope_low_freq_factor);
    return QSF_OK;
}
