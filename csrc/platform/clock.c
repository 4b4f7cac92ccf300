/* clock.c - adds up the laps of a stopwatch. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/clock.h"

_Static_assert((int)QSF_PHASE_OTHER + 1 == QSF_N_PHASES, "QSF_N_PHASES counts the phases");

const char *qsf_phase_name(uint32_t phase)
{
    static const char *const names[QSF_N_PHASES] = {
        [QSF_PHASE_EMBEDDING] = "embedding",
        [QSF_PHASE_NORM] = "norm",
        [QSF_PHASE_QKV] = "qkv",
        [QSF_PHASE_ATTENTION] = "attention",
        [QSF_PHASE_ATTN_OUT] = "attn_out",
        [QSF_PHASE_GATE_UP] = "gate_up",
        [QSF_PHASE_DOWN] = "down",
        [QSF_PHASE_HEAD] = "head",
        [QSF_PHASE_WAIT] = "wait",
        [QSF_PHASE_DECOMPRESS] = "decompress",
        [QSF_PHASE_OTHER] = "other",
    };
    return phase < QSF_N_PHASES ? names[phase] : "unknown";
}

void qsf_stopwatch_start(qsf_stopwatch *w, uint64_t now_ns)
{
    *w = (qsf_stopwatch){.last_ns = now_ns};
}

void qsf_stopwatch_lap(qsf_stopwatch *w, qsf_phase phase)
{
    if (w != NULL)
        qsf_stopwatch_lap_at(w, phase, qsf_clock_ns());
}

void qsf_stopwatch_lap_at(qsf_stopwatch *w, qsf_phase phase, uint64_t now_ns)
{
    if (w == NULL || now_ns <= w->last_ns)
        return;
    const uint64_t lap_ns = now_ns - w->last_ns;
    const uint64_t aside_ns = w->aside_ns < lap_ns ? w->aside_ns : lap_ns;
    w->phase_ns[phase] += lap_ns - aside_ns;
    w->aside_ns -= aside_ns;
    w->last_ns = now_ns;
}

void qsf_stopwatch_set_aside(qsf_stopwatch *w, qsf_phase phase, uint64_t begin_ns, uint64_t end_ns)
{
    if (w == NULL)
        return;
    w->phase_ns[phase] += end_ns - begin_ns;
    w->aside_ns += end_ns - begin_ns;
}
