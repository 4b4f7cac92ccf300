/* checked.h - arithmetic that reports overflow, for numbers from files and callers.
 *
 * A function that returns bool returns false, and does not change *out, if the result does not
 * fit.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The smaller and the larger of two numbers without side effects */
#define QSF_MIN(a, b) ((a) < (b) ? (a) : (b))
#define QSF_MAX(a, b) ((a) > (b) ? (a) : (b))

static inline bool qsf_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    if (b > UINT64_MAX - a)
        return false;
    *out = a + b;
    return true;
}

/* a + b, or UINT64_MAX if the sum does not fit. Use it only for comparisons. */
static inline uint64_t qsf_add_capped(uint64_t a, uint64_t b)
{
    return b > UINT64_MAX - a ? UINT64_MAX : a + b;
}

/* a - b, or 0 if b is larger. */
static inline uint64_t qsf_sub_floored(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

static inline bool qsf_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    if (a != 0 && b > UINT64_MAX / a)
        return false;
    *out = a * b;
    return true;
}

/* Rounds a up to a multiple of `align`, a power of two. */
static inline bool qsf_align_up_u64(uint64_t a, uint64_t align, uint64_t *out)
{
    if (a > UINT64_MAX - (align - 1))
        return false;
    *out = (a + (align - 1)) & ~(align - 1);
    return true;
}

/* True if [off, off + n_bytes) lies inside [0, limit). */
static inline bool qsf_extent_inside(uint64_t off, uint64_t n_bytes, uint64_t limit)
{
    return off <= limit && n_bytes <= limit - off;
}

/* n / group, rounded up. n + group must not overflow. */
static inline size_t qsf_ceil_div(size_t n, size_t group)
{
    return (n + group - 1) / group;
}

static inline size_t qsf_round_up(size_t n, size_t group)
{
    return qsf_ceil_div(n, group) * group;
}
