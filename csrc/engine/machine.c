/* machine.c - gathers cpu and memory facts. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/machine.h"

#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "platform/cpu.h"
#include "platform/sysmem.h"

qsf_status qsf_machine_look(qsf_machine *out)
{
    memset(out, 0, sizeof *out);
    qsf_isa isa;
    QSF_TRY(qsf_isa_choose(&isa));
    snprintf(out->isa_name, sizeof out->isa_name, "%s", qsf_isa_name(isa));
    qsf_isa_list(out->isa_available, sizeof out->isa_available);
    qsf_sysmem memory;
    qsf_sysmem_read(&memory);
    out->n_cores = qsf_cpu_core_count();
    out->memory_bytes = memory.total_bytes;
    out->available_bytes = memory.available_bytes;
    out->resident_bytes = memory.resident_bytes;
    out->peak_bytes = memory.peak_bytes;
    return QSF_OK;
}
