/* heap_posix.c - small allocations from the C library, large ones from mmap.
 *
 * The size of an allocation decides where it comes from, so no record is stored with it. Under
 * AddressSanitizer all come from the C library, because it checks only those for overruns and
 * leaks.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/heap.h"

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/asan.h"

#define MAPPED_FROM_BYTES ((size_t)128 * 1024)
/* Above any real memory, and rounding up cannot overflow. From 2^40 bytes on AddressSanitizer would
 * end the process instead of returning NULL. */
#define MAX_BYTES (QSF_ASAN ? (size_t)1 << 39 : SIZE_MAX / 2)

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

static bool is_mapped(size_t n_bytes)
{
    return !QSF_ASAN && n_bytes >= MAPPED_FROM_BYTES;
}

void *qsf_heap_alloc(size_t n_bytes)
{
    assert(n_bytes >= 1);
    if (n_bytes > MAX_BYTES)
        return NULL;
    if (is_mapped(n_bytes)) {
        /* The kernel rounds up to pages and zeroes them. */
        void *const mapped =
            mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return mapped != MAP_FAILED ? mapped : NULL;
    }
    const size_t rounded = (n_bytes + QSF_HEAP_ALIGN - 1) & ~(size_t)(QSF_HEAP_ALIGN - 1);
    void *const p = aligned_alloc(QSF_HEAP_ALIGN, rounded);
    if (p == NULL)
        return NULL;
    memset(p, 0, n_bytes);
    QSF_ASAN_POISON((unsigned char *)p + n_bytes, rounded - n_bytes);
    return p;
}

static size_t page_bytes(void)
{
    const long n_bytes = sysconf(_SC_PAGESIZE);
    return n_bytes > 0 ? (size_t)n_bytes : 4096;
}

#if defined(MADV_HUGEPAGE)

/* Maps whole pages at a multiple of HUGE_PAGE_BYTES: maps more and unmaps the rest around them.
 * NULL if the system refuses. */
static void *map_aligned(size_t n_bytes)
{
    const size_t kept_bytes = (n_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
    unsigned char *const mapped = mmap(NULL, kept_bytes + HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return NULL;
    const size_t skipped_bytes = -(uintptr_t)mapped % HUGE_PAGE_BYTES;
    if (skipped_bytes > 0)
        (void)munmap(mapped, skipped_bytes);
    unsigned char *const kept = mapped + skipped_bytes;
    (void)munmap(kept + kept_bytes, HUGE_PAGE_BYTES - skipped_bytes);
    return kept;
}

#endif

void *qsf_heap_alloc_huge(size_t n_bytes)
{
#if defined(MADV_HUGEPAGE)
    if (is_mapped(n_bytes) && n_bytes >= HUGE_PAGE_BYTES && n_bytes <= MAX_BYTES) {
        void *const p = map_aligned(n_bytes);
        if (p != NULL) {
            (void)madvise(p, n_bytes, MADV_HUGEPAGE); /* may fail: some kernels lack it */
            return p;
        }
    }
#endif
    return qsf_heap_alloc(n_bytes);
}

void *qsf_heap_alloc_row(size_t n, size_t item_bytes)
{
    assert(n >= 1);
    if (!is_mapped(item_bytes) || item_bytes % page_bytes() != 0 || item_bytes > MAX_BYTES / n)
        return NULL;
    return qsf_heap_alloc_huge(n * item_bytes);
}

void qsf_heap_free(void *p, size_t n_bytes)
{
    if (p == NULL)
        return;
    if (is_mapped(n_bytes))
        munmap(p, n_bytes);
    else
        free(p);
}
