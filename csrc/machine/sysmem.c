/* sysmem.c - the memory that the system reports, within the limits of the control group. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "machine/sysmem.h"

#include "platform/cgroup.h"
#include "platform/system_memory.h"

/* Address space of a process: with 32 bits the kernel keeps a quarter for itself. */
#define ADDRESS_BYTES ((uint64_t)SIZE_MAX / 4 * 3)

void qsf_sysmem_read(qsf_sysmem *out)
{
    qsf_system_memory system;
    qsf_system_memory_read(&system);
    *out = (qsf_sysmem){.total_bytes = system.total_bytes,
                        .available_bytes = system.available_bytes,
                        .resident_bytes = system.resident_bytes,
                        .peak_bytes = system.peak_bytes};

    qsf_cgroup group;
    qsf_cgroup_read(&group, "");
    if (group.limit_bytes < out->total_bytes)
        out->total_bytes = group.limit_bytes;
    if (group.left_bytes < out->available_bytes) {
        out->available_bytes = group.left_bytes;
        out->limit_bytes = group.limit_bytes;
    }
    if (out->available_bytes > ADDRESS_BYTES - out->resident_bytes)
        out->available_bytes = ADDRESS_BYTES - out->resident_bytes;
    /* The kernel updates VmHWM only now and then. */
    if (out->peak_bytes < out->resident_bytes)
        out->peak_bytes = out->resident_bytes;
}
