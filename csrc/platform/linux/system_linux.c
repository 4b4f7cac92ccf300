/* system_linux.c - memory, cores, AMX tiles and ARM extensions, as the Linux kernel reports them.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "platform/cpu.h"
#include "platform/linux/procfile.h"
#include "platform/system_memory.h"

#define MAX_CPUS 8192 /* most processors of a Linux kernel */

typedef struct cpu_mask {
    cpu_set_t sets[MAX_CPUS / CPU_SETSIZE];
} cpu_mask;

static bool mask_has(const cpu_mask *mask, size_t cpu)
{
    return CPU_ISSET_S(cpu, sizeof mask->sets, mask->sets) != 0;
}

/* True if the mask has a processor of the same core with a lower number, so that the core is
 * already counted. The list looks like "0,64" or "0-3". If it is unreadable, the processor counts
 * as a core. */
static bool core_is_counted(const cpu_mask *mask, size_t cpu)
{
    char path[128];
    char list[256];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%zu/topology/thread_siblings_list",
             cpu);
    if (!qsf_procfile_read(path, list, sizeof list))
        return false;
    char *at = list;
    while (*at >= '0' && *at <= '9') {
        const size_t first = strtoul(at, &at, 10);
        const size_t last = *at == '-' ? strtoul(at + 1, &at, 10) : first;
        for (size_t other = first; other <= last && other < cpu; other++)
            if (mask_has(mask, other))
                return true;
        at += *at == ',';
    }
    return false;
}

uint32_t qsf_cpu_list_cores(uint32_t *cpus, uint32_t cap)
{
    cpu_mask mask;
    memset(&mask, 0, sizeof mask);
    if (sched_getaffinity(0, sizeof mask.sets, mask.sets) != 0)
        return 0;
    uint32_t n_cores = 0;
    for (uint32_t cpu = 0; cpu < MAX_CPUS; cpu++) {
        if (!mask_has(&mask, cpu) || core_is_counted(&mask, cpu))
            continue;
        if (n_cores < cap)
            cpus[n_cores] = cpu;
        n_cores++;
    }
    return n_cores;
}

#if QSF_ARCH_X86

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

bool qsf_cpu_request_tiles(void)
{
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#endif

#if QSF_ARCH_ARM

#include <sys/auxv.h>

#define HWCAP_BIT_CRC32 (1UL << 7)
#define HWCAP_BIT_ASIMDDP (1UL << 20)
#define HWCAP2_BIT_I8MM (1UL << 13)

qsf_arm_features qsf_cpu_arm_features(void)
{
    const unsigned long first = getauxval(AT_HWCAP);
    return (qsf_arm_features){.has_dotprod = (first & HWCAP_BIT_ASIMDDP) != 0,
                              .has_i8mm = (getauxval(AT_HWCAP2) & HWCAP2_BIT_I8MM) != 0,
                              .has_crc32 = (first & HWCAP_BIT_CRC32) != 0};
}

#endif

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
