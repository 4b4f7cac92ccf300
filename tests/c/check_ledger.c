/* check_ledger.c - the ceiling holds and the counts are right. Blocks: check_heap.c. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include "base/asan.h"
#include "memory/ledger.h"
#include "platform/heap.h"

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
static void check_row(void)
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
static void check_faults(void)
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
    check_ceiling();
    check_row();
    check_faults();
    return check_report("check_ledger");
}
