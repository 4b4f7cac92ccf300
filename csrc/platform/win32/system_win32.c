/* system_win32.c - memory, cores, features of the processor, the limits of a job and the texts of
 * errors, as Windows reports them; and its allocator.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>
/* After windows.h. */
#include <psapi.h>

#include "platform/cpu.h"
#include "platform/file.h"
#include "platform/heap.h"
#include "platform/system_memory.h"

static bool read_process(PROCESS_MEMORY_COUNTERS_EX *p)
{
    return K32GetProcessMemoryInfo(GetCurrentProcess(), (PROCESS_MEMORY_COUNTERS *)p, sizeof *p) !=
           0;
}

void qsf_system_memory_read(qsf_system_memory *out)
{
    *out = (qsf_system_memory){0};
    MEMORYSTATUSEX machine = {.dwLength = sizeof machine};
    if (GlobalMemoryStatusEx(&machine)) {
        out->total_bytes = machine.ullTotalPhys;
        out->available_bytes = machine.ullAvailPhys;
    }
    PROCESS_MEMORY_COUNTERS_EX process;
    if (read_process(&process)) {
        out->resident_bytes = process.WorkingSetSize;
        out->peak_bytes = process.PeakWorkingSetSize;
    }
}

uint32_t qsf_cpu_count_online(void)
{
    const DWORD n_online = GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    return n_online > 0 ? (uint32_t)n_online : 1;
}

/* The lowest processor of the group that the mask has; each group takes 64 numbers. */
static uint32_t first_of(const GROUP_AFFINITY *core)
{
    uint32_t bit = 0;
    while ((core->Mask >> bit & 1) == 0 && bit < 63)
        bit++;
    return (uint32_t)core->Group * 64 + bit;
}

uint32_t qsf_cpu_list_cores(uint32_t *cpus, uint32_t cap)
{
    DWORD n_bytes = 0;
    (void)GetLogicalProcessorInformationEx(RelationProcessorCore, NULL, &n_bytes);
    unsigned char *const rows = n_bytes > 0 ? malloc(n_bytes) : NULL;
    if (rows == NULL)
        return 0;
    uint32_t n_cores = 0;
    if (GetLogicalProcessorInformationEx(RelationProcessorCore, (void *)rows, &n_bytes)) {
        for (DWORD at = 0; at < n_bytes;) {
            const SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX *const row = (const void *)(rows + at);
            if (n_cores < cap)
                cpus[n_cores] = first_of(&row->Processor.GroupMask[0]);
            n_cores++;
            at += row->Size;
        }
    }
    free(rows);
    return n_cores;
}

#if QSF_ARCH_X86

/* Windows 11 and Server 2022 have the call that lets a process use the tiles of AMX. */
bool qsf_cpu_request_tiles(void)
{
    typedef BOOL(WINAPI * enable_fn)(DWORD64);
    const DWORD64 tile_data = (DWORD64)1 << 18;
    FARPROC address =
        GetProcAddress(GetModuleHandleW(L"kernel32.dll"), "EnableProcessOptionalXStateFeatures");
    enable_fn enable;
    _Static_assert(sizeof enable == sizeof address, "both are addresses of functions");
    memcpy(&enable, &address, sizeof enable);
    return enable != NULL && enable(tile_data);
}

#endif

#if QSF_ARCH_ARM

qsf_arm_features qsf_cpu_arm_features(void)
{
    const DWORD crc32 = 31;   /* PF_ARM_V8_CRC32_INSTRUCTIONS_AVAILABLE */
    const DWORD dotprod = 43; /* PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE */
    return (qsf_arm_features){.has_dotprod = IsProcessorFeaturePresent(dotprod) != 0,
                              .has_crc32 = IsProcessorFeaturePresent(crc32) != 0};
}

#endif

/* A job is what a control group is on Linux. Its limits count memory that is committed, touched or
 * not. */
void qsf_cgroup_read(qsf_cgroup *out, const char *root)
{
    (void)root;
    *out = (qsf_cgroup){UINT64_MAX, UINT64_MAX, UINT32_MAX};
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION job = {0};
    if (!QueryInformationJobObject(NULL, JobObjectExtendedLimitInformation, &job, sizeof job, NULL))
        return;
    const DWORD flags = job.BasicLimitInformation.LimitFlags;
    if ((flags & JOB_OBJECT_LIMIT_JOB_MEMORY) != 0)
        out->limit_bytes = job.JobMemoryLimit;
    if ((flags & JOB_OBJECT_LIMIT_PROCESS_MEMORY) != 0 && job.ProcessMemoryLimit < out->limit_bytes)
        out->limit_bytes = job.ProcessMemoryLimit;
    PROCESS_MEMORY_COUNTERS_EX process;
    if (out->limit_bytes == UINT64_MAX || !read_process(&process))
        return;
    out->left_bytes =
        out->limit_bytes > process.PrivateUsage ? out->limit_bytes - process.PrivateUsage : 0;
}

/* All or nothing: Windows reports only that memory is low. */
double qsf_psi_memory_percent(const char *root)
{
    (void)root;
    HANDLE low = CreateMemoryResourceNotification(LowMemoryResourceNotification);
    BOOL is_low = FALSE;
    if (low != NULL) {
        (void)QueryMemoryResourceNotification(low, &is_low);
        (void)CloseHandle(low);
    }
    return is_low ? 100.0 : 0.0;
}

/* ---- errors ---- */

void qsf_system_error_text(int code, char text[QSF_SYSTEM_ERROR_BYTES])
{
    char system[QSF_SYSTEM_ERROR_BYTES - 24] = "";
    const DWORD english = MAKELANGID(LANG_ENGLISH, SUBLANG_ENGLISH_US);
    const DWORD n = FormatMessageA(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, NULL,
                                   (DWORD)code, english, system, sizeof system, NULL);
    system[n < sizeof system ? n : 0] = '\0';
    system[strcspn(system, "\r\n")] = '\0';
    (void)snprintf(text, QSF_SYSTEM_ERROR_BYTES, "%s (error %d)",
                   system[0] != '\0' ? system : "the system gives no text", code);
}

/* ---- memory ---- */

#define PAGES_FROM_BYTES ((size_t)128 * 1024)

static bool is_pages(size_t n_bytes)
{
    return n_bytes >= PAGES_FROM_BYTES;
}

void *qsf_heap_alloc(size_t n_bytes)
{
    assert(n_bytes >= 1);
    if (n_bytes > SIZE_MAX / 2)
        return NULL;
    if (is_pages(n_bytes)) /* zeroed; a page takes memory when it is touched, and counts at once */
        return VirtualAlloc(NULL, n_bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    void *const p = _aligned_malloc(n_bytes, QSF_HEAP_ALIGN);
    if (p != NULL)
        memset(p, 0, n_bytes);
    return p;
}

/* Large pages of Windows need a right that users do not have. */
void *qsf_heap_alloc_huge(size_t n_bytes)
{
    return qsf_heap_alloc(n_bytes);
}

/* Refuses: Windows frees an allocation as a whole, so items of a row could not go back alone. */
void *qsf_heap_alloc_row(size_t n, size_t item_bytes)
{
    (void)n;
    (void)item_bytes;
    return NULL;
}

void qsf_heap_free(void *p, size_t n_bytes)
{
    if (p == NULL)
        return;
    if (is_pages(n_bytes))
        (void)VirtualFree(p, 0, MEM_RELEASE);
    else
        _aligned_free(p);
}
