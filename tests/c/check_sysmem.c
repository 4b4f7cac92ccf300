/* check_sysmem.c - memory figures that move with what is touched, and the limits of
 * control groups and stalls, read from small models of /proc and /sys. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <ftw.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/asan.h"
#include "platform/system_memory.h"
#include "platform/heap.h"
#include "platform/linux/procfile.h"
#include "machine/machine.h"

#define MIB (UINT64_C(1) << 20)

static void check_figures(void)
{
    qsf_sysmem now;
    qsf_sysmem_read(&now);
    CHECK(now.total_bytes > 0);
    CHECK(now.available_bytes <= now.total_bytes);
    CHECK(now.peak_bytes >= now.resident_bytes);
#if defined(__linux__)
    CHECK(now.available_bytes > 0);
    CHECK(now.resident_bytes > 0);
#endif
}

/* Within what the kernel's counters may lag behind: some pages on each processor. */
static void check_touched_counts(void)
{
#if defined(__linux__)
    const size_t n_bytes = 64 * MIB;
    qsf_sysmem before;
    qsf_sysmem after;
    qsf_sysmem_read(&before);
    unsigned char *const p = qsf_heap_alloc(n_bytes);
    if (!CHECK(p != NULL))
        return;
    qsf_sysmem_read(&after);
    if (!QSF_ASAN) /* under it, the block is cleared by hand */
        CHECK(after.resident_bytes < before.resident_bytes + 8 * MIB);
    memset(p, 1, n_bytes);
    qsf_sysmem_read(&after);
    CHECK(after.resident_bytes > before.resident_bytes + 56 * MIB);
    CHECK(after.peak_bytes >= after.resident_bytes);
    qsf_heap_free(p, n_bytes);
    const uint64_t full_bytes = after.resident_bytes;
    qsf_sysmem_read(&after);
    if (!QSF_ASAN) /* under it, freed blocks are kept for a while */
        CHECK(after.resident_bytes < full_bytes - 56 * MIB);
    CHECK(after.peak_bytes > before.resident_bytes + 56 * MIB);
#endif
}

static void check_fields(void)
{
    static const char text[] =
        "MemTotal:  2048 kB\nMemFree: 7 kB\nAnonTotal: x\ninactive_file 55\n";
    uint64_t n = 99;
    CHECK(qsf_procfile_field(text, "MemTotal:", &n));
    CHECK_EQ_U64(n, 2048);
    CHECK(qsf_procfile_field(text, "inactive_file ", &n));
    CHECK_EQ_U64(n, 55);
    CHECK(!qsf_procfile_field(text, "Total:", &n)); /* not at the start of a line */
    CHECK(!qsf_procfile_field(text, "AnonTotal:", &n));
    CHECK(!qsf_procfile_field("", "MemTotal:", &n));
    CHECK_EQ_U64(n, 55);
    char none[8] = "xxxxxxx";
    CHECK(!qsf_procfile_read("check_sysmem.missing", none, sizeof none));
    CHECK_STR(none, "");
}

#if defined(__linux__)

static char root[] = "check_sysmem.XXXXXX";

static int remove_one(const char *path, const struct stat *about, int type, struct FTW *where)
{
    (void)about;
    (void)type;
    (void)where;
    return remove(path);
}

/* Writes `text` into a file below the root, making the folders on the way. */
static void put(const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s%s", root, name);
    for (char *slash = strchr(path, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    FILE *const file = fopen(path, "w");
    if (!CHECK(file != NULL))
        return;
    fputs(text, file);
    fclose(file);
}

/* What the process says of itself. */
static void put_self(const char *mountinfo, const char *groups)
{
    put("/proc/self/mountinfo", mountinfo);
    put("/proc/self/cgroup", groups);
}

/* Memory of a group of version 2 or, with a name of the controller, of version 1. */
static void put_group(const char *folder, const char *limit, const char *used)
{
    const bool is_v1 = strstr(folder, "/memory") != NULL;
    char name[256];
    snprintf(name, sizeof name, "%s/memory.%s", folder, is_v1 ? "limit_in_bytes" : "max");
    put(name, limit);
    snprintf(name, sizeof name, "%s/memory.%s", folder, is_v1 ? "usage_in_bytes" : "current");
    put(name, used);
}

static void clear_root(void)
{
    CHECK_EQ(nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
    CHECK_EQ(mkdir(root, 0700), 0);
}

static void expect(uint64_t limit_bytes, uint64_t left_bytes, uint32_t n_cpus)
{
    qsf_cgroup have;
    qsf_cgroup_read(&have, root);
    CHECK_EQ_U64(have.limit_bytes, limit_bytes);
    CHECK_EQ_U64(have.left_bytes, left_bytes);
    CHECK_EQ_U64(have.n_cpus, n_cpus);
    clear_root();
}

#define V2_MOUNT "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
#define OTHER_MOUNTS "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:5 / /proc rw - proc proc rw\n"

static void check_version_2(void)
{
    expect(UINT64_MAX, UINT64_MAX, UINT32_MAX); /* nothing there at all */

    /* The tightest is the group in the middle; the own group has no limit. */
    put_self(OTHER_MOUNTS V2_MOUNT, "0::/user/session/app\n");
    put_group("/sys/fs/cgroup/user/session/app", "max\n", "500\n");
    put("/sys/fs/cgroup/user/session/app/cpu.max", "max 100000\n");
    put_group("/sys/fs/cgroup/user/session", "10000\n", "7000\n");
    put("/sys/fs/cgroup/user/session/memory.stat",
        "anon 1\nfile 2600\ninactive_anon 9\nactive_file 600\ninactive_file 2000\n");
    put("/sys/fs/cgroup/user/session/cpu.max", "250000 100000\n");
    put_group("/sys/fs/cgroup/user", "20000\n", "8000\n");
    put("/sys/fs/cgroup/user/cpu.max", "400000 100000\n");
    expect(10000, 5600, 3);

    /* The lowest limit and the least that is left may belong to different groups. */
    put_self(V2_MOUNT, "0::/a/b\n");
    put_group("/sys/fs/cgroup/a/b", "1000\n", "100\n");
    put_group("/sys/fs/cgroup/a", "2000\n", "2100\n");
    put("/sys/fs/cgroup/a/cpu.max", "1000 100000\n");
    expect(1000, 0, 1);

    /* What slows down for good binds like what kills. */
    put_self(V2_MOUNT, "0::/a\n");
    put("/sys/fs/cgroup/a/memory.max", "2000\n");
    put("/sys/fs/cgroup/a/memory.high", "1500\n");
    put("/sys/fs/cgroup/a/memory.current", "1200\n");
    expect(1500, 300, UINT32_MAX);

    /* In a container's own namespace: the files lie at the mount point itself. */
    put_self(V2_MOUNT, "0::/\n");
    put_group("/sys/fs/cgroup", "4096\n", "96\n");
    put("/sys/fs/cgroup/cpu.max", "200000 100000\n");
    expect(4096, 4000, 2);

    /* A group outside of what is visible. */
    put_self(V2_MOUNT, "0::/../other\n");
    put_group("/sys/fs/cgroup", "4096\n", "96\n");
    put("/other/memory.max", "1\n");
    put("/other/memory.current", "1\n");
    expect(4096, 4000, UINT32_MAX);
}

#define V1_MOUNTS(from)                                                                  \
    "31 25 0:27 " from " /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" \
    "32 25 0:28 " from " /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"           \
    "33 25 0:29 " from " /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
#define V1_GROUPS(path) "9:name=systemd:/\n8:cpuset:/\n4:memory:" path "\n2:cpu,cpuacct:" path "\n"

static void check_version_1(void)
{
    put_self(OTHER_MOUNTS V1_MOUNTS("/"), V1_GROUPS("/jobs/17"));
    put_group("/sys/fs/cgroup/memory/jobs/17", "9223372036854771712\n", "50\n");
    put_group("/sys/fs/cgroup/memory/jobs", "3000\n", "1500\n");
    put("/sys/fs/cgroup/memory/jobs/memory.stat",
        "inactive_file 7\ntotal_inactive_file 500\ntotal_active_file 100\n");
    put("/sys/fs/cgroup/cpu,cpuacct/jobs/17/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuacct/jobs/17/cpu.cfs_period_us", "100000\n");
    put("/sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us", "150000\n");
    put("/sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us", "100000\n");
    expect(3000, 2100, 2);

    /* In a container that sees its own part only, while the group is named in full. */
    put_self(V1_MOUNTS("/docker/abc"), V1_GROUPS("/docker/abc/job"));
    put_group("/sys/fs/cgroup/memory", "5000\n", "1000\n");
    put_group("/sys/fs/cgroup/memory/job", "4000\n", "900\n");
    expect(4000, 3100, UINT32_MAX);

    /* Another container whose name begins alike is not this one. */
    put_self(V1_MOUNTS("/docker/abc"), V1_GROUPS("/docker/abcdef"));
    put_group("/sys/fs/cgroup/memory", "5000\n", "1000\n");
    expect(5000, 4000, UINT32_MAX);
}

/* Version 1 for memory, version 2 mounted beside it for the rest. */
static void check_hybrid(void)
{
    put("/proc/self/mountinfo",
        OTHER_MOUNTS V1_MOUNTS(
            "/") "34 25 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    put("/proc/self/cgroup", V1_GROUPS("/job") "0::/unit\n");
    put_group("/sys/fs/cgroup/memory/job", "6000\n", "1000\n");
    put("/sys/fs/cgroup/unified/unit/cpu.max", "100001 100000\n");
    expect(6000, 5000, 2);
}

#define PSI(full)                                               \
    "some avg10=77.00 avg60=66.00 avg300=55.00 total=9000000\n" \
    "full avg10=" full " avg60=44.00 avg300=33.00 total=8000000\n"

static void expect_percent(double percent)
{
    CHECK_NEAR(qsf_psi_memory_percent(root), percent, 1e-9);
    clear_root();
}

static void check_psi(void)
{
    expect_percent(0.0);
    put("/proc/pressure/memory", PSI("12.34"));
    expect_percent(12.34);
    put("/proc/pressure/memory", "some avg10=5.00 avg60=0.00 avg300=0.00 total=1\n");
    expect_percent(0.0);

    /* The own group says more about this process than the machine, */
    put_self(V2_MOUNT, "0::/a/b\n");
    put("/proc/pressure/memory", PSI("12.34"));
    put("/sys/fs/cgroup/a/b/memory.pressure", PSI("0.50"));
    put("/sys/fs/cgroup/a/memory.pressure", PSI("99.00"));
    expect_percent(0.5);

    /* where it has the file. */
    put_self(V2_MOUNT, "0::/\n");
    put("/proc/pressure/memory", PSI("100.00"));
    expect_percent(100.0);
}

/* Mounts beyond the first buffer, and a line that no buffer holds, hide nothing. */
static void check_many_mounts(void)
{
    static char text[5 * QSF_PROCFILE_LINE_BYTES];
    size_t at = 0;
    while (at < 2 * QSF_PROCFILE_LINE_BYTES)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s", OTHER_MOUNTS);
    memset(text + at, 'x', QSF_PROCFILE_LINE_BYTES + 100);
    at += QSF_PROCFILE_LINE_BYTES + 100;
    snprintf(text + at, sizeof text - at, "\n%s", V2_MOUNT);
    for (int has_end = 1; has_end >= 0; has_end--) {
        if (!has_end)
            text[strlen(text) - 1] = '\0';
        put_self(text, "0::/a\n");
        put_group("/sys/fs/cgroup/a", "2000\n", "1200\n");
        expect(2000, 800, UINT32_MAX);
    }
}

static void check_cgroups(void)
{
    if (!CHECK(mkdtemp(root) != NULL))
        return;
    check_psi();
    check_many_mounts();
    check_version_2();
    check_version_1();
    check_hybrid();
    CHECK_EQ(rmdir(root), 0);
}

#else

static void check_cgroups(void)
{
    qsf_cgroup have;
    qsf_cgroup_read(&have, "");
    CHECK_EQ_U64(have.limit_bytes, UINT64_MAX);
    CHECK_EQ_U64(have.n_cpus, UINT32_MAX);
    CHECK_NEAR(qsf_psi_memory_percent(""), 0.0, 0.0);
}

#endif

int main(void)
{
    check_figures();
    check_touched_counts();
    check_fields();
    check_cgroups();
    return check_report("check_sysmem");
}
