/* psi.h - the share of time that is lost for lack of memory (pressure stall information). */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Percent of the last 10 s in which all tasks with work waited for memory: in this process's
 * control group (version 2), else in the machine. Never fails: 0 if neither reports it. `root` as
 * in qsf_cgroup_read. */
double qsf_psi_memory_percent(const char *root);
