/* status.c - the text of each thread's last error, the names of statuses, the version. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char detail_text[512] = "no error";

qsf_status qsf_fail(qsf_status status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(detail_text, sizeof detail_text, fmt, args);
    va_end(args);
    return status;
}

qsf_status qsf_require(const char *function, const char *names, const void *const *arguments,
                       size_t n_arguments)
{
    for (size_t i = 0; i < n_arguments; i++) {
        const size_t name_bytes = strcspn(names, ",");
        QSF_FAIL_IF(arguments[i] == NULL, ARG, "%s: %.*s is NULL", function, (int)name_bytes,
                    names);
        names += name_bytes + strspn(names + name_bytes, ", ");
    }
    return QSF_OK;
}

const char *qsf_error_detail(void)
{
    return detail_text;
}

const char *qsf_version(void)
{
    return QSF_VERSION;
}

const char *qsf_status_name(qsf_status status)
{
#define NAME(status) [-(status)] = #status
    static const char *const names[] = {
        NAME(QSF_OK),
        NAME(QSF_ERR_ARG),
        NAME(QSF_ERR_NOMEM),
        NAME(QSF_ERR_IO),
        NAME(QSF_ERR_FORMAT),
        NAME(QSF_ERR_UNSUPPORTED),
        NAME(QSF_ERR_CANCELLED),
        NAME(QSF_ERR_NUMERIC),
        NAME(QSF_ERR_DAMAGED),
    };
#undef NAME
    const size_t i = (size_t) - (int64_t)status;
    return i < sizeof names / sizeof names[0] ? names[i] : "unknown status";
}
