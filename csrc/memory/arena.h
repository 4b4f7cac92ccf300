/* arena.h - one block of memory, handed out from the front, given back all at once.
 *
 * Used twice with the same layout code: first `measuring`, to learn how many
 * bytes a plan needs, then for real on a block of exactly that size. So the
 * plan cannot drift away from what is really allocated.
 *
 * A push that does not fit sets `failed` and returns NULL; later pushes then
 * fail too. Layout code pushes everything and looks at `failed` once. Under
 * AddressSanitizer a poisoned gap follows each push.
 *
 * Owns no memory: the block belongs to whoever called qsf_arena_init().
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MEMORY_ARENA_H
#define QSF_MEMORY_ARENA_H

#include <stdbool.h>
#include <stddef.h>

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

/* Space for n objects of elem_bytes each, left as the block had it, aligned to
 * QSF_ARENA_ALIGN. NULL when measuring or when it does not fit. A push of nothing
 * takes nothing and returns a pointer that may not be used. */
void *qsf_arena_push(qsf_arena *a, size_t n, size_t elem_bytes);

#endif
