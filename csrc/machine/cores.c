/* cores.c - the cores of the system, within the quota of the control group. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "machine/cores.h"

#include <stddef.h>

#include "platform/cgroup.h"
#include "platform/cpu_system.h"

uint32_t qsf_core_count(void)
{
    uint32_t n_cores = qsf_cpu_list_cores(NULL, 0);
    if (n_cores == 0)
        n_cores = qsf_cpu_count_online();
    qsf_cgroup group;
    qsf_cgroup_read(&group, "");
    return n_cores < group.n_cpus ? n_cores : group.n_cpus;
}
