/* pressure_watch.h - measures the system's memory and moves the model's, as pressure.h decides. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "include/qsf.h"

/* Takes the first measurement. The model is open. */
void qsf_pressure_begin(qsf_model *m);

/* Takes a measurement if one is due, and moves memory. The caller holds the model's lock,
 * between two units. True: units of the stream moved. */
bool qsf_pressure_watch(qsf_model *m);
