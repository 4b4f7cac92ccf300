/* clock_posix.c - the system's monotonic clock. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/clock.h"

#include <time.h>

uint64_t qsf_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail: the clock is mandatory */
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}
