/* check_pressure.c - memory is given back when it runs short and taken again when there is plenty,
 * without going to and fro, and no logit changes on the way. */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20)
#define TINY_LAYERS 6
#define TINY_MODEL_DIM 256
#define TINY_MODEL_FFN 2048

#include "engine/model.h"
#include "engine_rig.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define SECOND_NS UINT64_C(1000000000)
#define LOOK_NS (SECOND_NS / 4)

static char path[64];
static tiny_file file;

/* ---- the decision ---- */

static qsf_pressure begun(uint64_t available_bytes, uint64_t total_bytes)
{
    qsf_pressure p;
    qsf_pressure_init(&p, &(qsf_pressure_signs){SECOND_NS, available_bytes, total_bytes, 0.0});
    return p;
}

static void check_marks(void)
{
    CHECK_EQ_U64(begun(600 * MIB, 16 * GIB).low_bytes, 100 * MIB);
    CHECK_EQ_U64(begun(8 * GIB, 10 * GIB).low_bytes, 512 * MIB);
    CHECK_EQ_U64(begun(200 * GIB, 256 * GIB).low_bytes, GIB);
    CHECK_EQ_U64(begun(0, 16 * GIB).low_bytes, 0);
    CHECK_EQ_U64(begun(GIB, 0).low_bytes, 0);
}

/* What is to be given back (below 0) or taken. */
static int64_t judge(qsf_pressure *p, qsf_pressure_signs signs)
{
    uint64_t give;
    uint64_t take;
    qsf_pressure_judge(p, &signs, &give, &take);
    CHECK(give == 0 || take == 0);
    return give > 0 ? -(int64_t)give : (int64_t)take;
}

typedef struct judged {
    uint64_t available_bytes;
    double percent;
    uint64_t give_bytes;
} judged;

static void check_shortage(void)
{
    /* low is 100 MiB. */
    static const judged cases[] = {
        {100 * MIB, 0.0, 0},         {100 * MIB - 1, 0.0, 100 * MIB + 1},
        {40 * MIB, 0.0, 160 * MIB},  {0, 0.0, 200 * MIB},
        {0, 99.0, 200 * MIB},        {150 * MIB, 10.0, 0},
        {150 * MIB, 10.1, 50 * MIB}, {399 * MIB, 50.0, 1},
        {400 * MIB, 50.0, 0},        {GIB, 100.0, 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const judged *const c = &cases[i];
        qsf_pressure p = begun(600 * MIB, 16 * GIB);
        CHECK_EQ_I64(judge(&p, (qsf_pressure_signs){9 * SECOND_NS, c->available_bytes, 16 * GIB,
                                                    c->percent}),
                     -(int64_t)c->give_bytes);
    }
}

/* Looks every quarter of a second at the same signs; returns how many looks pass until something
 * is taken; at most n. */
static int looks_until_taken(qsf_pressure *p, qsf_pressure_signs *signs, int n)
{
    for (int i = 0; i < n; i++) {
        const int64_t take = judge(p, *signs);
        signs->now_ns += LOOK_NS;
        if (take != 0) {
            CHECK_EQ_I64(take, (int64_t)(signs->available_bytes - 4 * p->low_bytes));
            return i;
        }
    }
    return n;
}

static void give_once(qsf_pressure *p, qsf_pressure_signs *signs)
{
    const uint64_t available_bytes = signs->available_bytes;
    signs->available_bytes = p->low_bytes - 1;
    CHECK(judge(p, *signs) < 0);
    signs->available_bytes = available_bytes;
    signs->now_ns += LOOK_NS;
}

static void check_calm(void)
{
    qsf_pressure p = begun(600 * MIB, 16 * GIB);
    qsf_pressure_signs signs = {SECOND_NS, 451 * MIB, 16 * GIB, 0.0};
    CHECK_EQ(looks_until_taken(&p, &signs, 100), 100); /* nothing was given back */
    p.next_cost_bytes = 50 * MIB;
    CHECK_EQ(looks_until_taken(&p, &signs, 100), 20); /* five seconds */
    CHECK_EQ(looks_until_taken(&p, &signs, 100), 3);  /* one more */
    signs.available_bytes = 450 * MIB;                /* would leave no more than 4 low */
    CHECK_EQ(looks_until_taken(&p, &signs, 100), 100);
    signs.available_bytes = GIB;
    signs.stalled_percent = 5.1;
    CHECK_EQ(looks_until_taken(&p, &signs, 100), 100);
    signs.stalled_percent = 5.0;
    CHECK_EQ(looks_until_taken(&p, &signs, 10), 10);
    signs.available_bytes = 300 * MIB; /* a look that is not calm: from the beginning */
    CHECK_EQ(looks_until_taken(&p, &signs, 1), 1);
    signs.available_bytes = GIB;
    CHECK_EQ(looks_until_taken(&p, &signs, 100), 20);

    /* A shortage soon after a taking doubles the wait, up to a limit; each episode once. */
    int wanted = 20;
    for (int i = 0; i < 10; i++) {
        give_once(&p, &signs);
        give_once(&p, &signs);
        wanted = wanted * 2 < 1280 ? wanted * 2 : 1280;
        CHECK_EQ(looks_until_taken(&p, &signs, 10000), wanted);
    }
    signs.now_ns += 61 * SECOND_NS; /* a shortage that has nothing to do with it */
    give_once(&p, &signs);
    CHECK_EQ(looks_until_taken(&p, &signs, 10000), 20);
}

/* Stalls are renewed every two seconds, and so is what they cost. */
static void check_stalls(void)
{
    qsf_pressure p = begun(600 * MIB, 16 * GIB);
    int n_gives = 0;
    for (uint64_t i = 0; i < 40; i++)
        n_gives += judge(&p, (qsf_pressure_signs){(9 * 4 + i) * LOOK_NS, 250 * MIB, GIB, 60.0}) < 0;
    CHECK_EQ(n_gives, 5);
}

/* A group whose limit is the budget: 300 MiB, of which the process and the engine come to take all
 * but 6. What is left to touch after opening was subtracted; the cache of the file fills the rest,
 * and counts as available, give or take what is on its way between lists. */
static void check_tight_group(void)
{
    qsf_pressure p = begun(6 * MIB, 300 * MIB);
    for (uint64_t i = 0; i < 20000; i++) {
        const uint64_t touched_bytes = i < 10000 ? 40 * MIB * i / 10000 : 40 * MIB;
        const uint64_t available_bytes = 46 * MIB - touched_bytes - check_draw(2 * MIB);
        /* Reading through the page cache of a full group stalls on reclaim, without end. */
        CHECK_EQ_I64(judge(&p, (qsf_pressure_signs){i * LOOK_NS, available_bytes, 300 * MIB, 40.0}),
                     0);
    }
}

/* ---- a model ---- */

/* What the test lets the system say: what is left beside the engine and others. */
typedef struct system_signs {
    qsf_model *model;
    uint64_t now_ns;
    uint64_t step_ns; /* that pass between two looks */
    uint64_t others_bytes;
    uint64_t n_looks;
    uint64_t strike_at; /* at this look there is a shortage, a slow read and a cancellation */
    qsf_session *session;
} system_signs;

#define SYSTEM_BYTES (64 * MIB)

static void look(void *arg, qsf_pressure_signs *out)
{
    system_signs *const system = arg;
    const uint64_t taken_bytes = system->others_bytes + system->model->ledger.held_bytes;
    system->now_ns += system->step_ns;
    system->n_looks++;
    if (system->n_looks == system->strike_at) {
        system->model->reader.file.fault_kind = QSF_FAULT_SLOW;
        system->model->reader.file.reads_until_fault = 0;
        qsf_session_cancel(system->session);
        *out = (qsf_pressure_signs){.now_ns = system->now_ns, .total_bytes = 1 * GIB};
        return;
    }
    *out = (qsf_pressure_signs){
        .now_ns = system->now_ns,
        .available_bytes = taken_bytes < SYSTEM_BYTES ? SYSTEM_BYTES - taken_bytes : 0,
        .total_bytes = 1 * GIB,
    };
}

/* Evaluates some tokens from the beginning. */
static void run(qsf_session *s)
{
    static const uint32_t tokens[5] = {3, 1, 4, 1, 5};
    CHECK_OK(qsf_session_rewind(s, 0));
    rig_sync(s, tokens, 4);
    CHECK_OK(qsf_session_step(s, tokens[4]));
}

/* The sums of the plan are the ledger's. */
static void check_books(qsf_model *m)
{
    qsf_model_facts facts;
    qsf_model_info(m, &facts);
    const qsf_plan *const p = &facts.plan;
    CHECK_EQ_U64(p->weights_bytes, m->ledger.held_by_use[QSF_USE_WEIGHTS]);
    CHECK_EQ_U64(p->engine_bytes, p->weights_bytes + p->stream_bytes + p->embedding_bytes +
                                      p->kv_bytes + p->scratch_bytes + p->tables_bytes +
                                      p->stacks_bytes);
    uint32_t n_resident = 0;
    for (uint32_t i = 0; i < p->n_units; i++)
        n_resident += qsf_stream_is_resident(&m->stream, i);
    CHECK_EQ(p->n_units_resident, n_resident);
    CHECK_EQ(p->io_depth != 0, m->stream.ring != NULL);
    CHECK(m->ledger.held_bytes <= m->ledger.ceiling_bytes);
}

/* Which layers were given back first: spread around the circle, none beside another. */
static void check_spread(const qsf_model *m)
{
    for (uint32_t i = 1; i <= TINY_LAYERS; i++)
        if (!qsf_stream_is_resident(&m->stream, i))
            CHECK(qsf_stream_is_resident(&m->stream, i % TINY_LAYERS + 1));
}

static void check_events(qsf_model *m, const qsf_stats *stats)
{
    qsf_memory_event events[2 * QSF_PRESSURE_EVENTS];
    const size_t n = qsf_model_memory_events(m, events, 2 * QSF_PRESSURE_EVENTS);
    uint64_t moved_bytes[2] = {0, 0};
    CHECK_EQ(n, stats->n_given_back + stats->n_taken_again);
    for (size_t i = 0; i < n; i++) {
        moved_bytes[events[i].is_given_back != 0] += events[i].bytes;
        CHECK(i == 0 || events[i].seconds >= events[i - 1].seconds);
    }
    CHECK_EQ_U64(moved_bytes[1], stats->given_back_bytes);
    CHECK_EQ_U64(moved_bytes[0], stats->taken_again_bytes);
    CHECK_EQ(events[n - 1].n_units_resident, m->plan.n_units);
    CHECK_EQ(qsf_model_memory_events(m, events, 2), 2); /* the latest ones */
    CHECK_EQ(events[1].n_units_resident, m->plan.n_units);
}

/* Runs passes and expects the same logits of all of them. */
static void run_passes(qsf_model *m, qsf_session *s, const float *wanted, int n)
{
    for (int i = 0; i < n; i++) {
        run(s);
        rig_check_logits(s, wanted);
        check_books(m);
    }
}

/* From now on the system says what the test wants; low is 1 MiB. */
static void plant(qsf_model *m, system_signs *system)
{
    qsf_pressure_signs signs;
    system->others_bytes = SYSTEM_BYTES - m->ledger.held_bytes - 6 * MIB;
    look(system, &signs);
    qsf_pressure_init(&m->pressure, &signs);
    m->pressure.look = look;
    m->pressure.look_arg = system;
    m->pressure.pause_ns = 0;
    m->pressure.next_look_ns = 0;
}

/* A model in memory with a session, the logits it gives, and signs planted. */
typedef struct rig {
    qsf_model *m;
    qsf_session *s;
    float wanted[TINY_MODEL_VOCAB];
    system_signs system;
} rig;

static bool open_rig(rig *r, uint64_t step_ns)
{
    qsf_options opt = rig_options(2, 0);
    opt.ctx_tokens = 32;
    opt.io_depth = 1;
    opt.io_method = QSF_IO_BUFFERED;
    *r = (rig){.m = rig_open(path, &opt)};
    if (r->m == NULL || !CHECK_OK(qsf_session_create(r->m, &r->s)))
        return false;
    r->m->pressure.look = NULL; /* this machine's memory is not the subject */
    run(r->s);
    CHECK_OK(qsf_session_logits(r->s, r->wanted, TINY_MODEL_VOCAB));
    r->system =
        (system_signs){.model = r->m, .now_ns = SECOND_NS, .step_ns = step_ns, .session = r->s};
    plant(r->m, &r->system);
    return true;
}

static void close_rig(rig *r)
{
    qsf_session_destroy(r->s);
    qsf_model_close(r->m);
}

/* Nothing is left for the engine until nothing more moves. Between passes the model is between
 * units. */
static void take_all(rig *r)
{
    r->system.others_bytes = SYSTEM_BYTES;
    while (qsf_pressure_watch(r->m))
        ;
    CHECK_EQ(r->m->plan.n_units_resident, 0);
}

/* Gives all units back and lets them be taken again while reads fail. */
static void check_faults(rig *r)
{
    static const qsf_fault_kind kinds[] = {QSF_FAULT_FAIL, QSF_FAULT_SHORT, QSF_FAULT_CORRUPT};
    qsf_model *const m = r->m;
    const uint64_t others_bytes = r->system.others_bytes;
    int n_failed = 0;
    for (int64_t i = 0; i < 12; i++) {
        take_all(r);
        r->system.others_bytes = others_bytes;
        for (int k = 0; k < 200 && m->plan.n_units_resident < m->plan.n_units; k++) {
            const uint64_t n_taken = m->pressure.n_taken_again;
            const uint64_t held_bytes = m->ledger.held_bytes;
            m->reader.file.fault_kind = kinds[i % 3];
            m->reader.file.reads_until_fault = k % 2 == 0 ? i / 3 : -1;
            const bool has_moved = qsf_pressure_watch(m);
            m->reader.file.reads_until_fault = -1;
            if (has_moved && m->pressure.n_taken_again == n_taken) {
                n_failed++;
                CHECK_EQ_U64(m->ledger.held_bytes, held_bytes);
            }
            check_books(m);
        }
        CHECK_EQ(m->plan.n_units_resident, m->plan.n_units);
        run_passes(m, r->s, r->wanted, 1);
    }
    CHECK(n_failed > 0);
}

/* The ring is given after the last unit, and taken again before the first. */
static void check_ring(rig *r)
{
    qsf_model *const m = r->m;
    const uint64_t others_bytes = r->system.others_bytes;
    const uint64_t n_taken = m->pressure.n_taken_again;
    take_all(r);
    CHECK(m->stream.ring_bytes < 2 * MIB); /* no more than such small units need */
    m->full_ring_bytes = 3 * MIB;          /* as if the plan had had it */
    m->pressure.next_cost_bytes = 3 * MIB;
    r->system.others_bytes = others_bytes;
    while (m->pressure.n_taken_again == n_taken)
        (void)qsf_pressure_watch(m);
    CHECK_EQ_U64(m->stream.ring_bytes, 3 * MIB);
    CHECK_EQ(m->plan.n_units_resident, 0);
    run_passes(m, r->s, r->wanted, 1);
    CHECK(m->plan.n_units_resident > 0);
    take_all(r);
    CHECK_EQ_U64(m->stream.ring_bytes, 2 * MIB);
    run_passes(m, r->s, r->wanted, 1);
}

/* A unit given back in the middle of a pass is waited for as in any pass: until it is cancelled. */
static void check_cancelled(rig *r)
{
    CHECK_OK(qsf_session_rewind(r->s, 4));
    r->system.step_ns = LOOK_NS;
    r->system.n_looks = 0;
    r->system.strike_at = TINY_LAYERS; /* before the last layer, which is given back first */
    CHECK_STATUS(qsf_session_step(r->s, 5), QSF_ERR_CANCELLED);
    CHECK(!qsf_stream_is_resident(&r->m->stream, TINY_LAYERS));
    CHECK_EQ(qsf_session_position(r->s), 4);
    run_passes(r->m, r->s, r->wanted, 2);
}

static void run_with(void (*check)(rig *r))
{
    rig r;
    if (!open_rig(&r, 10 * SECOND_NS))
        return;
    check(&r);
    close_rig(&r);
}

static void check_model(const tiny_model *shape)
{
    rig r;
    if (!rig_build(path, &file, shape) || !open_rig(&r, LOOK_NS))
        return;
    qsf_model *const m = r.m;
    const qsf_plan plan = m->plan;
    const uint64_t held_bytes = m->ledger.held_bytes;
    CHECK_EQ(plan.n_units_resident, plan.n_units);

    qsf_pressure_signs signs;
    run_passes(m, r.s, r.wanted, 3);
    CHECK(r.system.n_looks > 3 * TINY_LAYERS);
    CHECK_EQ(m->plan.n_units_resident, m->plan.n_units);

    r.system.others_bytes += 5 * MIB + MIB / 2; /* half a MiB is left */
    run_passes(m, r.s, r.wanted, 3);
    CHECK(m->plan.n_units_resident < m->plan.n_units);
    CHECK(m->plan.n_units_resident > 3);
    CHECK_EQ_U64(m->pressure.n_given_back, 1);
    check_spread(m);
    look(&r.system, &signs);
    CHECK(signs.available_bytes >= 2 * MIB);

    for (int i = 0; i < 5; i++) { /* until nothing is left to give */
        r.system.others_bytes += MIB;
        run_passes(m, r.s, r.wanted, 1);
    }
    r.system.others_bytes = SYSTEM_BYTES;
    run_passes(m, r.s, r.wanted, 3);
    CHECK_EQ(m->plan.n_units_resident, 0);
    CHECK(m->plan.streamed_bytes >= TINY_LAYERS * 800000);
    const uint64_t n_given_back = m->pressure.n_given_back;
    run_passes(m, r.s, r.wanted, 3);
    CHECK_EQ_U64(m->pressure.n_given_back, n_given_back);
    CHECK(m->ledger.held_bytes < held_bytes - 5 * MIB);

    r.system.others_bytes = SYSTEM_BYTES - held_bytes - 6 * MIB; /* they are gone */
    r.system.step_ns = 2 * SECOND_NS;
    uint32_t n_before = 0;
    for (int i = 0; i < 8; i++) {
        run_passes(m, r.s, r.wanted, 1);
        CHECK(m->plan.n_units_resident >= n_before);
        n_before = m->plan.n_units_resident;
    }
    CHECK_EQ(m->plan.n_units_resident, m->plan.n_units);
    CHECK_EQ_U64(m->ledger.held_bytes, held_bytes);
    CHECK_EQ_U64(m->plan.embedding_bytes, plan.embedding_bytes);
    CHECK_EQ_U64(m->pressure.n_taken_again, m->plan.n_units);
    CHECK_EQ_U64(m->plan.engine_bytes, plan.engine_bytes);
    CHECK_EQ_U64(m->plan.stream_bytes, plan.stream_bytes);
    CHECK_EQ_U64(m->plan.stacks_bytes, plan.stacks_bytes);
    CHECK_EQ_U64(m->plan.streamed_bytes, 0);
    qsf_stats stats;
    qsf_session_stats(r.s, &stats);
    CHECK_EQ_U64(stats.n_taken_again, m->pressure.n_taken_again);
    check_events(m, &stats);
    close_rig(&r);
}

int main(void)
{
    check_path(path, sizeof path, "check_pressure");
    check_marks();
    check_shortage();
    check_calm();
    check_stalls();
    check_tight_group();
    check_model(&(tiny_model){.n_layers = TINY_LAYERS, .dtype = QSF_DTYPE_4BIT});
    run_with(check_faults);
    run_with(check_cancelled);
    run_with(check_ring);
    check_model(&(tiny_model){.n_layers = TINY_LAYERS, .dtype = QSF_DTYPE_8BIT, .is_tied = true});
    unlink(path);
    return check_report("check_pressure");
}
