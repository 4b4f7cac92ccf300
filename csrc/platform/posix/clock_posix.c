/* clock_posix.c - monotonic time and sleep through POSIX. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/clock.h"

#include <errno.h>
#include <time.h>

uint64_t qsf_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail: the clock is mandatory */
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void qsf_sleep_ms(uint32_t n_ms)
{
    struct timespec left = {.tv_sec = n_ms / 1000, .tv_nsec = (long)(n_ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
}
