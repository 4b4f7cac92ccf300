/* cgroup.h - the limits that Linux control groups, version 1 or 2, put on this process.
 *
 * The limits of the process's group and of all groups above it hold; each number is the lowest of
 * them. On other systems there are no limits.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

typedef struct qsf_cgroup {
    uint64_t limit_bytes; /* of memory; UINT64_MAX: none */
    uint64_t left_bytes;  /* memory left below the limit; UINT64_MAX: no limit */
    uint32_t n_cpus;      /* time quota in processors, rounded up; UINT32_MAX: none */
} qsf_cgroup;

/* `root` is a prefix of all paths: "" for this machine; tests use a folder with its own proc/ and
 * sys/. Never fails: a limit that is not found is no limit. */
void qsf_cgroup_read(qsf_cgroup *out, const char *root);
