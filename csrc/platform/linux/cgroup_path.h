/* cgroup_path.h - files of this process's control group. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* Path of the file `name` in this process's version-2 group; false if there is no such group. */
bool qsf_cgroup_path(const char *name, const char *root, char *path, size_t cap_bytes);
