/* cores.h - how many cores this process has the use of. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MACHINE_CORES_H
#define QSF_MACHINE_CORES_H

#include <stdint.h>

/* Physical cores this process may run on, or fewer where its control group grants less processor
 * time; at least 1. */
uint32_t qsf_core_count(void);

#endif
