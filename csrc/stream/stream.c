/* stream.c - gives bytes of resident units from memory, of other units from the ring.
 *
 * Invariants during a compressed unit: decode_off is a multiple of 64 and
 * decode_off <= source.raw_done_bytes <= decode_off + decode_bytes; the decode buffer holds the raw
 * bytes from decode_off to raw_done_bytes.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "checksum/crc32.h"
#include "platform/clock.h"
#include "stream/unit_source.h"
#include "types/dtype.h"

/* ---- sizes ---- */

/* Bytes needed at once: a row of tiles or a whole vector. Sparse outliers are copied in pieces. */
static size_t tensor_range_bytes(const qsf_tensor *t)
{
    if (t->layout == QSF_LAYOUT_OUTLIERS)
        return QSF_DATA_ALIGN;
    return t->layout == QSF_LAYOUT_VECTOR
               ? (size_t)t->data_bytes
               : qsf_ceil_div(t->n_cols, QSF_BLOCK) * qsf_dtype_tile_bytes(t->dtype);
}

static size_t unit_range_bytes(const qsf_reader *r, const qsf_unit *u)
{
    size_t range_bytes = 0;
    for (uint32_t i = 0; i < u->n_tensors; i++) {
        const size_t n = tensor_range_bytes(&r->tensors[u->first_tensor + i]);
        if (n > range_bytes)
            range_bytes = n;
    }
    return qsf_round_up(range_bytes, QSF_DATA_ALIGN);
}

static void raise_to(size_t *most, size_t n)
{
    if (n > *most)
        *most = n;
}

/* Raises the sizes to those needed for streaming this unit. */
static void add_streamed(const qsf_reader *r, const qsf_unit *u, qsf_stream_sizes *sizes)
{
    const size_t range_bytes = unit_range_bytes(r, u);
    if (u->compression == QSF_COMPRESSION_NONE) {
        raise_to(&sizes->range_bytes, range_bytes);
    } else {
        /* A block is taken and decoded as a whole, even if only one byte of it is needed; the
         * decode buffer begins at a multiple of 64. */
        raise_to(&sizes->range_bytes, QSF_COMPRESSED_BLOCK_BYTES);
        raise_to(&sizes->decode_bytes, range_bytes + QSF_DATA_ALIGN + QSF_COMPRESSED_BLOCK_BYTES);
        raise_to(&sizes->codec_bytes, qsf_codec_workspace_bytes(u->compression));
    }
    raise_to(&sizes->ring_bytes, qsf_ring_least_bytes(sizes->range_bytes));
}

/* Raises the sizes to those needed for loading this unit, block by block. */
static void add_loaded(const qsf_unit *u, qsf_stream_sizes *sizes)
{
    if (u->compression == QSF_COMPRESSION_NONE) {
        raise_to(&sizes->range_bytes, QSF_DATA_ALIGN);
    } else {
        raise_to(&sizes->range_bytes, QSF_COMPRESSED_BLOCK_BYTES);
        raise_to(&sizes->codec_bytes, qsf_codec_workspace_bytes(u->compression));
    }
    raise_to(&sizes->ring_bytes, qsf_ring_least_bytes(sizes->range_bytes));
}

bool qsf_stream_passes_ring(const qsf_reader *r, uint32_t unit_idx)
{
    return unit_idx != r->embedding_unit || (r->arch.tied_head && !r->is_without_head);
}

/* The buffers, without the band, for loading these units. */
static void find_load_sizes(const qsf_reader *r, const bool *is_resident, qsf_stream_sizes *out)
{
    *out = (qsf_stream_sizes){0};
    for (uint32_t i = 0; i < r->n_pass_units; i++)
        if (is_resident[r->pass_units[i]])
            add_loaded(&r->units[r->pass_units[i]], out);
}

void qsf_stream_least(const qsf_reader *r, const bool *is_resident, qsf_stream_sizes *out)
{
    *out = (qsf_stream_sizes){0};
    for (uint32_t i = 0; i < r->n_pass_units; i++) {
        const uint32_t unit_idx = r->pass_units[i];
        if (!is_resident[unit_idx] && qsf_stream_passes_ring(r, unit_idx))
            add_streamed(r, &r->units[unit_idx], out);
    }
    qsf_stream_sizes load;
    find_load_sizes(r, is_resident, &load);
    if (out->ring_bytes != 0) { /* resident units load through the ring of the streamed ones */
        raise_to(&out->range_bytes, load.range_bytes);
        raise_to(&out->codec_bytes, load.codec_bytes);
        raise_to(&out->ring_bytes, qsf_ring_least_bytes(out->range_bytes));
    } else {
        out->load_bytes = qsf_stream_buffer_bytes(r, &load, load.ring_bytes);
    }
    if (r->own_table_unit != 0)
        out->ple_band_bytes = qsf_round_up(
            tensor_range_bytes(qsf_reader_tensor(r, r->own_table_unit, QSF_TENSOR_OWN_TABLE)),
            QSF_DATA_ALIGN);
    if (!is_resident[r->embedding_unit])
        out->band_bytes = qsf_round_up(
            tensor_range_bytes(qsf_reader_tensor(r, r->embedding_unit, QSF_TENSOR_EMBEDDING)),
            QSF_DATA_ALIGN);
}

size_t qsf_stream_buffer_bytes(const qsf_reader *r, const qsf_stream_sizes *sizes,
                               size_t ring_bytes)
{
    if (sizes->ring_bytes == 0)
        return 0;
    return qsf_ring_bytes(ring_bytes, sizes->range_bytes, r) + sizes->decode_bytes +
           sizes->codec_bytes;
}

size_t qsf_stream_unit_buffer_bytes(const qsf_reader *r, uint32_t unit_idx)
{
    qsf_stream_sizes sizes = {0};
    if (!qsf_stream_passes_ring(r, unit_idx))
        return 0;
    add_streamed(r, &r->units[unit_idx], &sizes);
    return qsf_stream_buffer_bytes(r, &sizes, sizes.ring_bytes);
}

size_t qsf_stream_table_bytes(const qsf_reader *r)
{
    return r->n_stream_units * (sizeof(unsigned char *) + sizeof(qsf_unit_time) + sizeof(bool)) +
           qsf_ring_order_units(r) * sizeof(uint32_t);
}

#define NONE UINT32_MAX
#define LOAD_RING_BYTES ((size_t)8 << 20) /* more would not load faster */
#define TOUCH_BYTES ((size_t)2 << 20)     /* a large page of most processors */
#define PAGE_BYTES 4096

/* ---- memory ---- */

static qsf_status acquire(qsf_stream *s, qsf_use use, uint64_t n_bytes, void *out)
{
    return qsf_ledger_take(s->ledger, use, n_bytes, qsf_use_name(use), out);
}

static void add_counts(qsf_ring_counts *sum, const qsf_ring_counts *a, const qsf_ring_counts *b)
{
    sum->read_bytes += a->read_bytes - b->read_bytes;
    sum->busy_ns += a->busy_ns - b->busy_ns;
    sum->checksum_ns += a->checksum_ns - b->checksum_ns;
}

static void release_buffers(qsf_stream *s)
{
    if (s->ring != NULL) {
        const qsf_ring_counts counts = qsf_ring_count(s->ring);
        add_counts(&s->counts, &counts, &s->load_counts);
        s->load_counts = (qsf_ring_counts){0};
    }
    qsf_ring_destroy(s->ring);
    qsf_ledger_release(s->ledger, QSF_USE_STREAM, s->codec, s->sizes.codec_bytes);
    qsf_ledger_release(s->ledger, QSF_USE_STREAM, s->decode_buffer, s->sizes.decode_bytes);
    s->ring = NULL;
    s->codec = NULL;
    s->decode_buffer = NULL;
    s->ring_bytes = 0;
}

static qsf_status take_from_ring(void *arg, uint64_t off, size_t n_bytes, const unsigned char **out)
{
    qsf_stream *const s = arg;
    return qsf_ring_take(s->ring, off, n_bytes, &s->unit_wait_ns, out);
}

/* Acquires ring, decode buffer and workspace; on failure none of them. */
static qsf_status take_buffers(qsf_stream *s, const qsf_stream_sizes *sizes, size_t ring_bytes)
{
    s->sizes.decode_bytes = sizes->decode_bytes;
    s->sizes.codec_bytes = sizes->codec_bytes;
    s->sizes.range_bytes = sizes->range_bytes;
    if (sizes->ring_bytes == 0)
        return QSF_OK;
    qsf_status status = acquire(s, QSF_USE_STREAM, sizes->decode_bytes, &s->decode_buffer);
    if (status == QSF_OK)
        status = acquire(s, QSF_USE_STREAM, sizes->codec_bytes, &s->codec);
    if (status == QSF_OK)
        status = qsf_ring_create(&s->ring, s->reader, s->ledger, s->io, &s->setup, ring_bytes,
                                 sizes->range_bytes);
    if (status != QSF_OK) {
        release_buffers(s);
        return status;
    }
    s->ring_bytes = ring_bytes;
    s->source = (qsf_unit_source){
        .reader = s->reader,
        .take = take_from_ring,
        .take_arg = s,
        .codec = s->codec,
        .codec_bytes = sizes->codec_bytes,
        .decompress_ns = s->source.decompress_ns,
    };
    return QSF_OK;
}

/* Gives the ring the order of streamed units: layers, then units needed only for logits. */
static void set_order(qsf_stream *s)
{
    const qsf_reader *const r = s->reader;
    uint32_t n = 0;
    uint32_t n_always = 0;
    for (uint32_t i = 0; i < r->n_visits; i++) {
        const uint32_t layer = qsf_reader_visited(r, i);
        if (s->resident[r->layer_units[layer]] == NULL)
            s->order[n++] = r->layer_units[layer];
        n_always = layer < r->n_storing_layers ? n : n_always;
    }
    if (s->resident[r->final_unit] == NULL && !r->is_without_head)
        s->order[n++] = r->final_unit;
    if (s->resident[r->embedding_unit] == NULL && qsf_stream_passes_ring(r, r->embedding_unit))
        s->order[n++] = r->embedding_unit;
    if (n == 0)
        release_buffers(s);
    else if (s->ring != NULL)
        qsf_ring_set_order(s->ring, s->order, n, n_always);
}

/* ---- loading ---- */

static bool is_compressed(const qsf_stream *s, uint32_t unit_idx)
{
    return s->reader->units[unit_idx].compression != QSF_COMPRESSION_NONE;
}

/* Copies a whole unit from the ring to memory. */
static qsf_status copy_unit(qsf_stream *s, uint32_t unit_idx, unsigned char *to)
{
    uint64_t read_ns;
    QSF_TRY(qsf_ring_begin_unit(s->ring, unit_idx));
    qsf_unit_source_begin(&s->source, unit_idx);
    while (qsf_unit_source_left_bytes(&s->source) > 0) {
        const size_t cap_bytes = is_compressed(s, unit_idx)
                                     ? QSF_COMPRESSED_BLOCK_BYTES
                                     : qsf_ring_range_bytes(s->ring, s->source.stored_done_bytes);
        size_t n_bytes;
        QSF_TRY(
            qsf_unit_source_next(&s->source, to + s->source.raw_done_bytes, cap_bytes, &n_bytes));
    }
    QSF_TRY(qsf_unit_source_finish(&s->source));
    return qsf_ring_end_unit(s->ring, &s->unit_wait_ns, &read_ns);
}

/* Touches pieces [begin, end) of memory that the ledger gave, which is zero. */
static void touch_pieces(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    volatile unsigned char *const bytes = (volatile unsigned char *)arg;
    (void)worker_idx;
    for (size_t at = begin * TOUCH_BYTES; at < end * TOUCH_BYTES; at += PAGE_BYTES)
        bytes[at] = 0;
}

/* Loads the units of order [n_units], which are not resident yet, through the ring. The system
 * clears pages when they are first touched, which takes a virtual machine longer than reading the
 * file: all workers of the pool do that. */
static qsf_status load_units(qsf_stream *s, uint32_t n_units, qsf_pool *pool)
{
    const uint32_t n_ahead = 0; /* no pass follows, so nothing is read ahead */
    qsf_ring_set_order(s->ring, s->order, n_units, n_ahead);
    qsf_ring_begin_pass(s->ring, true, NULL, s->stopwatch);
    for (uint32_t i = 0; i < n_units; i++) {
        const uint32_t unit_idx = s->order[i];
        unsigned char *to;
        QSF_TRY(acquire(s, QSF_USE_WEIGHTS, s->reader->units[unit_idx].raw_bytes, &to));
        s->resident[unit_idx] = to;
        const size_t n_pieces = (size_t)s->reader->units[unit_idx].raw_bytes / TOUCH_BYTES;
        if (pool != NULL)
            qsf_pool_run(pool, n_pieces, 1, touch_pieces, to);
        QSF_TRY(copy_unit(s, unit_idx, to));
    }
    return QSF_OK;
}

/* Size of a ring used only for loading: as large as the unplanned memory allows. */
static size_t load_ring_bytes(const qsf_stream *s, const qsf_stream_sizes *sizes,
                              uint64_t load_bytes)
{
    const uint64_t free_bytes = s->ledger->ceiling_bytes - s->ledger->held_bytes;
    const uint64_t other_bytes =
        load_bytes + qsf_stream_buffer_bytes(s->reader, sizes, sizes->ring_bytes);
    uint64_t room_bytes = free_bytes > other_bytes ? (free_bytes - other_bytes) / 8 * 7 : 0;
    if (room_bytes > LOAD_RING_BYTES)
        room_bytes = LOAD_RING_BYTES;
    if (room_bytes > load_bytes + sizes->ring_bytes)
        room_bytes = load_bytes + sizes->ring_bytes;
    const size_t ring_bytes = (size_t)room_bytes / QSF_IO_ALIGN * QSF_IO_ALIGN;
    return QSF_MAX(ring_bytes, sizes->ring_bytes);
}

/* Loads the resident units and acquires the buffers for streaming. */
static qsf_status fill(qsf_stream *s, const qsf_stream_options *options)
{
    const qsf_reader *const r = s->reader;
    qsf_stream_sizes sizes;
    qsf_stream_sizes load;
    qsf_stream_least(r, options->is_resident, &sizes);
    find_load_sizes(r, options->is_resident, &load);
    QSF_TRY(acquire(s, QSF_USE_EMBEDDING, sizes.band_bytes, &s->band.bytes));
    s->sizes.band_bytes = sizes.band_bytes;
    QSF_TRY(acquire(s, QSF_USE_EMBEDDING, sizes.ple_band_bytes, &s->ple_band.bytes));
    s->sizes.ple_band_bytes = sizes.ple_band_bytes;
    uint32_t n_load = 0;
    uint64_t load_bytes = 0;
    for (uint32_t i = 0; i < r->n_pass_units; i++) {
        const uint32_t unit_idx = r->pass_units[i];
        if (options->is_resident[unit_idx]) {
            s->order[n_load++] = unit_idx;
            load_bytes += r->units[unit_idx].raw_bytes;
        }
    }
    const bool is_streaming = sizes.ring_bytes != 0;
    if (is_streaming)
        QSF_TRY(take_buffers(s, &sizes, options->ring_bytes));
    else
        QSF_TRY(take_buffers(s, &load, load_ring_bytes(s, &load, load_bytes)));
    if (n_load > 0)
        QSF_TRY(load_units(s, n_load, options->pool));
    if (s->ring != NULL)
        s->load_counts = qsf_ring_count(s->ring);
    s->source.decompress_ns = 0;
    set_order(s);
    return QSF_OK;
}

qsf_status qsf_stream_init(qsf_stream *s, qsf_reader *r, qsf_ledger *ledger,
                           const qsf_stream_options *options)
{
    *s = (qsf_stream){
        .reader = r,
        .ledger = ledger,
        .io = options->io,
        .setup = options->setup,
        .band = {NULL, NONE},
        .ple_band = {NULL, NONE},
        .unit_idx = NONE,
    };
    qsf_stream_sizes sizes;
    qsf_stream_least(r, options->is_resident, &sizes);
    QSF_FAIL_IF(
        options->ring_bytes < sizes.ring_bytes || options->ring_bytes % QSF_IO_ALIGN != 0, ARG,
        "internal error: a ring of %zu bytes, these units need %zu or more, a multiple of %d",
        options->ring_bytes, sizes.ring_bytes, QSF_IO_ALIGN);
    qsf_status status =
        acquire(s, QSF_USE_TABLES, r->n_stream_units * sizeof *s->resident, &s->resident);
    if (status == QSF_OK)
        status = acquire(s, QSF_USE_TABLES, r->n_stream_units * sizeof *s->times, &s->times);
    if (status == QSF_OK)
        status = acquire(s, QSF_USE_TABLES, qsf_ring_order_units(r) * sizeof *s->order, &s->order);
    if (status == QSF_OK)
        status = acquire(s, QSF_USE_TABLES, r->n_stream_units * sizeof *s->mask, &s->mask);
    if (status == QSF_OK)
        status = fill(s, options);
    if (status != QSF_OK)
        qsf_stream_destroy(s);
    return status;
}

void qsf_stream_destroy(qsf_stream *s)
{
    if (s->ledger == NULL)
        return;
    const uint32_t n_units = s->reader->n_stream_units;
    release_buffers(s); /* first: its readers may be active */
    for (uint32_t i = 0; s->resident != NULL && i < n_units; i++)
        qsf_ledger_release(s->ledger, QSF_USE_WEIGHTS, s->resident[i],
                           (size_t)s->reader->units[i].raw_bytes);
    qsf_ledger_release(s->ledger, QSF_USE_EMBEDDING, s->ple_band.bytes, s->sizes.ple_band_bytes);
    qsf_ledger_release(s->ledger, QSF_USE_EMBEDDING, s->band.bytes, s->sizes.band_bytes);
    qsf_ledger_release(s->ledger, QSF_USE_TABLES, s->mask, n_units * sizeof *s->mask);
    qsf_ledger_release(s->ledger, QSF_USE_TABLES, s->order,
                       qsf_ring_order_units(s->reader) * sizeof *s->order);
    qsf_ledger_release(s->ledger, QSF_USE_TABLES, s->times, n_units * sizeof *s->times);
    qsf_ledger_release(s->ledger, QSF_USE_TABLES, s->resident, n_units * sizeof *s->resident);
    *s = (qsf_stream){.band = {NULL, NONE}, .ple_band = {NULL, NONE}, .unit_idx = NONE};
}

/* ---- a pass ---- */

void qsf_stream_begin_pass(qsf_stream *s, bool wants_logits, const qsf_cancel *cancel,
                           qsf_stopwatch *stopwatch)
{
    s->stopwatch = stopwatch;
    s->source.stopwatch = stopwatch;
    if (s->ring != NULL)
        qsf_ring_begin_pass(s->ring, wants_logits, cancel, stopwatch);
}

void qsf_stream_end_pass(qsf_stream *s)
{
    s->stopwatch = NULL;
    s->source.stopwatch = NULL;
}

bool qsf_stream_is_resident(const qsf_stream *s, uint32_t unit_idx)
{
    assert(unit_idx < s->reader->n_stream_units);
    return s->resident[unit_idx] != NULL;
}

const unsigned char *qsf_stream_resident(const qsf_stream *s, uint32_t unit_idx)
{
    return s->resident[unit_idx];
}

qsf_status qsf_stream_begin_unit(qsf_stream *s, uint32_t unit_idx)
{
    QSF_FAIL_IF(s->unit_idx != NONE || unit_idx >= s->reader->n_stream_units, ARG,
                "internal error: unit %u of %u begins before unit %u ends", unit_idx,
                s->reader->n_stream_units, s->unit_idx);
    s->begin_ns = s->stopwatch != NULL ? s->stopwatch->last_ns : qsf_clock_ns();
    s->unit_wait_ns = 0;
    if (s->resident[unit_idx] == NULL) {
        QSF_FAIL_IF(s->ring == NULL, NOMEM,
                    "unit %u cannot be streamed: the system had no memory for the ring", unit_idx);
        QSF_TRY(qsf_ring_begin_unit(s->ring, unit_idx));
        s->decode_off = 0;
        if (is_compressed(s, unit_idx))
            qsf_unit_source_begin(&s->source, unit_idx);
    }
    s->unit_idx = unit_idx;
    return QSF_OK;
}

size_t qsf_stream_range_bytes(const qsf_stream *s, uint32_t unit_idx, uint64_t off)
{
    assert(unit_idx < s->reader->n_stream_units);
    if (s->resident[unit_idx] != NULL)
        return SIZE_MAX;
    if (is_compressed(s, unit_idx))
        return s->sizes.decode_bytes - QSF_COMPRESSED_BLOCK_BYTES - QSF_DATA_ALIGN;
    return qsf_ring_range_bytes(s->ring, off);
}

/* Drops bytes of the decode buffer before off, rounded down to a multiple of 64, so that addresses
 * and offsets stay equal modulo 64. */
static void drop_before(qsf_stream *s, uint64_t off)
{
    const uint64_t end_off = s->source.raw_done_bytes;
    const uint64_t keep_off = QSF_MIN(off, end_off) & ~(uint64_t)(QSF_DATA_ALIGN - 1);
    if (keep_off <= s->decode_off)
        return;
    memmove(s->decode_buffer, s->decode_buffer + (keep_off - s->decode_off),
            (size_t)(end_off - keep_off));
    s->decode_off = keep_off;
}

/* Decodes until the decode buffer holds raw bytes [off, end_off). */
static qsf_status advance(qsf_stream *s, uint64_t off, uint64_t end_off)
{
    while (s->source.raw_done_bytes < end_off) {
        drop_before(s, off);
        const size_t used_bytes = (size_t)(s->source.raw_done_bytes - s->decode_off);
        size_t n_bytes;
        QSF_TRY(qsf_unit_source_next(&s->source, s->decode_buffer + used_bytes,
                                     s->sizes.decode_bytes - used_bytes, &n_bytes));
    }
    return QSF_OK;
}

/* Checks a request for bytes of the begun unit. */
static qsf_status check_range(const qsf_stream *s, uint64_t off, size_t n_bytes)
{
    const uint32_t unit_idx = s->unit_idx;
    QSF_FAIL_IF(unit_idx == NONE, ARG, "internal error: no unit has begun");
    const uint64_t raw_bytes = s->reader->units[unit_idx].raw_bytes;
    const uint64_t first_off = s->resident[unit_idx] != NULL ? 0 : s->decode_off;
    QSF_FAIL_IF(!qsf_extent_inside(off, n_bytes, raw_bytes) || off < first_off ||
                    n_bytes > qsf_stream_range_bytes(s, unit_idx, off),
                ARG,
                "internal error: unit %u: %zu bytes at %" PRIu64 ", allowed: from %" PRIu64
                " on, inside %" PRIu64 " bytes, at most one range",
                unit_idx, n_bytes, off, first_off, raw_bytes);
    return QSF_OK;
}

/* Acquires a checked range of a streamed unit. */
static qsf_status take_range(qsf_stream *s, uint64_t off, size_t n_bytes, const unsigned char **out)
{
    if (!is_compressed(s, s->unit_idx)) {
        s->decode_off = off & ~(uint64_t)(QSF_DATA_ALIGN - 1); /* offsets ascend from here */
        return qsf_ring_take(s->ring, off, n_bytes, &s->unit_wait_ns, out);
    }
    QSF_TRY(advance(s, off, off + n_bytes));
    *out = s->decode_buffer + (off - s->decode_off);
    return QSF_OK;
}

qsf_status qsf_stream_acquire(qsf_stream *s, uint64_t off, size_t n_bytes,
                              const unsigned char **out)
{
    qsf_status status = check_range(s, off, n_bytes);
    if (status == QSF_OK && s->resident[s->unit_idx] != NULL)
        *out = s->resident[s->unit_idx] + off;
    else if (status == QSF_OK)
        status = take_range(s, off, n_bytes, out);
    if (status != QSF_OK)
        qsf_stream_abandon(s);
    return status;
}

/* Waits for the rest of a streamed unit and verifies it. */
static qsf_status pass_rest(qsf_stream *s)
{
    const uint32_t unit_idx = s->unit_idx;
    const qsf_unit *const u = &s->reader->units[unit_idx];
    if (is_compressed(s, unit_idx)) {
        QSF_TRY(advance(s, u->raw_bytes, u->raw_bytes));
        QSF_TRY(qsf_unit_source_finish(&s->source));
    }
    uint64_t read_ns;
    QSF_TRY(qsf_ring_end_unit(s->ring, &s->unit_wait_ns, &read_ns));
    s->times[unit_idx].read_bytes += u->stored_bytes;
    s->times[unit_idx].read_ns += read_ns;
    return QSF_OK;
}

qsf_status qsf_stream_end_unit(qsf_stream *s)
{
    const uint32_t unit_idx = s->unit_idx;
    QSF_FAIL_IF(unit_idx == NONE, ARG, "internal error: no unit has begun");
    if (s->resident[unit_idx] == NULL) {
        const qsf_status status = pass_rest(s);
        if (status != QSF_OK) {
            qsf_stream_abandon(s);
            return status;
        }
    }
    qsf_unit_time *const time = &s->times[unit_idx];
    time->n_passes++;
    time->wait_ns += s->unit_wait_ns;
    s->end_ns = qsf_clock_ns();
    time->compute_ns += s->end_ns - s->begin_ns - s->unit_wait_ns;
    s->wait_ns += s->unit_wait_ns;
    s->unit_idx = NONE;
    return QSF_OK;
}

void qsf_stream_abandon(qsf_stream *s)
{
    s->unit_idx = NONE;
    if (s->ring != NULL)
        qsf_ring_abandon(s->ring);
}

qsf_status qsf_stream_table_band(qsf_stream *s, const qsf_tensor *table, uint32_t band_idx,
                                 const unsigned char **out)
{
    const qsf_reader *const r = s->reader;
    const bool is_own = table->type == QSF_TENSOR_OWN_TABLE;
    const char *const name = is_own ? "own table" : "embedding";
    const unsigned char *const resident = is_own ? NULL : s->resident[table->unit_idx];
    qsf_stream_band *const band = is_own ? &s->ple_band : &s->band;
    QSF_FAIL_IF(band_idx >= r->n_bands, ARG, "internal error: %s band %u of %u", name, band_idx,
                r->n_bands);
    const size_t row_bytes = (size_t)(table->data_bytes / r->n_bands);
    const uint64_t raw_off = table->data_off + (uint64_t)band_idx * row_bytes;
    *out = resident != NULL ? resident + raw_off : band->bytes;
    if (resident != NULL || band->idx == band_idx)
        return QSF_OK;
    band->idx = NONE;
    const uint64_t start_ns = qsf_clock_ns();
    QSF_TRY(qsf_file_read_at(&s->reader->file, r->units[table->unit_idx].off + raw_off, band->bytes,
                             row_bytes));
    qsf_stopwatch_set_aside(s->stopwatch, QSF_PHASE_WAIT, start_ns, qsf_clock_ns());
    s->band_bytes_read += row_bytes;
    const uint32_t crc32 = qsf_crc32(0, band->bytes, row_bytes);
    const uint32_t stored = r->band_crc32[is_own ? r->n_bands + band_idx : band_idx];
    QSF_FAIL_IF(crc32 != stored, DAMAGED, "%s band %u: checksum is %08x, stored is %08x", name,
                band_idx, crc32, stored);
    band->idx = band_idx;
    return QSF_OK;
}

/* ---- memory pressure ---- */

/* The sizes for the resident units without unit_idx (NONE: all of them). */
static void sizes_without(const qsf_stream *s, uint32_t unit_idx, qsf_stream_sizes *out)
{
    for (uint32_t i = 0; i < s->reader->n_stream_units; i++)
        s->mask[i] = s->resident[i] != NULL && i != unit_idx;
    qsf_stream_least(s->reader, s->mask, out);
}

static bool holds(const qsf_stream *s, const qsf_stream_sizes *sizes)
{
    return s->ring != NULL && s->ring_bytes >= sizes->ring_bytes &&
           s->sizes.range_bytes >= sizes->range_bytes &&
           s->sizes.decode_bytes >= sizes->decode_bytes &&
           s->sizes.codec_bytes >= sizes->codec_bytes;
}

qsf_status qsf_stream_drop(qsf_stream *s, uint32_t unit_idx, size_t ring_bytes)
{
    const qsf_reader *const r = s->reader;
    assert(s->unit_idx == NONE && s->resident[unit_idx] != NULL);
    qsf_stream_sizes sizes;
    sizes_without(s, unit_idx, &sizes);
    const uint64_t raw_bytes = r->units[unit_idx].raw_bytes;
    const bool takes_buffers = sizes.ring_bytes != 0 && !holds(s, &sizes);
    const bool takes_band = s->band.bytes == NULL && sizes.band_bytes != 0;
    if (ring_bytes < s->ring_bytes)
        ring_bytes = s->ring_bytes;
    if (ring_bytes < sizes.ring_bytes)
        ring_bytes = sizes.ring_bytes;
    uint64_t needed_bytes = takes_band ? sizes.band_bytes : 0;
    if (takes_buffers)
        needed_bytes += qsf_stream_buffer_bytes(r, &sizes, ring_bytes);
    const uint64_t free_bytes = s->ledger->ceiling_bytes - s->ledger->held_bytes;
    const uint64_t old_bytes =
        s->ring == NULL ? 0 : qsf_stream_buffer_bytes(r, &s->sizes, s->ring_bytes);
    QSF_FAIL_IF(needed_bytes > free_bytes && needed_bytes - free_bytes > raw_bytes + old_bytes,
                NOMEM,
                "dropping unit %u frees %" PRIu64 " MB, but streaming it needs %" PRIu64 " MB",
                unit_idx, raw_bytes >> 20, needed_bytes >> 20);
    if (takes_buffers)
        release_buffers(s);
    qsf_ledger_release(s->ledger, QSF_USE_WEIGHTS, s->resident[unit_idx], (size_t)raw_bytes);
    s->resident[unit_idx] = NULL;
    qsf_status status = QSF_OK;
    if (takes_band) {
        s->sizes.band_bytes = sizes.band_bytes;
        status = acquire(s, QSF_USE_EMBEDDING, sizes.band_bytes, &s->band.bytes);
    }
    if (status == QSF_OK && takes_buffers)
        status = take_buffers(s, &sizes, ring_bytes);
    set_order(s);
    return status;
}

qsf_status qsf_stream_resize_ring(qsf_stream *s, size_t ring_bytes)
{
    assert(s->unit_idx == NONE && s->ring != NULL);
    qsf_stream_sizes sizes;
    sizes_without(s, NONE, &sizes);
    const size_t old_bytes = s->ring_bytes;
    release_buffers(s);
    qsf_status status = take_buffers(s, &sizes, QSF_MAX(ring_bytes, sizes.ring_bytes));
    if (status != QSF_OK && take_buffers(s, &sizes, old_bytes) != QSF_OK)
        status = QSF_ERR_NOMEM;
    set_order(s);
    return status;
}

qsf_status qsf_stream_keep(qsf_stream *s, uint32_t unit_idx)
{
    assert(s->unit_idx == NONE && s->resident[unit_idx] == NULL && s->ring != NULL);
    const qsf_ring_counts before = qsf_ring_count(s->ring);
    s->order[0] = unit_idx;
    const qsf_status status = load_units(s, 1, NULL);
    const qsf_ring_counts after = qsf_ring_count(s->ring);
    add_counts(&s->load_counts, &after, &before);
    if (status != QSF_OK) {
        qsf_ring_abandon(s->ring);
        qsf_ledger_release(s->ledger, QSF_USE_WEIGHTS, s->resident[unit_idx],
                           (size_t)s->reader->units[unit_idx].raw_bytes);
        s->resident[unit_idx] = NULL;
    } else if (unit_idx == s->reader->embedding_unit) {
        qsf_ledger_release(s->ledger, QSF_USE_EMBEDDING, s->band.bytes, s->sizes.band_bytes);
        s->band = (qsf_stream_band){NULL, NONE};
    }
    set_order(s);
    return status;
}

/* ---- statistics ---- */

void qsf_stream_report(const qsf_stream *s, qsf_stats *out)
{
    qsf_ring_counts sum = s->counts;
    if (s->ring != NULL) {
        const qsf_ring_counts counts = qsf_ring_count(s->ring);
        add_counts(&sum, &counts, &s->load_counts);
    }
    out->read_bytes = sum.read_bytes + s->band_bytes_read;
    out->read_ns = sum.busy_ns;
    out->checksum_ns = sum.checksum_ns;
    out->wait_ns = s->wait_ns;
    out->decompress_ns = s->source.decompress_ns;
}

void qsf_stream_timeline(const qsf_stream *s, qsf_unit_time *out, size_t cap_units)
{
    const qsf_reader *const r = s->reader;
    const uint32_t *next = r->pass_units;
    for (size_t i = 0; i < cap_units && i < r->n_stream_units; i++) {
        const bool runs = next < r->pass_units + r->n_pass_units && *next == i;
        out[i] = s->times[i];
        out[i].is_resident = s->resident[i] != NULL;
        out[i].is_skipped = !runs;
        out[i].role = r->units[i].role;
        out[i].layer = r->units[i].layer;
        next += runs;
    }
}
