/* system_linux.c - memory, control groups, cores and extensions, as Linux reports them. */
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

/* ---- control groups ---- */

/* /proc/self/cgroup names the group as "id:controllers:path". /proc/self/mountinfo names the mount
 * point of the hierarchy and its highest visible group; the mount point replaces that part of the
 * path. */

#define PATH_BYTES 1024

typedef struct group_mount {
    char visible_from[PATH_BYTES];
    char point[PATH_BYTES];
} group_mount;

typedef void visit_fn(const char *folder, qsf_cgroup *out);

static bool join(char *dst, size_t cap_bytes, const char *a, const char *b, const char *c)
{
    const int n_bytes = snprintf(dst, cap_bytes, "%s%s%s", a, b, c);
    return n_bytes >= 0 && (size_t)n_bytes < cap_bytes;
}

/* True if `word` is one of the comma-separated words of `list`. */
static bool has_word(const char *list, const char *word)
{
    const size_t word_bytes = strlen(word);
    for (const char *at = list; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, word, word_bytes) == 0 && (at[word_bytes] == ',' || at[word_bytes] == '\0'))
            return true;
    }
    return false;
}

/* One line: "id parent major:minor from point options [more] - type source options". */
static bool parse_mount(const char *line, const char *controller, group_mount *out)
{
    char type[32];
    char options[256];
    const char *const tail = strstr(line, " - ");
    if (tail == NULL || sscanf(tail, " - %31s %*s %255s", type, options) != 2)
        return false;
    const bool is_it = *controller != '\0'
                           ? strcmp(type, "cgroup") == 0 && has_word(options, controller)
                           : strcmp(type, "cgroup2") == 0;
    return is_it && sscanf(line, "%*s %*s %*s %1023s %1023s", out->visible_from, out->point) == 2;
}

typedef struct mount_search {
    const char *controller;
    group_mount *out;
} mount_search;

static bool is_wanted_mount(void *arg, const char *line)
{
    const mount_search *const search = arg;
    return parse_mount(line, search->controller, search->out);
}

/* `controller`: name in version 1; "" for version 2. */
static bool find_mount(const char *root, const char *controller, group_mount *out)
{
    char path[PATH_BYTES];
    mount_search search = {controller, out};
    return join(path, sizeof path, root, "/proc/self/mountinfo", "") &&
           qsf_procfile_find_line(path, is_wanted_mount, &search);
}

/* The group's path in /proc/self/cgroup, which starts with '/'. */
static bool find_group(const char *root, const char *controller, char *group, size_t cap_bytes)
{
    char path[PATH_BYTES];
    char text[QSF_PROCFILE_BYTES];
    if (!join(path, sizeof path, root, "/proc/self/cgroup", "") ||
        !qsf_procfile_read(path, text, sizeof text))
        return false;
    for (char *line = text; line != NULL && *line != '\0';) {
        char *const end = strchr(line, '\n');
        if (end != NULL)
            *end = '\0';
        char *const controllers = strchr(line, ':');
        char *const name = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (name != NULL) {
            *name = '\0';
            if (has_word(controllers + 1, controller))
                return join(group, cap_bytes, name + 1, "", "");
        }
        line = end != NULL ? end + 1 : NULL;
    }
    return false;
}

/* The part of `group` below the mount point; "" if the group is not visible. */
static const char *below_mount(const char *group, const char *visible_from)
{
    const size_t shared_bytes = strcmp(visible_from, "/") == 0 ? 0 : strlen(visible_from);
    const char *const rest = group + shared_bytes;
    if (strncmp(group, visible_from, shared_bytes) != 0 || *rest != '/' || rest[1] == '\0' ||
        strstr(group, "/..") != NULL)
        return "";
    return rest;
}

/* The group's folder. Its first *top_bytes bytes are the mount point. */
static bool find_folder(const char *root, const char *controller, char *folder, size_t cap_bytes,
                        size_t *top_bytes)
{
    group_mount mount;
    char group[PATH_BYTES];
    if (!find_mount(root, controller, &mount) ||
        !find_group(root, controller, group, sizeof group) ||
        !join(folder, cap_bytes, root, mount.point, below_mount(group, mount.visible_from)))
        return false;
    *top_bytes = strlen(root) + strlen(mount.point);
    return true;
}

/* Visits the group and then those above it, up to the mount point. */
static void walk_up(const char *root, const char *controller, visit_fn *visit, qsf_cgroup *out)
{
    char folder[2 * PATH_BYTES];
    size_t top_bytes;
    if (!find_folder(root, controller, folder, sizeof folder, &top_bytes))
        return;
    visit(folder, out);
    while (strlen(folder) > top_bytes) {
        *strrchr(folder, '/') = '\0';
        visit(folder, out);
    }
}

/* Path of the file `name` in this process's version-2 group; false if there is no such group. */
static bool path_in_group(const char *name, const char *root, char *path, size_t cap_bytes)
{
    char folder[2 * PATH_BYTES];
    size_t top_bytes;
    return find_folder(root, "", folder, sizeof folder, &top_bytes) &&
           join(path, cap_bytes, folder, "/", name);
}

static bool read_number(const char *folder, const char *name, uint64_t *out)
{
    char path[2 * PATH_BYTES];
    return join(path, sizeof path, folder, "/", name) && qsf_procfile_number(path, out);
}

static void lower_memory(qsf_cgroup *out, uint64_t limit_bytes, uint64_t used_bytes,
                         uint64_t cache_bytes)
{
    if (limit_bytes < out->limit_bytes)
        out->limit_bytes = limit_bytes;
    /* The kernel reclaims file pages, even recently used ones, before it refuses memory. */
    const uint64_t fixed_bytes = used_bytes > cache_bytes ? used_bytes - cache_bytes : 0;
    const uint64_t left_bytes = limit_bytes > fixed_bytes ? limit_bytes - fixed_bytes : 0;
    if (left_bytes < out->left_bytes)
        out->left_bytes = left_bytes;
}

static void visit_memory(const char *folder, qsf_cgroup *out, const char *limit_name,
                         const char *used_name, const char *const cache_keys[2])
{
    uint64_t limit_bytes;
    uint64_t used_bytes;
    if (!read_number(folder, limit_name, &limit_bytes) ||
        !read_number(folder, used_name, &used_bytes))
        return;
    uint64_t cache_bytes = 0;
    char path[2 * PATH_BYTES];
    char text[QSF_PROCFILE_BYTES];
    if (join(path, sizeof path, folder, "/memory.stat", "") &&
        qsf_procfile_read(path, text, sizeof text)) {
        for (size_t i = 0; i < 2; i++) {
            uint64_t n_bytes = 0;
            (void)qsf_procfile_field(text, cache_keys[i], &n_bytes);
            cache_bytes += n_bytes;
        }
    }
    lower_memory(out, limit_bytes, used_bytes, cache_bytes);
}

static void lower_cpus(qsf_cgroup *out, uint64_t quota_us, uint64_t period_us)
{
    if (period_us == 0 || quota_us == 0)
        return;
    const uint64_t n_cpus = quota_us / period_us + (quota_us % period_us != 0);
    if (n_cpus < out->n_cpus)
        out->n_cpus = (uint32_t)n_cpus;
}

static void visit_memory_v1(const char *folder, qsf_cgroup *out)
{
    static const char *const cache_keys[] = {"total_inactive_file ", "total_active_file "};
    visit_memory(folder, out, "memory.limit_in_bytes", "memory.usage_in_bytes", cache_keys);
}

static void visit_cpu_v1(const char *folder, qsf_cgroup *out)
{
    uint64_t quota_us;
    uint64_t period_us;
    if (read_number(folder, "cpu.cfs_quota_us", &quota_us) &&
        read_number(folder, "cpu.cfs_period_us", &period_us))
        lower_cpus(out, quota_us, period_us);
}

static void visit_v2(const char *folder, qsf_cgroup *out)
{
    static const char *const cache_keys[] = {"inactive_file ", "active_file "};
    visit_memory(folder, out, "memory.max", "memory.current", cache_keys);
    /* Above memory.high the kernel kills no process, but throttles all of them. */
    visit_memory(folder, out, "memory.high", "memory.current", cache_keys);

    char path[2 * PATH_BYTES];
    char text[64]; /* "quota period", or "max period" */
    unsigned long long quota_us;
    unsigned long long period_us;
    if (join(path, sizeof path, folder, "/cpu.max", "") &&
        qsf_procfile_read(path, text, sizeof text) &&
        sscanf(text, "%llu %llu", &quota_us, &period_us) == 2)
        lower_cpus(out, quota_us, period_us);
}

void qsf_cgroup_read(qsf_cgroup *out, const char *root)
{
    *out = (qsf_cgroup){UINT64_MAX, UINT64_MAX, UINT32_MAX};
    walk_up(root, "memory", visit_memory_v1, out);
    walk_up(root, "cpu", visit_cpu_v1, out);
    walk_up(root, "", visit_v2, out);
}

/* ---- pressure stall information: the line "full avg10=1.23 avg60=..." of Linux ---- */

static const char key[] = "full avg10=";

/* Not strtod, which uses the locale's decimal point. */
static double parse_percent(const char *at)
{
    double percent = 0.0;
    for (; *at >= '0' && *at <= '9'; at++)
        percent = percent * 10.0 + (*at - '0');
    double place = 0.1;
    if (*at == '.')
        for (at++; *at >= '0' && *at <= '9'; at++, place /= 10.0)
            percent += place * (*at - '0');
    return percent;
}

static bool read_percent(const char *path, double *out)
{
    char text[256];
    if (!qsf_procfile_read(path, text, sizeof text))
        return false;
    const char *const line = strstr(text, key);
    if (line == NULL)
        return false;
    *out = parse_percent(line + sizeof key - 1);
    return true;
}

double qsf_psi_memory_percent(const char *root)
{
    char path[2 * PATH_BYTES];
    double percent = 0.0;
    if (path_in_group("memory.pressure", root, path, sizeof path) && read_percent(path, &percent))
        return percent;
    if (join(path, sizeof path, root, "/proc/pressure/memory", ""))
        (void)read_percent(path, &percent);
    return percent;
}
