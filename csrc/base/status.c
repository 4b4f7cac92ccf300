/* status.c - the text of each thread's last error, the names of statuses, the version. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char detail_text[512] = "no error";

qsf_status qsf_fail(qsf_status status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(detail_text, sizeof detail_text, fmt, args);
    va_end(args);
    return status;
}

const char *qsf_error_detail(void)
{
    return detail_text;
}

const char *qsf_version(void)
{
    return QSF_VERSION;
}

/* No default, so that the compiler warns about a missing status. */
const char *qsf_status_name(qsf_status status)
{
    switch (status) {
    case QSF_OK:
        return "QSF_OK";
    case QSF_ERR_ARG:
        return "QSF_ERR_ARG";
    case QSF_ERR_NOMEM:
        return "QSF_ERR_NOMEM";
    case QSF_ERR_IO:
        return "QSF_ERR_IO";
    case QSF_ERR_FORMAT:
        return "QSF_ERR_FORMAT";
    case QSF_ERR_UNSUPPORTED:
        return "QSF_ERR_UNSUPPORTED";
    case QSF_ERR_CANCELLED:
        return "QSF_ERR_CANCELLED";
    case QSF_ERR_NUMERIC:
        return "QSF_ERR_NUMERIC";
    case QSF_ERR_DAMAGED:
        return "QSF_ERR_DAMAGED";
    }
    return "unknown status";
}
