/* scan.h - the matches of a regular expression in a text, from the tables of the section TEXT.
 *
 * They are those of Oniguruma: the leftmost ones, and of those that begin at one place the first in
 * the order of alternatives and quantifiers. Time is linear in the text. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "text/work.h"

typedef struct qsf_scan {
    const qsf_vocabulary *v;
    const qsf_split *split;
    qsf_work *work;
    int block; /* of `work`: where look-aheads match, then `memory` */
    qsf_bytes text;
    const unsigned char *low; /* classes of single bytes, those below n_low */
    unsigned n_low;
    const unsigned char *at;       /* the search goes on here */
    const unsigned char *last_end; /* of the last match, or NULL */
    bool has_memory; /* a bit for each state at every 64th byte: no match is reached from it */
} qsf_scan;

/* `text` is valid UTF-8, or any bytes if the expression is one on bytes. */
qsf_status qsf_scan_begin(qsf_scan *s, const qsf_vocabulary *v, uint32_t step_idx, qsf_work *w,
                          int block, qsf_bytes text);

/* The next match, which may be empty; its p is NULL if there is none. */
qsf_status qsf_scan_next(qsf_scan *s, qsf_bytes *match);
