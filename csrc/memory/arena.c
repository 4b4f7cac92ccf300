/* arena.c - a bump allocator in memory of the caller. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "memory/arena.h"

#include <assert.h>

#include "base/asan.h"
#include "base/checked.h"

/* Unused bytes after each push. Measuring counts them too. */
#define GAP_BYTES (QSF_ASAN ? QSF_ARENA_ALIGN : 0)

void qsf_arena_init(qsf_arena *a, void *block, size_t cap_bytes)
{
    assert(block != NULL && (uintptr_t)block % QSF_ARENA_ALIGN == 0);
    *a = (qsf_arena){.base = block, .cap_bytes = cap_bytes};
    QSF_ASAN_UNPOISON(block, cap_bytes); /* gaps of an earlier arena in this memory */
}

void qsf_arena_init_measuring(qsf_arena *a)
{
    *a = (qsf_arena){.cap_bytes = SIZE_MAX, .measuring = true};
}

void *qsf_arena_push(qsf_arena *a, uint64_t n, size_t elem_bytes)
{
    if (a->failed)
        return NULL;
    uint64_t wanted_bytes;
    uint64_t taken_bytes = 0;
    if (!qsf_mul_u64(n, elem_bytes, &wanted_bytes) ||
        (wanted_bytes > 0 && (!qsf_align_up_u64(wanted_bytes, QSF_ARENA_ALIGN, &taken_bytes) ||
                              !qsf_add_u64(taken_bytes, GAP_BYTES, &taken_bytes))) ||
        taken_bytes > a->cap_bytes - a->used_bytes) {
        a->failed = true;
        return NULL;
    }
    const size_t start = a->used_bytes;
    a->used_bytes += (size_t)taken_bytes;
    if (a->measuring)
        return NULL;
    unsigned char *const p = a->base + start;
    QSF_ASAN_POISON(p + wanted_bytes, (size_t)(taken_bytes - wanted_bytes));
    return p;
}
