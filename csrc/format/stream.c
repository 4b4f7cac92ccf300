/* stream.c - resident units answered from memory, the others passed through a window.
 *
 * Invariants while a unit passes: window_off is a multiple of 64 and
 * window_off <= source.raw_done_bytes <= window_off + window_bytes; the window holds the raw
 * bytes between the two.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/stream.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "format/crc32.h"
#include "platform/clock.h"

#define NONE UINT32_MAX
#define LOAD_PIECE_BYTES (1U << 20) /* small enough to be checksummed while still in cache */

/* What must be in the window at once: a row of tiles, or a vector. */
static size_t tensor_span_bytes(const qsf_tensor *t)
{
    return t->layout == QSF_LAYOUT_VECTOR
               ? (size_t)t->data_bytes
               : qsf_ceil_div(t->n_cols, QSF_BLOCK) * qsf_dtype_tile_bytes(t->dtype);
}

/* Of the window, what a span cannot use: it begins at a multiple of 64, and a block is decoded
 * whole even when only its first byte is wanted. */
static size_t slack_bytes(const qsf_unit *u)
{
    return QSF_DATA_ALIGN +
           (u->compression == QSF_COMPRESSION_NONE ? 0 : QSF_COMPRESSED_BLOCK_BYTES);
}

size_t qsf_stream_unit_window_bytes(const qsf_reader *r, uint32_t unit_idx)
{
    const qsf_unit *const u = &r->units[unit_idx];
    size_t span_bytes = 0;
    for (uint32_t i = 0; i < u->n_tensors; i++) {
        const size_t n = tensor_span_bytes(&r->tensors[u->first_tensor + i]);
        if (n > span_bytes)
            span_bytes = n;
    }
    return qsf_round_up(span_bytes, QSF_DATA_ALIGN) + slack_bytes(u);
}

void qsf_stream_least_bytes(const qsf_reader *r, const bool *is_resident, size_t *window_bytes,
                            size_t *stored_bytes, size_t *band_bytes)
{
    *window_bytes = 0;
    *stored_bytes = 0;
    for (uint32_t i = 0; i < r->n_units; i++) {
        const qsf_unit *const u = &r->units[i];
        const size_t window = is_resident[i] ? 0 : qsf_stream_unit_window_bytes(r, i);
        const size_t stored = qsf_unit_source_stored_bytes(u->compression);
        if (window > *window_bytes)
            *window_bytes = window;
        if (stored > *stored_bytes)
            *stored_bytes = stored;
    }
    *band_bytes =
        is_resident[0] ? 0 : qsf_round_up(tensor_span_bytes(&r->tensors[0]), QSF_DATA_ALIGN);
}

size_t qsf_stream_table_bytes(const qsf_reader *r)
{
    return r->n_units * sizeof(unsigned char *);
}

/* Reads a whole unit to its place in memory and verifies it. */
static qsf_status load_unit(qsf_stream *s, uint32_t unit_idx)
{
    const qsf_unit *const u = &s->reader->units[unit_idx];
    if (u->raw_bytes > SIZE_MAX)
        return QSF_FAIL(QSF_ERR_NOMEM, "unit %" PRIu32 ": %" PRIu64 " bytes", unit_idx,
                        u->raw_bytes);
    unsigned char *const to = qsf_ledger_acquire(s->ledger, QSF_USE_WEIGHTS, (size_t)u->raw_bytes);
    if (to == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM,
                        "resident unit %" PRIu32 ": %" PRIu64 " bytes do not fit, %" PRIu64
                        " of %" PRIu64 " are taken",
                        unit_idx, u->raw_bytes, s->ledger->held_bytes, s->ledger->ceiling_bytes);
    s->resident[unit_idx] = to;
    qsf_unit_source_begin(&s->source, unit_idx);
    while (qsf_unit_source_left_bytes(&s->source) > 0) {
        const uint64_t left_bytes = qsf_unit_source_left_bytes(&s->source);
        const size_t cap_bytes =
            left_bytes < LOAD_PIECE_BYTES ? (size_t)left_bytes : LOAD_PIECE_BYTES;
        size_t n_bytes;
        QSF_TRY(
            qsf_unit_source_next(&s->source, to + s->source.raw_done_bytes, cap_bytes, &n_bytes));
    }
    return qsf_unit_source_finish(&s->source);
}

static qsf_status acquire_buffer(qsf_stream *s, qsf_use use, size_t n_bytes, unsigned char **out)
{
    if (n_bytes == 0)
        return QSF_OK;
    *out = qsf_ledger_acquire(s->ledger, use, n_bytes);
    if (*out == NULL)
        return QSF_FAIL(
            QSF_ERR_NOMEM, "%s: %zu bytes do not fit, %" PRIu64 " of %" PRIu64 " are taken",
            qsf_use_name(use), n_bytes, s->ledger->held_bytes, s->ledger->ceiling_bytes);
    return QSF_OK;
}

static void release_stored(qsf_stream *s)
{
    qsf_ledger_release(s->ledger, QSF_USE_WINDOW, s->stored, s->stored_bytes);
    s->stored = NULL;
    s->stored_bytes = 0;
}

static qsf_status fill(qsf_stream *s, const bool *is_resident)
{
    const qsf_reader *const r = s->reader;
    s->resident = qsf_ledger_acquire(s->ledger, QSF_USE_TABLES, qsf_stream_table_bytes(r));
    if (s->resident == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "table of resident units: %zu bytes",
                        qsf_stream_table_bytes(r));
    QSF_TRY(acquire_buffer(s, QSF_USE_WINDOW, s->window_bytes, &s->window));
    QSF_TRY(acquire_buffer(s, QSF_USE_WINDOW, s->stored_bytes, &s->stored));
    QSF_TRY(acquire_buffer(s, QSF_USE_EMBEDDING, s->band_bytes, &s->band));
    qsf_unit_source_init(&s->source, s->reader, s->stored, s->stored_bytes);
    bool streams_compressed = false;
    for (uint32_t i = 0; i < r->n_units; i++) {
        if (is_resident[i])
            QSF_TRY(load_unit(s, i));
        else
            streams_compressed |= r->units[i].compression != QSF_COMPRESSION_NONE;
    }
    if (!streams_compressed)
        release_stored(s);
    qsf_unit_source_init(&s->source, s->reader, s->stored, s->stored_bytes);
    return QSF_OK;
}

qsf_status qsf_stream_init(qsf_stream *s, qsf_reader *r, qsf_ledger *ledger,
                           const bool *is_resident, size_t window_bytes)
{
    *s = (qsf_stream){.reader = r, .ledger = ledger, .band_idx = NONE, .unit_idx = NONE};
    size_t least_bytes;
    qsf_stream_least_bytes(r, is_resident, &least_bytes, &s->stored_bytes, &s->band_bytes);
    if (window_bytes < least_bytes)
        return QSF_FAIL(QSF_ERR_ARG, "a window of %zu bytes, these units need %zu", window_bytes,
                        least_bytes);
    s->window_bytes = least_bytes == 0 ? 0 : window_bytes;
    const qsf_status status = fill(s, is_resident);
    if (status != QSF_OK)
        qsf_stream_destroy(s);
    return status;
}

void qsf_stream_destroy(qsf_stream *s)
{
    if (s->ledger == NULL)
        return;
    for (uint32_t i = 0; s->resident != NULL && i < s->reader->n_units; i++)
        qsf_ledger_release(s->ledger, QSF_USE_WEIGHTS, s->resident[i],
                           (size_t)s->reader->units[i].raw_bytes);
    qsf_ledger_release(s->ledger, QSF_USE_EMBEDDING, s->band, s->band_bytes);
    release_stored(s);
    qsf_ledger_release(s->ledger, QSF_USE_WINDOW, s->window, s->window_bytes);
    qsf_ledger_release(s->ledger, QSF_USE_TABLES, s->resident, qsf_stream_table_bytes(s->reader));
    *s = (qsf_stream){.band_idx = NONE, .unit_idx = NONE};
}

qsf_status qsf_stream_begin_unit(qsf_stream *s, uint32_t unit_idx)
{
    if (s->unit_idx != NONE || unit_idx >= s->reader->n_units)
        return QSF_FAIL(QSF_ERR_ARG,
                        "unit %" PRIu32 " of %" PRIu32 " begun while unit %" PRIu32 " passes",
                        unit_idx, s->reader->n_units, s->unit_idx);
    s->unit_idx = unit_idx;
    if (s->resident[unit_idx] == NULL) {
        s->window_off = 0;
        qsf_unit_source_begin(&s->source, unit_idx);
    }
    return QSF_OK;
}

/* Gives up the window's bytes before off, but for the rest of a group of 64, so that offsets
 * and addresses stay equal modulo 64. */
static void drop_before(qsf_stream *s, uint64_t off)
{
    const uint64_t end_off = s->source.raw_done_bytes;
    const uint64_t keep_off = (off < end_off ? off : end_off) & ~(uint64_t)(QSF_DATA_ALIGN - 1);
    if (keep_off <= s->window_off)
        return;
    memmove(s->window, s->window + (keep_off - s->window_off), (size_t)(end_off - keep_off));
    s->window_off = keep_off;
}

/* Moves the window on until it holds raw bytes [off, end_off), at least one of them to come.
 * Bytes between the window and off are read, because they count for the checksum. */
static qsf_status advance(qsf_stream *s, uint64_t off, uint64_t end_off)
{
    const bool is_compressed = s->reader->units[s->unit_idx].compression != QSF_COMPRESSION_NONE;
    while (s->source.raw_done_bytes < end_off) {
        drop_before(s, off);
        const uint64_t done_off = s->source.raw_done_bytes;
        const size_t used_bytes = (size_t)(done_off - s->window_off);
        size_t cap_bytes = s->window_bytes - used_bytes;
        /* Stop where the caller's span begins or ends: what comes next is not needed yet. */
        const uint64_t stop_off = done_off < off ? off : end_off;
        if (!is_compressed && stop_off - done_off < cap_bytes)
            cap_bytes = (size_t)(stop_off - done_off);
        size_t n_bytes;
        const qsf_status status =
            qsf_unit_source_next(&s->source, s->window + used_bytes, cap_bytes, &n_bytes);
        s->read_bytes = s->source.read_bytes;
        s->read_ns = s->source.read_ns;
        QSF_TRY(status);
    }
    return QSF_OK;
}

qsf_status qsf_stream_acquire(qsf_stream *s, uint64_t off, size_t n_bytes,
                              const unsigned char **out)
{
    const uint32_t unit_idx = s->unit_idx;
    if (unit_idx == NONE)
        return QSF_FAIL(QSF_ERR_ARG, "no unit is begun");
    const uint64_t raw_bytes = s->reader->units[unit_idx].raw_bytes;
    const uint64_t first_off = s->resident[unit_idx] != NULL ? 0 : s->window_off;
    if (!qsf_extent_inside(off, n_bytes, raw_bytes) || off < first_off ||
        n_bytes > qsf_stream_span_bytes(s, unit_idx)) {
        qsf_stream_abandon(s);
        return QSF_FAIL(QSF_ERR_ARG,
                        "unit %" PRIu32 ": %zu bytes at %" PRIu64 ", allowed: from %" PRIu64
                        " on, inside %" PRIu64 " bytes, and no more than the window holds",
                        unit_idx, n_bytes, off, first_off, raw_bytes);
    }
    if (s->resident[unit_idx] != NULL) {
        *out = s->resident[unit_idx] + off;
        return QSF_OK;
    }
    const qsf_status status = advance(s, off, off + n_bytes);
    if (status != QSF_OK) {
        qsf_stream_abandon(s);
        return status;
    }
    *out = s->window + (off - s->window_off);
    return QSF_OK;
}

qsf_status qsf_stream_end_unit(qsf_stream *s)
{
    const uint32_t unit_idx = s->unit_idx;
    if (unit_idx == NONE)
        return QSF_FAIL(QSF_ERR_ARG, "no unit is begun");
    qsf_status status = QSF_OK;
    if (s->resident[unit_idx] == NULL) {
        const uint64_t raw_bytes = s->reader->units[unit_idx].raw_bytes;
        status = advance(s, raw_bytes, raw_bytes);
        if (status == QSF_OK)
            status = qsf_unit_source_finish(&s->source);
    }
    s->unit_idx = NONE;
    return status;
}

void qsf_stream_abandon(qsf_stream *s)
{
    s->unit_idx = NONE;
}

size_t qsf_stream_span_bytes(const qsf_stream *s, uint32_t unit_idx)
{
    assert(unit_idx < s->reader->n_units);
    if (s->resident[unit_idx] != NULL)
        return SIZE_MAX;
    return s->window_bytes - slack_bytes(&s->reader->units[unit_idx]);
}

qsf_status qsf_stream_embedding_band(qsf_stream *s, uint32_t band_idx, const unsigned char **out)
{
    const qsf_reader *const r = s->reader;
    const qsf_tensor *const t = &r->tensors[0]; /* [vocab, dim] */
    const size_t row_bytes = tensor_span_bytes(t);
    if (band_idx >= r->n_bands)
        return QSF_FAIL(QSF_ERR_ARG, "embedding band %" PRIu32 " of %" PRIu32, band_idx,
                        r->n_bands);
    const uint64_t raw_off = t->data_off + (uint64_t)band_idx * row_bytes;
    if (s->resident[0] != NULL) {
        *out = s->resident[0] + raw_off;
        return QSF_OK;
    }
    *out = s->band;
    if (s->band_idx == band_idx)
        return QSF_OK;
    s->band_idx = NONE;
    const uint64_t start_ns = qsf_clock_ns();
    QSF_TRY(qsf_file_read_at(&s->reader->file, r->units[0].off + raw_off, s->band, row_bytes));
    s->source.read_ns += qsf_clock_ns() - start_ns;
    s->source.read_bytes += row_bytes;
    s->read_ns = s->source.read_ns;
    s->read_bytes = s->source.read_bytes;
    const uint32_t crc32 = qsf_crc32(0, s->band, row_bytes);
    if (crc32 != r->band_crc32[band_idx])
        return QSF_FAIL(QSF_ERR_FORMAT,
                        "embedding band %" PRIu32 ": checksum is %08" PRIx32
                        ", stored is %08" PRIx32,
                        band_idx, crc32, r->band_crc32[band_idx]);
    s->band_idx = band_idx;
    return QSF_OK;
}
