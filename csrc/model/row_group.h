/* row_group.h - query rows that share a pass over the pages, one span at a time. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "model/ops.h"
#include "model/seen.h"

/* The keys and values of a layer */
typedef struct qsf_attention_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer;
    const float *sinks; /* [n_heads], or NULL */
    size_t group_rows;  /* most rows of a row group */
    size_t item_spans;  /* spans of a row group in an item; 0: all of them */
    /* If spans are attended part by part: the current part, and its cold pages in the transit
     * buffer */
    size_t first_span;
    size_t end_span;
    size_t first_cold;
    size_t end_cold;
} qsf_attention_job;

/* Up to QSF_ATTEND_ROWS query rows of one KV head, and of one segment: row i is query head i %
 * heads_per_kv of token i / heads_per_kv. */
typedef struct qsf_row_group {
    const qsf_segment *segment;
    uint32_t kv_head;
    size_t first_row; /* row i of the group is number first_row + i */
    size_t n_rows;
    qsf_seen seen[QSF_ATTEND_ROWS];
    qsf_seen all; /* from the first position that any row sees to the last one */
} qsf_row_group;

static inline uint32_t qsf_heads_per_kv(const qsf_layer_kind *k)
{
    return k->n_heads / k->n_kv_heads;
}

/* Returns the index of row r in the chunk: row of the chunk times heads, plus head. */
size_t qsf_row_group_chunk_row(const qsf_layer_kind *k, const qsf_row_group *group, size_t r);

/* Returns the offset of head row % n_heads in q or in the attended values. */
size_t qsf_row_group_head_off(const qsf_ops *o, size_t row);

/* Copies the query rows to the worker's scratch, as matmul input. */
qsf_acts qsf_row_group_gather(const qsf_ops *o, const qsf_row_group *group, size_t worker_idx);

/* Computes the sums, and in the worker's span_values the values, of all rows over one span. ranges
 * [n_rows] receives the slots that each row sees. */
void qsf_row_group_attend_span(const qsf_attention_job *job, const qsf_row_group *group,
                               const qsf_acts *x, size_t span, size_t worker_idx,
                               qsf_span_range *ranges, qsf_span_sums *sums);
