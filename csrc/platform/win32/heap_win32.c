/* heap_win32.c - small allocations from the C library, large ones from the system as whole pages.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/heap.h"

#include <assert.h>
#include <malloc.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <windows.h>

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

/* The system frees only what it allocated in one call. */
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
