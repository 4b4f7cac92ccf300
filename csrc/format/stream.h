/* stream.h - gives the forward pass the bytes of units, in execution order.
 *
 * The forward pass never assumes that a layer is in memory: it begins a unit,
 * acquires spans of it at ascending offsets, releases each before the next, and ends
 * the unit. A resident unit answers from memory; any other passes through a window:
 *
 *     unit on disk   |....header|tensor data.............|....|tensor data.......|
 *     window                     [ span ] -> [ span ] ->
 *
 * Every byte of a streamed unit goes through the running checksum, and end_unit fails
 * when it is not the index's: no result of the pass is given out before that.
 * Resident units are verified once, when they are loaded. One pass at a time.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_FORMAT_STREAM_H
#define QSF_FORMAT_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/reader.h"
#include "format/unit_source.h"

typedef struct qsf_stream {
    qsf_reader *reader;       /* borrowed */
    qsf_ledger *ledger;       /* borrowed */
    unsigned char **resident; /* [n_units]; NULL: streamed */
    unsigned char *window;    /* [window_bytes]; NULL when every unit is resident */
    size_t window_bytes;
    unsigned char *stored; /* codec workspace, then a block; NULL: none streamed needs it */
    size_t stored_bytes;
    unsigned char *band; /* a band of embedding rows; NULL when unit 0 is resident */
    size_t band_bytes;
    uint32_t band_idx; /* which band is held; UINT32_MAX: none */
    /* the unit being passed through; source.raw_done_bytes is the end of the window */
    uint32_t unit_idx;   /* UINT32_MAX: none */
    uint64_t window_off; /* raw offset of the window's first byte, a multiple of 64 */
    qsf_unit_source source;
    /* statistics since init */
    uint64_t read_bytes;
    uint64_t read_ns;
} qsf_stream;

/* What init takes from the ledger for these units besides the resident ones themselves
 * (raw_bytes each) and n_units pointers: a window in which every tile row and every vector
 * of a streamed unit fits, a block buffer when any unit is compressed (also a resident
 * one is decoded through it; it is given back if that was its only use), a band of
 * embedding rows. Each a multiple of 64, 0 when not needed. is_resident [n_units]. */
void qsf_stream_least_bytes(const qsf_reader *r, const bool *is_resident, size_t *window_bytes,
                            size_t *stored_bytes, size_t *band_bytes);

/* The window that this unit alone would need when streamed; a multiple of 64, never 0. */
size_t qsf_stream_unit_window_bytes(const qsf_reader *r, uint32_t unit_idx);

/* Bytes of the stream's own tables, which it takes besides the buffers. */
size_t qsf_stream_table_bytes(const qsf_reader *r);

/* Takes memory from the ledger, then loads and verifies the resident units.
 * window_bytes >= the least. On failure nothing is held. */
qsf_status qsf_stream_init(qsf_stream *s, qsf_reader *r, qsf_ledger *ledger,
                           const bool *is_resident, size_t window_bytes);
void qsf_stream_destroy(qsf_stream *s);

qsf_status qsf_stream_begin_unit(qsf_stream *s, uint32_t unit_idx);

/* Makes raw bytes [off, off + n_bytes) of the begun unit readable until the next
 * acquire or end_unit. Offsets ascend; n_bytes <= qsf_stream_span_bytes(). *out lies in
 * memory as off lies in the unit, modulo 64. On failure the unit is abandoned. */
qsf_status qsf_stream_acquire(qsf_stream *s, uint64_t off, size_t n_bytes,
                              const unsigned char **out);

/* Passes over the rest of the unit and verifies its checksum. */
qsf_status qsf_stream_end_unit(qsf_stream *s);

/* Drops the begun unit, if there is one, after a failure or a cancellation. */
void qsf_stream_abandon(qsf_stream *s);

/* The most bytes one acquire of this unit may ask for (SIZE_MAX when it is resident). */
size_t qsf_stream_span_bytes(const qsf_stream *s, uint32_t unit_idx);

/* The tile row that holds embedding rows 16 * band_idx ..; readable until the next
 * call. Verified against EBND when it is read. */
qsf_status qsf_stream_embedding_band(qsf_stream *s, uint32_t band_idx, const unsigned char **out);

#endif
