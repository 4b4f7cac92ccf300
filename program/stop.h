/* stop.h - how the program ends: errors of the engine, and Ctrl-C. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "qsf.h"

/* Ends the program with one line and exit code 1 unless the status is QSF_OK; with 130 after
 * Ctrl-C. */
void check(qsf_status status);

/* Prints one line of an error and ends the program with exit code 1. */
_Noreturn void fail(const char *what);

/* From now on Ctrl-C cancels what this session does; a second one ends the program. */
void stop_on_interrupt(qsf_session *session);
bool was_interrupted(void);
