/* ceiling.h - the most memory that the process may use, whatever the budget is.
 *
 * If the budget is larger than the memory that the machine or the control group has left, the
 * system kills a process. So the available memory, less a margin, is a bound too:
 *
 *     in a group   the larger of 2 MiB and a hundredth of the limit, for what the kernel charges to
 *                  the group in addition: page tables (a five-hundredth) and records of threads;
 *                  plus the page cache that running reads lock, which cannot be reclaimed
 *     outside      a sixteenth of the available memory, at most 256 MiB, so that other processes
 *                  keep running and the system does not swap
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

typedef struct qsf_supply {
    uint64_t process_bytes;   /* resident before the model is opened */
    uint64_t available_bytes; /* memory that is still free; 0 without a limit: unknown */
    uint64_t limit_bytes;     /* limit of the control group if it is the tighter one; 0: none */
    uint64_t locked_bytes;    /* page cache that running reads lock; charged to the group */
} qsf_supply;

/* Returns how many of available_bytes stay free. */
uint64_t qsf_ceiling_margin_bytes(const qsf_supply *s);

/* Returns the lower of the budget (0: none) and the memory there is; 0 only if neither is known. */
uint64_t qsf_ceiling_bytes(const qsf_supply *s, uint64_t budget_bytes);

/* Returns the budget for QSF_BUDGET_AUTO: half of the memory that would be free without this
 * process, at least 200 MiB; 200 MiB if it is unknown. */
uint64_t qsf_ceiling_auto_budget_bytes(const qsf_supply *s);
