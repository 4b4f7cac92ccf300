/* cgroup.h - the limits that Linux control groups, version 1 or 2, put on this process.
 *
 * The process is bound by its own group and by every group above it, so each number
 * is the tightest of that chain. Elsewhere than on Linux there are no limits.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MACHINE_CGROUP_H
#define QSF_MACHINE_CGROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qsf_cgroup {
    uint64_t limit_bytes; /* of memory; UINT64_MAX: none */
    uint64_t left_bytes;  /* what may still be taken; UINT64_MAX: no limit */
    uint32_t n_cpus;      /* time quota in processors, rounded up; UINT32_MAX: none */
} qsf_cgroup;

/* `root` stands before every path: "" for this machine; tests give a folder that
 * holds a proc/ and a sys/ of their own. Never fails: what is not found is no limit. */
void qsf_cgroup_read(qsf_cgroup *out, const char *root);

/* Where the file `name` of this process's own group of version 2 would lie; false where there is
 * no such group. */
bool qsf_cgroup_path(const char *name, const char *root, char *path, size_t cap_bytes);

#endif
