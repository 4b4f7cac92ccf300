/* not_linux.c - what POSIX systems other than Linux, such as macOS, report less of or lack. */
/* SPDX-License-Identifier: Apache-2.0 */
#if !defined(__linux__)

#include <stddef.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/status.h"
#include "platform/cgroup.h"
#include "platform/cpu_system.h"
#include "platform/io_cached.h"
#include "platform/io_way.h"
#include "platform/psi.h"
#include "platform/system_memory.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

void qsf_system_memory_read(qsf_system_memory *out)
{
    *out = (qsf_system_memory){0};
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

uint32_t qsf_cpu_list_cores(uint32_t *cpus, uint32_t cap)
{
    (void)cpus;
    (void)cap;
    return 0;
}

#if QSF_ARCH_X86

bool qsf_cpu_request_tiles(void)
{
    return false;
}

#endif

#if QSF_ARCH_ARM

static bool has_feature(const char *name)
{
#if defined(__APPLE__)
    int has = 0;
    size_t n_bytes = sizeof has;
    return sysctlbyname(name, &has, &n_bytes, NULL, 0) == 0 && has != 0;
#else
    (void)name;
    return false;
#endif
}

/* The compiler's macros are set where every processor of the system has the extension. */
qsf_arm_features qsf_cpu_arm_features(void)
{
    qsf_arm_features f = {.has_i8mm = has_feature("hw.optional.arm.FEAT_I8MM")};
#if defined(__ARM_FEATURE_DOTPROD)
    f.has_dotprod = true;
#endif
#if defined(__ARM_FEATURE_CRC32)
    f.has_crc32 = true;
#endif
    return f;
}

#endif

void qsf_cgroup_read(qsf_cgroup *out, const char *root)
{
    (void)root;
    *out = (qsf_cgroup){UINT64_MAX, UINT64_MAX, UINT32_MAX};
}

double qsf_psi_memory_percent(const char *root)
{
    (void)root;
    return 0.0;
}

bool qsf_io_is_cached(const qsf_file *file)
{
    (void)file;
    return false;
}

static qsf_status refuse(qsf_io *io)
{
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "I/O method %s: this system lacks it", io->way->name);
}

static void close_nothing(qsf_io *io)
{
    (void)io;
}

const qsf_io_way qsf_io_uring_way = {.name = "uring", .open = refuse, .close = close_nothing};
const qsf_io_way qsf_io_mmap_way = {.name = "mmap", .open = refuse, .close = close_nothing};

#endif
