/* branch.h - the pages of a sequence as a branch (chunk.h) sees them. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_BRANCH_H
#define QSF_MODEL_BRANCH_H

#include "model/chunk.h"
#include "model/scratch.h"

/* Replaces, of the pages first .. end - 1 of a span whose first page is `page`, those that rows of
 * the branch or of a branch before it belong to: by copies in the worker's scratch, with each row
 * at its own position. The bytes of the positions that the branch sees are those of a sequence
 * without branches. */
void qsf_branch_compose_pages(const qsf_attend_scratch *s, const qsf_segment *branch,
                              uint32_t layer, uint32_t kv_head, size_t page, size_t first,
                              size_t end, size_t worker_idx, const void **k_pages,
                              const void **v_pages);

#endif
