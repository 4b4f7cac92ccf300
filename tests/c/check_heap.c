/* check_heap.c - blocks are aligned, zeroed, no larger than asked for, and go back; the ledger. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <stdbool.h>
#include <stdint.h>

#include "base/asan.h"
#include "sanitized.h"
#include "memory/ledger.h"
#include "platform/heap.h"
#include "platform/linux/procfile.h"

#define MIB ((size_t)1 << 20)
#define HUGE_PAGE_BYTES (2 * MIB)
/* Of the C library: what a block's size is compared with, loosely. */
#define SLACK_KIB 1024

static const size_t sizes[] = {
    1,           63,      65,          4096,           128 * 1024 - 1, 128 * 1024 + 1,
    2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 4097, 32 * MIB + 5,
};

static uint64_t status_kib(const char *name)
{
    char text[QSF_PROCFILE_BYTES];
    uint64_t kib = 0;
    if (qsf_procfile_read("/proc/self/status", text, sizeof text))
        (void)qsf_procfile_field(text, name, &kib);
    return kib;
}

static bool all_equal(const unsigned char *p, size_t n, unsigned char value)
{
    while (n > 0 && p[n - 1] == value)
        n--;
    return n == 0;
}

static void check_block(size_t n_bytes, void *alloc(size_t n_bytes), size_t align)
{
    unsigned char *const p = alloc(n_bytes);
    if (!CHECK(p != NULL))
        return;
    CHECK_EQ((uintptr_t)p % align, 0);
    CHECK(all_equal(p, n_bytes, 0));
    memset(p, 0xA5, n_bytes);
    qsf_heap_free(p, n_bytes);
}

static void check_sizes(void)
{
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        const bool is_huge = !QSF_ASAN && sizes[i] >= HUGE_PAGE_BYTES;
        check_block(sizes[i], qsf_heap_alloc, QSF_HEAP_ALIGN);
#if defined(__linux__)
        check_block(sizes[i], qsf_heap_alloc_huge, is_huge ? HUGE_PAGE_BYTES : QSF_HEAP_ALIGN);
#else
        (void)is_huge;
        check_block(sizes[i], qsf_heap_alloc_huge, QSF_HEAP_ALIGN);
#endif
    }
    CHECK(qsf_heap_alloc(SIZE_MAX) == NULL);
    CHECK(qsf_heap_alloc_huge(SIZE_MAX) == NULL);
    if (SIZE_MAX > UINT32_MAX) /* else a machine may have that much */
        CHECK(qsf_heap_alloc_huge(SIZE_MAX / 2 - 1) == NULL);
    qsf_heap_free(NULL, 5);
}

/* A block in huge pages takes no more memory than its size, and all of it, with the
 * addresses around it, goes back. */
static void check_footprint(void)
{
    if (IS_SANITIZED || status_kib("VmRSS:") == 0) {
        printf("check_heap: skipped: the system does not say what the process uses\n");
        return;
    }
    enum { N_BLOCKS = 6 };
    static const size_t n_bytes = 3 * MIB + 4096;
    unsigned char *blocks[N_BLOCKS];
    const uint64_t size_kib = status_kib("VmSize:");
    const uint64_t rss_kib = status_kib("VmRSS:");
    for (size_t i = 0; i < N_BLOCKS; i++) {
        blocks[i] = qsf_heap_alloc_huge(n_bytes);
        if (CHECK(blocks[i] != NULL))
            memset(blocks[i], 1, n_bytes);
    }
    const uint64_t asked_kib = N_BLOCKS * n_bytes / 1024;
    CHECK(status_kib("VmRSS:") - rss_kib <= asked_kib + SLACK_KIB);
    CHECK(status_kib("VmSize:") - size_kib <= asked_kib + SLACK_KIB);
    for (size_t i = 0; i < N_BLOCKS; i++)
        qsf_heap_free(blocks[i], n_bytes);
    CHECK(status_kib("VmRSS:") <= rss_kib + SLACK_KIB);
    CHECK(status_kib("VmSize:") <= size_kib + SLACK_KIB);
}

/* Items of a row lie behind each other and are freed in any order. */
static void check_row(void)
{
    enum { N_ITEMS = 5 };
    static const size_t n_bytes = 3 * MIB + 65536; /* a multiple of every system's page */
    static const uint32_t order[N_ITEMS] = {2, 0, 4, 1, 3};
    unsigned char *const row = qsf_heap_alloc_row(N_ITEMS, n_bytes);
    CHECK_EQ(row == NULL, QSF_ASAN);
    for (size_t i = 0; row != NULL && i < N_ITEMS; i++) {
        unsigned char *const item = row + order[i] * n_bytes;
        CHECK(all_equal(item, n_bytes, 0));
        memset(item, 0xA5, n_bytes);
        qsf_heap_free(item, n_bytes);
    }
    CHECK(qsf_heap_alloc_row(2, 65536) == NULL); /* from the C library, which frees no parts */
    CHECK(qsf_heap_alloc_row(2, n_bytes + 64) == NULL);
    CHECK(qsf_heap_alloc_row(SIZE_MAX / MIB, 65536 * 64) == NULL);
}

/* ---- the ledger: the ceiling holds and the counts are right ---- */

static void check_ceiling(void)
{
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, 1000);
    void *const a = qsf_ledger_acquire(&ledger, QSF_USE_WEIGHTS, 600);
    CHECK(a != NULL);
    CHECK(qsf_ledger_acquire(&ledger, QSF_USE_KV, 401) == NULL);
    CHECK(qsf_ledger_acquire(&ledger, QSF_USE_KV, SIZE_MAX) == NULL);
    CHECK_EQ_U64(ledger.held_bytes, 600);
    CHECK_EQ_U64(ledger.n_acquired, 1);
    void *const b = qsf_ledger_acquire(&ledger, QSF_USE_KV, 400);
    CHECK(b != NULL);
    CHECK_EQ_U64(ledger.held_bytes, 1000);
    CHECK_EQ_U64(ledger.peak_bytes, 1000);
    CHECK_EQ_U64(ledger.held_by_use[QSF_USE_WEIGHTS], 600);
    CHECK_EQ_U64(ledger.held_by_use[QSF_USE_KV], 400);
    CHECK(qsf_ledger_acquire(&ledger, QSF_USE_SCRATCH, 1) == NULL);

    qsf_ledger_release(&ledger, QSF_USE_WEIGHTS, a, 600);
    qsf_ledger_release(&ledger, QSF_USE_WEIGHTS, NULL, 600);
    CHECK_EQ_U64(ledger.held_bytes, 400);
    CHECK_EQ_U64(ledger.held_by_use[QSF_USE_WEIGHTS], 0);
    CHECK_EQ_U64(ledger.held_by_use[QSF_USE_KV], 400);
    CHECK_EQ_U64(ledger.peak_bytes, 1000);
    void *const c = qsf_ledger_acquire(&ledger, QSF_USE_SCRATCH, 600);
    CHECK(c != NULL);
    qsf_ledger_release(&ledger, QSF_USE_SCRATCH, c, 600);
    qsf_ledger_release(&ledger, QSF_USE_KV, b, 400);
    CHECK_EQ_U64(ledger.held_bytes, 0);
    CHECK_EQ_U64(ledger.n_acquired, 3);

    qsf_ledger_init(&ledger, 0);
    CHECK(qsf_ledger_acquire(&ledger, QSF_USE_HANDLE, 1) == NULL);
}

/* A row is one request, and each item goes back by itself. */
static void check_ledger_row(void)
{
    static const size_t n_bytes = 1 << 20;
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, 3 * n_bytes);
    CHECK(qsf_ledger_acquire_row(&ledger, QSF_USE_EXPERTS, 4, n_bytes) == NULL);
    CHECK(qsf_ledger_acquire_row(&ledger, QSF_USE_EXPERTS, 4, SIZE_MAX / 2) == NULL);
    ledger.grants_until_fault = 0;
    CHECK(qsf_ledger_acquire_row(&ledger, QSF_USE_EXPERTS, 3, n_bytes) == NULL);
    CHECK_EQ_U64(ledger.held_bytes, 0);
    unsigned char *const row = qsf_ledger_acquire_row(&ledger, QSF_USE_EXPERTS, 3, n_bytes);
#if defined(_WIN32) /* frees only what it allocated in one call */
    CHECK(row == NULL);
#else
    CHECK_EQ(row == NULL, QSF_ASAN);
#endif
    for (size_t i = 0; row != NULL && i < 3; i++) {
        CHECK_EQ_U64(ledger.held_by_use[QSF_USE_EXPERTS], (3 - i) * n_bytes);
        qsf_ledger_release(&ledger, QSF_USE_EXPERTS, row + i * n_bytes, n_bytes);
    }
    CHECK_EQ_U64(ledger.held_bytes, 0);
    CHECK_EQ_U64(ledger.n_acquired, row != NULL);
}

/* With n the n-th request after n good ones fails, and only that one. */
static void check_ledger_faults(void)
{
    for (int64_t n_good = 0; n_good < 4; n_good++) {
        qsf_ledger ledger;
        qsf_ledger_init(&ledger, 1 << 20);
        CHECK_EQ_I64(ledger.grants_until_fault, -1);
        ledger.grants_until_fault = n_good;
        void *blocks[6];
        for (int64_t i = 0; i < 6; i++) {
            blocks[i] = qsf_ledger_acquire(&ledger, QSF_USE_TABLES, 100);
            CHECK((blocks[i] == NULL) == (i == n_good));
        }
        CHECK_EQ_U64(ledger.n_acquired, 5);
        CHECK_EQ_U64(ledger.held_bytes, 500);
        for (int64_t i = 0; i < 6; i++)
            qsf_ledger_release(&ledger, QSF_USE_TABLES, blocks[i], 100);
        CHECK_EQ_U64(ledger.held_bytes, 0);
    }
}

int main(void)
{
    check_sizes();
    check_row();
    check_footprint();
    check_ceiling();
    check_ledger_row();
    check_ledger_faults();
    return check_report("check_heap");
}
