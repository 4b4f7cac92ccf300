/* cores.h - how many cores this process may use. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

/* Physical cores that this process may use, or fewer if its control group limits processor time; at
 * least 1. */
uint32_t qsf_core_count(void);
