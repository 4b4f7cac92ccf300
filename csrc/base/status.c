/* status.c - the per-thread text of the last failure, and the names of statuses. */
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

const char *qsf_fail_text(void)
{
    return detail_text;
}
