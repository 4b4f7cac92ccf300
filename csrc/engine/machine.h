/* machine.h - what the engine would run with on this machine. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_MACHINE_H
#define QSF_ENGINE_MACHINE_H

#include "include/qsf.h"

qsf_status qsf_machine_look(qsf_machine *out);

#endif
