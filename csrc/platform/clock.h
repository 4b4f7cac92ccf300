/* clock.h - monotonic time, and waiting. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

uint64_t qsf_clock_ns(void);

/* Lets the calling thread sleep for at least n_ms, also if signals arrive. */
void qsf_sleep_ms(uint32_t n_ms);
