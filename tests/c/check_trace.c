/* check_trace.c - what a trace says, that it keeps to its memory, and that nobody touches that
 * memory once it has ended. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "timed_model.h"

#include "platform/thread.h"
#include "platform/trace.h"

#define CAP 20000
#define UNTOUCHED 0xA5

static qsf_trace_event events[CAP];

static bool is_untouched(const qsf_trace_event *first, size_t n)
{
    const unsigned char *const bytes = (const unsigned char *)first;
    for (size_t i = 0; i < n * sizeof *first; i++)
        if (bytes[i] != UNTOUCHED)
            return false;
    return true;
}

static void clear(void)
{
    memset(events, UNTOUCHED, sizeof events);
}

/* ---- the memory ---- */

static void check_capacity(void)
{
    qsf_trace t;
    uint64_t n_dropped = 77;
    clear();
    if (!CHECK_OK(qsf_trace_init(&t)))
        return;
    qsf_trace_record(NULL, &(qsf_trace_event){.kind = 1});
    qsf_trace_record(&t, &(qsf_trace_event){.kind = 1}); /* there is no trace */
    CHECK(!qsf_trace_is_on(NULL) && !qsf_trace_is_on(&t));
    CHECK_EQ_U64(qsf_trace_count(&t, &n_dropped), 0);
    CHECK_EQ_U64(n_dropped, 0);
    qsf_trace_set(&t, events, 3);
    for (uint32_t i = 0; i < 5; i++)
        qsf_trace_record(&t, &(qsf_trace_event){.kind = i});
    CHECK_EQ_U64(qsf_trace_count(&t, &n_dropped), 3);
    CHECK_EQ_U64(n_dropped, 2);
    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQ(events[i].kind, i);
    CHECK(is_untouched(events + 3, 10));
    qsf_trace_set(&t, events + 10, 4); /* another one in its place */
    qsf_trace_record(&t, &(qsf_trace_event){.kind = 9});
    CHECK_EQ_U64(qsf_trace_count(&t, &n_dropped), 1);
    CHECK_EQ_U64(n_dropped, 0);
    CHECK_EQ(events[0].kind, 0);
    CHECK_EQ(events[10].kind, 9);
    qsf_trace_set(&t, NULL, 0);
    qsf_trace_record(&t, &(qsf_trace_event){.kind = 8});
    CHECK_EQ_U64(qsf_trace_count(&t, NULL), 1); /* of the latest */
    CHECK(is_untouched(events + 11, 10));
    qsf_trace_destroy(&t);
}

/* ---- what it says ---- */

static bool is_aside(uint32_t kind)
{
    return kind == QSF_PHASE_WAIT || kind == QSF_PHASE_DECOMPRESS;
}

/* Laps of the computing thread between `begin_ns` and `end_ns` follow each other without a gap,
 * asides lie inside them, and both add up to the phases. */
static void check_tiling(const qsf_trace_event *from, size_t n, const uint64_t *phase_ns,
                         bool is_streamed)
{
    uint64_t lap_ns[QSF_N_PHASES] = {0};
    uint64_t aside_ns[QSF_N_PHASES] = {0};
    uint64_t sum_ns = 0;
    uint64_t phase_sum_ns = 0;
    uint64_t last_ns = 0;
    uint64_t earliest_ns = UINT64_MAX; /* of asides since the last lap */
    for (size_t i = 0; i < n; i++) {
        const qsf_trace_event *const e = &from[i];
        if (e->thread_idx != 0 || e->kind >= QSF_N_PHASES)
            continue;
        CHECK(e->end_ns > e->begin_ns);
        if (is_aside(e->kind)) {
            CHECK(e->begin_ns >= last_ns);
            CHECK(e->n_bytes > 0 || e->kind == QSF_PHASE_WAIT); /* for a unit's last padding */
            earliest_ns = e->begin_ns < earliest_ns ? e->begin_ns : earliest_ns;
            aside_ns[e->kind] += e->end_ns - e->begin_ns;
            continue;
        }
        CHECK(last_ns == 0 || e->begin_ns == last_ns || e->unit_idx == QSF_UNIT_NONE);
        CHECK(earliest_ns >= e->begin_ns);
        last_ns = e->end_ns;
        earliest_ns = UINT64_MAX;
        lap_ns[e->kind] += e->end_ns - e->begin_ns;
        sum_ns += e->end_ns - e->begin_ns;
    }
    for (uint32_t i = 0; i < QSF_N_PHASES; i++) {
        phase_sum_ns += phase_ns[i];
        if (is_aside(i))
            CHECK(phase_ns[i] >= aside_ns[i]); /* short ones are no events */
        else if (is_streamed)
            CHECK(phase_ns[i] <= lap_ns[i]);
        else
            CHECK_EQ_U64(phase_ns[i], lap_ns[i]);
    }
    CHECK_EQ_U64(sum_ns, phase_sum_ns);
}

/* The phases of one step in their order. */
static void check_order(const qsf_trace_event *from, size_t n, const timed_kind *kind)
{
    static const uint32_t of_layer[] = {QSF_PHASE_NORM,     QSF_PHASE_QKV,  QSF_PHASE_ATTENTION,
                                        QSF_PHASE_ATTN_OUT, QSF_PHASE_NORM, QSF_PHASE_GATE_UP,
                                        QSF_PHASE_DOWN};
    const size_t n_of_layer = sizeof of_layer / sizeof of_layer[0];
    const size_t n_layers = kind->model.n_layers;
    size_t place = 0;
    for (size_t i = 0; i < n; i++) {
        const qsf_trace_event *const e = &from[i];
        const uint32_t phase = e->kind;
        if (e->thread_idx != 0 || phase >= QSF_N_PHASES || is_aside(phase) ||
            phase == QSF_PHASE_OTHER)
            continue;
        CHECK_EQ(e->n_tokens, 1);
        const size_t layer = place > 0 ? (place - 1) / n_of_layer : 0;
        if (place == 0) {
            CHECK_EQ(phase, QSF_PHASE_EMBEDDING);
            CHECK_EQ(e->unit_idx, 0);
        } else if (layer < n_layers) {
            CHECK_EQ(phase, of_layer[(place - 1) % n_of_layer]);
            CHECK_EQ(e->unit_idx, layer + 1);
        } else if (phase == QSF_PHASE_NORM) {
            CHECK_EQ(e->unit_idx, n_layers + 1);
        } else {
            CHECK_EQ(phase, QSF_PHASE_HEAD);
            CHECK_EQ(e->unit_idx, kind->model.is_tied ? 0 : n_layers + 1);
        }
        place++;
    }
    CHECK_EQ(place, 3 + n_layers * n_of_layer);
}

/* Reads, each followed by its check, by threads of their own. */
static void check_reads(const qsf_model *m, const qsf_trace_event *from, size_t n, uint32_t depth)
{
    uint32_t n_reads = 0;
    uint32_t n_checks = 0;
    uint64_t end_ns[QSF_IO_MAX_DEPTH + 1] = {0};
    for (size_t i = 0; i < n; i++) {
        const qsf_trace_event *const e = &from[i];
        if (e->kind != QSF_TRACE_READ && e->kind != QSF_TRACE_CHECKSUM)
            continue;
        if (!CHECK(e->thread_idx >= 1 && e->thread_idx <= depth))
            continue;
        CHECK(e->end_ns >= e->begin_ns && e->end_ns >= end_ns[e->thread_idx]);
        CHECK(e->unit_idx < m->reader.n_stream_units && e->n_bytes > 0);
        end_ns[e->thread_idx] = e->end_ns;
        n_reads += e->kind == QSF_TRACE_READ;
        n_checks += e->kind == QSF_TRACE_CHECKSUM;
    }
    CHECK(n_checks <= n_reads + depth); /* of some the read was before the trace */
    CHECK((n_reads > 0) == (m->stream.ring != NULL));
    CHECK((n_checks > 0) == (m->stream.ring != NULL));
}

static void check_passes(const qsf_trace_event *from, size_t n, size_t want)
{
    size_t n_passes = 0;
    uint64_t begin_ns = UINT64_MAX; /* of the first phase since the last pass */
    for (size_t i = 0; i < n; i++) {
        const qsf_trace_event *const e = &from[i];
        if (e->kind == QSF_TRACE_PASS) {
            CHECK_EQ(e->unit_idx, QSF_UNIT_NONE);
            CHECK(e->begin_ns <= begin_ns && e->n_tokens >= 1 && e->n_tokens <= 4);
            begin_ns = UINT64_MAX;
            n_passes++;
        } else if (e->kind == QSF_PHASE_EMBEDDING && e->thread_idx == 0) {
            begin_ns = e->begin_ns;
        }
    }
    CHECK_EQ(n_passes, want);
}

static void check_said(const timed_kind *kind, uint32_t n_threads)
{
    qsf_model *const m = timed_open(kind, n_threads);
    qsf_session *s = NULL;
    float plain[TINY_MODEL_VOCAB];
    float traced[TINY_MODEL_VOCAB];
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    timed_run(s, 5);
    CHECK_OK(qsf_session_logits(s, plain, TINY_MODEL_VOCAB));
    qsf_stats before;
    qsf_stats after;
    qsf_session_stats(s, &before);
    clear();
    CHECK_OK(qsf_model_trace(m, events, CAP));
    timed_run(s, 5);
    CHECK_OK(qsf_session_logits(s, traced, TINY_MODEL_VOCAB));
    CHECK_BYTES(plain, traced, sizeof plain);
    const size_t n_before_step = qsf_model_trace_count(m, NULL);
    CHECK_OK(qsf_session_step(s, 2));
    qsf_session_stats(s, &after);
    uint64_t n_dropped = 77;
    CHECK_OK(qsf_model_trace(m, NULL, 0));
    const size_t n = qsf_model_trace_count(m, &n_dropped);
    CHECK_EQ_U64(n_dropped, 0);
    for (uint32_t i = 0; i < QSF_N_PHASES; i++)
        after.phase_ns[i] -= before.phase_ns[i];
    check_tiling(events, n, after.phase_ns, kind->is_streamed);
    check_order(events + n_before_step, n - n_before_step, kind);
    check_reads(m, events, n, m->io_setup.depth);
    check_passes(events, n, 3 + 5 + 1);
    CHECK(is_untouched(events + n, CAP - n));
    qsf_session_destroy(s);
    qsf_model_close(m);
}

/* ---- when it ends ---- */

/* Neither passes nor readers that read ahead, nor one session that outlives its model, touch memory
 * that was taken back: it is freed at once, which a sanitizer would notice. */
static void check_end(void)
{
    qsf_model *const m = timed_open(&timed_kinds[1], 2);
    qsf_session *s = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    for (int i = 0; i < 20; i++) {
        const size_t cap = i % 2 == 0 ? 1000 : 7;
        qsf_trace_event *const own = malloc(cap * sizeof *own);
        if (!CHECK(own != NULL))
            break;
        uint64_t n_dropped;
        CHECK_OK(qsf_model_trace(m, own, cap));
        CHECK_OK(qsf_session_step(s, 1));
        CHECK_OK(qsf_model_trace(m, NULL, 0)); /* while it reads for the next step */
        const size_t n = qsf_model_trace_count(m, &n_dropped);
        CHECK(n <= cap && (n == cap) == (i % 2 == 1) && (n_dropped > 0) == (i % 2 == 1));
        free(own);
    }
    clear();
    CHECK_OK(qsf_model_trace(m, events, CAP));
    CHECK_OK(qsf_session_step(s, 1));
    qsf_model_close(m);
    clear();
    CHECK_OK(qsf_session_step(s, 1));
    CHECK(is_untouched(events, CAP));
    qsf_session_destroy(s);
}

/* Another thread begins and ends traces while this one computes. */
static void *trace_on_and_off(void *arg)
{
    qsf_model *const m = arg;
    for (int i = 0; i < 200; i++) {
        qsf_trace_event *const own = malloc(50 * sizeof *own);
        if (own == NULL)
            return NULL;
        (void)qsf_model_trace(m, own, 50);
        qsf_thread_yield();
        (void)qsf_model_trace_count(m, NULL);
        (void)qsf_model_trace(m, NULL, 0);
        free(own);
    }
    return m;
}

static void check_beside_passes(void)
{
    qsf_model *const m = timed_open(&timed_kinds[1], 2);
    qsf_session *s = NULL;
    qsf_thread thread;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)) ||
        !CHECK_OK(qsf_thread_start(&thread, 1 << 18, trace_on_and_off, m)))
        return;
    for (int i = 0; i < 5; i++)
        timed_run(s, 10);
    qsf_thread_join(&thread);
    qsf_session_destroy(s);
    qsf_model_close(m);
}

/* ---- rings that come and go ---- */

static size_t count_kind(uint32_t kind, size_t from, size_t n)
{
    size_t n_found = 0;
    for (size_t i = from; i < n; i++)
        n_found += events[i].kind == kind;
    return n_found;
}

static void check_rings(void)
{
    qsf_model *const m = timed_open(&timed_kinds[0], 1);
    qsf_session *s = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    clear();
    CHECK_OK(qsf_model_trace(m, events, CAP));
    CHECK_OK(qsf_session_step(s, 1));
    size_t n = qsf_model_trace_count(m, NULL);
    CHECK_EQ(count_kind(QSF_TRACE_READ, 0, n), 0);
    for (int i = 0; i < 3; i++) { /* the first ring, a larger one, none and one again */
        const size_t n_before = n;
        if (i == 1)
            CHECK_OK(qsf_stream_resize_ring(&m->stream, 1 << 20));
        else
            CHECK_OK(qsf_stream_drop(&m->stream, 1, 0));
        CHECK_OK(qsf_session_step(s, 1));
        n = qsf_model_trace_count(m, NULL);
        CHECK(count_kind(QSF_TRACE_READ, n_before, n) > 0);
        if (i == 1)
            CHECK_OK(qsf_stream_keep(&m->stream, 1));
        CHECK((m->stream.ring == NULL) == (i == 1));
    }
    CHECK_OK(qsf_model_trace(m, NULL, 0));
    qsf_session_destroy(s);
    qsf_model_close(m);
}

static void check_sample(void)
{
    qsf_model *const m = timed_open(&timed_kinds[0], 1);
    qsf_session *s = NULL;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return;
    qsf_sampling how;
    uint64_t random_state = 1;
    uint32_t token;
    qsf_sampling_default(&how);
    CHECK_OK(qsf_session_step(s, 1));
    CHECK_OK(qsf_model_trace(m, events, CAP));
    CHECK_OK(qsf_session_sample(s, &how, NULL, 0, &random_state, &token));
    CHECK_OK(qsf_model_trace(m, NULL, 0));
    qsf_stats stats;
    qsf_session_stats(s, &stats);
    CHECK_EQ(qsf_model_trace_count(m, NULL), 1);
    CHECK_EQ(events[0].kind, QSF_TRACE_SAMPLE);
    CHECK_EQ(events[0].unit_idx, QSF_UNIT_NONE);
    CHECK_EQ_U64(events[0].end_ns - events[0].begin_ns, stats.sample_ns);
    /* A pass that is cancelled is one too. */
    qsf_session_cancel(s);
    CHECK_OK(qsf_model_trace(m, events, CAP));
    CHECK_STATUS(qsf_session_step(s, 1), QSF_ERR_CANCELLED);
    CHECK_EQ(count_kind(QSF_TRACE_PASS, 0, qsf_model_trace_count(m, NULL)), 1);
    qsf_session_destroy(s);
    qsf_model_close(m);
}

static void check_arguments(void)
{
    qsf_model *const m = timed_open(&timed_kinds[0], 1);
    uint64_t n_dropped = 77;
    CHECK_STATUS(qsf_model_trace(NULL, events, CAP), QSF_ERR_ARG);
    CHECK_STATUS(qsf_model_trace(m, events, 0), QSF_ERR_ARG);
    CHECK_OK(qsf_model_trace(m, NULL, 0)); /* there is none */
    CHECK_EQ_U64(qsf_model_trace_count(NULL, &n_dropped), 0);
    CHECK_EQ_U64(n_dropped, 0);
    CHECK_EQ_U64(qsf_model_trace_count(m, NULL), 0);
    qsf_model_close(m);
}

int main(void)
{
    check_capacity();
    for (size_t i = 0; i < N_TIMED_KINDS; i++)
        for (uint32_t n_threads = 1; n_threads <= 2; n_threads++)
            check_said(&timed_kinds[i], n_threads);
    check_end();
    check_beside_passes();
    check_rings();
    check_sample();
    check_arguments();
    return check_report("check_trace");
}
