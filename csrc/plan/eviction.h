/* eviction.h - which unit is evicted next under memory pressure, and which returns first.
 *
 * A separate embedding table is evicted first, because streaming it costs one small read for each
 * token; loading it again needs a ring, so there must be one already. Layers follow, each as far
 * from streamed layers as possible, so that reads overlap with computing. The head, as large as
 * several layers, is last.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "include/qsf.h"
#include "stream/stream.h"

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
