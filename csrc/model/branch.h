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

/* Room for a block of 64 dims of each V page of a span */
typedef struct qsf_branch_copies {
    unsigned char at[QSF_KV_SPAN_PAGES][QSF_KV_PAGE_TOKENS * QSF_BLOCK * sizeof(float)];
} qsf_branch_copies;

/* Copies the blocks that have slots of the branch below end_slot, and puts these in: blocks [8],
 * those of the sequence at first. block: which 64 dims. */
void qsf_branch_values(const qsf_branch_span *b, size_t block, size_t end_slot,
                       const unsigned char **blocks, qsf_branch_copies *copies);

#endif
