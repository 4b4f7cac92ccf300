/* keyvalues.c - walks the entries and checks each value against its key. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/sections.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/status.h"

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
