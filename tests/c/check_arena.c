/* check_arena.c - what is measured is what is needed, and nothing overlaps. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <stdlib.h>

#include "base/asan.h"
#include "memory/arena.h"
#include "system.h"

#define N_PUSHES 40

typedef struct layout {
    unsigned char *parts[N_PUSHES];
    size_t n_bytes[N_PUSHES];
} layout;

/* The same code for measuring and for real, as the engine's layouts are. */
static void lay_out(layout *l, qsf_arena *a, uint32_t seed)
{
    uint32_t state = seed;
    for (size_t i = 0; i < N_PUSHES; i++) {
        state = state * 1664525U + 1013904223U;
        const size_t elem_bytes = (size_t)1 << (state >> 28 & 3);
        const size_t n = state >> 12 & 0x1FF;
        l->n_bytes[i] = n * elem_bytes;
        l->parts[i] = qsf_arena_push(a, n, elem_bytes);
    }
}

static void check_contents(const layout *l, const unsigned char *block, size_t cap_bytes)
{
    /* Each part is filled with its own number; an overlap would change an earlier one. */
    for (size_t i = 0; i < N_PUSHES; i++) {
        if (l->n_bytes[i] == 0)
            continue;
        CHECK_EQ((uintptr_t)l->parts[i] % QSF_ARENA_ALIGN, 0);
        CHECK(l->parts[i] >= block && l->parts[i] + l->n_bytes[i] <= block + cap_bytes);
        memset(l->parts[i], (int)i + 1, l->n_bytes[i]);
    }
    for (size_t i = 0; i < N_PUSHES; i++) {
        size_t n_wrong = 0;
        for (size_t b = 0; b < l->n_bytes[i]; b++)
            n_wrong += l->parts[i][b] != i + 1;
        CHECK_EQ(n_wrong, 0);
    }
}

static void check_measured_is_needed(uint32_t seed)
{
    layout l;
    qsf_arena a;
    qsf_arena_init_measuring(&a);
    lay_out(&l, &a, seed);
    CHECK(!a.failed && l.parts[0] == NULL && l.parts[N_PUSHES - 1] == NULL);
    const size_t cap_bytes = a.used_bytes;
    CHECK(cap_bytes > 0 && cap_bytes % QSF_ARENA_ALIGN == 0);

    unsigned char *const block = check_alloc(QSF_ARENA_ALIGN, cap_bytes);
    if (!CHECK(block != NULL))
        return;
    memset(block, 0x5A, cap_bytes);
    qsf_arena_init(&a, block, cap_bytes);
    lay_out(&l, &a, seed);
    CHECK(!a.failed);
    CHECK_EQ_U64(a.used_bytes, cap_bytes);
    CHECK_EQ(block[0], 0x5A); /* left as the block had it */
    check_contents(&l, block, cap_bytes);
    CHECK(qsf_arena_push(&a, 0, 8) != NULL && !a.failed);
    CHECK(qsf_arena_push(&a, 1, 1) == NULL);
    CHECK(a.failed);

    /* The same block once more, now one unit too small: the failure stays. */
    qsf_arena_init(&a, block, cap_bytes - QSF_ARENA_ALIGN);
    lay_out(&l, &a, seed);
    CHECK(a.failed && a.used_bytes <= cap_bytes - QSF_ARENA_ALIGN);
    qsf_arena_init(&a, block, cap_bytes);
    CHECK(!a.failed && qsf_arena_push(&a, cap_bytes + 1, 1) == NULL);
    CHECK(qsf_arena_push(&a, 1, 1) == NULL && qsf_arena_push(&a, 0, 1) == NULL);
    CHECK_EQ_U64(a.used_bytes, 0);
    QSF_ASAN_UNPOISON(block, cap_bytes);
    check_free(block);
}

/* Sizes that no machine has, as a hostile file could ask for. */
static void check_overflow(void)
{
    static const size_t hostile[][2] = {{SIZE_MAX, 2},
                                        {2, SIZE_MAX},
                                        {SIZE_MAX, SIZE_MAX},
                                        {SIZE_MAX, 1},
                                        {SIZE_MAX - 62, 1},
                                        {SIZE_MAX / 2 + 1, 2},
                                        {SIZE_MAX / 2 + 1, SIZE_MAX / 2 + 1}};
    for (size_t i = 0; i < COUNT_OF(hostile); i++) {
        qsf_arena a;
        qsf_arena_init_measuring(&a);
        CHECK(qsf_arena_push(&a, hostile[i][0], hostile[i][1]) == NULL);
        CHECK(a.failed);
    }
    qsf_arena a; /* each fits, their sum does not */
    qsf_arena_init_measuring(&a);
    (void)qsf_arena_push(&a, SIZE_MAX / 2, 1);
    CHECK(!a.failed);
    (void)qsf_arena_push(&a, SIZE_MAX / 2 - 4096, 1);
    CHECK(!a.failed);
    (void)qsf_arena_push(&a, 8192, 1);
    CHECK(a.failed);
}

#if QSF_ASAN
static void check_gaps_are_poisoned(void)
{
    unsigned char *const block = check_alloc(QSF_ARENA_ALIGN, 4096);
    if (!CHECK(block != NULL))
        return;
    qsf_arena a;
    qsf_arena_init(&a, block, 4096);
    unsigned char *const first = qsf_arena_push(&a, 128, 1);
    unsigned char *const second = qsf_arena_push(&a, 100, 1);
    CHECK(second >= first + 128 + QSF_ARENA_ALIGN);
    CHECK(!__asan_address_is_poisoned(first + 127));
    CHECK(__asan_address_is_poisoned(first + 128));
    CHECK(__asan_address_is_poisoned(second - 1));
    CHECK(!__asan_address_is_poisoned(second + 99));
    CHECK(__asan_address_is_poisoned(second + 100));
    qsf_arena_init(&a, block, 4096);
    CHECK(__asan_region_is_poisoned(block, 4096) == NULL);
    check_free(block);
}
#endif

int main(void)
{
    for (uint32_t seed = 1; seed <= 20; seed++)
        check_measured_is_needed(seed);
    check_overflow();
#if QSF_ASAN
    check_gaps_are_poisoned();
#endif
    return check_report("check_arena");
}
