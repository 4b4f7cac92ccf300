/* ceiling.h - how much memory the process may come to use, whatever the budget says.
 *
 * A budget that is larger than what the machine or the control group has left would end in the
 * system killing somebody. So what is available is a bound too, less a margin:
 *
 *     in a group   2 MiB, or a hundredth of the limit: what the kernel charges to the group
 *                  besides what we count, page tables (a five-hundredth) and records of threads;
 *                  and the page cache that reads under way lock, which cannot be reclaimed
 *     outside      a sixteenth of what is available, at most 256 MiB: others go on living, and the
 *                  system does not fall into swapping while it looks for the last free page
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_CEILING_H
#define QSF_ENGINE_CEILING_H

#include <stdint.h>

typedef struct qsf_supply {
    uint64_t process_bytes;   /* resident already */
    uint64_t available_bytes; /* what may still be taken; 0 without a limit: unknown */
    uint64_t limit_bytes;     /* of the control group, where it is what binds; 0: none */
    uint64_t locked_bytes;    /* of page cache, by reads under way; charged to a group */
} qsf_supply;

/* What stays free of available_bytes. */
uint64_t qsf_ceiling_margin_bytes(const qsf_supply *s);

/* The lower of the budget (0: none) and what there is; never 0 unless neither is known. */
uint64_t qsf_ceiling_bytes(const qsf_supply *s, uint64_t budget_bytes);

/* The budget that QSF_BUDGET_AUTO stands for: all that a group leaves, as nobody else is meant to
 * use it; outside, three quarters of what is available. The default budget where that is
 * not known. */
uint64_t qsf_ceiling_auto_budget_bytes(const qsf_supply *s);

#endif
