/* rope.c - reads and checks ROPE: docs/format.md, section 8. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "base/bytes.h"
#include "base/status.h"
#include "format/keyvalues.h"
#include "format/sections.h"

#define HEAD_BYTES 4
#define SET_HEAD_BYTES 12

/* Checks a set by itself, and against the one before it, which may be NULL. */
static qsf_status check_set(const qsf_rope_set *s, const qsf_rope_set *last, uint32_t idx)
{
    const uint32_t next_number = last != NULL ? last->number + 1 : 0;
    const bool is_same = last != NULL && s->number == last->number;
    if (!is_same && s->number != next_number)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ROPE: set %u has number %u, allowed: ascending from 0 without gaps", idx,
                        s->number);
    if (is_same ? s->least_context <= last->least_context : s->least_context != 0)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ROPE: set %u is for contexts from %u on, allowed: 0 for the first of a "
                        "number, then ascending",
                        idx, s->least_context);
    if (is_same &&
        (s->is_interleaved != last->is_interleaved || s->frequencies.n != last->frequencies.n))
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ROPE: set %u has other pairs than the one before it, of the same number",
                        idx);
    if (!isfinite(s->factor) || !(s->factor > 0.0F))
        return QSF_FAIL(QSF_ERR_FORMAT, "ROPE: set %u has the factor %g, allowed: finite, above 0",
                        idx, (double)s->factor);
    for (uint32_t i = 0; i < s->frequencies.n; i++) {
        const float frequency = s->frequencies.values[i];
        if (!isfinite(frequency) || frequency < 0.0F)
            return QSF_FAIL(QSF_ERR_FORMAT,
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
    if (n_left < SET_HEAD_BYTES)
        return QSF_FAIL(QSF_ERR_FORMAT, "ROPE: %zu bytes left, set %u begins with %d", n_left, idx,
                        SET_HEAD_BYTES);
    const uint32_t n_pairs = qsf_load_u16(set + 2);
    if (set[1] > 1 || n_pairs == 0 || n_pairs > QSF_MAX_ROPE_PAIRS ||
        4 * (size_t)n_pairs > n_left - SET_HEAD_BYTES)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ROPE: set %u has pairing %d and %u pairs, with %zu bytes left; allowed: "
                        "pairing 0, 1; 1 .. %u pairs of 4 bytes",
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
    if (n_sets == 0 || n_sets > QSF_MAX_ROPE_SETS || reserved != 0)
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "ROPE: %u sets in %zu bytes, reserved %u, allowed: 1 .. %u, reserved 0",
                        n_sets, t->n_bytes, reserved, QSF_MAX_ROPE_SETS);
    r->rope_sets = qsf_ledger_acquire(r->ledger, QSF_USE_TABLES, n_sets * sizeof *r->rope_sets);
    if (r->rope_sets == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "no memory for %u RoPE sets", n_sets);
    r->n_rope_sets = n_sets;
    size_t at = HEAD_BYTES;
    for (uint32_t i = 0; i < n_sets; i++)
        QSF_TRY(parse_set(r, i, &at));
    if (at != t->n_bytes)
        return QSF_FAIL(QSF_ERR_FORMAT, "ROPE: %zu bytes behind the last set", t->n_bytes - at);
    return QSF_OK;
}
