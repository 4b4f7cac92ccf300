/* text.h - the handle of a vocabulary: its memory and its tables. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "memory/ledger.h"
#include "text/vocabulary.h"

struct qsf_text {
    qsf_ledger ledger;
    unsigned char *section;
    size_t n_bytes;
    qsf_vocabulary vocabulary;
};

/* Two halves of opening: the first allocates a section of n_bytes, which the caller fills; the
 * second checks it. After any failure call qsf_text_close. */
qsf_status qsf_text_reserve(uint64_t n_bytes, qsf_text **out);
qsf_status qsf_text_check(qsf_text *t);
