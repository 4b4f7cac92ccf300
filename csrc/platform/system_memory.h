/* system_memory.h - memory of the machine and of this process, its limits and its pressure, as the
 * system reports them.
 */
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

/* ---- the limits that Linux control groups, version 1 or 2, put on this process ---- */

/* Those of the process's group and of all groups above it: each number is the lowest of them. On
 * other systems there are no limits. */
typedef struct qsf_cgroup {
    uint64_t limit_bytes; /* of memory; UINT64_MAX: none */
    uint64_t left_bytes;  /* memory left below the limit; UINT64_MAX: no limit */
    uint32_t n_cpus;      /* time quota in processors, rounded up; UINT32_MAX: none */
} qsf_cgroup;

/* `root` is a prefix of all paths: "" for this machine; tests use a folder with its own proc/ and
 * sys/. Never fails: a limit that is not found is no limit. */
void qsf_cgroup_read(qsf_cgroup *out, const char *root);

/* Pressure stall information: percent of the last 10 s in which all tasks with work waited for
 * memory: in this process's control group (version 2), else in the machine. Never fails: 0 if
 * neither reports it. `root` as in qsf_cgroup_read. */
double qsf_psi_memory_percent(const char *root);
