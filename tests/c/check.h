/* check.h - the assertions of the C tests.
 *
 * They work whatever NDEBUG says, go on after a failure, and print the place and
 * both sides. Each test is one program: its main() ends in
 * `return check_report("check_name");`. A program that checked nothing fails.
 * Checks may be made from one thread only.
 *
 * QSF_CHECK_STRIDE=N in the environment thins the exhaustive loops of the tests that call
 * check_stride(): they take every N-th case. `make` sets it but for `make test-c` in CI, which runs
 * all cases.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_CHECK_H
#define QSF_TESTS_CHECK_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "include/qsf.h"

#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])
#define CHECK_MAX_PRINTED 50 /* a broken loop should not print a million lines */

typedef struct check_counts {
    uint64_t n_checks;
    uint64_t n_failed;
} check_counts;

static check_counts check_counts_;

/* Counts; returns whether a failure should be printed. */
static inline bool check_count(bool ok, const char *file, int line)
{
    check_counts_.n_checks++;
    if (ok)
        return false;
    check_counts_.n_failed++;
    if (check_counts_.n_failed > CHECK_MAX_PRINTED)
        return false;
    printf("%s:%d: ", file, line);
    return true;
}

/* Was the latest failure printed? For a test that has more to say about it. */
static inline bool check_is_printed(void)
{
    return check_counts_.n_failed <= CHECK_MAX_PRINTED;
}

static inline bool check_true(bool ok, const char *text, const char *file, int line)
{
    if (check_count(ok, file, line))
        printf("not true: %s\n", text);
    return ok;
}

static inline bool check_i64(int64_t a, int64_t b, const char *text, const char *file, int line)
{
    if (check_count(a == b, file, line))
        printf("%s: %" PRId64 " != %" PRId64 "\n", text, a, b);
    return a == b;
}

static inline bool check_u64(uint64_t a, uint64_t b, const char *text, const char *file, int line)
{
    if (check_count(a == b, file, line))
        printf("%s: %" PRIu64 " != %" PRIu64 " (0x%" PRIx64 ", 0x%" PRIx64 ")\n", text, a, b, a, b);
    return a == b;
}

static inline bool check_str(const char *a, const char *b, const char *text, const char *file,
                             int line)
{
    const char *const left = a != NULL ? a : "(null)";
    const char *const right = b != NULL ? b : "(null)";
    const bool ok = a != NULL && b != NULL && strcmp(a, b) == 0;
    if (check_count(ok, file, line))
        printf("%s: \"%s\" != \"%s\"\n", text, left, right);
    return ok;
}

static inline bool check_contains(const char *text, const char *part, const char *file, int line)
{
    const bool ok = text != NULL && strstr(text, part) != NULL;
    if (check_count(ok, file, line))
        printf("\"%s\" does not contain \"%s\"\n", text != NULL ? text : "(null)", part);
    return ok;
}

/* NaN is never near anything. */
static inline bool check_near(double a, double b, double tolerance, const char *text,
                              const char *file, int line)
{
    const double distance = a > b ? a - b : b - a;
    const bool ok = a == b || distance <= tolerance;
    if (check_count(ok, file, line))
        printf("%s: %.17g, %.17g differ by %.3g, more than %.3g\n", text, a, b, distance,
               tolerance);
    return ok;
}

static inline bool check_bytes(const void *a, const void *b, size_t n_bytes, const char *text,
                               const char *file, int line)
{
    const unsigned char *const left = a;
    const unsigned char *const right = b;
    size_t i = 0;
    while (i < n_bytes && left[i] == right[i])
        i++;
    if (check_count(i == n_bytes, file, line))
        printf("%s: byte %zu of %zu: 0x%02x != 0x%02x\n", text, i, n_bytes, left[i], right[i]);
    return i == n_bytes;
}

static inline bool check_status(qsf_status have, qsf_status want, const char *text,
                                const char *file, int line)
{
    if (check_count(have == want, file, line))
        printf("%s: %s != %s; last text: %s\n", text, qsf_status_name(have), qsf_status_name(want),
               qsf_error_detail());
    return have == want;
}

/* Prints the verdict; what main() returns. */
static inline int check_report(const char *name)
{
    if (check_counts_.n_failed > CHECK_MAX_PRINTED)
        printf("... and %" PRIu64 " failures more\n", check_counts_.n_failed - CHECK_MAX_PRINTED);
    printf("%s: %" PRIu64 " checks, %" PRIu64 " failed\n", name, check_counts_.n_checks,
           check_counts_.n_failed);
    return check_counts_.n_failed != 0 || check_counts_.n_checks == 0;
}

/* Each is also an expression: whether it held. */
#define CHECK(cond) check_true((cond), #cond, __FILE__, __LINE__)
#define CHECK_EQ(a, b) check_i64((long long)(a), (long long)(b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_EQ_I64(a, b) check_i64((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_EQ_U64(a, b) check_u64((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_STR(a, b) check_str((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_CONTAINS(text, part) check_contains((text), (part), __FILE__, __LINE__)
#define CHECK_NEAR(a, b, tolerance) \
    check_near((a), (b), (tolerance), #a " ~ " #b, __FILE__, __LINE__)
#define CHECK_BYTES(a, b, n_bytes) \
    check_bytes((a), (b), (n_bytes), #a " == " #b, __FILE__, __LINE__)
#define CHECK_OK(expr) check_status((expr), QSF_OK, #expr, __FILE__, __LINE__)
#define CHECK_STATUS(expr, want) check_status((expr), (want), #expr, __FILE__, __LINE__)

/* An arbitrary number below `below`; the same ones in each run. */
static inline uint32_t check_draw(uint32_t below)
{
    static uint32_t noise = 1;
    noise = noise * 1664525U + 1013904223U;
    return (uint32_t)((uint64_t)noise * below >> 32);
}

/* From QSF_CHECK_STRIDE; 1 if there is none. What is no number above 0 is a failure. */
static inline size_t check_stride(void)
{
    const char *const text = getenv("QSF_CHECK_STRIDE");
    char *end = NULL;
    if (text == NULL)
        return 1;
    const unsigned long stride = strtoul(text, &end, 10);
    if (!CHECK(stride > 0 && *end == '\0'))
        return 1;
    printf("QSF_CHECK_STRIDE: every %lu-th case of the exhaustive loops\n", stride);
    return (size_t)stride;
}

#endif
