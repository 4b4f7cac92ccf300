/* heap.h - the only door to the system's allocator.
 *
 * Called by memory/ledger and nobody else. Memory is 64-byte aligned and zeroed.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_HEAP_H
#define QSF_PLATFORM_HEAP_H

#include <stddef.h>

#define QSF_HEAP_ALIGN 64

/* NULL when the system has none. n_bytes >= 1. Large blocks come from mmap, so that
 * untouched pages cost nothing and freed ones go back to the system at once. */
void *qsf_heap_alloc(size_t n_bytes);

/* The same for memory that will all be touched and read again and again: large blocks
 * begin at a multiple of 2 MiB and the system is asked to back them with pages of that size.
 * What is left over at the end lies in small pages, so that nothing is rounded up. */
void *qsf_heap_alloc_huge(size_t n_bytes);

/* For both. */
void qsf_heap_free(void *p, size_t n_bytes);

#endif
