/* check_phases.c - every nanosecond of a call belongs to one phase: what a stopwatch adds up, and
 * that the phases of a session are the time of its calls. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "timed_model.h"

#include "platform/clock.h"

#define N_TRIES 20 /* of what a busy machine may disturb */

/* ---- the stopwatch ---- */

static void check_names(void)
{
    static const char *const names[] = {"embedding", "norm",       "qkv",  "attention",
                                        "attn_out",  "gate_up",    "down", "head",
                                        "wait",      "decompress", "other"};
    for (uint32_t i = 0; i < QSF_N_PHASES; i++)
        CHECK_STR(qsf_phase_name(i), names[i]);
    CHECK_STR(qsf_phase_name(QSF_N_PHASES), "unknown");
    CHECK_STR(qsf_phase_name(UINT32_MAX), "unknown");
}

static uint64_t sum_of(const uint64_t *phase_ns)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < QSF_N_PHASES; i++)
        sum += phase_ns[i];
    return sum;
}

static void check_laps(void)
{
    qsf_stopwatch w = {.last_ns = 1000};
    qsf_stopwatch_lap_at(&w, QSF_PHASE_NORM, 1300);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_NORM], 300);
    qsf_stopwatch_lap_at(&w, QSF_PHASE_QKV, 1300); /* neither of these is a lap */
    qsf_stopwatch_lap_at(&w, QSF_PHASE_QKV, 1200);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_QKV], 0);
    CHECK_EQ_U64(w.last_ns, 1300);
    qsf_stopwatch_set_aside(&w, QSF_PHASE_WAIT, 1400, 1450);
    qsf_stopwatch_set_aside(&w, QSF_PHASE_DECOMPRESS, 1450, 1500);
    qsf_stopwatch_lap_at(&w, QSF_PHASE_QKV, 2300);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_QKV], 900);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_WAIT], 50);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_DECOMPRESS], 50);
    /* A lap that ends before what was set aside does: the rest goes off the next one. */
    qsf_stopwatch_set_aside(&w, QSF_PHASE_WAIT, 2300, 2500);
    qsf_stopwatch_lap_at(&w, QSF_PHASE_NORM, 2400);
    qsf_stopwatch_lap_at(&w, QSF_PHASE_HEAD, 2600);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_NORM], 300);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_HEAD], 100);
    CHECK_EQ_U64(sum_of(w.phase_ns), 1600);
    qsf_stopwatch_start(&w, 5000);
    CHECK_EQ_U64(sum_of(w.phase_ns), 0);
    CHECK_EQ_U64(w.aside_ns, 0);
    CHECK_EQ_U64(w.last_ns, 5000);
    qsf_stopwatch_lap(NULL, QSF_PHASE_NORM);
    qsf_stopwatch_lap_at(NULL, QSF_PHASE_NORM, 1);
    qsf_stopwatch_set_aside(NULL, QSF_PHASE_WAIT, 1, 2);
}

/* ---- sessions ---- */

static qsf_stats stats_of(const qsf_session *s)
{
    qsf_stats stats;
    qsf_session_stats(s, &stats);
    return stats;
}

/* All of the time, never more; but for the few instructions between the clock reads of both, in
 * which a busy machine may do something else: hence several tries. */
static void check_sums(qsf_session *s, const char *what)
{
    bool is_near = false;
    for (int i = 0; i < N_TRIES && !is_near; i++) {
        const qsf_stats before = stats_of(s);
        timed_run(s, 20);
        const qsf_stats after = stats_of(s);
        const uint64_t call_ns =
            after.prompt_ns + after.step_ns - before.prompt_ns - before.step_ns;
        const uint64_t phase_ns = sum_of(after.phase_ns) - sum_of(before.phase_ns);
        CHECK(phase_ns <= call_ns);
        is_near = call_ns - phase_ns <= call_ns / 100 + 10000;
    }
    if (!CHECK(is_near))
        printf("%s\n", what);
}

static void check_phases_hit(const qsf_session *s, const timed_kind *kind)
{
    const qsf_stats stats = stats_of(s);
    const bool is_packed = kind->model.compression != QSF_COMPRESSION_NONE;
    for (uint32_t i = 0; i < QSF_N_PHASES; i++) {
        const bool is_hit = i == QSF_PHASE_WAIT         ? kind->is_streamed
                            : i == QSF_PHASE_DECOMPRESS ? is_packed
                                                        : true;
        if (!CHECK((stats.phase_ns[i] > 0) == is_hit))
            printf("%s: %s\n", kind->name, qsf_phase_name(i));
    }
    CHECK(stats.phase_ns[QSF_PHASE_WAIT] >= stats.wait_ns);
    CHECK_EQ_U64(stats.phase_ns[QSF_PHASE_DECOMPRESS], stats.decompress_ns);
}

/* Does the same to the units' times as to the phases: they are of the same clock. */
static void check_unit_times(qsf_model *m, const qsf_session *s)
{
    qsf_unit_time times[TINY_LAYERS + 2];
    const size_t n_units = qsf_model_timeline(m, times, TINY_LAYERS + 2);
    const qsf_stats stats = stats_of(s);
    uint64_t unit_ns = 0;
    for (size_t i = 0; i < n_units; i++)
        unit_ns += times[i].compute_ns + times[i].wait_ns;
    CHECK(unit_ns > 0 && unit_ns < stats.prompt_ns + stats.step_ns);
}

static void check_same_phases(const qsf_session *s, const qsf_stats *before)
{
    const qsf_stats after = stats_of(s);
    CHECK_BYTES(after.phase_ns, before->phase_ns, sizeof after.phase_ns);
    CHECK_EQ_U64(after.prompt_ns + after.step_ns, before->prompt_ns + before->step_ns);
}

/* Calls that fail are in no figure, wherever they do; the next one is whole again. */
static void check_failures(qsf_model *m, qsf_session *s, const char *what)
{
    static const uint32_t bad = TINY_MODEL_VOCAB;
    const qsf_stats before = stats_of(s);
    size_t n_done = 0;
    CHECK_STATUS(qsf_session_step(s, bad), QSF_ERR_ARG);
    CHECK_STATUS(qsf_session_sync(s, &bad, 1, &n_done), QSF_ERR_ARG);
    qsf_session_cancel(s);
    CHECK_STATUS(qsf_session_step(s, 1), QSF_ERR_CANCELLED);
    check_same_phases(s, &before);
    /* Reading runs ahead: a step may go well, and the next one meet what went wrong in it. */
    uint32_t n_failed = 0;
    for (int64_t i = 0; i < 40 && m->stream.ring != NULL; i++) {
        const qsf_stats until_now = stats_of(s);
        CHECK_OK(qsf_session_rewind(s, 3));
        m->reader.file.reads_until_fault = i % 8;
        const qsf_status status = qsf_session_step(s, 1);
        if (status == QSF_OK)
            continue;
        n_failed++;
        CHECK_EQ(status, QSF_ERR_IO);
        check_same_phases(s, &until_now);
    }
    m->reader.file.reads_until_fault = -1;
    CHECK(n_failed > 3 || m->stream.ring == NULL);
    if (n_failed > 0) /* the last fault, met late */
        (void)qsf_session_step(s, 1);
    check_sums(s, what);
}

/* A sync that finds everything done is no call of the figures. */
static void check_nothing_to_do(qsf_session *s)
{
    static const uint32_t tokens[2] = {4, 5};
    size_t n_done = 0;
    CHECK_OK(qsf_session_sync(s, tokens, 2, &n_done));
    const qsf_stats before = stats_of(s);
    CHECK_OK(qsf_session_sync(s, tokens, 2, &n_done));
    check_same_phases(s, &before);
}

static void check_kind(const timed_kind *kind, uint32_t n_threads)
{
    qsf_model *const m = timed_open(kind, n_threads);
    qsf_session *s = NULL;
    qsf_session *other = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)) ||
        !CHECK_OK(qsf_session_create(m, &other)))
        return;
    check_sums(s, kind->name);
    check_phases_hit(s, kind);
    check_unit_times(m, s);
    CHECK_EQ_U64(sum_of(stats_of(other).phase_ns), 0); /* they are of a session */
    check_failures(m, s, kind->name);
    check_nothing_to_do(s);
    check_sums(other, kind->name);
    qsf_session_destroy(other);
    qsf_session_destroy(s);
    qsf_model_close(m);
}

/* Where another session has its turn for long, the time is neither lost nor computing. */
static void check_turns(void)
{
    qsf_model *const m = timed_open(&timed_kinds[0], 1);
    qsf_session *s = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    float rows[3 * TINY_MODEL_VOCAB];
    static const uint32_t tokens[3] = {1, 2, 3};
    size_t n_done = 0;
    CHECK_OK(qsf_session_score(s, tokens, 3, 0, rows, 3 * TINY_MODEL_VOCAB, &n_done));
    const qsf_stats stats = stats_of(s);
    CHECK(sum_of(stats.phase_ns) > 0 && sum_of(stats.phase_ns) <= stats.prompt_ns);
    CHECK(stats.phase_ns[QSF_PHASE_HEAD] > 0);
    qsf_session_destroy(s);
    qsf_model_close(m);
}

static void check_samples(void)
{
    qsf_model *const m = timed_open(&timed_kinds[0], 1);
    qsf_session *s = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    qsf_sampling how;
    uint64_t random_state = 1;
    uint32_t token;
    qsf_sampling_default(&how);
    CHECK_STATUS(qsf_session_sample(s, &how, NULL, 0, &random_state, &token), QSF_ERR_ARG);
    CHECK_OK(qsf_session_step(s, 1));
    qsf_stats stats = stats_of(s);
    CHECK_EQ_U64(stats.n_samples + stats.sample_ns, 0);
    const uint64_t phase_ns = sum_of(stats.phase_ns);
    for (int i = 0; i < 3; i++)
        CHECK_OK(qsf_session_sample(s, &how, NULL, 0, &random_state, &token));
    stats = stats_of(s);
    CHECK_EQ_U64(stats.n_samples, 3);
    CHECK(stats.sample_ns > 0);
    CHECK_EQ_U64(sum_of(stats.phase_ns), phase_ns); /* choosing is no phase */
    qsf_session_destroy(s);
    qsf_model_close(m);
}

int main(void)
{
    check_names();
    check_laps();
    for (size_t i = 0; i < N_TIMED_KINDS; i++)
        for (uint32_t n_threads = 1; n_threads <= 2; n_threads++)
            check_kind(&timed_kinds[i], n_threads);
    check_turns();
    check_samples();
    return check_report("check_phases");
}
