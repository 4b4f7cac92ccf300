/* clock.h - monotonic time. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_CLOCK_H
#define QSF_PLATFORM_CLOCK_H

#include <stdint.h>

uint64_t qsf_clock_ns(void);

#endif
