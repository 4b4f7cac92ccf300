/* check_experts.c - experts in slots: one answer whatever is kept, faults that leave everything as
 * it was, and what the policy keeps. Settings change no bit: tests/python/api/test_same_bits.py.
 *
 * Uses tests/golden/tiny-experts-4bit.qsf, made by tools/make_golden_files.py: three layers, of
 * which two have 6 and 8 experts and choose 2 and 3.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "engine/model.h"
#include "engine_rig.h"
#include "model/ops.h"

static const char path[] = "tests/golden/tiny-experts-4bit.qsf"; /* tests run in the root */

#define N_TOKENS 60
#define N_VOCAB 101
#define N_EXPERTS 14
#define N_CHOSEN 5 /* of a token, in both layers */

static uint32_t tokens[N_TOKENS];

static qsf_options options_of(uint32_t n_threads, uint32_t chunk_tokens)
{
    qsf_options opt = rig_options(n_threads, chunk_tokens);
    opt.ctx_tokens = 96;
    return opt;
}

static qsf_model *open_with(uint32_t n_threads, uint32_t chunk_tokens, uint32_t n_slots)
{
    const qsf_options opt = options_of(n_threads, chunk_tokens);
    qsf_model *m = NULL;
    if (!CHECK_OK(qsf_model_create(path, &opt, NULL, &m)))
        return NULL;
    CHECK_EQ(m->plan.n_experts, N_EXPERTS);
    CHECK_EQ(m->plan.expert_slots, N_EXPERTS);
    CHECK_EQ(m->plan.experts_a_token, N_CHOSEN);
    CHECK(m->plan.expert_slot_bytes > 2 * QSF_IO_ALIGN);
    m->experts.piece_bytes = QSF_IO_ALIGN;
    while (m->experts.n_held > n_slots)
        CHECK(qsf_experts_give_slot(&m->experts));
    return m;
}

/* Evaluates the tokens [n]: as a prompt, or one by one. */
static qsf_status run_tokens(qsf_model *m, const uint32_t *all, size_t n, bool is_prompt,
                             float *logits)
{
    qsf_session *s;
    QSF_TRY(qsf_session_create(m, &s));
    qsf_status status = QSF_OK;
    for (size_t n_done = 0; is_prompt && status == QSF_OK && n_done < n;)
        status = qsf_session_sync(s, all, n, &n_done);
    for (size_t i = 0; !is_prompt && status == QSF_OK && i < n; i++)
        status = qsf_session_step(s, all[i]);
    if (status == QSF_OK)
        status = qsf_session_logits(s, logits, N_VOCAB);
    qsf_session_destroy(s);
    return status;
}

static qsf_status run(qsf_model *m, bool is_prompt, float *logits)
{
    return run_tokens(m, tokens, N_TOKENS, is_prompt, logits);
}

/* Runs and expects these logits. */
static void run_again(qsf_model *m, bool is_prompt, const float *want)
{
    float have[N_VOCAB];
    if (CHECK_OK(run(m, is_prompt, have)))
        CHECK_BYTES(have, want, sizeof have);
}

/* With no slot to all, as a prompt and one by one, twice: with what the first run left there. */
static void check_slots(void)
{
    static const uint32_t slots[] = {N_EXPERTS, 0, 1, N_CHOSEN, N_EXPERTS / 2};
    float want[N_VOCAB];
    for (size_t i = 0; i < 2 * COUNT_OF(slots); i++) {
        const uint32_t n_slots = slots[i / 2];
        const bool is_prompt = i % 2 != 0;
        qsf_model *const m = open_with(2, 16, n_slots);
        if (m == NULL)
            return;
        if (i == 0)
            CHECK_OK(run(m, false, want));
        for (int again = 0; again < 2; again++)
            run_again(m, is_prompt, want);
        CHECK_EQ(m->experts.n_held, n_slots);
        CHECK((m->experts.totals.n_right_guesses > 0) == (n_slots < N_EXPERTS));
        if (n_slots == 0 || !is_prompt)
            CHECK((m->experts.totals.n_hits > 0) == (n_slots > 0));
        if (n_slots == N_EXPERTS) /* loaded by opening */
            CHECK_EQ_U64(m->experts.totals.n_hits, m->experts.totals.n_uses);
        qsf_model_close(m);
    }
}

/* Chunks so large that experts run one after the other, and one with more rows than run together,
 * whose outputs several threads add: the same logits as in small chunks. */
static void check_large_chunks(void)
{
    enum { N_MANY = 511 }; /* odd: each of two threads adds half of a row */
    static const uint32_t chunk_tokens[] = {16, N_MANY};
    static uint32_t many[N_MANY];
    float logits[2][N_VOCAB];
    for (uint32_t i = 0; i < N_MANY; i++)
        many[i] = tokens[i % 3]; /* which choose few experts */
    for (size_t i = 0; i < COUNT_OF(chunk_tokens); i++) {
        qsf_options opt = options_of(2, chunk_tokens[i]);
        opt.ctx_tokens = N_MANY;
        qsf_model *const m = rig_open(path, &opt);
        if (m == NULL)
            return;
        CHECK_OK(run_tokens(m, many, N_MANY, true, logits[i]));
        qsf_model_close(m);
    }
    CHECK_BYTES(logits[1], logits[0], sizeof logits[0]);
}

/* The N-th read of an expert fails, ends early or is wrong: the step says so, unless it was a
 * guess, which changes nothing; the next one works. */
static void check_read_faults(void)
{
    static const qsf_fault_kind kinds[] = {QSF_FAULT_FAIL, QSF_FAULT_SHORT, QSF_FAULT_CORRUPT};
    static const qsf_status wanted[] = {QSF_ERR_IO, QSF_ERR_FORMAT, QSF_ERR_DAMAGED};
    float want[N_VOCAB];
    float have[N_VOCAB];
    int n_ignored = 0;
    for (int k = 0; k < 3; k++)
        for (int64_t n = 0; n < 24; n += n < 6 ? 1 : 5) {
            qsf_model *const m = open_with(2, 16, (uint32_t)n % 4);
            if (m == NULL)
                return;
            if (n == 0)
                CHECK_OK(run(m, false, want));
            const uint64_t held_bytes = m->ledger.held_bytes;
            m->reader.file.fault_kind = kinds[k];
            m->reader.file.reads_until_fault = n;
            const qsf_status status = run(m, n % 2 == 0, have);
            if (status == QSF_OK && n > 0) {
                n_ignored++;
                CHECK(m->experts.totals.n_guesses > 0 && m->reader.file.reads_until_fault < 0);
                CHECK(memcmp(want, have, sizeof want) == 0);
            } else {
                CHECK_EQ(status, wanted[k]);
                CHECK_CONTAINS(qsf_error_detail(), "an expert of layer ");
            }
            CHECK_EQ_U64(m->ledger.held_bytes, held_bytes);
            run_again(m, n % 2 == 0, want);
            qsf_model_close(m);
        }
    CHECK(n_ignored < 3 * 10 / 2);
}

/* Cancelled while reads are queued: nothing is read afterwards, and the next run is right. */
static void check_cancel(void)
{
    static const uint32_t uses[] = {1, 1, 1};
    float want[N_VOCAB];
    atomic_bool is_cancelled = true;
    const atomic_bool *const flags[] = {&is_cancelled};
    const qsf_cancel cancel = {flags, 1};
    qsf_model *const m = open_with(1, 16, 0);
    if (m == NULL)
        return;
    CHECK_OK(run(m, false, want));
    const unsigned char *bytes;
    uint32_t units[3];
    for (uint32_t i = 0; i < 3; i++)
        units[i] = m->reader.n_stream_units + i;
    m->reader.file.fault_kind = QSF_FAULT_SLOW;
    m->reader.file.reads_until_fault = 0;
    qsf_experts_begin_pass(&m->experts, 1, &cancel, NULL);
    qsf_experts_request(&m->experts, 1, units, uses, 3);
    qsf_experts_guess(&m->experts, units, 3);
    qsf_status status = QSF_OK;
    for (uint32_t i = 0; status == QSF_OK && i < 3; i++)
        status = qsf_experts_take(&m->experts, i, &bytes);
    CHECK_EQ(status, QSF_ERR_CANCELLED);
    qsf_experts_end(&m->experts);
    CHECK_EQ(m->experts.n_reading, 0);
    CHECK_EQ_U64(m->experts.next_job, m->experts.end_job);
    run_again(m, false, want);
    qsf_model_close(m);
}

/* Takes and releases the experts of a request, in order, and compares them with those of `all`,
 * which holds every expert. */
static void take_all(qsf_experts *e, const qsf_experts *all, const uint32_t *units, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t expert = units[i] - e->reader->n_stream_units;
        const unsigned char *bytes;
        if (CHECK_OK(qsf_experts_take(e, i, &bytes)))
            CHECK(memcmp(bytes, all->slots[all->slot_of[expert]].raw,
                         (size_t)e->reader->units[units[i]].raw_bytes) == 0);
        qsf_experts_release(e, i);
    }
}

/* The units of experts, numbered from the first of the first layer. */
static void find_units(const qsf_model *m, const uint32_t *experts, uint32_t *units, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        units[i] = m->reader.n_stream_units + experts[i];
}

/* Experts that the second layer may want are guessed while the first one runs: none of them right,
 * some, or those that are needed last in all places in transit. Each is there in its turn. */
static void check_guesses(const qsf_model *all)
{
    enum { N_WANTED = 5 };
    static const uint32_t uses[N_WANTED] = {1, 1, 1, 1, 1};
    static const uint32_t guesses[][3] = {
        {7, 9, 11}, {6, 7, 8}, {12, 13, 11}, {13, 12, 10}, {8, 6, 13}};
    static const uint32_t wanted[N_WANTED] = {6, 8, 10, 12, 13};
    for (uint32_t n_slots = 0; n_slots < 4; n_slots++) {
        qsf_model *const m = open_with(1, 16, n_slots);
        if (m == NULL)
            return;
        qsf_experts *const e = &m->experts;
        for (uint32_t i = 0; i < 20; i++) {
            uint32_t here[2];
            uint32_t next[N_WANTED];
            uint32_t guessed[3];
            find_units(m, (const uint32_t[]){i % 3, 3 + i % 2}, here, 2);
            find_units(m, wanted, next, N_WANTED);
            find_units(m, guesses[i % 5], guessed, 3);
            qsf_experts_begin_pass(e, 1, NULL, NULL);
            qsf_experts_request(e, 1, here, uses, 2);
            qsf_experts_guess(e, guessed, 3);
            take_all(e, &all->experts, here, 2);
            qsf_experts_end(e);
            if (i % 7 != 6) { /* else nobody wants the guesses */
                qsf_experts_request(e, 2, next, uses, N_WANTED);
                take_all(e, &all->experts, next, N_WANTED);
            }
            qsf_experts_end_pass(e);
            CHECK_EQ(e->n_reading, 0);
            CHECK_EQ_U64(e->next_job, e->end_job);
        }
        CHECK(e->totals.n_guesses > e->totals.n_right_guesses && e->totals.n_right_guesses > 10);
        qsf_model_close(m);
    }
}

/* A chunk that meets nearly all experts reads the next layer's into slots of experts that are used
 * least; afterwards they are slots again, and the others have kept what they had. */
static void check_lending(const qsf_model *all)
{
    enum { FIRST = 6, N_NEXT = 8, N_HELD = 9, N_LENT = N_HELD / 4, N_TRANSIT = 3 };
    static const uint32_t uses[N_NEXT] = {20, 20, 20, 20, 20, 20, 20, 20};
    static const uint32_t numbers[N_EXPERTS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13};
    uint32_t here[FIRST];
    uint32_t next[N_NEXT];
    uint32_t n_slots = 0;
    qsf_model *const m = open_with(1, 16, N_HELD);
    if (m == NULL)
        return;
    qsf_experts *const e = &m->experts;
    find_units(m, numbers, here, FIRST);
    find_units(m, numbers + FIRST, next, N_NEXT);
    CHECK_EQ(m->plan.expert_transit_slots, N_TRANSIT);
    for (uint32_t i = 0; i < 4; i++) { /* in the first two, experts of one layer are used most */
        const bool is_large = i >= 2;
        const uint64_t n_guesses = e->totals.n_guesses;
        qsf_experts_begin_pass(e, is_large ? 16 : 1, NULL, NULL);
        CHECK_EQ(e->n_lent, is_large ? N_LENT : 0);
        qsf_experts_request(e, 1, here, uses, FIRST);
        if (is_large) {
            CHECK_EQ(e->n_missing, 0);
            qsf_experts_guess(e, next, N_NEXT);
            CHECK_EQ_U64(e->totals.n_guesses - n_guesses, N_LENT + N_TRANSIT);
        }
        take_all(e, &all->experts, here, FIRST);
        if (is_large) {
            qsf_experts_end(e);
            qsf_experts_request(e, 2, next, uses, N_NEXT);
            take_all(e, &all->experts, next, N_NEXT);
        }
        qsf_experts_end_pass(e);
        CHECK_EQ(e->n_lent, 0);
    }
    for (uint32_t j = 0; j < e->n_places; j++)
        n_slots += e->slots[j].memory != NULL && e->slots[j].stays;
    CHECK_EQ(n_slots, N_HELD);
    qsf_model_close(m);
}

/* Slots are given back before anything else, and taken again, between answers and inside one. */
static void check_pressure(void)
{
    qsf_model *const m = open_with(1, 16, N_EXPERTS);
    if (m == NULL)
        return;
    float want[N_VOCAB];
    CHECK_OK(run(m, false, want));
    const uint64_t engine_bytes = m->plan.engine_bytes;
    const qsf_memory_move given = qsf_model_give(m, 3 * m->plan.expert_slot_bytes);
    CHECK(given.is_done && !given.has_disturbed);
    CHECK_EQ(m->plan.expert_slots, N_EXPERTS - 3);
    CHECK_EQ(m->plan.n_units_resident, m->plan.n_units);
    CHECK_EQ_U64(m->plan.engine_bytes, engine_bytes - given.n_bytes);
    run_again(m, false, want);
    CHECK(qsf_model_next_cost_bytes(m) >= m->plan.expert_slot_bytes);
    const qsf_memory_move taken = qsf_model_take(m, 100 * m->plan.expert_slot_bytes);
    CHECK(taken.is_done && !taken.has_disturbed);
    CHECK_EQ_U64(taken.n_bytes, given.n_bytes);
    CHECK_EQ(m->plan.expert_slots, N_EXPERTS);
    CHECK_EQ_U64(m->plan.engine_bytes, engine_bytes);
    CHECK_EQ_U64(qsf_model_next_cost_bytes(m), 0);
    run_again(m, false, want);
    qsf_session *s;
    if (CHECK_OK(qsf_session_create(m, &s))) {
        for (size_t i = 0; i < N_TOKENS; i++) {
            CHECK_OK(qsf_session_step(s, tokens[i]));
            if (i % 20 == 9)
                CHECK(qsf_model_give(m, 5 * m->plan.expert_slot_bytes).is_done);
            if (i % 20 == 19)
                CHECK(qsf_model_take(m, 3 * m->plan.expert_slot_bytes).is_done);
        }
        CHECK(m->plan.expert_slots > 0 && m->plan.expert_slots < N_EXPERTS);
        rig_check_logits(s, want);
        qsf_session_destroy(s);
    }
    qsf_model_close(m);
}

/* From the smallest budget to one in which all fit: the plan fits, no other slot would, more memory
 * is never fewer slots, and the answer is one. */
static void check_plans(void)
{
    const qsf_faults faults = {-1, -1, UINT64_C(10) << 20};
    qsf_options opt = options_of(1, 0);
    qsf_model *m = NULL;
    float want[N_VOCAB];
    opt.budget_bytes = 1;
    CHECK_STATUS(qsf_model_create(path, &opt, &faults, &m), QSF_ERR_NOMEM);
    opt.budget_bytes = UINT64_C(1) << 30;
    if (!CHECK_OK(qsf_model_create(path, &opt, &faults, &m)))
        return;
    CHECK_OK(run(m, false, want));
    CHECK_EQ(m->plan.expert_slots, N_EXPERTS);
    const uint64_t most_bytes = m->plan.process_bytes + m->plan.engine_bytes;
    opt.budget_bytes = m->plan.min_budget_bytes;
    qsf_model_close(m);
    uint32_t n_seen = 0; /* numbers of slots */
    uint32_t n_slots = 0;
    for (; opt.budget_bytes < most_bytes + 100000; opt.budget_bytes += 40000) {
        if (!CHECK_OK(qsf_model_create(path, &opt, &faults, &m)))
            return;
        const qsf_plan *const p = &m->plan;
        const uint64_t used_bytes = p->process_bytes + p->engine_bytes;
        CHECK(used_bytes <= opt.budget_bytes);
        CHECK(p->expert_slots == N_EXPERTS ||
              opt.budget_bytes - used_bytes < p->expert_slot_bytes + 8192);
        CHECK(m->ledger.held_bytes <= m->ledger.ceiling_bytes);
        CHECK_EQ(m->experts.n_slots, p->expert_slots);
        n_seen += opt.budget_bytes == p->min_budget_bytes || p->expert_slots != n_slots;
        n_slots = p->expert_slots;
        run_again(m, false, want);
        qsf_model_close(m);
    }
    CHECK_EQ(n_slots, N_EXPERTS);
    CHECK(n_seen > 4);
}

/* The hits of every token are those that the model of the policy in tests/python/oracle found for
 * the same experts and slots: a line of the trace has the experts, then the hits. */
static void check_replay(void)
{
    static const uint32_t slots[] = {0, 1, 2, 4, 5, 7, 10, 13};
    enum { N_SETUPS = COUNT_OF(slots), LINES = 200, FIRST_LAYER_CHOICES = 2 };
    static const uint32_t uses[N_CHOSEN] = {1, 1, 1, 1, 1};
    static const uint32_t n_of[] = {FIRST_LAYER_CHOICES, N_CHOSEN - FIRST_LAYER_CHOICES};
    for (size_t i = 0; i < N_SETUPS; i++) {
        FILE *const trace = fopen("tests/golden/expert-trace.txt", "r");
        qsf_model *const m = open_with(1, 16, 0);
        if (m == NULL || !CHECK(trace != NULL))
            return;
        qsf_experts *const e = &m->experts;
        uint32_t n_lines = 0;
        uint32_t n_wrong = 0;
        memset(e->counts, 0, N_EXPERTS * sizeof *e->counts);
        while (e->n_held < slots[i])
            CHECK(qsf_experts_take_slot(e));
        unsigned row[N_CHOSEN + N_SETUPS];
        for (bool is_line = true; is_line;) {
            for (size_t j = 0; is_line && j < N_CHOSEN + N_SETUPS; j++)
                is_line = fscanf(trace, "%u", &row[j]) == 1;
            if (!is_line)
                break;
            const uint64_t n_hits = e->totals.n_hits;
            uint32_t units[N_CHOSEN];
            for (uint32_t j = 0; j < N_CHOSEN; j++)
                units[j] = m->reader.n_stream_units + row[j];
            qsf_experts_begin_pass(e, 1, NULL, NULL);
            for (uint32_t layer = 0; layer < 2; layer++) {
                qsf_experts_request(e, layer + 1, units + layer * FIRST_LAYER_CHOICES, uses,
                                    n_of[layer]);
                for (uint32_t j = 0; j < n_of[layer]; j++) {
                    const unsigned char *bytes;
                    CHECK_OK(qsf_experts_take(e, j, &bytes));
                    qsf_experts_release(e, j);
                }
                qsf_experts_end(e);
            }
            n_wrong += e->totals.n_hits - n_hits != row[N_CHOSEN + i];
            n_lines++;
        }
        CHECK_EQ(n_lines, LINES);
        CHECK_EQ(n_wrong, 0);
        qsf_model_close(m);
        fclose(trace);
    }
}

/* Of equal scores the lower number is chosen, of groups too. */
static void check_ties(void)
{
    static const struct {
        float logits[6];
        uint32_t n_groups;
        uint16_t chosen[2];
    } cases[] = {
        {{1, 3, 3, 3, 0, 0}, 1, {1, 2}}, {{2, 2, 2, 2, 2, 2}, 1, {0, 1}},
        {{3, 1, 1, 1, 1, 3}, 1, {0, 5}}, {{4, 0, 1, 4, 4, 0}, 3, {0, 3}},
        {{1, 0, 2, 2, 0, 2}, 3, {2, 3}},
    };
    qsf_kernels kernels;
    qsf_kernels_init(&kernels, QSF_ISA_SCALAR);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const qsf_layer_kind kind = {.n_experts = 6,
                                     .n_chosen = 2,
                                     .n_groups = cases[i].n_groups,
                                     .n_groups_kept = cases[i].n_groups > 1 ? 2 : 1,
                                     .expert_score = QSF_EXPERT_LOGIT,
                                     .expert_weights = QSF_EXPERT_WEIGHTS_SOFTMAX,
                                     .weights_factor = 1.0F};
        float logits[6];
        float weights[2];
        uint16_t chosen[2];
        memcpy(logits, cases[i].logits, sizeof logits);
        qsf_routing_choose(&kernels, &kind, logits, NULL, chosen, weights);
        CHECK_EQ(chosen[0], cases[i].chosen[0]);
        CHECK_EQ(chosen[1], cases[i].chosen[1]);
        CHECK(weights[0] == 0.5F && weights[1] == 0.5F);
    }
}

int main(void)
{
    uint64_t state = 3;
    for (int i = 0; i < N_TOKENS; i++)
        tokens[i] = (uint32_t)(qsf_random_uniform(&state) * N_VOCAB);
    check_slots();
    check_large_chunks();
    check_read_faults();
    const qsf_options opt = options_of(2, 16);
    rig_fail_open(path, &opt, false);
    check_cancel();
    qsf_model *const all = open_with(1, 16, N_EXPERTS);
    if (all != NULL) {
        check_guesses(all);
        check_lending(all);
    }
    qsf_model_close(all);
    check_pressure();
    check_ties();
    check_plans();
    check_replay();
    return check_report("check_experts");
}
