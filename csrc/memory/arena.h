/* arena.h - hands out parts of one block of memory from its front and frees them together.
 *
 * The same layout code runs twice: first while `measuring`, which counts the bytes, then on a
 * block of exactly that size. So the plan always equals the allocation.
 *
 * A push that does not fit sets `failed` and returns NULL; later pushes then fail too. Layout code
 * pushes everything and checks `failed` once. Under AddressSanitizer a poisoned gap follows each
 * push.
 *
 * The arena owns no memory: the block belongs to the caller of qsf_arena_init().
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QSF_ARENA_ALIGN 64

typedef struct qsf_arena {
    unsigned char *base; /* QSF_ARENA_ALIGN aligned; NULL while measuring */
    size_t cap_bytes;
    size_t used_bytes;
    bool measuring;
    bool failed;
} qsf_arena;

void qsf_arena_init(qsf_arena *a, void *block, size_t cap_bytes);
void qsf_arena_init_measuring(qsf_arena *a);

/* Returns space for n objects of elem_bytes each, aligned to QSF_ARENA_ALIGN and not zeroed.
 * Returns NULL while measuring or if it does not fit. A push of 0 bytes uses no space; its pointer
 * must not be used. */
void *qsf_arena_push(qsf_arena *a, uint64_t n, size_t elem_bytes);
