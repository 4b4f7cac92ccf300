/* eviction.h - which unit leaves memory next under pressure, and which comes back first.
 *
 * An embedding of its own costs a small read for a token and so goes first, or nearly: to load it
 * again takes a ring. Then the layers, each as far from streamed ones as can be, so that reading
 * has time everywhere. The head, which is as large as several, last.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_EVICTION_H
#define QSF_ENGINE_EVICTION_H

#include <stdbool.h>
#include <stdint.h>

#include "stream/stream.h"

/* What is in memory now, and what was when the model was opened. */
typedef struct qsf_residency {
    const qsf_stream *stream;
    const bool *is_planned; /* [n_units] */
} qsf_residency;

/* A resident unit that takes more memory than streaming it would; UINT32_MAX: none. */
uint32_t qsf_eviction_choose(const qsf_residency *now);

/* The reverse: the embedding of its own while another unit keeps the ring there. UINT32_MAX: no
 * planned unit is missing, or there is no ring to load it through. */
uint32_t qsf_eviction_choose_return(const qsf_residency *now);

#endif
