/* heap.h - the only access to the system's allocator; only memory/ledger may call it.
 *
 * Memory is aligned to 64 bytes and zeroed.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#define QSF_HEAP_ALIGN 64

/* Returns NULL if the system has no memory. n_bytes >= 1. Large allocations come from mmap:
 * untouched pages cost nothing, and freed ones return to the system at once. */
void *qsf_heap_alloc(size_t n_bytes);

/* Allocates memory that will be used completely and often: large allocations begin at a multiple
 * of 2 MiB, and the system may use huge pages. The rest at the end is in small pages, so the size
 * is not rounded up. */
void *qsf_heap_alloc_huge(size_t n_bytes);

/* Allocates n items in one mapping, so that huge pages cross their borders; each item is freed
 * by itself. NULL also if the system cannot free in parts of item_bytes. */
void *qsf_heap_alloc_row(size_t n, size_t item_bytes);

/* Frees memory of these functions; accepts NULL. */
void qsf_heap_free(void *p, size_t n_bytes);
