/* cpu_system.h - facts about the processor that only the operating system reports. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "platform/cpu.h"

/* Requests the state of AMX tiles for this process; false if the system does not grant it. */
bool qsf_cpu_request_tiles(void);

/* Logical processors that are online; at least 1. */
uint32_t qsf_cpu_count_online(void);

#if QSF_ARCH_ARM
typedef struct qsf_arm_features {
    bool has_dotprod;
    bool has_i8mm;
    bool has_crc32;
} qsf_arm_features;

qsf_arm_features qsf_cpu_arm_features(void);
#endif
