/* cpu_posix.c - the number of processors, through sysconf. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "platform/cpu_system.h"

uint32_t qsf_cpu_count_online(void)
{
    const long n_online = sysconf(_SC_NPROCESSORS_ONLN);
    return n_online > 0 ? (uint32_t)n_online : 1;
}
