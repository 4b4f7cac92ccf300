/* sysmem.h - how much memory the machine has and this process uses. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MACHINE_SYSMEM_H
#define QSF_MACHINE_SYSMEM_H

#include <stdint.h>

typedef struct qsf_sysmem {
    uint64_t total_bytes;     /* of the machine, or the cgroup limit (v1 or v2) where lower */
    uint64_t available_bytes; /* MemAvailable, or what the cgroup leaves where lower */
    uint64_t limit_bytes;     /* of the cgroup, where what it leaves is the lower; 0: it is not */
    uint64_t resident_bytes;  /* of this process, now */
    uint64_t peak_bytes;      /* of this process, so far */
} qsf_sysmem;

/* Never fails: what cannot be found out is 0. */
void qsf_sysmem_read(qsf_sysmem *out);

#endif
