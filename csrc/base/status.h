/* status.h - how functions of the engine report errors.
 *
 * The function that detects an error writes its text with QSF_FAIL; its callers forward the status
 * with QSF_TRY. Each thread keeps its own text. The text of an error that only a bug of the engine
 * can cause begins with "internal error: ".
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "include/qsf.h"

#if defined(__GNUC__)
#define QSF_PRINTF(fmt_idx, args_idx) __attribute__((format(printf, fmt_idx, args_idx)))
#else
#define QSF_PRINTF(fmt_idx, args_idx)
#endif

/* Records the text for this thread and returns `status`. */
qsf_status qsf_fail(qsf_status status, const char *fmt, ...) QSF_PRINTF(2, 3);

/* QSF_FAIL(ARG, "n is %u", n) records the text and returns QSF_ERR_ARG. */
#define QSF_FAIL(status, ...) qsf_fail(QSF_ERR_##status, __VA_ARGS__)

/* Leaves the function with an error if the condition is true. */
#define QSF_FAIL_IF(condition, status, ...)                 \
    do {                                                    \
        if (condition)                                      \
            return qsf_fail(QSF_ERR_##status, __VA_ARGS__); \
    } while (0)

#define QSF_TRY(expr)                          \
    do {                                       \
        const qsf_status try_status_ = (expr); \
        if (try_status_ != QSF_OK)             \
            return try_status_;                \
    } while (0)

/* Error texts give sizes in MB of 2^20 bytes. */
static inline double qsf_mb(uint64_t n_bytes)
{
    return (double)n_bytes / (1 << 20);
}

/* Leaves a public function with QSF_ERR_ARG if one of these arguments is NULL. */
#define QSF_REQUIRE(...)                                                            \
    QSF_TRY(qsf_require(__func__, #__VA_ARGS__, (const void *const[]){__VA_ARGS__}, \
                        sizeof((const void *const[]){__VA_ARGS__}) / sizeof(void *)))
qsf_status qsf_require(const char *function, const char *names, const void *const *arguments,
                       size_t n_arguments);
