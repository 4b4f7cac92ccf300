/* clock_win32.c - monotonic time and sleep through the performance counter of Windows. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/clock.h"

#include <windows.h>

uint64_t qsf_clock_ns(void)
{
    const uint64_t second_ns = UINT64_C(1000000000);
    LARGE_INTEGER frequency; /* neither call can fail since Windows XP */
    LARGE_INTEGER count;
    QueryPerformanceFrequency(&frequency);
    QueryPerformanceCounter(&count);
    const uint64_t per_second = (uint64_t)frequency.QuadPart;
    const uint64_t ticks = (uint64_t)count.QuadPart;
    return ticks / per_second * second_ns + ticks % per_second * second_ns / per_second;
}

void qsf_sleep_ms(uint32_t n_ms)
{
    const uint64_t end_ns = qsf_clock_ns() + (uint64_t)n_ms * 1000000;
    for (uint64_t now_ns = qsf_clock_ns(); now_ns < end_ns; now_ns = qsf_clock_ns())
        Sleep((DWORD)((end_ns - now_ns + 999999) / 1000000));
}
