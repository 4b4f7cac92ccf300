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

#define QSF_FAIL(status, ...) qsf_fail((status), __VA_ARGS__)

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

/* Returns QSF_ERR_ARG if a pointer argument of a public function is NULL. */
#define QSF_REQUIRE(p)                                                    \
    do {                                                                  \
        if ((p) == NULL)                                                  \
            return QSF_FAIL(QSF_ERR_ARG, "%s: %s is NULL", __func__, #p); \
    } while (0)
