/* stream.h - gives the forward pass the bytes of units, in execution order.
 *
 * The forward pass never assumes that a layer is in memory: it begins a unit, acquires ranges of
 * its bytes at ascending offsets, and ends the unit. Bytes of a resident unit are in memory. Bytes
 * of other units come through the ring (ring.h), and through the decode buffer if compressed:
 *
 *     ring            stored bytes    |....header|tensor data.............|....|tensor data.......|
 *     decode buffer   raw bytes                    [ range ] -> [ range ] ->
 *
 * end_unit verifies the checksum of all stored bytes of a streamed unit; no result of the pass
 * leaves the engine before that. Resident units are verified once, when they are loaded. One pass
 * at a time.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/cancel.h"
#include "format/records.h"
#include "platform/pool.h"
#include "stream/ring.h"
#include "stream/unit_source.h"

/* Bytes that init will acquire from the ledger; 0 for parts that this stream does not use. Resident
 * units (raw_bytes each) and the tables are extra. An embedding table that is not also the head is
 * not streamed: its rows are read band by band. */
typedef struct qsf_stream_sizes {
    size_t ring_bytes; /* smallest ring; a larger one reads further ahead. 0: nothing is streamed */
    size_t range_bytes;    /* largest range that the ring must give at once */
    size_t decode_bytes;   /* decode buffer of compressed units */
    size_t codec_bytes;    /* workspace for decoding */
    size_t band_bytes;     /* a band of embedding rows */
    size_t ple_band_bytes; /* a band of the own table, which is never resident */
    size_t load_bytes;     /* if nothing is streamed: least size of all buffers while resident units
                            * load; released before init returns */
} qsf_stream_sizes;

typedef struct qsf_stream_options {
    const bool *is_resident; /* [n_stream_units] */
    size_t ring_bytes;       /* at least qsf_stream_sizes.ring_bytes */
    qsf_io *io;              /* borrowed, open */
    qsf_io_setup setup;
    qsf_pool *pool; /* takes part while resident units load; NULL: the caller alone */
} qsf_stream_options;

/* A band in memory */
typedef struct qsf_stream_band {
    unsigned char *bytes;
    uint32_t idx; /* UINT32_MAX: none */
} qsf_stream_band;

typedef struct qsf_stream {
    qsf_reader *reader;       /* borrowed */
    qsf_ledger *ledger;       /* borrowed */
    qsf_io *io;               /* borrowed */
    qsf_io_setup setup;       /* how the ring reads */
    qsf_stopwatch *stopwatch; /* borrowed, of the pass; or NULL */
    unsigned char **resident; /* [n_stream_units]; NULL: streamed */
    qsf_unit_time *times;     /* [n_stream_units] */
    uint32_t *order;          /* [qsf_ring_order_units()] streamed units in the order of the pass */
    bool *mask;               /* [n_stream_units] scratch */
    qsf_ring *ring;           /* NULL if nothing is streamed */
    size_t ring_bytes;
    qsf_stream_sizes sizes;       /* of the buffers held now */
    unsigned char *decode_buffer; /* [sizes.decode_bytes] */
    unsigned char *codec;         /* [sizes.codec_bytes] */
    qsf_stream_band band;         /* [sizes.band_bytes] of the embedding */
    qsf_stream_band ple_band;     /* [sizes.ple_band_bytes] of the own table */
    /* the current unit */
    uint32_t unit_idx;   /* UINT32_MAX: none */
    uint64_t decode_off; /* compressed: raw offset of the decode buffer, a multiple of 64 */
    uint64_t begin_ns;
    uint64_t end_ns; /* of the latest unit that ended without error */
    uint64_t unit_wait_ns;
    qsf_unit_source source; /* compressed; raw_done_bytes is the end of the decode buffer */
    /* statistics since init; the ring counts its own, from which those of loading are subtracted */
    uint64_t band_bytes_read;
    uint64_t wait_ns;
    qsf_ring_counts counts;      /* of earlier rings */
    qsf_ring_counts load_counts; /* of the present ring while it loaded units */
} qsf_stream;

/* The smallest sizes for these units. */
void qsf_stream_least(const qsf_reader *r, const bool *is_resident, qsf_stream_sizes *out);

/* True if the unit passes through the ring when it is not resident. */
bool qsf_stream_passes_ring(const qsf_reader *r, uint32_t unit_idx);

/* Bytes of ring, decode buffer and workspace together, for a ring of ring_bytes. */
size_t qsf_stream_buffer_bytes(const qsf_reader *r, const qsf_stream_sizes *sizes,
                               size_t ring_bytes);

/* The least value of qsf_stream_buffer_bytes if only this unit is streamed; 0 for an embedding
 * that is never streamed. */
size_t qsf_stream_unit_buffer_bytes(const qsf_reader *r, uint32_t unit_idx);

/* Bytes of the stream's tables, which are not part of the buffers. */
size_t qsf_stream_table_bytes(const qsf_reader *r);

/* Acquires memory from the ledger, loads and verifies the resident units, then starts reading
 * ahead. On failure nothing is held. */
qsf_status qsf_stream_init(qsf_stream *s, qsf_reader *r, qsf_ledger *ledger,
                           const qsf_stream_options *options);
void qsf_stream_destroy(qsf_stream *s);

/* Begins a pass over the units, with or without the head (wants_logits). A wait for the disk ends
 * with QSF_ERR_CANCELLED soon after *cancel is set. The stopwatch (borrowed until the pass ends,
 * or NULL) counts waiting and decompressing as phases of their own. */
void qsf_stream_begin_pass(qsf_stream *s, bool wants_logits, const qsf_cancel *cancel,
                           qsf_stopwatch *stopwatch);

/* Ends the use of the stopwatch. Optional before another pass begins. */
void qsf_stream_end_pass(qsf_stream *s);

/* Begins a unit. Its time begins at the stopwatch's latest lap, or now without a stopwatch: reading
 * the clock again would add to the time of a small unit. */
qsf_status qsf_stream_begin_unit(qsf_stream *s, uint32_t unit_idx);

/* Most raw bytes that one acquire of this unit at `off` may ask for; SIZE_MAX if it is resident. At
 * least one row of tiles of any of its tensors. */
size_t qsf_stream_range_bytes(const qsf_stream *s, uint32_t unit_idx, uint64_t off);

/* Makes raw bytes [off, off + n_bytes) of the current unit readable until the next acquire or
 * end_unit. Offsets ascend; n_bytes <= qsf_stream_range_bytes(). *out equals off modulo 64. On
 * failure the unit is abandoned. */
qsf_status qsf_stream_acquire(qsf_stream *s, uint64_t off, size_t n_bytes,
                              const unsigned char **out);

/* Reads the rest of the unit and verifies its checksum. */
qsf_status qsf_stream_end_unit(qsf_stream *s);

/* Drops the current unit, if any, after an error or a cancellation. */
void qsf_stream_abandon(qsf_stream *s);

/* Returns the tile row with rows 16 * band_idx .. 16 * band_idx + 15 of the embedding or of the own
 * table, valid until the next call for that table. A band that is read is verified against EBND. */
qsf_status qsf_stream_table_band(qsf_stream *s, const qsf_tensor *table, uint32_t band_idx,
                                 const unsigned char **out);

/* For memory pressure; call them between units. drop makes a resident unit a streamed one and frees
 * its memory; keep does the reverse. The first drop creates a ring of ring_bytes, or more if
 * needed; the last keep destroys it. QSF_ERR_NOMEM from drop: the freed memory is not enough for
 * the buffers, and nothing has changed. If the allocation fails although the ledger has room, the
 * unit is streamed without a ring, and passes fail. If keep fails, nothing has changed. */
qsf_status qsf_stream_drop(qsf_stream *s, uint32_t unit_idx, size_t ring_bytes);
qsf_status qsf_stream_keep(qsf_stream *s, uint32_t unit_idx);
/* Gives an existing ring ring_bytes, or more if needed. */
qsf_status qsf_stream_resize_ring(qsf_stream *s, size_t ring_bytes);

bool qsf_stream_is_resident(const qsf_stream *s, uint32_t unit_idx);
/* Returns the raw bytes of a resident unit, else NULL. */
const unsigned char *qsf_stream_resident(const qsf_stream *s, uint32_t unit_idx);

/* Fills the reading part of the statistics. */
void qsf_stream_report(const qsf_stream *s, qsf_stats *out);
/* Copies the times of the first cap_units units. */
void qsf_stream_timeline(const qsf_stream *s, qsf_unit_time *out, size_t cap_units);
