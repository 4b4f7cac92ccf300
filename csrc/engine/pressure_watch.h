/* pressure_watch.h - looks at the system's memory and moves the model's, as pressure.h decides. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_PRESSURE_WATCH_H
#define QSF_ENGINE_PRESSURE_WATCH_H

#include <stdbool.h>

#include "include/qsf.h"

/* Looks at the system for the first time. The model is ready. */
void qsf_pressure_begin(qsf_model *m);

/* Looks at the system if it is time to, and acts on the model, whose lock is held and which is
 * between units. True: units of the stream moved. */
bool qsf_pressure_watch(qsf_model *m);

#endif
