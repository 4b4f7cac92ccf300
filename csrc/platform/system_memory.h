/* system_memory.h - memory of the machine and of this process, as the system reports it. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

typedef struct qsf_system_memory {
    uint64_t total_bytes;     /* of the machine */
    uint64_t available_bytes; /* that processes can still get without swapping */
    uint64_t resident_bytes;  /* of this process now */
    uint64_t peak_bytes;      /* of this process so far; may lag behind resident_bytes */
} qsf_system_memory;

/* Never fails: a number that the system does not report is 0. */
void qsf_system_memory_read(qsf_system_memory *out);
