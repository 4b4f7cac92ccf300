/* machine.c - gathers cpu and memory facts, measures limits. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "machine/machine.h"
#include "memory/ledger.h"
#include "platform/cpu.h"
#include "platform/pool.h"
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

uint32_t qsf_core_count(void)
{
    uint32_t n_cores = qsf_cpu_list_cores(NULL, 0);
    if (n_cores == 0)
        n_cores = qsf_cpu_count_online();
    qsf_cgroup group;
    qsf_cgroup_read(&group, "");
    return n_cores < group.n_cpus ? n_cores : group.n_cpus;
}

#define ROOFLINE_MIN_BYTES (64ULL << 20)
#define ROOFLINE_MAX_MS 60000U

qsf_status qsf_machine_describe(qsf_machine *out)
{
    QSF_REQUIRE(out);
    memset(out, 0, sizeof *out);
    qsf_isa isa;
    QSF_TRY(qsf_isa_choose(&isa));
    snprintf(out->isa_name, sizeof out->isa_name, "%s", qsf_isa_name(isa));
    qsf_isa_list(out->isa_available, sizeof out->isa_available);
    qsf_sysmem memory;
    qsf_sysmem_read(&memory);
    out->n_cores = qsf_core_count();
    out->memory_bytes = memory.total_bytes;
    out->available_bytes = memory.available_bytes;
    out->resident_bytes = memory.resident_bytes;
    out->peak_bytes = memory.peak_bytes;
    return QSF_OK;
}

static qsf_status measure(uint32_t n_threads, uint64_t n_bytes, uint32_t n_ms, double *out)
{
    qsf_sysmem memory;
    qsf_sysmem_read(&memory);
    if (n_bytes > memory.available_bytes) /* mmap may succeed, but using the memory may not */
        return QSF_FAIL(NOMEM,
                        "the measurement needs %llu MB of memory, the system has %llu MB left",
                        (unsigned long long)(n_bytes >> 20),
                        (unsigned long long)(memory.available_bytes >> 20));
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, UINT64_MAX);
    const size_t pool_bytes = qsf_pool_bytes(n_threads);
    void *const block = qsf_ledger_acquire(&ledger, QSF_USE_TABLES, pool_bytes);
    unsigned char *const bytes = qsf_ledger_acquire(&ledger, QSF_USE_WEIGHTS, (size_t)n_bytes);
    qsf_pool *pool = NULL;
    qsf_status status = block != NULL && bytes != NULL
                            ? qsf_pool_init(block, n_threads, false, &pool)
                            : QSF_FAIL(NOMEM, "no memory for %llu MB to measure with",
                                       (unsigned long long)(n_bytes >> 20));
    if (status == QSF_OK) {
        *out = qsf_roofline_read_rate(pool, bytes, (size_t)n_bytes, n_ms);
        qsf_pool_destroy(pool);
    }
    qsf_ledger_release(&ledger, QSF_USE_WEIGHTS, bytes, (size_t)n_bytes);
    qsf_ledger_release(&ledger, QSF_USE_TABLES, block, pool_bytes);
    return status;
}

qsf_status qsf_machine_roofline(uint32_t n_threads, uint64_t n_bytes, uint32_t n_ms,
                                double *read_bytes_per_s)
{
    QSF_REQUIRE(read_bytes_per_s);
    *read_bytes_per_s = 0;
    QSF_FAIL_IF(n_threads < 1 || n_threads > QSF_POOL_MAX_THREADS, ARG,
                "%u threads, allowed: 1 .. %u", n_threads, QSF_POOL_MAX_THREADS);
    QSF_FAIL_IF(n_ms < 1 || n_ms > ROOFLINE_MAX_MS, ARG, "%u ms, allowed: 1 .. %u", n_ms,
                ROOFLINE_MAX_MS);
    QSF_FAIL_IF(n_bytes < ROOFLINE_MIN_BYTES || n_bytes >> 20 < n_threads, ARG,
                "%llu MB for %u threads, allowed: %llu MB or more, and 1 MB a thread",
                (unsigned long long)(n_bytes >> 20), n_threads, ROOFLINE_MIN_BYTES >> 20);
    return measure(n_threads, n_bytes, n_ms, read_bytes_per_s);
}
