/* ledger.c - counts bytes before it allocates them. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "memory/ledger.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

#include "base/status.h"
#include "platform/heap.h"

void qsf_ledger_init(qsf_ledger *l, uint64_t ceiling_bytes)
{
    *l = (qsf_ledger){.ceiling_bytes = ceiling_bytes, .grants_until_fault = -1};
}

/* True if a request is granted: the ceiling allows it, and no test injects a fault. */
static bool is_granted(qsf_ledger *l, size_t n_bytes)
{
    if (l->grants_until_fault >= 0 && l->grants_until_fault-- == 0)
        return false;
    return n_bytes <= l->ceiling_bytes - l->held_bytes;
}

static void *count(qsf_ledger *l, qsf_use use, size_t n_bytes, void *p)
{
    if (p == NULL)
        return NULL;
    l->held_bytes += n_bytes;
    l->held_by_use[use] += n_bytes;
    l->n_acquired++;
    if (l->held_bytes > l->peak_bytes)
        l->peak_bytes = l->held_bytes;
    return p;
}

void *qsf_ledger_acquire(qsf_ledger *l, qsf_use use, size_t n_bytes)
{
    assert(n_bytes >= 1 && (unsigned)use < QSF_USE_COUNT);
    if (!is_granted(l, n_bytes))
        return NULL;
    /* Weights and the ring are fully used, so huge pages cost nothing there. A read of 1 MB into
     * one huge page is one request for the disk; into small pages it is a list of 256. KV and
     * scratch may stay partly unused. */
    const bool is_all_used =
        use == QSF_USE_WEIGHTS || use == QSF_USE_STREAM || use == QSF_USE_EXPERTS;
    void *const p = is_all_used ? qsf_heap_alloc_huge(n_bytes) : qsf_heap_alloc(n_bytes);
    return count(l, use, n_bytes, p);
}

qsf_status qsf_ledger_take(qsf_ledger *l, qsf_use use, uint64_t n_bytes, const char *what,
                           void *out)
{
    void *const p =
        n_bytes == 0 || n_bytes > SIZE_MAX ? NULL : qsf_ledger_acquire(l, use, (size_t)n_bytes);
    memcpy(out, &p, sizeof p);
    QSF_FAIL_IF(p == NULL && n_bytes != 0, NOMEM,
                "no memory for %s: %.3g MB; %.1f MB are in use, of at most %.1f MB", what,
                qsf_mb(n_bytes), qsf_mb(l->held_bytes), qsf_mb(l->ceiling_bytes));
    return QSF_OK;
}

void *qsf_ledger_acquire_row(qsf_ledger *l, qsf_use use, size_t n, size_t item_bytes)
{
    assert(n >= 1 && item_bytes >= 1 && (unsigned)use < QSF_USE_COUNT);
    if (item_bytes > SIZE_MAX / n || !is_granted(l, n * item_bytes))
        return NULL;
    return count(l, use, n * item_bytes, qsf_heap_alloc_row(n, item_bytes));
}

void qsf_ledger_release(qsf_ledger *l, qsf_use use, void *p, size_t n_bytes)
{
    if (p == NULL)
        return;
    assert((unsigned)use < QSF_USE_COUNT && n_bytes <= l->held_by_use[use]);
    l->held_bytes -= n_bytes;
    l->held_by_use[use] -= n_bytes;
    qsf_heap_free(p, n_bytes);
}

const char *qsf_use_name(qsf_use use)
{
    static const char *const names[QSF_USE_COUNT] = {
        [QSF_USE_HANDLE] = "handle",   [QSF_USE_TABLES] = "tables",
        [QSF_USE_WEIGHTS] = "weights", [QSF_USE_STREAM] = "stream",
        [QSF_USE_EXPERTS] = "experts", [QSF_USE_EMBEDDING] = "embedding",
        [QSF_USE_KV] = "kv",           [QSF_USE_SCRATCH] = "scratch",
        [QSF_USE_TEXT] = "text",       [QSF_USE_ADAPTERS] = "adapters",
    };
    return (unsigned)use < QSF_USE_COUNT ? names[use] : "unknown";
}
