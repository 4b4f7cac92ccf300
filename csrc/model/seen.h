/* seen.h - which positions a token sees, and in which spans (256 positions) and slots they are. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "kernels/kernels.h"
#include "model/ops.h"

/* Positions first .. end - 1, and those below `pinned`, which is 0 or below `first` */
typedef struct qsf_seen {
    size_t pinned;
    size_t first;
    size_t end;
} qsf_seen;

/* Returns the positions that a token of a segment sees: itself and earlier ones, of an encoder also
 * later ones, within the window or pinned. */
qsf_seen qsf_seen_at(const qsf_layer_kind *k, const qsf_segment *g, size_t position);

/* Returns the slots that are seen in the span from position `begin` on, from the first to the
 * last; slots between pinned positions and the window are among them. Begin and end are 0 if
 * there are none. */
qsf_span_range qsf_seen_slots(qsf_seen seen, size_t begin);

/* Spans in ascending order: the first n_pinned, then those from `first` on, n in all */
typedef struct qsf_spans {
    size_t n_pinned;
    size_t first;
    size_t n;
} qsf_spans;

/* Returns the spans that the tokens of a segment see. */
qsf_spans qsf_seen_spans(const qsf_layer_kind *k, const qsf_segment *g);

/* Returns the most spans that tokens of a segment of chunk_tokens see. */
size_t qsf_seen_most_spans(const qsf_layer_kind *k, size_t chunk_tokens, size_t ctx_tokens);

/* Returns span i of `s`. */
static inline size_t qsf_span_at(const qsf_spans *s, size_t i)
{
    return i < s->n_pinned ? i : s->first + (i - s->n_pinned);
}
