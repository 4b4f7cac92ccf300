/* psi.h - how much the work stands still for want of memory (pressure stall information). */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MACHINE_PSI_H
#define QSF_MACHINE_PSI_H

/* Percent of the last ten seconds in which every task that had work to do waited for memory: of
 * this process's control group where that tells (version 2), else of the machine. Never fails: 0
 * where nobody tells. `root` as for qsf_cgroup_read. */
double qsf_psi_memory_percent(const char *root);

#endif
