/* cpu.c - chooses the instruction-set level. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/cpu.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

/* No default, so that the compiler warns about a missing level. */
const char *qsf_isa_name(qsf_isa isa)
{
    switch (isa) {
    case QSF_ISA_SCALAR:
        return "scalar";
    case QSF_ISA_AVX2:
        return "avx2";
    case QSF_ISA_AVXVNNI:
        return "avxvnni";
    case QSF_ISA_AVX512:
        return "avx512";
    case QSF_ISA_AMX:
        return "amx";
    case QSF_ISA_NEON:
        return "neon";
    case QSF_ISA_DOTPROD:
        return "dotprod";
    case QSF_ISA_I8MM:
        return "i8mm";
    case QSF_ISA_COUNT:
        break;
    }
    return "unknown";
}

#if !QSF_ARCH_X86 && !QSF_ARCH_ARM
bool qsf_isa_has(qsf_isa isa)
{
    return isa == QSF_ISA_SCALAR;
}
#endif

qsf_isa qsf_isa_detect(void)
{
    int level = QSF_ISA_COUNT - 1;
    while (!qsf_isa_has((qsf_isa)level))
        level--;
    return (qsf_isa)level;
}

void qsf_isa_list(char *text, size_t cap_bytes)
{
    size_t used_bytes = 0;
    for (int level = 0; level < QSF_ISA_COUNT && used_bytes < cap_bytes; level++) {
        if (!qsf_isa_has((qsf_isa)level))
            continue;
        const int n_bytes = snprintf(text + used_bytes, cap_bytes - used_bytes, "%s%s",
                                     level > 0 ? " " : "", qsf_isa_name((qsf_isa)level));
        used_bytes += n_bytes > 0 ? (size_t)n_bytes : 0;
    }
}

qsf_isa qsf_isa_limit(void)
{
    const char *const wanted = getenv("QSF_ISA");
    int level = 0;
    while (level < (int)QSF_ISA_COUNT &&
           (wanted == NULL || strcmp(wanted, qsf_isa_name((qsf_isa)level)) != 0))
        level++;
    return (qsf_isa)level;
}

qsf_status qsf_isa_choose(qsf_isa *out)
{
    const char *const wanted = getenv("QSF_ISA");
    *out = qsf_isa_detect();
    if (wanted == NULL || *wanted == '\0')
        return QSF_OK;
    char available[64];
    qsf_isa_list(available, sizeof available);
    for (int level = 0; level < (int)QSF_ISA_COUNT; level++) {
        if (strcmp(wanted, qsf_isa_name((qsf_isa)level)) != 0)
            continue;
        if (!qsf_isa_has((qsf_isa)level))
            return QSF_FAIL(QSF_ERR_ARG, "QSF_ISA is \"%s\", which this machine lacks; it has: %s",
                            wanted, available);
        *out = (qsf_isa)level;
        return QSF_OK;
    }
    return QSF_FAIL(QSF_ERR_ARG, "QSF_ISA is \"%.32s\", which is unknown; this machine has: %s",
                    wanted, available);
}
