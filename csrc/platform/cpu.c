/* cpu.c - chooses the instruction-set level and lists the cores. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/cpu.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "platform/linux/procfile.h"

#if defined(__linux__)
#include <sched.h>
#endif

/* No default, so that the compiler warns about a missing level. */
const char *qsf_isa_name(qsf_isa isa)
{
    switch (isa) {
    case QSF_ISA_SCALAR:
        return "scalar";
    case QSF_ISA_AVX2:
        return "avx2";
    case QSF_ISA_AVXVNNI:
        return "avxvnni";
    case QSF_ISA_AVX512:
        return "avx512";
    case QSF_ISA_AMX:
        return "amx";
    case QSF_ISA_NEON:
        return "neon";
    case QSF_ISA_DOTPROD:
        return "dotprod";
    case QSF_ISA_I8MM:
        return "i8mm";
    case QSF_ISA_COUNT:
        break;
    }
    return "unknown";
}

#if !QSF_ARCH_X86 && !QSF_ARCH_ARM
bool qsf_isa_has(qsf_isa isa)
{
    return isa == QSF_ISA_SCALAR;
}
#endif

#if !QSF_ARCH_X86
bool qsf_cpu_has_clmul(void)
{
    return false;
}

bool qsf_cpu_has_clmul512(void)
{
    return false;
}
#endif

#if !QSF_ARCH_ARM
bool qsf_cpu_has_crc32(void)
{
    return false;
}
#endif

qsf_isa qsf_isa_detect(void)
{
    int level = QSF_ISA_COUNT - 1;
    while (!qsf_isa_has((qsf_isa)level))
        level--;
    return (qsf_isa)level;
}

void qsf_isa_list(char *text, size_t cap_bytes)
{
    size_t used_bytes = 0;
    for (int level = 0; level < QSF_ISA_COUNT && used_bytes < cap_bytes; level++) {
        if (!qsf_isa_has((qsf_isa)level))
            continue;
        const int n_bytes = snprintf(text + used_bytes, cap_bytes - used_bytes, "%s%s",
                                     level > 0 ? " " : "", qsf_isa_name((qsf_isa)level));
        used_bytes += n_bytes > 0 ? (size_t)n_bytes : 0;
    }
}

qsf_isa qsf_isa_limit(void)
{
    const char *const wanted = getenv("QSF_ISA");
    int level = 0;
    while (level < (int)QSF_ISA_COUNT &&
           (wanted == NULL || strcmp(wanted, qsf_isa_name((qsf_isa)level)) != 0))
        level++;
    return (qsf_isa)level;
}

qsf_status qsf_isa_choose(qsf_isa *out)
{
    const char *const wanted = getenv("QSF_ISA");
    *out = qsf_isa_detect();
    if (wanted == NULL || *wanted == '\0')
        return QSF_OK;
    char available[64];
    qsf_isa_list(available, sizeof available);
    for (int level = 0; level < (int)QSF_ISA_COUNT; level++) {
        if (strcmp(wanted, qsf_isa_name((qsf_isa)level)) != 0)
            continue;
        if (!qsf_isa_has((qsf_isa)level))
            return QSF_FAIL(QSF_ERR_ARG, "QSF_ISA is \"%s\", which this machine lacks; it has: %s",
                            wanted, available);
        *out = (qsf_isa)level;
        return QSF_OK;
    }
    return QSF_FAIL(QSF_ERR_ARG, "QSF_ISA is \"%.32s\", which is unknown; this machine has: %s",
                    wanted, available);
}

#if defined(__linux__)

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

#else

uint32_t qsf_cpu_list_cores(uint32_t *cpus, uint32_t cap)
{
    (void)cpus;
    (void)cap;
    return 0;
}

#endif
