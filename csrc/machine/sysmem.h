/* sysmem.h - how much memory the machine has and this process uses. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

typedef struct qsf_sysmem {
    uint64_t total_bytes;     /* of the machine, or the control group's limit if lower */
    uint64_t available_bytes; /* MemAvailable, or memory left in the control group or in the
                               * addresses of a process if lower */
    uint64_t limit_bytes;     /* control group's limit if it sets available_bytes; else 0 */
    uint64_t resident_bytes;  /* of this process now */
    uint64_t peak_bytes;      /* highest resident memory of this process so far */
} qsf_sysmem;

/* Never fails: a number that the system does not report is 0. */
void qsf_sysmem_read(qsf_sysmem *out);
