/* branch.h - attention of a branch (chunk.h) to its own rows, which lie behind their positions.
 *
 * Rows of a branch attend to the pages of its sequence as all others do. Their slots from the first
 * branch on hold what other rows have stored there: these functions put the branch's in their
 * place. The bits are those of a sequence without branches.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_BRANCH_H
#define QSF_MODEL_BRANCH_H

#include "model/chunk.h"
#include "model/ops.h"

/* The part of one layer, KV head and span that rows of a branch attend to */
typedef struct qsf_branch_span {
    const qsf_segment *branch;
    uint32_t layer;
    uint32_t kv_head;
    size_t begin; /* first position of the span */
} qsf_branch_span;

/* Replaces the scores [n, 256] of n rows of the branch at its own slots below end_slot. x: the
 * rows, at most QSF_ATTEND_ROWS */
void qsf_branch_score(const qsf_ops *o, const qsf_branch_span *b, const qsf_acts *x,
                      size_t end_slot, float *scores);

/* Computes block `block` of the values of n_rows rows of the branch over the span, as
 * qsf_span_values(); shared [8]: that block of the pages of its sequence. */
void qsf_branch_values(const qsf_ops *o, const qsf_branch_span *b, size_t block,
                       const unsigned char *const *shared, const float *e,
                       const qsf_span_range *ranges, size_t n_rows, float *values, size_t stride);

#endif
