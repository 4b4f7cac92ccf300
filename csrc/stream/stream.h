/* stream.h - gives the forward pass the bytes of units, in execution order.
 *
 * The forward pass never assumes that a layer is in memory: it begins a unit,
 * acquires spans of it at ascending offsets, releases each before the next, and ends
 * the unit. A resident unit answers from memory; the bytes of any other come through the
 * ring, which is filled ahead (ring.h), and where they are compressed through a window:
 *
 *     ring      stored bytes    |....header|tensor data.............|....|tensor data.......|
 *     window    decoded bytes                [ span ] -> [ span ] ->
 *
 * Every stored byte of a streamed unit is checked, and end_unit fails when the checksum is
 * not the index's: no result of the pass is given out before that. Resident units are verified
 * once, when they are loaded. One pass at a time.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_STREAM_STREAM_H
#define QSF_STREAM_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/records.h"
#include "stream/ring.h"
#include "stream/unit_source.h"

/* What init takes from the ledger; 0 what is not needed. Resident units (raw_bytes each) and the
 * tables come on top. An embedding table that is not the head too is not streamed: its rows are
 * read band by band. */
typedef struct qsf_stream_sizes {
    size_t ring_bytes;   /* at least so many; more lets reading run further ahead. 0: nothing is
                          * streamed */
    size_t range_bytes;  /* of the ring: what must be takeable at once */
    size_t decode_bytes; /* that compressed units are decoded to */
    size_t codec_bytes;  /* workspace for decoding */
    size_t band_bytes;   /* a band of embedding rows */
    size_t load_bytes;   /* where nothing is streamed: of all buffers, at least, while resident
                          * units load; given back before init returns */
} qsf_stream_sizes;

typedef struct qsf_stream_options {
    const bool *is_resident; /* [n_units] */
    size_t ring_bytes;       /* at least the least */
    qsf_io *io;              /* borrowed, open */
    qsf_trace *trace;        /* borrowed, or NULL: of reads */
    qsf_io_setup setup;
} qsf_stream_options;

typedef struct qsf_stream {
    qsf_reader *reader;       /* borrowed */
    qsf_ledger *ledger;       /* borrowed */
    qsf_io *io;               /* borrowed */
    qsf_io_setup setup;       /* how the ring reads */
    qsf_trace *trace;         /* borrowed, or NULL */
    qsf_stopwatch *stopwatch; /* borrowed, of the pass; or NULL */
    unsigned char **resident; /* [n_units]; NULL: streamed */
    qsf_unit_time *times;     /* [n_units] */
    uint32_t *order;          /* [n_units] those that are streamed, in the order of the pass */
    bool *mask;               /* [n_units] scratch */
    qsf_ring *ring;           /* NULL when nothing is streamed */
    size_t ring_bytes;
    qsf_stream_sizes sizes;       /* what is held */
    unsigned char *decode_buffer; /* [sizes.decode_bytes] */
    unsigned char *codec;         /* [sizes.codec_bytes] */
    unsigned char *band;          /* [sizes.band_bytes] */
    uint32_t band_idx;            /* which band is held; UINT32_MAX: none */
    /* the unit being passed through */
    uint32_t unit_idx;   /* UINT32_MAX: none */
    uint64_t decode_off; /* compressed: raw offset of the window's first byte, a multiple of 64 */
    uint64_t begin_ns;
    uint64_t end_ns; /* of the latest unit that ended well */
    uint64_t unit_wait_ns;
    qsf_unit_source source; /* compressed; raw_done_bytes is the end of the window */
    /* statistics since init; the ring has its own, of which those of loading do not count */
    uint64_t band_bytes_read;
    uint64_t wait_ns;
    qsf_ring_counts counts;      /* of rings that are gone */
    qsf_ring_counts load_counts; /* of the present ring, before it streamed */
} qsf_stream;

/* The least for these units. */
void qsf_stream_least(const qsf_reader *r, const bool *is_resident, qsf_stream_sizes *out);

/* The buffers, without the band, through which these units load. */
void qsf_stream_load_sizes(const qsf_reader *r, const bool *is_resident, qsf_stream_sizes *out);

/* Is the unit one of those that pass through the ring unless they are resident? */
bool qsf_stream_passes_ring(const qsf_reader *r, uint32_t unit_idx);

/* What ring, window and workspace take of the ledger, with a ring of ring_bytes. */
size_t qsf_stream_buffer_bytes(const qsf_reader *r, const qsf_stream_sizes *sizes,
                               size_t ring_bytes);

/* The least of that if only this unit were streamed; 0 for an embedding that is not. */
size_t qsf_stream_unit_buffer_bytes(const qsf_reader *r, uint32_t unit_idx);

/* Bytes of the stream's own tables, which it takes besides the buffers. */
size_t qsf_stream_table_bytes(const qsf_reader *r);

/* Takes memory from the ledger, loads and verifies the resident units, then starts
 * reading ahead. On failure nothing is held. */
qsf_status qsf_stream_init(qsf_stream *s, qsf_reader *r, qsf_ledger *ledger,
                           const qsf_stream_options *options);
void qsf_stream_destroy(qsf_stream *s);

/* A pass over the units begins, which ends with the logits or without. A wait for the disk
 * ends with QSF_ERR_CANCELLED soon after *cancelled is set. Waiting and decompressing are set aside
 * on the stopwatch (borrowed until the pass ends, or NULL). */
void qsf_stream_begin_pass(qsf_stream *s, bool wants_logits, const atomic_bool *cancelled,
                           qsf_stopwatch *stopwatch);

/* The stopwatch is given back. Not needed before another pass begins. */
void qsf_stream_end_pass(qsf_stream *s);

/* The unit's time begins when the stopwatch's latest lap ended, or without one now: looking at
 * the clock is a part of what a small unit takes. */
qsf_status qsf_stream_begin_unit(qsf_stream *s, uint32_t unit_idx);

/* The most raw bytes that one acquire of this unit at `off` may ask for (SIZE_MAX when it is
 * resident); at least a row of tiles of any of its tensors. */
size_t qsf_stream_range_bytes(const qsf_stream *s, uint32_t unit_idx, uint64_t off);

/* Makes raw bytes [off, off + n_bytes) of the begun unit readable until the next
 * acquire or end_unit. Offsets ascend; n_bytes <= qsf_stream_range_bytes(). *out lies in
 * memory as off lies in the unit, modulo 64. On failure the unit is abandoned. */
qsf_status qsf_stream_acquire(qsf_stream *s, uint64_t off, size_t n_bytes,
                              const unsigned char **out);

/* Passes over the rest of the unit and verifies its checksum. */
qsf_status qsf_stream_end_unit(qsf_stream *s);

/* Drops the begun unit, if there is one, after a failure or a cancellation. */
void qsf_stream_abandon(qsf_stream *s);

/* The tile row that holds embedding rows 16 * band_idx ..; readable until the next
 * call. Verified against EBND when it is read. */
qsf_status qsf_stream_embedding_band(qsf_stream *s, uint32_t band_idx, const unsigned char **out);

/* Under memory pressure, between units: makes a resident unit a streamed one, whose memory is
 * given back; or the reverse. A ring, of ring_bytes or what is needed, is taken or given back
 * with the first such unit and the last. QSF_ERR_NOMEM: the freed unit would not make room for it,
 * and all is as before; only where the system breaks its word and has no memory after all, is
 * the unit streamed without a ring, and passes fail. When keeping fails, all is as before. */
qsf_status qsf_stream_drop(qsf_stream *s, uint32_t unit_idx, size_t ring_bytes);
qsf_status qsf_stream_keep(qsf_stream *s, uint32_t unit_idx);
/* The same for the ring itself, which is there: it gets ring_bytes, or what is needed. */
qsf_status qsf_stream_resize_ring(qsf_stream *s, size_t ring_bytes);

bool qsf_stream_is_resident(const qsf_stream *s, uint32_t unit_idx);

/* Fills the reading part of the statistics. */
void qsf_stream_report(const qsf_stream *s, qsf_stats *out);
/* Copies the times of the first cap_units units. */
void qsf_stream_timeline(const qsf_stream *s, qsf_unit_time *out, size_t cap_units);

#endif
