/* work.h - memory of one call: blocks that grow, released all at once.
 *
 * Encoding allocates only when a piece is longer than all before it, never for each token. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "memory/ledger.h"
#include "text/vocabulary.h"

/* The most memory of one call; docs/memory.md says how much texts need. */
#define QSF_TEXT_WORK_BYTES (UINT64_C(64) << 20)

enum {
    QSF_WORK_NORMAL_A,
    QSF_WORK_NORMAL_B,
    QSF_WORK_RUN,  /* a character with its combining marks */
    QSF_WORK_SORT, /* the same, in order */
    QSF_WORK_UNITS,
    QSF_WORK_HEAP,
    QSF_WORK_STEPS, /* one for each step */
    QSF_WORK_COUNT = QSF_WORK_STEPS + QSF_TEXT_MAX_STEPS
};

typedef struct qsf_work {
    qsf_ledger ledger;
    void *blocks[QSF_WORK_COUNT];
    size_t block_bytes[QSF_WORK_COUNT];
} qsf_work;

void qsf_work_init(qsf_work *w);
void qsf_work_destroy(qsf_work *w);

/* Grows block `idx` to at least n_bytes and keeps its contents. QSF_ERR_NOMEM if all blocks
 * together exceed QSF_TEXT_WORK_BYTES. */
qsf_status qsf_work_reserve(qsf_work *w, int idx, size_t n_bytes);
