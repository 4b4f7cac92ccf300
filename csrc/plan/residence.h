/* residence.h - which units are resident if there is no room for all.
 *
 * Each pass reads every streamed unit once, so a resident byte saves a byte of reading, whichever
 * unit it belongs to. The choice of layers decides how well reading and computing overlap:
 *
 *     side by side    R R R R R R S S     the disk fills the ring, then waits for six layers
 *     spread          S R R R S R R R     it fills the ring twice, and waits for three layers
 *
 * A layer of 112 MB (7B, 4 bits) is computed in 4 to 7 ms from memory (16 to 30 GB/s) and read in
 * 62 ms (1.8 GB/s). A ring of 16 MiB takes 9 ms to fill: the time of one or two resident layers.
 * In longer runs of resident layers the disk idles, so all runs are about equally long, also the
 * one around the end of the pass, with the head and the choice of the token.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"
#include "include/qsf.h"
#include "stream/stream.h"

/* Marks more units as resident, at most room_bytes raw: the head first, then layers, then any
 * unit that still fits. Ignores separate embedding tables. Returns the bytes of the marked
 * units. Its time is proportional to the number of units. */
uint64_t qsf_residence_add(const qsf_reader *r, uint64_t room_bytes, bool *is_resident);

/* Returns the raw bytes of the longest run of resident units between two streamed ones, also around
 * the end of the pass; 0 if nothing is streamed. */
uint64_t qsf_residence_longest_run_bytes(const qsf_reader *r, const bool *is_resident);

/* ---- which unit is evicted next under memory pressure, and which returns first ---- */

/* A separate embedding table is evicted first, because streaming it costs one small read for each
 * token; loading it again needs a ring, so there must be one already. Layers follow, each as far
 * from streamed layers as possible, so that reads overlap with computing. The head, as large as
 * several layers, is last. */

#define QSF_UNIT_NONE UINT32_MAX /* no unit of the file */

/* The units that are resident now, and those that were at open. */
typedef struct qsf_residency {
    const qsf_stream *stream;
    const bool *is_planned; /* [n_stream_units] */
} qsf_residency;

/* Returns a resident unit that takes more memory than streaming it would; QSF_UNIT_NONE: none. */
uint32_t qsf_eviction_choose(const qsf_residency *now);

/* Returns the unit to load next: the reverse order, but a separate embedding table returns while
 * another unit still keeps the ring. QSF_UNIT_NONE: no planned unit is missing, or there is no ring
 * to load it through. */
uint32_t qsf_eviction_choose_return(const qsf_residency *now);
