/* machine.h - what the engine would run with on this machine. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MACHINE_MACHINE_H
#define QSF_MACHINE_MACHINE_H

#include "include/qsf.h"

qsf_status qsf_machine_look(qsf_machine *out);

/* As qsf_machine_roof of the public API, with arguments that were checked. */
qsf_status qsf_machine_measure(uint32_t n_threads, uint64_t n_bytes, uint32_t n_ms, qsf_roof *out);

#endif
