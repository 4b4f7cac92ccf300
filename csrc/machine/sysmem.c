/* sysmem.c - reads /proc on Linux; uses sysconf and getrusage on other systems. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "machine/sysmem.h"

#include <stdbool.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "platform/cgroup.h"
#include "platform/linux/procfile.h"

#if defined(__linux__)

static void read_system(qsf_sysmem *out)
{
    char text[QSF_PROCFILE_BYTES];
    uint64_t kib;
    (void)qsf_procfile_read("/proc/meminfo", text, sizeof text);
    if (qsf_procfile_field(text, "MemTotal:", &kib))
        out->total_bytes = kib * 1024;
    if (qsf_procfile_field(text, "MemAvailable:", &kib))
        out->available_bytes = kib * 1024;

    (void)qsf_procfile_read("/proc/self/status", text, sizeof text);
    if (qsf_procfile_field(text, "VmRSS:", &kib))
        out->resident_bytes = kib * 1024;
    if (qsf_procfile_field(text, "VmHWM:", &kib))
        out->peak_bytes = kib * 1024;
}

#else

static void read_system(qsf_sysmem *out)
{
#if defined(_SC_PHYS_PAGES)
    const long n_pages = sysconf(_SC_PHYS_PAGES);
    const long page_bytes = sysconf(_SC_PAGESIZE);
    if (n_pages > 0 && page_bytes > 0)
        out->total_bytes = (uint64_t)n_pages * (uint64_t)page_bytes;
#endif
#if defined(_SC_AVPHYS_PAGES)
    const long n_free_pages = sysconf(_SC_AVPHYS_PAGES);
    if (n_free_pages > 0)
        out->available_bytes = (uint64_t)n_free_pages * (uint64_t)sysconf(_SC_PAGESIZE);
#endif
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) == 0) {
#if defined(__APPLE__)
        out->peak_bytes = (uint64_t)usage.ru_maxrss; /* bytes there, KiB elsewhere */
#else
        out->peak_bytes = (uint64_t)usage.ru_maxrss * 1024;
#endif
    }
}

#endif

void qsf_sysmem_read(qsf_sysmem *out)
{
    *out = (qsf_sysmem){0};
    read_system(out);

    qsf_cgroup group;
    qsf_cgroup_read(&group, "");
    if (group.limit_bytes < out->total_bytes)
        out->total_bytes = group.limit_bytes;
    if (group.left_bytes < out->available_bytes) {
        out->available_bytes = group.left_bytes;
        out->limit_bytes = group.limit_bytes;
    }
    /* The kernel updates VmHWM only now and then. */
    if (out->peak_bytes < out->resident_bytes)
        out->peak_bytes = out->resident_bytes;
}
