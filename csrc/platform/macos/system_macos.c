/* system_macos.c - memory, cores and features of the processor, as the Mach kernel reports them.
 *
 * Built for macOS on another system, never run there by the project.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <mach/mach.h>
#include <sys/sysctl.h>

#include "platform/cpu.h"
#include "platform/system_memory.h"

/* A number of 32 or 64 bits; 0 if the system does not know the name. */
static uint64_t number_of(const char *name)
{
    uint64_t value = 0; /* the system writes the low half of it where the number has 32 bits */
    size_t n_bytes = sizeof value;
    return sysctlbyname(name, &value, &n_bytes, NULL, 0) == 0 ? value : 0;
}

/* Available are free pages and those of files, as in Linux's MemAvailable; other inactive pages
 * would have to be compressed. Speculative pages are in free_count and in external_page_count. The
 * footprint is the number that the system's killer and Activity Monitor count: resident pages
 * without those of files, and compressed ones. */
void qsf_system_memory_read(qsf_system_memory *out)
{
    *out = (qsf_system_memory){.total_bytes = number_of("hw.memsize")};
    const mach_port_t host = mach_host_self();
    vm_statistics64_data_t pages;
    mach_msg_type_number_t n_words = HOST_VM_INFO64_COUNT;
    if (host_statistics64(host, HOST_VM_INFO64, (host_info64_t)&pages, &n_words) == KERN_SUCCESS)
        out->available_bytes = ((uint64_t)pages.free_count - pages.speculative_count +
                                pages.external_page_count + pages.purgeable_count) *
                               vm_kernel_page_size;
    mach_port_deallocate(mach_task_self(), host);

    task_vm_info_data_t task;
    n_words = TASK_VM_INFO_COUNT;
    if (task_info(mach_task_self(), TASK_VM_INFO, (task_info_t)&task, &n_words) != KERN_SUCCESS)
        return;
    out->resident_bytes = task.phys_footprint;
    out->peak_bytes = (uint64_t)task.ledger_phys_footprint_peak;
    if (out->peak_bytes < out->resident_bytes)
        out->peak_bytes = out->resident_bytes;
}

/* Only fast cores: the others would wait for a slow one at each barrier. Threads cannot be
 * pinned, so `cpus` holds numbers only. */
uint32_t qsf_cpu_list_cores(uint32_t *cpus, uint32_t cap)
{
    uint32_t n_cores = (uint32_t)number_of("hw.perflevel0.physicalcpu");
    if (n_cores == 0)
        n_cores = (uint32_t)number_of("hw.physicalcpu");
    for (uint32_t i = 0; i < n_cores && i < cap; i++)
        cpus[i] = i;
    return n_cores;
}

#if QSF_ARCH_X86

bool qsf_cpu_request_tiles(void)
{
    return false;
}

#endif

#if QSF_ARCH_ARM

qsf_arm_features qsf_cpu_arm_features(void)
{
    return (qsf_arm_features){.has_dotprod = number_of("hw.optional.arm.FEAT_DotProd") != 0,
                              .has_i8mm = number_of("hw.optional.arm.FEAT_I8MM") != 0,
                              .has_crc32 = number_of("hw.optional.armv8_crc32") != 0};
}

#endif

void qsf_cgroup_read(qsf_cgroup *out, const char *root)
{
    (void)root;
    *out = (qsf_cgroup){UINT64_MAX, UINT64_MAX, UINT32_MAX};
}

/* The levels of the system's warnings: 1 normal, 2 warning, 4 critical. */
double qsf_psi_memory_percent(const char *root)
{
    (void)root;
    switch (number_of("kern.memorystatus_vm_pressure_level")) {
    case 2:
        return 20.0;
    case 4:
        return 100.0;
    default:
        return 0.0;
    }
}
