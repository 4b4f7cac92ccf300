/* system_memory_linux.c - memory figures from /proc. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/linux/procfile.h"
#include "platform/system_memory.h"

void qsf_system_memory_read(qsf_system_memory *out)
{
    *out = (qsf_system_memory){0};
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
